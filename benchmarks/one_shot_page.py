"""The figures of docs/oneshot.md, from the results of `one_shot_grid.py`.

Run it when these are new; a test says when the page is behind. Results under the preset `paper` have a part of their
own, and so have sites with like patients: FedISCA's Table 2, by `wardround papers run fedisca-2`.

    python benchmarks/one_shot_page.py papers/one_shot_grid.json docs/oneshot.md
    python benchmarks/one_shot_page.py papers/one_shot_paper.json docs/oneshot.md
    python benchmarks/one_shot_page.py papers/fedisca_table2.json docs/oneshot.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from one_shot_entries import ABLATIONS, ENTRIES, OURS
from one_shot_summary import NONE, figure, stated
from pages import fill
from wardround.papers.library import table
from wardround.papers.schema import Line
from wardround.papers.summaries import cells, headed

LOCAL, GLOBAL = "local_accuracy", "global_accuracy"
PUBLISHED = "paper"  # the preset of published settings
VARIED = "fedbicross"  # whose bars are shown
LIKE = table("fedisca-2")  # FedISCA's ablations, of sites with like patients

Row = Mapping[str, Any]
Rows = Mapping[tuple[str, float, str], Row]


def figures(tree: Mapping[str, Any]) -> dict[str, str]:
    """What stands between the marks of the page."""
    rows = {(row["set"], row["alpha"], row["entry"]): row for row in tree["summary"]}
    if all(alpha is None for _, alpha, _ in rows):
        return {"like patients": like(tree["summary"], tree["study"]["data"]["sites"])}
    if tree["preset"] == PUBLISHED:
        return {"published settings": methods(rows, ENTRIES)}
    return {
        "methods": methods(rows, [*ENTRIES, *OURS]),
        "bars": bars(tree["entries"], rows),
        "ablations": variants(tree["entries"], ABLATIONS, rows),
    }


def methods(rows: Rows, lines: Sequence[Line]) -> str:
    """For each set a table of all methods in the order of the papers' tables: local / global, and the published."""
    text = []
    for images in dict.fromkeys(images for images, _, _ in rows):
        levels = sorted({alpha for found, alpha, _ in rows if found == images})
        head = ["method", *(f"α = {level:g}" for level in levels), "seeds", "published: local", "published: global"]
        text += [f"**{images}**", "", *headed(head)]
        for line in lines:
            found = [rows.get((images, level, line.label)) for level in levels]
            if any(found):
                text.append(cells([_name(line), *map(_pair, found), _seeds(found), *_published(found)]))
        text.append("")
    return "\n".join(text).rstrip()


def bars(entries: Sequence[Row], rows: Rows) -> str:
    """How far FedBiCross keeps what a site has and wins what the ensemble knows, over the seeds that all three have."""
    head = [
        "set",
        "α",
        "seeds",
        "local accuracy",
        "below `local`, points",
        "global: local, fedbicross, ensemble",
        "won",
    ]
    text = headed(head)
    for images, alpha, _ in sorted(key for key in rows if key[2] == VARIED):
        own, found, panel = (_by_seed(entries, images, alpha, name) for name in ("local", VARIED, "ensemble"))
        seeds = own.keys() & found.keys() & panel.keys()
        if not seeds:
            continue
        start, end, top = (mean(of[seed][GLOBAL] for seed in seeds) for of in (own, found, panel))
        won = f"{(end - start) / (top - start):.0%}" if top > start else NONE
        below = 100 * mean(own[seed][LOCAL] - found[seed][LOCAL] for seed in seeds)
        globally = ", ".join(f"{100 * value:.1f}" for value in (start, end, top))
        values = [100 * found[seed][LOCAL] for seed in sorted(seeds)]
        local = f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
        text.append(cells([images, f"{alpha:g}", str(len(seeds)), local, f"{below:.1f}", globally, won]))
    return "\n".join(text)


def like(summary: Sequence[Row], sites: int) -> str:
    """The shared model's accuracy on everybody's patients in the order of the paper's lines, and what it prints."""
    text = headed(["set", "entry", "seeds", "accuracy", "published"])
    order = [line.label for line in LIKE.entries]
    for row in sorted(summary, key=lambda row: (row["set"], order.index(row["entry"]))):
        printed = LIKE.printed(row["entry"], row["set"], sites, "iid")
        shown = NONE if printed is None else printed[0]
        text.append(cells([row["set"], row["entry"], str(len(row["seeds"])), figure(row, GLOBAL), shown]))
    return "\n".join(text)


def _by_seed(entries: Sequence[Row], images: str, alpha: float, name: str) -> dict[int, Mapping[str, float]]:
    place = (images, alpha, name)
    return {e["seed"]: e["figures"] for e in entries if (e["set"], e["alpha"], e["entry"]) == place}


def variants(entries: Sequence[Row], lines: Sequence[Line], rows: Rows) -> str:
    """Where a variant of a method was run, means over its seeds, and first the method itself over the same seeds."""
    head = ["set", "α", "seeds", "entry", "local", "global", "published: local"]
    text = headed(head)
    groups: dict[tuple[str, float, str, tuple[int, ...]], list[str]] = {}
    for images, alpha in sorted({(images, alpha) for images, alpha, _ in rows}):
        for line in lines:
            if seeds := tuple(sorted(_by_seed(entries, images, alpha, line.label))):
                groups.setdefault((images, alpha, line.group, seeds), [line.group]).append(line.label)
    for (images, alpha, _, seeds), names in groups.items():
        for name in names:
            of = _by_seed(entries, images, alpha, name)
            if not of.keys() >= {*seeds}:
                continue
            shown = [f"{100 * mean(of[seed][key] for seed in seeds):.1f}" for key in (LOCAL, GLOBAL)]
            beside = stated(rows[images, alpha, name]["published"]["local"])
            text.append(cells([images, f"{alpha:g}", ", ".join(map(str, seeds)), name, *shown, beside]))
    return "\n".join(text) if groups else "Not run yet."


def _name(line: Line) -> str:
    return f"`{line.label}`" if "," not in line.label else line.label


def _pair(row: Row | None) -> str:
    if row is None:
        return NONE
    return f"{figure(row, LOCAL)} / {figure(row, GLOBAL)}"


def _seeds(found: Sequence[Row | None]) -> str:
    counts = sorted({len(row["seeds"]) for row in found if row is not None})
    return " to ".join(map(str, {counts[0]: 0, counts[-1]: 0}))


def _published(found: Sequence[Row | None]) -> list[str]:
    return [
        " / ".join(stated(None if row is None else row["published"][key]) for row in found)
        if any(row is not None and row["published"][key] is not None for row in found)
        else NONE
        for key in ("local", "shared_global")
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page's figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path)
    given = parser.parse_args(arguments)
    parts = figures(json.loads(given.results.read_text(encoding="utf-8")))
    return fill(given.page, {f"one_shot_page.py, {part}": text for part, text in parts.items()})


if __name__ == "__main__":
    sys.exit(main())
