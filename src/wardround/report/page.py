"""One self-contained HTML page from a parsed `result.json`.

Each `..._view` function turns one part of the result into plain dicts that the template prints; nothing here measures.
The galleries that a result names are the only other files that are read. A result may come from a run that was
stopped, or hold measures this version has never heard of: what is missing is left out, what is undefined is shown as
"–", what is unknown is shown under its own name.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.report import charts
from wardround.report.charts import Bar, Label, Line, Stack
from wardround.report.features import features_view
from wardround.report.gallery import galleries_view
from wardround.report.parts import View, drawn, tabulate
from wardround.report.rounds import rounds_view
from wardround.report.values import (
    as_count,
    as_dict,
    as_list,
    as_number,
    as_records,
    as_text,
    as_texts,
    byte_size,
    duration,
    flat,
    humanise,
    is_ranked,
    mean_of,
    moment,
    percent,
    percent_mark,
    plural,
    show,
)
from wardround.report.workings import clusters_view, work_view

SCHEMA = 1
NOTES_SHOWN = 8  # the rest unfolds: fifty sites with one note each must not push the results off the screen
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


class Measure(NamedTuple):
    """What a row of the result measures."""

    split: str
    model: str
    metric: str
    per_site: bool


Rounds = dict[int, dict[str, list[float | None]]]  # round -> site -> one value per seed
Index = dict[str, dict[Measure, Rounds]]  # by method


def write_report(result: dict[str, Any], path: Path) -> None:
    """Write the page in one rename, so that a reader never sees half of it."""
    page = render(result, path.parent).encode()
    with disk_errors(path):
        write_atomically(path, page)


def render(result: dict[str, Any], folder: Path | None = None) -> str:
    """The page as text; `folder` is where the files lie that the result names."""
    version = result.get("schema_version")
    if version != SCHEMA:
        raise BadInput(
            f"this result has schema_version {version!r} and this wardround reads {SCHEMA}; "
            "write its report with the version that made it"
        )
    index = _index(as_records(result.get("rows")))
    methods = _methods(result)
    return _template().render(
        head=_head_view(result, methods),
        notes=_notes_view(result),
        results=_results_view(result, methods),
        accuracy=_accuracy_view(result, methods, index),
        holdings=_holdings_view(as_dict(result.get("data"))),
        curves=_curves_view(methods, index),
        rounds=rounds_view(result),
        features=features_view(result),
        clusters=clusters_view(result),
        galleries=galleries_view(result, folder),
        work=work_view(result, methods),
        ledger=_ledger_view(as_dict(result.get("ledger")), methods),
        measures=_measures_view(methods, index),
        settings=tabulate("Every setting", ("Setting", "Value"), flat(result.get("settings"))),
        environment=tabulate("Where it ran", ("Part", "Value"), flat(result.get("environment"))),
        command=_options(as_text(result.get("command"))),
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["csp_hash"] = _csp_hash
    return environment.get_template("template.html.j2")


def _head_view(result: View, methods: Sequence[str]) -> View:
    data = as_dict(result.get("data"))
    sites, classes = as_records(data.get("sites")), as_texts(data.get("classes"))
    seeds = sorted({as_count(row.get("seed")) for row in as_records(result.get("rows"))})
    facts = [plural(len(methods), "method")] if len(methods) > 1 else []
    facts += [plural(len(sites), "site")] if sites else []
    facts += [plural(sum(as_count(site.get("train")) for site in sites), "training image")] if sites else []
    facts += [plural(len(classes), "class", "classes")] if classes else []
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


def _notes_view(result: View) -> View:
    found = as_records(result.get("notes"))
    notes = [{"method": as_text(note.get("method")), "text": as_text(note.get("text"))} for note in found]
    return {"shown": notes[:NOTES_SHOWN], "more": notes[NOTES_SHOWN:]}


def _results_view(result: View, methods: Sequence[str]) -> View:
    """Figures are rows and methods columns: a figure's label is long, a method's name short."""
    headlines = as_records(result.get("headlines"))
    found = {(as_text(h.get("key")), as_text(h.get("method"))): h for h in headlines}
    labels = {as_text(h.get("key")): as_text(h.get("label")) or humanise(as_text(h.get("key"))) for h in headlines}

    def value(key: str, method: str) -> float | None:
        return as_number(found.get((key, method), {}).get("value"))

    table: list[list[Any]] = []
    for key, label in labels.items():
        shown = [show(key, value(key, method)) for method in methods]
        known = [v for method in methods if (v := value(key, method)) is not None]
        best = show(key, max(known)) if known and is_ranked(key) and len(set(shown)) > 1 else None
        table.append([label, *({"text": cell, "strong": cell == best} for cell in shown)])
    seconds, data = as_dict(result.get("seconds")), as_dict(result.get("data"))
    if seconds:
        table.append(["Time", *(duration(as_number(seconds.get(method))) for method in methods)])
    tiles = [key for key in ("local_accuracy", "global_accuracy", "balance") if key in labels and len(methods) == 1]
    return {
        "tiles": [{"label": labels[key], "value": show(key, value(key, methods[0]))} for key in tiles],
        "table": tabulate("Headline figures", ("Figure", *methods), table),
        "ranked": any(cell["strong"] for row in table for cell in row[1:] if isinstance(cell, dict)),
        "definitions": [{"label": label, "texts": _definitions(key, found)} for key, label in labels.items()],
        "protocols": [
            {"test": test, "words": as_text(data[key])}
            for test, key in (("Local", "local_protocol"), ("Global", "global_protocol"))
            if data.get(key)
        ],
    }


def _definitions(key: str, found: Mapping[tuple[str, str], View]) -> list[View]:
    """What a figure means: once where all methods agree, else each wording with the methods it holds for.

    The two tests are described once, above the table, so the meaning without them is enough here.
    """
    wordings: dict[str, list[str]] = {}
    for (figure, method), headline in found.items():
        text = as_text(headline.get("meaning") or headline.get("definition"))
        if figure == key and text:
            wordings.setdefault(text, []).append(method)
    return [{"who": ", ".join(who) if len(wordings) > 1 else "", "text": text} for text, who in wordings.items()]


def _accuracy_view(result: View, methods: Sequence[str], index: Index) -> View:
    """Local accuracy of the personal predictor at each site, after the last round that has any."""
    measured = {
        m: rounds for m in methods if (rounds := index.get(m, {}).get(Measure("local", "personal", "accuracy", True)))
    }
    held = (as_text(site.get("name")) for site in as_records(as_dict(result.get("data")).get("sites")))
    sites = list(dict.fromkeys([*held, *(site for rounds in measured.values() for site in rounds[max(rounds)])]))
    figures: list[View] = []
    columns: list[list[str]] = []
    for method, rounds in measured.items():
        values = {site: mean_of(rounds[max(rounds)].get(site, ())) for site in sites}
        figures.append({"name": method, "svg": _site_bars(f"accuracy-{len(figures)}", method, values)})
        columns.append([show("accuracy", value) for value in values.values()])
    table = [list(row) for row in zip(sites, *columns, strict=True)] if columns else []
    return {"figures": figures, "table": tabulate("Local accuracy at each site", ("Site", *measured), table)}


def _site_bars(key: str, method: str, values: Mapping[str, float | None]) -> Markup:
    known = {site: value for site, value in values.items() if value is not None}
    mean = mean_of(known.values())
    worst = min(known, key=lambda site: known[site]) if len(set(known.values())) > 1 else None
    desc = f"One bar per site; mean {show('accuracy', mean)}"
    if worst is not None:
        desc += f", lowest {show('accuracy', known[worst])} at {worst}"
    items = [Bar(site, value, "lowest" if site == worst else "") for site, value in values.items()]
    label = Label(key, f"Local accuracy of {method} at each site", f"{desc}.")
    return drawn(charts.bars(label, items, percent, percent_mark, mean))


def _holdings_view(data: View) -> View:
    """What each site holds: its label mix as bars, its sizes as a table."""
    classes, sites = as_texts(data.get("classes")), as_records(data.get("sites"))
    names = [as_text(site.get("name")) for site in sites]
    counts = [[as_count(n) for n in as_list(site.get("label_counts"))][: len(classes)] for site in sites]
    totals, held = [sum(site) for site in counts], [sum(map(bool, site)) for site in counts]
    svg, mix, sizes, many = Markup(""), [], [], len(sites) > charts.MANY_ROWS
    if classes and any(totals):
        desc = (
            f"One bar per site, split by class. A site holds {min(held)} to {max(held)} of the {len(classes)} classes "
            f"and {min(totals):,} to {max(totals):,} images."
        )
        stacks = [Stack(*row) for row in zip(names, counts, (f"{total:,}" for total in totals), strict=True)]
        label = Label("labels", "Label mix of each site's training images", desc)
        svg = drawn(charts.stacked_bars(label, stacks, classes, "{:,.0f} images".format, share=True))
        mix = [[name, *(f"{n:,}" for n in site)] for name, site in zip(names, counts, strict=True)]
    for name, site in zip(names, sites, strict=True):
        sizes.append([name, *(show("count", as_number(site.get(part))) for part in ("train", "val", "test"))])
    return {
        "provenance": as_text(data.get("provenance")),
        "rule": as_text(data.get("partition_rule")).rstrip("."),
        "hash": as_text(data.get("partition_hash")),
        "svg": svg,
        "words": "Each bar is all the images of one site" + ("." if many else "; the number at its end is how many."),
        "mix": tabulate("Training images of each class", ("Site", *classes), mix),
        "sizes": tabulate("Images at each site", ("Site", "Training", "Validation", "Test"), sizes),
    }


def _curves_view(methods: Sequence[str], index: Index) -> list[View]:
    """Accuracy over rounds, for each of `CURVES` that more than one round measured."""
    views = []
    for split, model, title, words in CURVES:
        curves: dict[str, dict[int, float | None]] = {}
        for method in methods:
            known = index.get(method, {})
            rounds = [known.get(Measure(split, model, "accuracy", per_site), {}) for per_site in (False, True)]
            if points := {r: mean_of(_pool(sites)) for r, sites in sorted((rounds[0] or rounds[1]).items())}:
                curves[method] = points
        xs = sorted({r for points in curves.values() for r in points})
        if len(xs) < 2:
            continue
        ends = ", ".join(f"{method} {show('accuracy', points[max(points)])}" for method, points in curves.items())
        label = Label(f"curve-{split}-{model}", title, f"{words} After the last round: {ends}.")
        series = [Line(method, tuple(points.items())) for method, points in curves.items()]
        table = [[str(x), *(show("accuracy", points.get(x)) for points in curves.values())] for x in xs]
        svg = drawn(charts.lines(label, series, percent, percent_mark, "round"))
        views.append({"title": title, "words": words, "svg": svg, "table": tabulate(title, ("Round", *curves), table)})
    return views


def _ledger_view(ledger: View, methods: Sequence[str]) -> View:
    """Bytes by method and direction, split by group; overhead is what framing adds to the tensors."""
    sums: dict[tuple[str, str], dict[str, int]] = {}
    for row in as_records(ledger.get("totals")):
        part = sums.setdefault((as_text(row.get("method")), as_text(row.get("direction"))), {})
        group = as_text(row.get("group"))
        part[group] = part.get(group, 0) + as_count(row.get("bytes"))
    groups = sorted(dict.fromkeys(group for part in sums.values() for group in part), key="overhead".__eq__)
    stacks, table = [], []
    for (method, direction), part in sums.items():
        sizes, name = [part.get(group, 0) for group in groups], f"{method} {direction}"
        stacks.append(Stack(name if len(methods) > 1 else direction, sizes, byte_size(sum(sizes))))
        table.append([name, *({"text": byte_size(n), "title": f"{n:,} bytes"} for n in (*sizes, sum(sizes)))])
    said = ", ".join(f"{stack.name} {stack.note}" for stack in stacks)
    label = Label("ledger", "What crossed the sites' boundaries", f"One bar per method and direction: {said}.")
    talking = {method for method, _ in sums}
    return {
        "svg": drawn(charts.stacked_bars(label, stacks, groups, byte_size, share=False)) if stacks else "",
        "table": tabulate("Bytes by group, over all sites and rounds", ("Direction", *groups, "Total"), table),
        "sites": _site_bytes(as_records(ledger.get("rows"))),
        "silent": [method for method in methods if method not in talking] if sums else [],
    }


def _site_bytes(rows: Sequence[View]) -> View:
    sums: dict[str, dict[str, int]] = {}
    for row in rows:
        way = f"{as_text(row.get('method'))} {as_text(row.get('direction'))}"
        part = sums.setdefault(as_text(row.get("site")), {})
        size = sum(map(as_count, as_dict(row.get("groups")).values())) + as_count(row.get("overhead"))
        part[way] = part.get(way, 0) + size
    ways = list(dict.fromkeys(way for part in sums.values() for way in part))
    table = [[site, *(f"{part.get(way, 0):,}" for way in ways)] for site, part in sums.items()]
    return tabulate("Bytes of each site, over all rounds", ("Site", *ways), table)


def _measures_view(methods: Sequence[str], index: Index) -> View:
    """Everything measured, known to this version or not, at each method's last round."""
    table: list[list[Any]] = []
    for measure in dict.fromkeys(measure for method in methods for measure in index.get(method, {})):
        over = "mean over sites" if measure.per_site else "all sites"
        cells = [{"text": word, "left": True} for word in (measure.split, measure.model, over)]
        for method in methods:
            rounds = index.get(method, {}).get(measure)
            values = _pool(rounds[max(rounds)]) if rounds else []
            missing = sum(value is None for value in values)
            note = f" ({len(values) - missing} of {len(values)})" if 0 < missing < len(values) else ""
            cells.append({"text": show(measure.metric, mean_of(values)) + note})
        table.append([humanise(measure.metric), *cells])
    head = ("Metric", "Split", "Model", "Over", *methods)
    return tabulate("Everything measured, after each method's last round", head, table)


def _index(rows: Sequence[View]) -> Index:
    index: Index = {}
    for row in rows:
        site, metric = as_text(row.get("site")), as_text(row.get("metric"))
        measure = Measure(as_text(row.get("split")), as_text(row.get("model")), metric, bool(site))
        rounds = index.setdefault(as_text(row.get("method")), {}).setdefault(measure, {})
        rounds.setdefault(as_count(row.get("round")), {}).setdefault(site, []).append(as_number(row.get("value")))
    return index


def _pool(sites: Mapping[str, Iterable[float | None]]) -> list[float | None]:
    return [value for seeds in sites.values() for value in seeds]


def _methods(result: View) -> list[str]:
    """The methods in the order they were asked for, then any that only figures name."""
    parts = [*as_records(result.get("headlines")), *as_records(result.get("rows"))]
    named = (as_text(part.get("method")) for part in parts if part.get("method"))
    return list(dict.fromkeys([*as_texts(result.get("methods")), *named])) or ["–"]


def _options(command: str) -> list[str]:
    """The command in pieces that should not break across lines: each option with its value."""
    return [piece if i == 0 else f"--{piece}" for i, piece in enumerate(command.split(" --"))]


def _printable(value: object) -> object:
    """What the template prints, without control characters; markup was made so already."""
    return charts.plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _csp_hash(style: str) -> str:
    """The hash by which the page's security policy admits its own style sheet and nothing else."""
    return base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
