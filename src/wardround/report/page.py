"""One self-contained HTML page from a parsed `result.json`.

Each `..._view` function turns one part of the result into plain dicts that the templates print; nothing here measures.
The galleries that a result names and the audits of its runs are the only other files that are read. Patients' images
are on a page only where somebody hands them over (`RealImages`), which `write_report` never does. A result may come
from a run that was stopped, or hold measures this version has never heard of: what is missing is left out, what is
undefined is shown as "–", what is unknown is shown under its own name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template

from wardround.embedded import environment
from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.report.answers import answers_view
from wardround.report.audit import audits_view, counts_view, spent_view
from wardround.report.features import features_view, projections_view
from wardround.report.gallery import galleries_view
from wardround.report.index import index_rows, methods_of
from wardround.report.ledger import ledger_view
from wardround.report.overview import overview_view
from wardround.report.parts import View, tabulate
from wardround.report.real import RealImages
from wardround.report.results import costs_at_the_end, measures_view, results_view
from wardround.report.rounds import costs_view, curves_view, rounds_view
from wardround.report.sites import accuracy_view, holdings_view
from wardround.report.svg import plain
from wardround.report.values import as_count, as_dict, as_records, as_text, as_texts, flat, moment, plural
from wardround.report.workings import clusters_view, work_view

SCHEMA = 1
MOST_SOURCE = 120  # characters about the images at the head of the page; all are with the sites
NOTES_SHOWN = 4  # the rest unfolds: notes must not push what happened off the first screen


def write_report(result: dict[str, Any], path: Path) -> None:
    """Write the page in one rename, so that a reader never sees half of it."""
    page = render(result, path.parent).encode()
    with disk_errors(path):
        write_atomically(path, page)


def render(result: dict[str, Any], folder: Path | None = None, real: RealImages | None = None) -> str:
    """The page as text; `folder` is where the files lie that the result names."""
    return _template().render(**views(result, folder, real))


def views(result: dict[str, Any], folder: Path | None = None, real: RealImages | None = None) -> View:
    """Everything that the page shows, section by section."""
    version = result.get("schema_version")
    if version != SCHEMA:
        raise BadInput(
            f"this result has schema_version {version!r} and this wardround reads {SCHEMA}; "
            "write its report with the version that made it"
        )
    index = index_rows(as_records(result.get("rows")))
    methods = methods_of(result)
    return {
        "head": _head_view(result, methods),
        "overview": overview_view(result, methods, index),
        "notes": _notes_view(result, methods),
        "results": results_view(result, methods),
        "accuracy": accuracy_view(result, methods, index),
        "answers": answers_view(result, methods),
        "bought": costs_at_the_end(result, methods),
        "holdings": holdings_view(as_dict(result.get("data"))),
        "curves": curves_view(methods, index),
        "costs": costs_view(result, methods),
        "rounds": rounds_view(result),
        "features": features_view(result),
        "projections": projections_view(result),
        "clusters": clusters_view(result),
        "galleries": galleries_view(result, folder, real),
        "work": work_view(result, methods),
        "ledger": ledger_view(as_dict(result.get("ledger")), methods),
        "audits": audits_view(folder, methods),
        "spent": spent_view(result),
        "noised_counts": counts_view(result),
        "measures": measures_view(methods, index),
        "settings": tabulate("Every setting", ("Setting", "Value"), flat(result.get("settings"))),
        "environment": tabulate("Where it ran", ("Part", "Value"), flat(result.get("environment"))),
        "command": _options(as_text(result.get("command"))),
    }


def style_sheet(part: str) -> str:
    """A part of what the page looks like, for whoever shows charts elsewhere: `palette` or `chart`."""
    return _environment().get_template(f"{part}.css.j2").render()


def _template() -> Template:
    return _environment().get_template("page.html.j2")


@cache
def _environment() -> Environment:
    return environment(Path(__file__).parent / "templates", plain)


def _head_view(result: View, methods: Sequence[str]) -> View:
    data = as_dict(result.get("data"))
    sites, classes = as_records(data.get("sites")), as_texts(data.get("classes"))
    seeds = sorted({as_count(row.get("seed")) for row in as_records(result.get("rows"))})
    facts = [plural(len(methods), "method")] if len(methods) > 1 else []
    facts += [plural(len(sites), "site")] if sites else []
    facts += [plural(sum(as_count(site.get("train")) for site in sites), "training image")] if sites else []
    facts += [plural(len(classes), "class", "classes")] if classes else []
    facts += [source] if (source := as_text(data.get("provenance")).partition(";")[0][:MOST_SOURCE]) else []
    facts += [f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"] if seeds else []
    return {
        "name": as_text(result.get("name")) or "A run",
        "kind": "Comparison" if len(methods) > 1 else "Run",
        "methods": methods,
        "facts": facts,
        "created": as_text(result.get("created")),
        "when": moment(as_text(result.get("created"))),
        "version": as_text(result.get("version")),
    }


def _notes_view(result: View, methods: Sequence[str]) -> View:
    """What is said of several methods is said once."""
    whom: dict[str, dict[str, None]] = {}
    for note in as_records(result.get("notes")):
        whom.setdefault(as_text(note.get("text")), {})[as_text(note.get("method"))] = None
    everyone = {*methods} if len(methods) > 1 else None
    said = {text: "all methods" if {*who} == everyone else ", ".join(filter(None, who)) for text, who in whom.items()}
    notes = [{"method": who, "text": text} for text, who in said.items()]
    return {"shown": notes[:NOTES_SHOWN], "more": notes[NOTES_SHOWN:]}


def _options(command: str) -> list[str]:
    """The command in pieces that should not break across lines: each option with its value."""
    return [piece if i == 0 else f"--{piece}" for i, piece in enumerate(command.split(" --"))]
