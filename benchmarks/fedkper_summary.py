"""From the entries of `fedkper_table.py` to means over seeds beside the published rows, ranks, and accuracy by time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedkper_entries import ABLATIONS, COLUMNS, ENTRIES, published
from wardround.papers.courses import by_time
from wardround.papers.fedkper import MEASURES, PROTOCOL, sites_of
from wardround.papers.runs import SECONDS
from wardround.papers.summaries import averaged, cells, grouped, headed

PUBLISHED_WORDS = "FedKPer (arXiv 2605.00698), Table 1, means of 3 seeds on the authors' protocol"
BY_TIME = ("fedavg", "fedkper")  # its Figure 5
NONE = "–"

Record = Mapping[str, Any]


def summarise(entries: Iterable[Record], study: Record) -> list[dict[str, Any]]:
    """Mean and sample standard deviation over seeds by entry, with ranks among the methods of the table.

    Published figures stand beside a study of the paper's protocol only.
    """
    rows = [_row(found, study) for found in grouped(entries, "set")]
    order = {entry.label: number for number, entry in enumerate((*ENTRIES, *ABLATIONS))}
    compared = {entry.label for entry in ENTRIES}
    for key in COLUMNS:
        ranked = [row for row in rows if row["entry"] in compared and row["mean"][key] is not None]
        for row in ranked:
            better = sum(other["mean"][key] > row["mean"][key] for other in ranked)
            row["rank"][key] = f"{better + 1} of {len(ranked)}"
    return sorted(rows, key=lambda row: order.get(row["entry"], len(order)))


def _row(found: Sequence[Record], study: Record) -> dict[str, Any]:
    images, label = found[0]["set"], found[0]["entry"]
    stated = published(images, label) if _is_the_papers(images, study) else None
    return {"set": images, "entry": label, **averaged(found, MEASURES, 5), "rank": {}, "published": stated}


def _is_the_papers(images: str, study: Record) -> bool:
    return (study["rounds"], study["data"]["sites"]) == (PROTOCOL["rounds"], sites_of(images))


def markdown(results: Record) -> str:
    """The table with the published rows below ours, accuracy by time, and what the columns mean."""
    rows = results["summary"]
    head = ["entry", "seeds", *COLUMNS.values(), "seconds"]
    lines = [f"### {results['set']}", "", *headed(head)]
    for row in rows:
        lines += _lines(row)
    lines += ["", *_by_time(results["entries"])]
    lines += [f"- {name}: {MEASURES[key]}" for key, name in COLUMNS.items()]
    lines.append("- ± is the sample standard deviation over seeds; (n) the rank among the methods of the table")
    lines.append(f"- seconds: {SECONDS}")
    lines.append(f"- published: {PUBLISHED_WORDS}")
    return "\n".join(lines)


def _lines(row: Record) -> list[str]:
    figures = []
    for key in COLUMNS:
        rank = row["rank"].get(key, "").partition(" ")[0]
        figures.append(figure(row["mean"][key], row["standard_deviation"][key]) + (f" ({rank})" if rank else ""))
    lines = [cells([row["entry"], str(len(row["seeds"])), *figures, f"{row['seconds']:.0f}"])]
    if row["published"] is not None:
        lines.append(cells(["published", "", *(f"{value:.3f}" for value in row["published"].values()), ""]))
    return lines


def figure(mean: float | None, deviation: float | None = None) -> str:
    """A mean in the paper's digits, with its deviation where there is one."""
    if mean is None:
        return NONE
    return f"{mean:.3f}" + (f" ± {deviation:.3f}" if deviation is not None else "")


def _by_time(entries: Sequence[Record]) -> list[str]:
    """Figure 5, where both of its methods are there."""
    found = by_time(entries, BY_TIME)
    if found is None:
        return []
    shared = f", up to {found.jobs} entries at once" if found.jobs > 1 else ""
    head = ["seconds of work", *(f"{seconds:.1f}" for seconds in found.seconds)]
    title = f"Accuracy on the global test at matched seconds of work{shared}:"
    rows = [cells([label, *(f"{value:.3f}" for value in values)]) for label, values in found.accuracies.items()]
    return [title, "", *headed(head), *rows, ""]
