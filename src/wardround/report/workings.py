"""How the coordinator went about it: where its time went, and which sites it put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wardround.report import charts
from wardround.report.charts import Label, Line, Stack
from wardround.report.parts import View, drawn, tabulate
from wardround.report.values import (
    UNDEFINED,
    as_count,
    as_dict,
    as_list,
    as_number,
    as_records,
    as_text,
    as_texts,
    duration,
    humanise,
    plural,
)

PARTS = {  # what one step of each part is
    "synthesis": "the batch of images is moved once, towards what the models were trained on",
    "adaptation": "copies of the models follow the images of one step",
    "distillation": "the new model learns once from what the models say of one batch",
    "weighting": "the weights of the models move once, by what they say of one batch",
}
SHADES = 10  # of the heat map; the style sheet has one class for each


def work_view(result: View, methods: Sequence[str]) -> View:
    """Seconds by method and part, and milliseconds of one step: FedISCA's Figure 5, and the numbers behind it."""
    entries = as_records(result.get("work"))
    parts = list(dict.fromkeys(as_text(entry.get("part")) for entry in entries))
    seconds: dict[str, dict[str, float]] = {}
    rows: list[list[Any]] = []
    for entry in entries:
        method, part = as_text(entry.get("method")), as_text(entry.get("part"))
        spent = as_number(entry.get("seconds")) or 0.0
        seconds.setdefault(method, {})[part] = spent
        each = as_number(entry.get("ms_per_step"))
        steps = f"{as_count(entry.get('steps')):,}"
        name = f"{method}, {part}" if len(methods) > 1 else humanise(part)
        rows.append([name, steps, duration(spent), UNDEFINED if each is None else f"{each:,.1f} ms"])
    stacks = [
        Stack(m, [spent.get(p, 0.0) for p in parts], duration(sum(spent.values()))) for m, spent in seconds.items()
    ]
    said = ", ".join(f"{stack.name} {stack.note}" for stack in stacks)
    label = Label("work", "Where the coordinator's time went", f"One bar per method, split by part: {said}.")
    return {
        "svg": drawn(charts.stacked_bars(label, stacks, parts, duration, share=False)) if stacks else "",
        "table": tabulate("The coordinator's work", ("Part", "Steps", "Time", "One step"), rows),
        "definitions": [
            {"part": humanise(part), "words": f"One step: {PARTS[part]}."} for part in parts if part in PARTS
        ],
    }


def clusters_view(result: View) -> list[View]:
    """For each method that clusters: who is with whom, what the number was chosen by, who learns from whom."""
    return [_clusters(i, entry) for i, entry in enumerate(as_records(result.get("clusters")))]


def _clusters(i: int, entry: View) -> View:
    method, groups = as_text(entry.get("method")), [as_texts(sites) for sites in as_list(entry.get("clusters"))]
    members = [
        [f"Cluster {k}", f"{len(sites):,}", {"text": ", ".join(sites), "left": True}]
        for k, sites in enumerate(groups, 1)
    ]
    return {
        "method": method,
        "count": plural(len(groups), "cluster"),
        "members": tabulate(f"Clusters of {method}", ("Cluster", "Sites", "Which"), members),
        "silhouettes": _silhouettes(i, method, as_dict(entry.get("silhouettes"))),
        "weights": _weights(method, as_list(entry.get("weights"))),
    }


def _silhouettes(i: int, method: str, found: View) -> View:
    """The silhouette of each number of clusters that was tried, drawn where there are several."""
    points = sorted((int(k), as_number(value)) for k, value in found.items() if k.isdecimal())
    known = {k: value for k, value in points if value is not None}
    title = f"Silhouette by number of clusters, {method}"
    rows = [[str(k), UNDEFINED if value is None else _three(value)] for k, value in points]
    svg = ""
    if len(known) > 1:
        best = max(known, key=lambda k: (round(known[k], 6), -k))
        label = Label(f"silhouette-{i}", title, f"Highest, {_three(known[best])}, with {plural(best, 'cluster')}.")
        line = Line("silhouette", tuple((float(k), value) for k, value in points))
        svg = drawn(charts.lines(label, [line], _three, "{:g}".format, "clusters"))
    return {"svg": svg, "table": tabulate(title, ("Clusters", "Silhouette"), rows)}


def _weights(method: str, matrix: list[Any]) -> View:
    """A heat map that is a table: the number is in every cell, the shade only helps the eye."""
    rows: list[list[Any]] = []
    for k, weights in enumerate(matrix, 1):
        values = [as_number(weight) for weight in as_list(weights)]
        rows.append([f"Cluster {k}", *(_weight(value) for value in values)])
    head = [f"Cluster {k}" for k in range(1, max((len(row) for row in rows), default=1))]
    return tabulate(f"Cross-cluster weights of {method}", ("Learns from", *head), rows)


def _weight(value: float | None) -> View:
    if value is None:
        return {"text": UNDEFINED}
    return {"text": _three(value), "shade": round(SHADES * min(max(value, 0.0), 1.0))}


def _three(value: float) -> str:
    return f"{value:.3f}"
