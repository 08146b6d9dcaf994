"""The board's pages as text. Everything that comes out of a run folder is escaped by the templates or the charts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment
from markupsafe import Markup

from wardround.board.index import Run
from wardround.board.live import CURVES, Course
from wardround.board.record import FIGURES
from wardround.embedded import environment
from wardround.report.charts import Line, lines
from wardround.report.parts import View, drawn, tabulate
from wardround.report.points import Axis, scatter
from wardround.report.svg import Label, plain
from wardround.report.values import UNDEFINED, byte_size, duration, moment, percent, percent_mark, plural, show
from wardround.show import COLUMNS

STATES = ("running", "finished", "failed", "stopped", "unreadable")


def runs_page(runs: Sequence[Run], folder: Path, version: str) -> str:
    """The list of all runs."""
    return _render(
        "runs.html.j2",
        title=folder.name or "Runs",
        rows=[_row(run) for run in runs],
        states={state: count for state in STATES if (count := sum(run.state == state for run in runs))},
        version=version,
    )


def _row(run: Run) -> View:
    seconds, size = run.total_seconds, run.bytes
    return {
        "run": run,
        "address": address(run.id),
        "methods": ", ".join(run.methods),
        "data": f"{run.data}, {plural(run.sites, 'site')}" if run.sites else run.data,
        "when": moment(run.when),
        "figures": [{"text": show(key, run.best(key)), "order": run.best(key)} for key in FIGURES[:3]],
        "bytes": {"text": UNDEFINED if size is None else byte_size(size), "order": size},
        "seconds": {"text": duration(seconds), "order": seconds},
    }


def run_page(run: Run, courses: Sequence[Course]) -> str:
    """One run."""
    return _render(
        "run.html.j2",
        title=run.id,
        run=run,
        address=address(run.id),
        progress=Markup(progress(run, courses)),  # noqa: S704
    )


def progress(run: Run, courses: Sequence[Course]) -> str:
    """The part of a run's page that changes while it runs."""
    return _render(
        "progress.html.j2",
        run=run,
        when=moment(run.when),
        methods=[_course(course) for course in courses],
        waiting=max(len(run.methods) - len(courses), 0),
        curves=_curves(courses),
        notes=[(course.method, note) for course in courses for note in reversed(course.notes)],
    )


def _course(course: Course) -> View:
    share = course.rounds / course.total if course.total else None
    latest = {name: curve[-1][1] for place, name in CURVES.items() if (curve := course.curve(place))}
    return {
        "method": course.method,
        "rounds": f"{course.rounds} of {course.total} rounds" if course.total else plural(course.rounds, "round"),
        "share": 1.0 if course.is_over else share,
        "is_over": course.is_over,
        "fits": plural(course.fits, "fit"),
        "seconds": duration(course.seconds),
        "latest": [(name, show("accuracy", value)) for name, value in latest.items()],
    }


def _curves(courses: Sequence[Course]) -> list[View]:
    """Accuracy over rounds, a chart for each thing that was measured in more than one round."""
    views = []
    for number, (place, name) in enumerate(CURVES.items()):
        series = [Line(course.method, tuple(curve)) for course in courses if len(curve := course.curve(place)) > 1]
        if series:
            ends = ", ".join(f"{line.name} {show('accuracy', line.points[-1][1])}" for line in series)
            label = Label(f"curve-{number}", f"Accuracy by round: {name}", f"So far: {ends}.")
            svg = drawn(lines(label, series, percent, percent_mark, "round"))
            views.append({"name": name[:1].upper() + name[1:], "svg": svg})
    return views


def compare_page(runs: Sequence[Run], left_out: int = 0) -> str:
    """Several finished runs side by side, a line for each method of each."""
    spots: dict[str, tuple[float, float]] = {}
    table: list[list[str]] = []
    said: list[str] = []
    for run, method in [(each, method) for each in runs for method in each.methods]:
        figures, ways = run.figures.get(method, {}), run.sent.get(method, {})
        sign = method if len(runs) == 1 else chr(ord("A") + len(table))  # names of runs are too long for the picture
        name = method if len(runs) == 1 else f"{sign} · {run.id}: {method}"
        sizes = (byte_size(ways.get(direction, 0)) for direction in ("up", "down"))
        table.append(
            [name, *(show(key, figures.get(key)) for key in FIGURES), *sizes, duration(run.seconds.get(method))]
        )
        local, overall = figures.get("local_accuracy"), figures.get("global_accuracy")
        if local is not None and overall is not None:
            spots[sign] = local, overall
            said.append(f"{name} {percent(local)} and {percent(overall)}")
    label = Label("balance", "Local against global accuracy", f"Local and global accuracy of each: {'; '.join(said)}.")
    axes = (Axis(f"{name} accuracy", percent_mark, percent) for name in ("local", "global"))
    return _render(
        "compare.html.j2",
        title="Comparison",
        runs=[{"run": run, "address": address(run.id)} for run in runs],
        table=tabulate("Headline figures", ["", *(COLUMNS[key][0] for key in FIGURES), "up", "down", "time"], table),
        meanings=[COLUMNS[key] for key in FIGURES],
        svg=drawn(scatter(label, spots, *axes, diagonals=True)) if spots else None,
        differ=len({run.sites_hash for run in runs}) > 1,
        left_out=left_out,
    )


def message_page(title: str, text: str) -> str:
    """A page that says why there is none."""
    return _render("message.html.j2", title=title, text=text)


def address(name: str) -> str:
    """A run's name as a part of an address; it may hold any character a file system allows."""
    return quote(name, safe="/", errors="surrogateescape")


@cache
def _environment() -> Environment:
    return environment(Path(__file__).parent / "templates", plain)


def _render(template: str, **values: object) -> str:
    return _environment().get_template(template).render(**values)
