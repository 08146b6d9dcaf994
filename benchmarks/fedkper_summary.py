"""From the entries of `fedkper_table.py` to means over seeds beside the published rows, ranks, and accuracy by time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedkper_entries import ABLATIONS, COLUMNS, ENTRIES, PROTOCOL, PUBLISHED, SITES

MEASURES = {
    "mean_shared_global_accuracy": "the shared model on the global test, mean over rounds",
    "backward_transfer": "change of the shared model on sites' local tests since they last took part, mean over rounds",
    "shared_global_consistency": "consistency of the shared model on the global test",
    "mean_trained_local_accuracy": "asked sites right after their training on their local tests, mean over rounds",
    "worst_trained_local_accuracy": "the lowest of these in a round, mean over rounds",
    "trained_local_consistency": "consistency of these by round",
    "balance_over_rounds": "the mean of global and local",
    "deviation_shared_global": "standard deviation over rounds of the first",
    "deviation_backward_transfer": "standard deviation over rounds of the second",
    "deviation_trained_local": "standard deviation over rounds of the fourth",
    "bottom_decile_trained_local_accuracy": "sites' means over their rounds, the lowest tenth of the sites",
    "rounds_to_convergence": "first round from which the running mean of five stays within a point of its final value",
    "shared_global_accuracy": "the shared model on the global test after the last round",
    "shared_local_accuracy": "the shared model on sites' local tests after the last round",
    "local_accuracy": "what sites deploy at the end on their local tests",
    "global_accuracy": "what sites deploy at the end on the global test",
}
SERIES = {
    "shared_global_accuracy": "the shared model on the global test after each round",
    "trained_local_accuracy": "the round's sites right after their training on their local tests",
    "backward_transfer": "by round",
    "seconds": "of work from the beginning to the round's end, without measuring",
    "bytes": "from the beginning to the round's end",
}
SECONDS = "of the run, measuring included, without the time it lay stopped; `jobs` entries shared the machine"
PUBLISHED_WORDS = "FedKPer (arXiv 2605.00698), Table 1, means of 3 seeds on the authors' protocol"
BUDGETS = (0.25, 0.5, 0.75, 1.0)  # of the time that the fastest of the compared takes
BY_TIME = ("fedavg", "fedkper")  # its Figure 5
NONE = "–"

Record = Mapping[str, Any]


def summarise(entries: Iterable[Record], study: Record) -> list[dict[str, Any]]:
    """Mean and sample standard deviation over seeds by entry, with ranks among the methods of the table.

    Entries of one label under different settings are never averaged together: they are rows of their own. Published
    figures stand beside a study of the paper's protocol only.
    """
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for entry in entries:
        groups[entry["set"], entry["entry"], entry["recipe"]].append(entry)
    rows = [_row(images, label, found, study) for (images, label, _), found in groups.items()]
    order = {entry.label: number for number, entry in enumerate((*ENTRIES, *ABLATIONS))}
    compared = {entry.label for entry in ENTRIES}
    for key in COLUMNS:
        ranked = [row for row in rows if row["entry"] in compared and row["mean"][key] is not None]
        for row in ranked:
            better = sum(other["mean"][key] > row["mean"][key] for other in ranked)
            row["rank"][key] = f"{better + 1} of {len(ranked)}"
    return sorted(rows, key=lambda row: order.get(row["entry"], len(order)))


def _row(images: str, label: str, found: Sequence[Record], study: Record) -> dict[str, Any]:
    means, deviations = {}, {}
    for measure in MEASURES:
        values = [entry["figures"][measure] for entry in found if entry["figures"][measure] is not None]
        means[measure] = round(statistics.fmean(values), 5) if values else None
        deviations[measure] = round(statistics.stdev(values), 5) if len(values) > 1 else None
    stated = PUBLISHED.get(images, {}).get(label) if _is_the_papers(images, study) else None
    return {
        "set": images,
        "entry": label,
        "recipe": found[0]["recipe"],
        "seeds": sorted(entry["seed"] for entry in found),
        "mean": means,
        "standard_deviation": deviations,
        "rank": {},
        "seconds": round(statistics.fmean(entry["seconds"] for entry in found), 1),
        "published": None if stated is None else dict(zip(COLUMNS, stated, strict=True)),
    }


def _is_the_papers(images: str, study: Record) -> bool:
    return (study["rounds"], study["data"]["sites"]) == (PROTOCOL["rounds"], SITES.get(images))


def markdown(results: Record) -> str:
    """The table with the published rows below ours, accuracy by time, and what the columns mean."""
    rows = results["summary"]
    head = ["entry", "seeds", *COLUMNS.values(), "seconds"]
    lines = [f"### {results['set']}", "", _cells(head), _cells(["---"] * len(head))]
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
        figures.append(_figure(row["mean"][key], row["standard_deviation"][key]) + (f" ({rank})" if rank else ""))
    lines = [_cells([row["entry"], str(len(row["seeds"])), *figures, f"{row['seconds']:.0f}"])]
    if row["published"] is not None:
        lines.append(_cells(["published", "", *(f"{value:.3f}" for value in row["published"].values()), ""]))
    return lines


def _figure(mean: float | None, deviation: float | None) -> str:
    if mean is None:
        return NONE
    return f"{mean:.3f}" + (f" ± {deviation:.3f}" if deviation is not None else "")


def _by_time(entries: Sequence[Record]) -> list[str]:
    """Figure 5: the shared model's accuracy at matched seconds of work, mean over seeds, where both are there."""
    found = {label: [e["rounds"] for e in entries if e["entry"] == label] for label in BY_TIME}
    if not all(found.values()):
        return []
    jobs = max(e.get("jobs", 1) for e in entries if e["entry"] in BY_TIME)
    shared = f", up to {jobs} entries at once" if jobs > 1 else ""
    whole = min(rounds["seconds"][-1] for courses in found.values() for rounds in courses)
    head = ["seconds of work", *(f"{share * whole:.1f}" for share in BUDGETS)]
    title = f"Accuracy on the global test at matched seconds of work{shared}:"
    lines = [title, "", _cells(head), _cells(["---"] * len(head))]
    for label, courses in found.items():
        values = [statistics.fmean(_at(rounds, share * whole) for rounds in courses) for share in BUDGETS]
        lines.append(_cells([label, *(f"{value:.3f}" for value in values)]))
    return [*lines, ""]


def _at(rounds: Record, seconds: float) -> float:
    """The accuracy of the last round that had ended by then; 0 before the first had."""
    ended = [a for a, end in zip(rounds["shared_global_accuracy"], rounds["seconds"], strict=True) if end <= seconds]
    return float(ended[-1]) if ended else 0.0


def _cells(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"
