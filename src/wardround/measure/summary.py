"""From many figures to the few that are printed, each with its definition in words.

Two accuracies of one study can differ by 30 points and both be right: which test, which model, which round, which
sites. So a headline figure is never a bare number; its definition is derived here, together with its value, from the
same rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]  # method, seed, site ("" for none), round (from 0), split, model, metric, value, n
# method, key, label, value (None where there is none), meaning (one sentence), definition (with the tests in words)
Headline = dict[str, Any]

_Kind = tuple[str, str, str]  # what a row measures: which model, on which split, by which metric
_LOCAL: _Kind = ("personal", "local", "accuracy")
_GLOBAL: _Kind = ("personal", "global", "accuracy")
_LOCAL_BALANCED: _Kind = ("personal", "local", "balanced_accuracy")
_GLOBAL_BALANCED: _Kind = ("personal", "global", "balanced_accuracy")
_AUC: _Kind = ("personal", "global", "macro_auc")
_SHARED_LOCAL: _Kind = ("shared", "local", "accuracy")
_SHARED_GLOBAL: _Kind = ("shared", "global", "accuracy")


def mean(values: Mapping[str, float]) -> float:
    """The mean over sites, each counting alike."""
    return math.fsum(_some(values).values()) / len(values)


def worst(values: Mapping[str, float]) -> tuple[float, str]:
    """The lowest value and its site; of equally low sites, the first by name."""
    return min((value, site) for site, value in _some(values).items())


def bottom_decile(values: Mapping[str, float]) -> float:
    """The mean over the lowest tenth of the sites, rounded up, so that there is always one."""
    lowest = sorted(_some(values).values())[: _tenth(len(values))]
    return math.fsum(lowest) / len(lowest)


def balance(local: float, global_: float) -> float:
    """FedKPer's balance: the mean of local and global accuracy."""
    return (local + global_) / 2


def last_and_best(values_by_round: Mapping[int, float]) -> tuple[int, float, int, float]:
    """The last round and its value, then the best round and its value; of equally good rounds, the earliest."""
    last = max(values_by_round)
    best = min(values_by_round, key=lambda round: (-values_by_round[round], round))
    return last, values_by_round[last], best, values_by_round[best]


def headlines(
    rows: Iterable[Row], method: str, sites: Sequence[str], local_protocol: str, global_protocol: str
) -> list[Headline]:
    """The headline figures of one method's run, in the order they are printed.

    Local and global accuracy are of the same thing, the predictor each site would deploy, so that a method cannot show
    a personal model on one test and a shared model on the other. The shared model has figures of its own. Rows of
    other methods and of sites not in `sites` are ignored.
    """
    measured = _collect(rows, method, sites)
    protocols = {"local": local_protocol, "global": global_protocol}

    def figure(key: str, label: str, value_and_words: tuple[float | None, str], *kinds: _Kind) -> Headline:
        value, words = value_and_words
        sentence = words if value is not None else f"{label}: no value, since {measured.reason(kinds[0])}"
        tests = [f"{split.capitalize()} test: {protocols[split].removesuffix('.')}" for _, split, _ in kinds]
        definition = " ".join(f"{part}." for part in [sentence, *tests])
        named = {"method": method, "key": key, "label": label, "value": value}
        return {**named, "meaning": f"{sentence}.", "definition": definition}

    own = "each site's personal predictor on that site's local test"
    same = "each site's personal predictor, the one of local accuracy, on the global test"
    shared = "the one shared model on each site's local test"
    recall = "balanced accuracy (the mean recall of the classes tested)"
    area = (
        "area under the ROC curve as MedMNIST reports it (one class against the rest, averaged over the classes; "
        "of two classes, the second alone)"
    )
    average = measured.average
    return [
        figure("local_accuracy", "Local accuracy", average(_LOCAL, f"accuracy of {own}"), _LOCAL),
        figure("global_accuracy", "Global accuracy", average(_GLOBAL, f"accuracy of {same}"), _GLOBAL),
        figure("balance", "Balance", measured.balance(), _LOCAL, _GLOBAL),
        figure("worst_site_accuracy", "Worst site", measured.worst(), _LOCAL),
        figure("bottom_decile_accuracy", "Bottom decile", measured.bottom_decile(), _LOCAL),
        figure(
            "local_balanced_accuracy",
            "Local balanced accuracy",
            average(_LOCAL_BALANCED, f"{recall} of {own}"),
            _LOCAL_BALANCED,
        ),
        figure(
            "global_balanced_accuracy",
            "Global balanced accuracy",
            average(_GLOBAL_BALANCED, f"{recall} of {same}"),
            _GLOBAL_BALANCED,
        ),
        figure("macro_auc", "Macro-AUC", average(_AUC, f"{area} of {same}"), _AUC),
        figure("shared_global_accuracy", "Shared model, global", measured.shared(), _SHARED_GLOBAL),
        figure(
            "shared_local_accuracy",
            "Shared model, local",
            average(_SHARED_LOCAL, f"accuracy of {shared}"),
            _SHARED_LOCAL,
        ),
        figure(
            "best_round_shared_global_accuracy",
            "Shared model, global, best round",
            measured.best_shared(),
            _SHARED_GLOBAL,
        ),
    ]


def _collect(rows: Iterable[Row], method: str, sites: Sequence[str]) -> _Measured:
    """Sort one method's rows by what they measure; a row without a value, such as an undefined AUC, is no row."""
    table: dict[_Kind, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    wanted = {"", *sites}
    for row in rows:
        if row["method"] != method or row["site"] not in wanted or row["value"] is None:
            continue
        values = table[row["model"], row["split"], row["metric"]][row["round"]]
        if row["site"] in values:
            raise ValueError(
                f"two rows measure the same thing; summarise the rows of one run and one seed: {dict(row)}"
            )
        values[row["site"]] = row["value"]
    return _Measured(sites, table)


@dataclass(frozen=True)
class _Measured:
    """One method's rows as kind to round to site to value, and the figures drawn from them, each with its words.

    The words are complete only where there is a value; where there is none, `reason` says why.
    """

    sites: Sequence[str]
    table: Mapping[_Kind, Mapping[int, Mapping[str, float]]]

    def average(self, kind: _Kind, what: str) -> tuple[float | None, str]:
        values = self._by_site(kind)
        return (mean(values) if values else None), f"The {what}, averaged {self._over(kind)}, {self._when(kind)}"

    def balance(self) -> tuple[float | None, str]:
        local, global_ = self._by_site(_LOCAL), self._by_site(_GLOBAL)
        return balance(mean(local), mean(global_)) if local and global_ else None, (
            f"The mean of local accuracy ({self._over(_LOCAL)}) and global accuracy ({self._over(_GLOBAL)}) of the "
            f"personal predictors, FedKPer's balance, {self._when(_LOCAL)}"
        )

    def worst(self) -> tuple[float | None, str]:
        values = self._by_site(_LOCAL)
        value, site = worst(values) if values else (None, "")
        return value, (
            f"The lowest accuracy of a personal predictor on its own site's local test, that of {site}, "
            f"{self._over(_LOCAL)}, {self._when(_LOCAL)}"
        )

    def bottom_decile(self) -> tuple[float | None, str]:
        values = self._by_site(_LOCAL)
        return bottom_decile(values) if values else None, (
            "The accuracy of the personal predictors on their own sites' local tests, averaged over the lowest tenth "
            f"of the sites ({_sites(_tenth(len(values)))}), taken {self._over(_LOCAL)}, {self._when(_LOCAL)}"
        )

    def shared(self) -> tuple[float | None, str]:
        last = self._last_round(_SHARED_GLOBAL)
        return self._shared_by_round().get(last), (
            f"The accuracy on the global test of the one model shared by {_sites(len(self.sites))}, "
            f"{self._when(_SHARED_GLOBAL)}"
        )

    def best_shared(self) -> tuple[float | None, str]:
        by_round = self._shared_by_round()
        best_round, best = last_and_best(by_round)[2:] if by_round else (-1, None)
        return best, (
            f"The highest accuracy on the global test of the one model shared by {_sites(len(self.sites))}, first "
            f"reached in round {best_round + 1}; that round was chosen on the test set, so the figure is optimistic"
        )

    def reason(self, kind: _Kind) -> str:
        """Why a figure of this kind has no value."""
        if self._last_round(kind) >= 0:
            return f"it was not measured {self._when(kind)}"
        return "this method has no shared model" if kind[0] == "shared" else "no personal predictor was measured"

    def _last_round(self, kind: _Kind) -> int:
        """The last round in which anything about the kind's model was measured; -1 for none."""
        return max((r for (model, _, _), rounds in self.table.items() if model == kind[0] for r in rounds), default=-1)

    def _by_site(self, kind: _Kind) -> dict[str, float]:
        """The sites' values in the last round of the kind's model."""
        found = self.table.get(kind, {}).get(self._last_round(kind), {})
        return {site: found[site] for site in self.sites if site in found}

    def _shared_by_round(self) -> dict[int, float]:
        """The shared model's accuracy on the global test, which belongs to no single site."""
        return {round: values[""] for round, values in self.table.get(_SHARED_GLOBAL, {}).items() if "" in values}

    def _over(self, kind: _Kind) -> str:
        known, count = len(self._by_site(kind)), len(self.sites)
        return f"over all {_sites(count)}" if known == count else f"over {known} of {_sites(count)}"

    def _when(self, kind: _Kind) -> str:
        return f"in round {self._last_round(kind) + 1}, the last one with results"


def _tenth(count: int) -> int:
    return math.ceil(count / 10)


def _some(values: Mapping[str, float]) -> Mapping[str, float]:
    if not values:
        raise ValueError("there is no site to summarise")
    return values


def _sites(count: int) -> str:
    return f"{count} site" if count == 1 else f"{count} sites"
