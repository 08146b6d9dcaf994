"""The sites: how well each is served, and what each holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from wardround.report import charts
from wardround.report.charts import Bar, Stack
from wardround.report.index import OWN, Index, at_the_end
from wardround.report.parts import View, drawn, tabulate
from wardround.report.svg import Label, keyed
from wardround.report.values import (
    as_count,
    as_dict,
    as_list,
    as_number,
    as_records,
    as_text,
    as_texts,
    mean_of,
    percent,
    percent_mark,
    show,
)


def accuracy_view(result: View, methods: Sequence[str], index: Index) -> View:
    """Local accuracy of the personal predictor at each site, after the last round that has any."""
    measured = {m: found for m in methods if (found := at_the_end(index, m, OWN))}
    held = (as_text(site.get("name")) for site in as_records(as_dict(result.get("data")).get("sites")))
    sites = list(dict.fromkeys([*held, *(site for found in measured.values() for site in found)]))
    figures: list[View] = []
    columns: list[list[str]] = []
    for method, found in measured.items():
        values = {site: found.get(site) for site in sites}
        figures.append({"name": method, "svg": _site_bars(keyed("accuracy", len(figures), method), method, values)})
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


def holdings_view(data: View) -> View:
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
