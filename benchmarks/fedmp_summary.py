"""From the entries of `fedmp_table.py` to means over seeds, differences to FedAvg, and the paper's four tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from scipy.stats import t as student  # type: ignore[import-untyped]  # scikit-learn brings it along

from fedmp_entries import ABLATIONS, BASELINES, FEDAVG, FEDMP, FEWSHOT, STAGE_UPLOAD, STAGES, published
from wardround.papers.fedmp import MEASURES
from wardround.papers.runs import SECONDS
from wardround.papers.summaries import averaged, cells, grouped, headed

WORDS = {
    "against fedavg": "difference to fedavg of the same seed, in points, mean over seeds, with its 95 % interval by a "
    "paired t-test",
    "network": "ResNet-18 for small images, from scratch: no pretrained weights are at hand",
    "stages": f"in the study of stages a site sends {STAGE_UPLOAD} embeddings a round; otherwise all",
    "published": "FedMP's Tables 1 to 4 on TB and DR, which are other images than these, at 256 pixels and with a "
    "pretrained ResNet-50: for orientation, not to be met",
}
HEADLINE = "shared_global_accuracy"
NONE = "–"

Record = Mapping[str, Any]
ORDER = [entry.label for entry in (FEDAVG, FEDMP, *ABLATIONS, *STAGES)] + [FEWSHOT, *(e.label for e in BASELINES)]


# Figures --------------------------------------------------------------------------------------------------------------


def summarise(entries: Iterable[Record]) -> list[dict[str, Any]]:
    """Mean and sample standard deviation over seeds by set and entry, and the difference to FedAvg."""
    lines = list(entries)
    base = {(e["set"], e["seed"]): e["figures"][HEADLINE] for e in lines if e["entry"] == FEDAVG.label}
    rows = [_row(found, base) for found in grouped(lines, "set")]
    return sorted(rows, key=lambda row: (row["set"], _place(row["entry"])))


def _row(found: Sequence[Record], base: Mapping[tuple[str, int], float]) -> dict[str, Any]:
    images, label = found[0]["set"], found[0]["entry"]
    pairs = [(entry["figures"][HEADLINE], base.get((images, entry["seed"]))) for entry in found]
    differences = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
    compared = paired(differences) if differences and label != FEDAVG.label else None
    return {"set": images, "entry": label, **averaged(found, MEASURES, 5), "against_fedavg": compared}


def paired(differences: Sequence[float]) -> dict[str, Any]:
    """The mean of paired differences and its 95 % interval by Student's t; no interval of a single pair."""
    n, mean = len(differences), statistics.fmean(differences)
    interval = None
    if n > 1:
        half = float(student.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
        interval = [round(mean - half, 5), round(mean + half, 5)]
    return {"pairs": n, "mean": round(mean, 5), "interval": interval}


def _place(label: str) -> int:
    return ORDER.index(label) if label in ORDER else len(ORDER)


# Tables ---------------------------------------------------------------------------------------------------------------

Column = Callable[[Record, Record | None], str]  # a row and its set's FedAvg, as text


def _percent(measure: str) -> Column:
    def shown(row: Record, _: Record | None) -> str:
        mean, deviation = row["mean"][measure], row["standard_deviation"][measure]
        if mean is None:
            return NONE
        return f"{100 * mean:.1f}" + (f" ± {100 * deviation:.1f}" if deviation is not None else "")

    return shown


def _plain(measure: str, form: str) -> Column:
    def shown(row: Record, _: Record | None) -> str:
        return NONE if row["mean"][measure] is None else form.format(row["mean"][measure])

    return shown


def _against(row: Record, _: Record | None) -> str:
    found = row["against_fedavg"]
    if found is None:
        return NONE
    interval = "" if found["interval"] is None else " [{:+.1f}, {:+.1f}]".format(*(100 * x for x in found["interval"]))
    return f"{100 * found['mean']:+.1f}{interval}"


def _gigabytes(measure: str) -> Column:
    def shown(row: Record, _: Record | None) -> str:
        return NONE if row["mean"][measure] is None else f"{row['mean'][measure] / 1e9:.3f}"

    return shown


def _share(measure: str) -> Column:
    """The bytes of a row as a share of FedAvg's by that measure."""

    def shown(row: Record, fedavg: Record | None) -> str:
        whole = fedavg["mean"][measure] if fedavg else None
        return f"{100 * row['mean']['bytes'] / whole:.1f} %" if whole and row["mean"]["bytes"] is not None else NONE

    return shown


def _published(id: str, dataset: str, form: str) -> Column:
    def shown(row: Record, _: Record | None) -> str:
        figures = published(id, row["entry"], dataset)
        return NONE if figures is None else form.format(*(figure.partition("±")[0] for figure in figures))

    return shown


LAST, BEST = _percent(HEADLINE), _percent("best_round_shared_global_accuracy")
CONVERGED = _plain("rounds_to_convergence", "{:.0f}")
BOTH = [FEDAVG.label, FEDMP.label]
TABLES: tuple[tuple[str, list[str], dict[str, Column]], ...] = (
    (
        "Methods (Table 1)",
        [*BOTH, *(entry.label for entry in BASELINES)],
        {
            "last round": LAST,
            "against fedavg": _against,
            "best round": BEST,
            "balanced": _percent("global_balanced_accuracy"),
            "site's own test": _percent("shared_local_accuracy"),
            "feature distance": _plain("feature_distance", "{:.2f}"),
            "published TB": _published("fedmp-1", "tb", "{0}"),
            "published DR": _published("fedmp-1", "dr", "{0}"),
        },
    ),
    (
        "Modules (Table 3; none is fedavg, both is fedmp)",
        [FEDAVG.label, *(entry.label for entry in ABLATIONS), FEDMP.label],
        {
            "last round": LAST,
            "against fedavg": _against,
            "best round": BEST,
            "feature distance": _plain("feature_distance", "{:.2f}"),
            "published DR": _published("fedmp-3", "dr", "{0}"),
        },
    ),
    (
        "Stages (Table 2)",
        [*(entry.label for entry in STAGES), FEDAVG.label],
        {
            "numbers per image": _plain("embedding_width", "{:,.0f}"),
            "last round": LAST,
            "against fedavg": _against,
            "best round": BEST,
            "rounds to convergence": CONVERGED,
            "GB": _gigabytes("bytes"),
            "published TB (rounds)": _published("fedmp-2", "tb", "{0} ({1})"),
            "published DR (rounds)": _published("fedmp-2", "dr", "{0} ({1})"),
        },
    ),
    (
        "Bytes (Table 4)",
        [*BOTH, FEWSHOT, *(entry.label for entry in BASELINES)],
        {
            "last round": LAST,
            "against fedavg": _against,
            "rounds to convergence": CONVERGED,
            "GB": _gigabytes("bytes"),
            "GB to convergence": _gigabytes("bytes_to_convergence"),
            "of fedavg's GB": _share("bytes"),
            "of fedavg's GB to convergence": _share("bytes_to_convergence"),
            "published TB: rounds, GB, accuracy": _published("fedmp-4", "tb", "{0}, {1}, {2}"),
        },
    ),
)


def markdown(results: Record) -> str:
    """Four tables for each set, accuracies in percent, and what the columns mean."""
    lines = []
    for images in dict.fromkeys(row["set"] for row in results["summary"]):
        rows = [row for row in results["summary"] if row["set"] == images]
        fedavg = next((row for row in rows if row["entry"] == FEDAVG.label), None)
        lines += [f"### {images}", ""]
        for title, labels, columns in TABLES:
            shown = [row for label in labels for row in rows if row["entry"] == label]
            if {row["entry"] for row in shown} <= {FEDAVG.label, FEDMP.label} and title != TABLES[0][0]:
                continue  # nothing of this table was run
            head = ["entry", "seeds", *columns, "seconds"]
            lines += [title, "", *headed(head)]
            for row in shown:
                figures = [column(row, fedavg) for column in columns.values()]
                lines.append(cells([row["entry"], str(len(row["seeds"])), *figures, f"{row['seconds']:.0f}"]))
            lines.append("")
    lines += [f"- last round, best round: {MEASURES[HEADLINE]}, or in its best round, which is optimistic"]
    lines += [f"- feature distance: {MEASURES['feature_distance']}"]
    lines += [f"- rounds to convergence: {MEASURES['rounds_to_convergence']}; over the seeds that converged"]
    lines += [f"- GB: {MEASURES['bytes']}"]
    lines += ["- ± is the sample standard deviation over seeds", f"- seconds: {SECONDS}"]
    lines += [f"- {name}: {words}" for name, words in WORDS.items()]
    return "\n".join(lines)
