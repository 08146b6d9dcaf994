"""What some tables show below a figure for each line: bytes by arithmetic, accuracy by time, windows of forgetting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wardround.papers.communication import DATASET, costs
from wardround.papers.comparison import Comparison
from wardround.papers.courses import by_time, longest_window
from wardround.papers.results import read_results
from wardround.papers.stored import files_of

NONE = "–"
COSTS = ["line", "rounds", "published GB", "by arithmetic GB", "declared in full GB"]
COST_WORDS = (
    "by arithmetic: what our methods declare to send, counted the paper's way (three sites, up and down, float32, "
    "763 training images, 100 embeddings down, no batch-norm statistics), over the paper's rounds; in full: with "
    "statistics, counters, labels and whatever else travels. FRAug's generator is not described in the paper."
)
TIME_WORDS = (
    "at matched seconds of work: the mean over seeds of the last round that had ended by then; the last column is the "
    "time that the fastest run took for all its rounds. Without measuring, on our machine"
)
RECONSTRUCTION = {  # heading, and its figure with so many digits
    "Fréchet": ("frechet", 3),
    "max SSIM": ("max_ssim", 4),
    "min L2": ("min_l2", 4),
    "identified": ("identified", 3),
}
WINDOW = ["line", "record in round", "regained in round", "record", "lowest between"]
WINDOW_WORDS = "longest window: from a record to the first later round that is at least as good, as in FedKPer's Eq. 7"


@dataclass(frozen=True)
class Further:
    """A sheet below a table's own; `place` is the part of the table that it is of, where it is of a part."""

    dataset: str
    place: str
    title: str
    head: list[str]
    lines: list[list[str]]
    words: str


def further(found: Comparison) -> list[Further]:
    """Every such sheet of a table; most have none."""
    make = {
        "fedmp-4": _communication,
        "fedmp-5": _reconstruction,
        "fedkper-fig3": _windows,
        "fedkper-fig5": _by_time,
    }
    return list(make[found.table.id](found)) if found.table.id in make else []


def _communication(found: Comparison) -> Iterator[Further]:
    lines = [
        [cost.label, str(cost.rounds), cost.printed, f"{cost.counted:.2f}", f"{cost.declared:.2f}"]
        for cost in costs(found.table)
    ]
    yield Further(DATASET, "", "communication by arithmetic", COSTS, lines, COST_WORDS)


def _reconstruction(found: Comparison) -> Iterator[Further]:
    """What `benchmarks/fedmp_privacy.py` keeps: one file for each set of images and network."""
    for file in files_of(found.files, "fedmp_table5"):
        record = read_results(file, "fedmp_table5", ("means", "settings", "feature_network", "sites"))
        settings = record["settings"]
        images = settings["data"]["source"]
        lines = [
            [f"stage {stage}", *(f"{mean[key]:.{digits}f}" for key, digits in RECONSTRUCTION.values())]
            for stage, mean in record["means"].items()
        ]
        words = (
            f"on {images}: {settings['model']['name']}, mean over {len(record['sites'])} sites, Fréchet distance by "
            f"{record['feature_network']}, so the order of the stages can be compared and not the values; {file}"
        )
        yield Further(Path(images).stem, images, "reconstruction, ours", ["line", *RECONSTRUCTION], lines, words)


def _windows(found: Comparison) -> Iterator[Further]:
    for block in found.blocks:
        lines = []
        for one in block.finished:
            window = longest_window(one.entry["rounds"]["shared_global_accuracy"])
            if window is not None:
                rounds = [str(window.peak), str(window.regained)]
                figures = [f"{window.record:.3f}", f"{window.lowest:.3f}"]
                lines.append([f"{one.entry['entry']}, seed {one.entry['seed']}", *rounds, *figures])
        if lines:
            yield Further(block.dataset, found.heading(block), "the longest window", WINDOW, lines, WINDOW_WORDS)


def _by_time(found: Comparison) -> Iterator[Further]:
    first, *_, last = (line.label for line in found.table.entries)
    for block in found.blocks:
        times = by_time([one.entry for one in block.finished], (first, last))
        if times is not None:
            lines = [[label, *(f"{a:.3f}" for a in values)] for label, values in times.accuracies.items()]
            pairs = zip(times.accuracies[first], times.accuracies[last], strict=True)
            better = [f"{100 * (other / one - 1):+.1f}" if one else NONE for one, other in pairs]
            lines.append([f"{last} over {first}, %", *better])
            head = ["line", *(f"{seconds:.1f} s" for seconds in times.seconds)]
            shared = f", which up to {times.jobs} entries shared" if times.jobs > 1 else ""
            title = "accuracy at matched seconds of work"
            yield Further(block.dataset, found.heading(block), title, head, lines, TIME_WORDS + shared)
