"""From round to round: accuracy with what was forgotten on the way, and what it had cost by then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wardround.measure import forgetting_intervals
from wardround.report import charts
from wardround.report.charts import Line
from wardround.report.index import Index, Measure, pool
from wardround.report.parts import View, figure, tabulate
from wardround.report.svg import Label
from wardround.report.values import (
    UNDEFINED,
    as_count,
    as_number,
    as_records,
    as_text,
    byte_size,
    duration,
    mean_of,
    percent,
    percent_mark,
    show,
    unit_of_time,
)

LOCAL = "on the site's own test, mean over the sites measured in that round"
CURVES = (  # split, model, name of the chart, what it shows in words
    ("global", "shared", "Shared model, global test", "Accuracy of the shared model on the global test set."),
    ("local", "personal", "Personal predictors, local tests", f"Accuracy of each site's personal predictor {LOCAL}."),
    ("local", "shared", "Shared model, local tests", f"Accuracy of the shared model {LOCAL}."),
    (
        "local",
        "trained",
        "After training, local tests",
        f"Accuracy of what a site has right after its training {LOCAL}.",
    ),
)
COLUMNS = {  # field of a point and its heading
    "shared_global_accuracy": "Shared, global",
    "backward_transfer": "Backward transfer",
    "trained_local_accuracy": "After training, local",
    "worst_trained_local_accuracy": "After training, worst",
}
HEAD = ("Round", "Seconds", "Bytes", *COLUMNS.values())
FORGETTING = "Shaded: what was lost from a record to the first later round that is as good again (FedKPer’s intervals)."
Curve = Mapping[int, float | None]


def rounds_view(result: View) -> View:
    """Seconds are those of the work alone, measuring left out; seconds and bytes are from the first round on."""
    table: list[list[Any]] = []
    for point in as_records(result.get("rounds")):
        seconds = as_number(point.get("seconds"))
        bytes_ = as_count(point.get("bytes"))
        cost = [
            UNDEFINED if seconds is None else f"{seconds:,.1f}",
            {"text": byte_size(bytes_), "title": f"{bytes_:,} bytes"},
        ]
        figures = [show(key, as_number(point.get(key))) for key in COLUMNS]
        table.append([f"{as_text(point.get('method'))}, {as_count(point.get('round')) + 1}", *cost, *figures])
    return tabulate("Each round: seconds of work and bytes from the beginning to its end", HEAD, table)


def curves_view(methods: Sequence[str], index: Index) -> list[View]:
    """Accuracy over rounds, counted from 1, for each of `CURVES` that a method has of more than one round."""
    views = []
    for split, model, title, words in CURVES:
        curves: dict[str, Curve] = {}
        for method in methods:
            known = index.get(method, {})
            rounds = [known.get(Measure(split, model, "accuracy", per_site), {}) for per_site in (False, True)]
            if points := {r + 1: mean_of(pool(sites)) for r, sites in sorted((rounds[0] or rounds[1]).items())}:
                curves[method] = points
        xs = sorted({r for points in curves.values() for r in points})
        if all(len(points) < 2 for points in curves.values()):
            continue
        ends = ", ".join(f"{method} {show('accuracy', points[max(points)])}" for method, points in curves.items())
        label = Label(f"curve-{split}-{model}", title, f"{words} After the last round: {ends}.")
        series = [Line(method, tuple(points.items()), lost_in(points)) for method, points in curves.items()]
        table = [[str(x), *(show("accuracy", points.get(x)) for points in curves.values())] for x in xs]
        svg = charts.lines(label, series, percent, percent_mark, "round")
        view = figure(title, words, svg, tabulate(title, ("Round", *curves), table))
        lost = forgotten(title, curves)
        views.append({**view, "forgotten": lost, "shading": FORGETTING if lost["rows"] else ""})
    return views


def lost_in(points: Curve) -> list[tuple[int, int]]:
    """Places of the forgetting intervals among the defined values."""
    values = [value for _, value in sorted(points.items()) if value is not None]
    return list(forgetting_intervals(values))


def forgotten(title: str, curves: Mapping[str, Curve]) -> View:
    """The intervals in numbers: from which round to which, and the most that was lost."""
    rows = []
    for method, points in curves.items():
        known = [(r, value) for r, value in sorted(points.items()) if value is not None]
        for peak, end in lost_in(points):
            deepest = known[peak][1] - min(value for _, value in known[peak:end])
            rows.append([method, str(known[peak][0]), str(known[end][0]), percent(known[peak][1]), percent(deepest)])
    head = ("Method", "From round", "To round", "Record", "Most lost")
    return tabulate(f"Forgetting intervals: {title}", head, rows)


def costs_view(result: View, methods: Sequence[str]) -> list[View]:
    """The shared model's accuracy against bytes and against seconds of work, where there are rounds to join."""
    points = as_records(result.get("rounds"))
    views = []
    for field, title, words, x_name, write in (
        ("bytes", "Accuracy against bytes", "that had crossed all sites’ boundaries by then", "bytes", byte_size),
        ("seconds", "Accuracy against seconds", "of work by then, measuring left out", "time", duration),
    ):
        lines = {}
        for method in methods:
            own = [p for p in points if as_text(p.get("method")) == method]
            pairs = [(as_number(p.get(field)), as_number(p.get("shared_global_accuracy"))) for p in own]
            known = [(x, y) for x, y in pairs if x is not None and y is not None]
            if known:
                lines[method] = known
        if not any(len(known) > 1 for known in lines.values()):
            continue
        label = Label(f"cost-{field}", title, f"One line per method: {', '.join(lines)}.")
        series = [Line(method, known) for method, known in lines.items()]
        xs = [x for known in lines.values() for x, _ in known]
        unit = unit_of_time(max(xs) - min(xs)) if field == "seconds" else 1.0
        svg = charts.lines(label, series, percent, percent_mark, x_name, x_show=write, x_unit=unit)
        rows = [[m, write(x), percent(y)] for m, known in lines.items() for x, y in known]
        table = tabulate(title, ("Method", x_name.capitalize(), "Accuracy"), rows)
        views.append(
            figure(title, f"The shared model on the global test after each round, by {x_name} {words}.", svg, table)
        )
    return views
