"""How the coordinator went about it: where its time went, and which sites it put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wardround.report.charts import Line, Stack, lines, stacked_bars
from wardround.report.heat import heat_map
from wardround.report.parts import View, drawn, figure, tabulate
from wardround.report.svg import Label, keyed
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
SIMILAR = {  # by how the sites were clustered
    "predictions": "what two models answer to the same noise",
    "hierarchical": "what two models answer to the same noise",
    "parameters": "the parameters of two models",
}
MOST_LINES = 9  # of the weights over time; more cannot be told apart


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
        "svg": drawn(stacked_bars(label, stacks, parts, duration, share=False)) if stacks else "",
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
        "figures": [
            view
            for view in (
                _similarity(i, method, as_dict(entry.get("similarity")), groups),
                _weights(i, method, as_list(entry.get("weights"))),
                _course(i, method, as_list(entry.get("course"))),
            )
            if view
        ],
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
        label = Label(
            keyed("silhouette", i, method), title, f"Highest, {_three(known[best])}, with {plural(best, 'cluster')}."
        )
        line = Line("silhouette", tuple((float(k), value) for k, value in points))
        svg = drawn(lines(label, [line], _three, "{:g}".format, "clusters"))
    return {"svg": svg, "table": tabulate(title, ("Clusters", "Silhouette"), rows)}


def _similarity(i: int, method: str, found: View, groups: Sequence[Sequence[str]]) -> View | None:
    """How alike the sites' models are, the sites of a cluster side by side."""
    sites, values = as_texts(found.get("sites")), [as_list(row) for row in as_list(found.get("values"))]
    if not sites or len(values) != len(sites) or any(len(row) != len(sites) for row in values):
        return None
    cluster = {site: k for k, group in enumerate(groups) for site in group}
    order = sorted(range(len(sites)), key=lambda place: cluster.get(sites[place], len(groups)))
    names = [sites[place] for place in order]
    matrix = [[as_number(values[a][b]) for b in order] for a in order]
    title = f"Similarity of the sites, {method}"
    what = SIMILAR.get(as_text(found.get("of")), "what the clusters were made from")
    label = Label(
        keyed("similarity", i, method),
        title,
        f"A row and a column for each site; 1 is the same. {len(groups)} clusters.",
    )
    svg = heat_map(label, names, names, matrix, "{:.2f}".format, [cluster.get(name, len(groups)) for name in names])
    rows = [[name, *(_number(value) for value in row)] for name, row in zip(names, matrix, strict=True)]
    words = f"Cosine between {what}: 1 where two are the same. Gaps part the clusters."
    return figure("How alike the sites’ models are", words, svg, tabulate(title, ("Site", *names), rows))


def _weights(i: int, method: str, matrix: list[Any]) -> View | None:
    """Who learns from whom at the end."""
    values = [[as_number(weight) for weight in as_list(row)] for row in matrix]
    if not values or any(len(row) != len(values) for row in values):
        return None
    names = [f"Cluster {k}" for k in range(1, len(values) + 1)]
    title = f"Cross-cluster weights of {method}"
    label = Label(
        keyed("weights", i, method), title, "A row for each cluster's model, a column for each cluster it learns from."
    )
    rows = [[name, *(_number(value) for value in row)] for name, row in zip(names, values, strict=True)]
    words = (
        "A row is the model of one cluster: the share that the images of each cluster had in what it learned at the "
        "end. A row adds up to 1."
    )
    svg = heat_map(label, names, names, values, "{:.2f}".format)
    return figure("Who learns from whom", words, svg, tabulate(title, ("Learns from", *names), rows))


def _course(i: int, method: str, course: list[Any]) -> View | None:
    """The same weights after each trajectory: a line for each pair of clusters."""
    steps = [[[as_number(w) for w in as_list(row)] for row in as_list(matrix)] for matrix in course]
    count = len(steps[0]) if steps else 0
    if len(steps) < 2 or count < 2 or any([len(row) for row in matrix] != [count] * count for matrix in steps):
        return None
    pairs = [(k, j) for k in range(count) for j in range(count)]
    series = [Line(f"{k + 1} from {j + 1}", [(float(t), m[k][j]) for t, m in enumerate(steps)]) for k, j in pairs]
    title = f"Cross-cluster weights over time, {method}"
    label = Label(keyed("course", i, method), title, f"{len(pairs)} lines over {len(steps) - 1} trajectories.")
    shown = (
        series if len(series) <= MOST_LINES else [line for line, (k, j) in zip(series, pairs, strict=True) if k == j]
    )
    svg = lines(label, shown, _three, "{:g}".format, "trajectory")
    rows = [[str(t), *(_number(m[k][j]) for k, j in pairs)] for t, m in enumerate(steps)]
    words = "“1 from 2”: the share of cluster 2’s images in what the model of cluster 1 learns, after each trajectory."
    if len(shown) < len(series):
        words += " Drawn are the shares of a cluster’s own images; the others are in the table."
    head = ("Trajectory", *(line.name for line in series))
    return figure("How the weights came about", words, svg, tabulate(title, head, rows))


def _number(value: float | None) -> str:
    return UNDEFINED if value is None else _three(value)


def _three(value: float) -> str:
    return f"{value:.3f}"
