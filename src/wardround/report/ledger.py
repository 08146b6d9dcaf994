"""Every byte that crossed a site's boundary."""

from __future__ import annotations

from collections.abc import Sequence

from wardround.report import charts
from wardround.report.charts import Stack
from wardround.report.parts import View, drawn, tabulate
from wardround.report.svg import Label
from wardround.report.values import as_count, as_dict, as_records, as_text, byte_size


def ledger_view(ledger: View, methods: Sequence[str]) -> View:
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
