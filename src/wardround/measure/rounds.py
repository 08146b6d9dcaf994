"""A run from its first round to its last: a point for every measured round, and the figures drawn from all of them.

FedKPer's Table 1 is made of these: its accuracies are means over all rounds, not the last one's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from wardround.measure.forgetting import WINDOW, WITHIN, backward_transfer, consistency, settled_after
from wardround.measure.summary import Headline, Row, balance, bottom_decile, mean

OVER_ROUNDS = {  # key and label of every figure, in the order they are printed
    "mean_shared_global_accuracy": "Shared model, global, mean over rounds",
    "deviation_shared_global": "Shared model, global, deviation over rounds",
    "shared_global_consistency": "Shared model, global, consistency",
    "rounds_to_convergence": "Rounds to convergence",
    "backward_transfer": "Backward transfer",
    "deviation_backward_transfer": "Backward transfer, deviation over rounds",
    "mean_trained_local_accuracy": "After training, local, mean over rounds",
    "deviation_trained_local": "After training, local, deviation over rounds",
    "last_trained_local_accuracy": "After training, local, last round",
    "worst_trained_local_accuracy": "After training, worst asked site",
    "bottom_decile_trained_local_accuracy": "After training, bottom decile",
    "trained_local_consistency": "After training, local, consistency",
    "balance_over_rounds": "Balance over rounds",
}
_DEVIATION = "The standard deviation (of the rounds as a whole, not of a sample) over"
_CONSISTENCY = "FedKPer's consistency, 1 less the average inter-peak forgetting rate,"


class _Figure(NamedTuple):
    value: float | None
    words: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Course:
    """One method's accuracies by round, on the global test or by site on its local test, and who took part when."""

    method: str
    sites: Sequence[str]
    shared: Mapping[int, float]  # the shared model on the global test
    shared_local: Mapping[int, Mapping[str, float]]
    trained: Mapping[int, Mapping[str, float]]  # what a site has right after its training, on its own local test
    took_part: Mapping[int, frozenset[str]]
    bytes: Mapping[int, int]  # that crossed boundaries in the round, what is taken home at the end left out

    def transfers(self) -> dict[int, float]:
        """Backward transfer by round; none where a round was not measured, since any may have been a site's last."""
        return backward_transfer(self.shared_local, self.took_part) if self._every_round() else {}

    def points(self, seconds: Mapping[int, float]) -> list[dict[str, Any]]:
        """A point for every measured round; bytes and seconds are those up to its end."""
        transfers = self.transfers()
        found = []
        for round in sorted({*self.shared, *self.trained}):
            trained = self.trained.get(round, {})
            found.append(
                {
                    "method": self.method,
                    "round": round,
                    "sites": sorted(self.took_part.get(round, ())),
                    "bytes": sum(count for r, count in self.bytes.items() if r <= round),
                    "seconds": seconds.get(round),
                    "shared_global_accuracy": self.shared.get(round),
                    "backward_transfer": transfers.get(round),
                    "trained_local_accuracy": mean(trained) if trained else None,
                    "worst_trained_local_accuracy": min(trained.values()) if trained else None,
                }
            )
        return found

    def headlines(self, local_protocol: str, global_protocol: str) -> list[Headline]:
        """The figures over rounds for which there are rows of two rounds or more, each with its definition."""
        tests = {"local": local_protocol, "global": global_protocol}
        found = {**self._of_shared(), **self._of_transfers(), **self._of_trained()}
        if {"mean_shared_global_accuracy", "mean_trained_local_accuracy"} <= found.keys():
            found["balance_over_rounds"] = self._balance()
        return [self._headline(key, found[key], tests) for key in OVER_ROUNDS if key in found]

    def _of_shared(self) -> dict[str, _Figure]:
        if len(self.shared) < 2:
            return {}
        values = [self.shared[round] for round in sorted(self.shared)]
        which = f"of the shared model on the global test, {self._over(self.shared)}"
        settled = settled_after(self.shared)
        rule = (
            f"the running mean over {WINDOW} measured rounds of the shared model's accuracy on the global test stays "
            f"within {100 * WITHIN:g} point of its final value"
        )
        converged = (
            f"The first round from which on {rule}"
            if settled is not None
            else f"Rounds to convergence: no value, since {rule} for fewer than {WINDOW} measured rounds"
        )
        return {
            key: _Figure(value, words, ("global",))
            for key, value, words in (
                ("mean_shared_global_accuracy", _mean(values), f"The mean accuracy {which}"),
                ("deviation_shared_global", _deviation(values), f"{_DEVIATION} rounds of the accuracy {which}"),
                ("shared_global_consistency", consistency(values), f"{_CONSISTENCY} of the accuracy {which}"),
                ("rounds_to_convergence", None if settled is None else float(settled + 1), converged),
            )
        }

    def _of_transfers(self) -> dict[str, _Figure]:
        values = list(self.transfers().values())
        if len(values) < 2:
            return {}
        each = (
            "of the change of the shared model's accuracy on a site's local test since the site last took part, a "
            "round's value being the mean over the sites that took part before it (0 in the first round)"
        )
        over = self._over(self.shared_local)
        return {
            "backward_transfer": _Figure(_mean(values), f"The mean {each}, {over}; negative is forgetting", ("local",)),
            "deviation_backward_transfer": _Figure(
                _deviation(values), f"{_DEVIATION} rounds {each}, {over}", ("local",)
            ),
        }

    def _of_trained(self) -> dict[str, _Figure]:
        if len(self.trained) < 2:
            return {}
        rounds = [self.trained[round] for round in sorted(self.trained)]
        means = [mean(values) for values in rounds]
        by_site: dict[str, list[float]] = defaultdict(list)
        for values in rounds:
            for site, value in values.items():
                by_site[site].append(value)
        each = "what a site has right after its training of a round, on its own local test"
        over = f"first over the sites of a round, then {self._over(self.trained)}"
        lowest = math.ceil(len(by_site) / 10)
        figures = {
            "mean_trained_local_accuracy": (_mean(means), f"The mean accuracy of {each}, {over}"),
            "deviation_trained_local": (_deviation(means), f"{_DEVIATION} rounds of the mean accuracy of {each}"),
            "last_trained_local_accuracy": (
                means[-1],
                f"The accuracy of {each}, averaged over the {len(rounds[-1])} sites of round {max(self.trained) + 1}",
            ),
            "worst_trained_local_accuracy": (
                _mean([min(values.values()) for values in rounds]),
                f"The lowest accuracy among the sites of a round, of {each}, averaged {self._over(self.trained)}",
            ),
            "bottom_decile_trained_local_accuracy": (
                bottom_decile({site: _mean(values) for site, values in by_site.items()}),
                f"The accuracy of {each}, averaged over the site's rounds and then over the lowest tenth of the sites "
                f"({lowest} of the {len(by_site)} that took part, of {len(self.sites)})",
            ),
            "trained_local_consistency": (
                consistency(means),
                f"{_CONSISTENCY} of the mean accuracy by round of {each}",
            ),
        }
        return {key: _Figure(value, words, ("local",)) for key, (value, words) in figures.items()}

    def _balance(self) -> _Figure:
        words = (
            "The mean of two means over rounds: the shared model's accuracy on the global test, and the sites' on "
            "their local tests right after their training"
        )
        local = _mean([mean(values) for values in self.trained.values()])
        return _Figure(balance(local, _mean([*self.shared.values()])), words, ("local", "global"))

    def _headline(self, key: str, figure: _Figure, protocols: Mapping[str, str]) -> Headline:
        tests = [f"{split.capitalize()} test: {protocols[split].removesuffix('.')}." for split in figure.tests]
        named = {"method": self.method, "key": key, "label": OVER_ROUNDS[key], "value": figure.value}
        return {**named, "meaning": f"{figure.words}.", "definition": " ".join([f"{figure.words}.", *tests])}

    def _every_round(self) -> bool:
        return bool(self.took_part) and self.took_part.keys() <= self.shared_local.keys()

    def _over(self, rounds: Mapping[int, Any]) -> str:
        return f"over the {len(rounds)} measured rounds"


def course(rows: Iterable[Row], ledger: Iterable[Mapping[str, Any]], method: str, sites: Sequence[str]) -> Course:
    """One method's course from its rows and its ledger; who answered in a round took part in it."""
    table: dict[tuple[str, str], dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    wanted = {"", *sites}
    for row in rows:
        if row["method"] == method and row["metric"] == "accuracy" and row["site"] in wanted:
            table[row["model"], row["split"]][row["round"]][row["site"]] = row["value"]
    took_part: dict[int, set[str]] = defaultdict(set)
    bytes_: dict[int, int] = defaultdict(int)
    for row in ledger:
        if row["kind"] == "delivery":
            continue
        bytes_[row["round"]] += sum(row["groups"].values()) + row["overhead"]
        if row["kind"] == "answer":
            took_part[row["round"]].add(row["site"])
    return Course(
        method,
        sites,
        {round: values[""] for round, values in table["shared", "global"].items() if "" in values},
        table["shared", "local"],
        table["trained", "local"],
        {round: frozenset(names) for round, names in took_part.items()},
        bytes_,
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    centre = _mean(values)
    return math.sqrt(_mean([(value - centre) ** 2 for value in values]))
