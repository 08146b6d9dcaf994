"""From the entries of `fedmp_table.py` to means over seeds, differences to FedAvg, and the paper's four tables."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from scipy.stats import t as student  # type: ignore[import-untyped]  # scikit-learn brings it along

from fedmp_entries import (
    ABLATIONS,
    BASELINES,
    FEDAVG,
    FEDMP,
    FEWSHOT,
    STAGE_UPLOAD,
    STAGES,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    TABLE_4,
)

MEASURES = {
    "shared_global_accuracy": "the shared model on the merged test after the last round",
    "best_round_shared_global_accuracy": "the same in its best round, chosen on the test set and so optimistic",
    "mean_shared_global_accuracy": "the same, mean over rounds",
    "global_balanced_accuracy": "mean recall of the classes of what sites deploy on the merged test, mean over sites",
    "shared_local_accuracy": "the shared model on each site's own test, mean over sites",
    "worst_site_accuracy": "what a site deploys on its own test, the lowest of the sites",
    "rounds_to_convergence": "first round from which the running mean of five stays within a point of its final value",
    "bytes": "up and down in all rounds, without what sites take home",
    "bytes_to_convergence": "the same up to the round of convergence",
    "feature_distance": "FedMP's Eq. 4 at the end: the distance of a site's features to all sites' of the class over "
    "their spread, mean over classes and sites",
    "embedding_width": "numbers in one embedding that sites share",
}
SERIES = {
    "shared_global_accuracy": "the shared model on the merged test after each round",
    "seconds": "of work from the beginning to the round's end, without measuring",
    "bytes": "from the beginning to the round's end",
}
SECONDS = "of the run, measuring included, without the time it lay stopped; `jobs` entries shared the machine"
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
    """Mean and sample standard deviation over seeds by set and entry, and the difference to FedAvg.

    Entries of one label under different settings are never averaged together: they are rows of their own.
    """
    lines = list(entries)
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for entry in lines:
        groups[entry["set"], entry["entry"], entry["recipe"]].append(entry)
    base = {(e["set"], e["seed"]): e["figures"][HEADLINE] for e in lines if e["entry"] == FEDAVG.label}
    rows = [_row(images, label, found, base) for (images, label, _), found in groups.items()]
    return sorted(rows, key=lambda row: (row["set"], _place(row["entry"])))


def _row(images: str, label: str, found: Sequence[Record], base: Mapping[tuple[str, int], float]) -> dict[str, Any]:
    means, deviations = {}, {}
    for measure in MEASURES:
        values = [entry["figures"][measure] for entry in found if entry["figures"][measure] is not None]
        means[measure] = round(statistics.fmean(values), 5) if values else None
        deviations[measure] = round(statistics.stdev(values), 5) if len(values) > 1 else None
    pairs = [(entry["figures"][HEADLINE], base.get((images, entry["seed"]))) for entry in found]
    differences = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
    return {
        "set": images,
        "entry": label,
        "recipe": found[0]["recipe"],
        "seeds": sorted(entry["seed"] for entry in found),
        "mean": means,
        "standard_deviation": deviations,
        "against_fedavg": paired(differences) if differences and label != FEDAVG.label else None,
        "seconds": round(statistics.fmean(entry["seconds"] for entry in found), 1),
    }


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


def _published(table: Mapping[str, Any], form: str) -> Column:
    def shown(row: Record, _: Record | None) -> str:
        return form.format(table[row["entry"]]) if row["entry"] in table else NONE

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
            "published TB": _published(TABLE_1, "{0[0]:.2f}"),
            "published DR": _published(TABLE_1, "{0[1]:.2f}"),
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
            "published DR": _published(TABLE_3, "{:.2f}"),
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
            "published TB (rounds)": _published(TABLE_2, "{0[0][0]:.2f} ({0[0][1]})"),
            "published DR (rounds)": _published(TABLE_2, "{0[1][0]:.2f} ({0[1][1]})"),
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
            "published TB: rounds, GB, accuracy": _published(TABLE_4, "{0[0]}, {0[1]:.2f}, {0[2]:.2f}"),
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
            lines += [title, "", _cells(head), _cells(["---"] * len(head))]
            for row in shown:
                figures = [column(row, fedavg) for column in columns.values()]
                lines.append(_cells([row["entry"], str(len(row["seeds"])), *figures, f"{row['seconds']:.0f}"]))
            lines.append("")
    lines += [f"- last round, best round: {MEASURES[HEADLINE]}, or in its best round, which is optimistic"]
    lines += [f"- feature distance: {MEASURES['feature_distance']}"]
    lines += [f"- rounds to convergence: {MEASURES['rounds_to_convergence']}; GB: {MEASURES['bytes']}"]
    lines += ["- ± is the sample standard deviation over seeds", f"- seconds: {SECONDS}"]
    lines += [f"- {name}: {words}" for name, words in WORDS.items()]
    return "\n".join(lines)


def _cells(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"
