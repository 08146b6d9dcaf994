"""The headline figures: a table with every definition, and all methods on the plane of local and global accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wardround.report.index import Index, pool
from wardround.report.parts import View, figure, tabulate
from wardround.report.points import Axis, scatter
from wardround.report.svg import Label
from wardround.report.values import (
    as_count,
    as_dict,
    as_number,
    as_records,
    as_text,
    byte_size,
    duration,
    humanise,
    is_ranked,
    mean_of,
    percent,
    percent_mark,
    show,
    unit_of_time,
)

TIME = (
    "The whole run of the method, measuring included, without the time between a stop and its resume. In a comparison, "
    "site models that an earlier method trained are not trained again: the first has the time of all."
)
Headlines = Mapping[tuple[str, str], View]  # by key and method


def results_view(result: View, methods: Sequence[str]) -> View:
    """Figures are rows and methods columns: a figure's label is long, a method's name short."""
    headlines = as_records(result.get("headlines"))
    found = {(as_text(h.get("key")), as_text(h.get("method"))): h for h in headlines}
    labels = {as_text(h.get("key")): as_text(h.get("label")) or humanise(as_text(h.get("key"))) for h in headlines}
    table: list[list[Any]] = []
    for key, label in labels.items():
        values = [headline(found, key, method) for method in methods]
        shown = [show(key, value) for value in values]
        known = [value for value in values if value is not None]
        best = show(key, max(known)) if known and is_ranked(key) and len(set(shown)) > 1 else None
        table.append([label, *({"text": cell, "strong": cell == best} for cell in shown)])
    seconds, data = as_dict(result.get("seconds")), as_dict(result.get("data"))
    if seconds:
        table.append(["Time", *(duration(as_number(seconds.get(method))) for method in methods)])
    definitions = [{"label": label, "texts": _definitions(key, found)} for key, label in labels.items()]
    if seconds:
        definitions.append({"label": "Time", "texts": [{"who": "", "text": TIME}]})
    tiles = [key for key in ("local_accuracy", "global_accuracy", "balance") if key in labels and len(methods) == 1]
    return {
        "tiles": [{"label": labels[key], "value": show(key, headline(found, key, methods[0]))} for key in tiles],
        "table": tabulate("Headline figures", ("Figure", *methods), table),
        "ranked": any(cell["strong"] for row in table for cell in row[1:] if isinstance(cell, dict)),
        "balance": _balance_figure(found, methods),
        "definitions": definitions,
        "protocols": [
            {"test": test, "words": as_text(data[key])}
            for test, key in (("Local", "local_protocol"), ("Global", "global_protocol"))
            if data.get(key)
        ],
    }


def headline(found: Headlines, key: str, method: str) -> float | None:
    """A figure of a method."""
    return as_number(found.get((key, method), {}).get("value"))


def _balance_figure(found: Headlines, methods: Sequence[str]) -> View | None:
    """All methods by local and global accuracy; nothing where there are not two to compare."""
    spots = {}
    for method in methods:
        local, everyone = (headline(found, key, method) for key in ("local_accuracy", "global_accuracy"))
        if local is not None and everyone is not None:
            spots[method] = (local, everyone)
    if len(spots) < 2:
        return None
    title = "Local against global accuracy"
    best = max(spots, key=lambda method: sum(spots[method]))
    desc = f"A point for each method. The highest balance, {percent(sum(spots[best]) / 2)}, has {best}."
    axes = (Axis(f"{test} accuracy", percent_mark, percent, span=0.05) for test in ("local", "global"))
    svg = scatter(Label("balance", title, desc), spots, *axes, diagonals=True)
    words = (
        "Local accuracy says how well sites are served on images like their own, global accuracy how well the same "
        "models do on everyone’s. Along a dashed line their mean, the balance, is the same; up and to the right is "
        "better. The axes span the values."
    )
    rows = [[m, percent(x), percent(y), percent((x + y) / 2)] for m, (x, y) in spots.items()]
    return figure(title, words, svg, tabulate(title, ("Method", "Local", "Global", "Balance"), rows))


def costs_at_the_end(result: View, methods: Sequence[str]) -> list[View]:
    """What accuracy cost in the end: methods by all their bytes, and by all their seconds."""
    found = {(as_text(h.get("key")), as_text(h.get("method"))): h for h in as_records(result.get("headlines"))}
    totals = as_records(as_dict(result.get("ledger")).get("totals"))
    seconds = as_dict(result.get("seconds"))
    sent = {m: sum(as_count(t.get("bytes")) for t in totals if as_text(t.get("method")) == m) for m in methods}
    views = []
    for key, title, words, axis, costs in (
        (
            "bytes",
            "Global accuracy for bytes",
            "all bytes that crossed boundaries",
            Axis("bytes", byte_size, byte_size, low=0.0),
            sent,
        ),
        (
            "time",
            "Global accuracy for time",
            "all its seconds",
            Axis("time", duration, duration, low=0.0, unit=unit_of_time),
            seconds,
        ),
    ):
        pairs = {m: (as_number(costs.get(m)), headline(found, "global_accuracy", m)) for m in methods}
        spots = {m: (x, y) for m, (x, y) in pairs.items() if x is not None and y is not None}
        if len(spots) < 2:
            continue
        label = Label(f"bought-{key}", title, f"A point for each method: {', '.join(spots)}.")
        svg = scatter(label, spots, axis, Axis("global accuracy", percent_mark, percent, span=0.05))
        rows = [[m, axis.show(x), percent(y)] for m, (x, y) in spots.items()]
        table = tabulate(title, ("Method", axis.name.capitalize(), "Global accuracy"), rows)
        views.append(
            figure(
                title,
                f"A method’s personal predictors on the global test, by {words}, up and left is better.",
                svg,
                table,
            )
        )
    return views


def _definitions(key: str, found: Headlines) -> list[View]:
    """What a figure means: once where all methods agree, else each wording with the methods it holds for.

    The two tests are described once, above the table, so the meaning without them is enough here.
    """
    wordings: dict[str, list[str]] = {}
    for (name, method), entry in found.items():
        text = as_text(entry.get("meaning") or entry.get("definition"))
        if name == key and text:
            wordings.setdefault(text, []).append(method)
    return [{"who": ", ".join(who) if len(wordings) > 1 else "", "text": text} for text, who in wordings.items()]


def measures_view(methods: Sequence[str], index: Index) -> View:
    """Everything measured, known to this version or not, at each method's last round."""
    table: list[list[Any]] = []
    for measure in dict.fromkeys(measure for method in methods for measure in index.get(method, {})):
        over = "mean over sites" if measure.per_site else "all sites"
        cells = [{"text": word, "left": True} for word in (measure.split, measure.model, over)]
        for method in methods:
            rounds = index.get(method, {}).get(measure)
            values = pool(rounds[max(rounds)]) if rounds else []
            missing = sum(value is None for value in values)
            note = f" ({len(values) - missing} of {len(values)})" if 0 < missing < len(values) else ""
            cells.append({"text": show(measure.metric, mean_of(values)) + note})
        table.append([humanise(measure.metric), *cells])
    head = ("Metric", "Split", "Model", "Over", *methods)
    return tabulate("Everything measured, after each method's last round", head, table)
