"""What is kept and what is lost from one round to the next: FedKPer's measures of forgetting, and when a run settles.

Z. Fowler and G. AlRegib, "FedKPer", ICIP 2026, section 3.3. Where the text leaves something open, the authors' code
decides (olivesgatech/FedKPer, `BaseServer.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

WINDOW = 5  # measured rounds in a running mean
WITHIN = 0.01  # of the final running mean: one point of accuracy


def consistency(accuracies: Sequence[float]) -> float:
    """1 less the average inter-peak forgetting rate, 1 − AIPFR (Eq. 7 to 9); 1 where there is nothing to average.

    The rate of an interval is the sum of |A_peak − A| / A_peak over it, both ends included (so a record that is passed
    by far counts as deviation, as Eq. 7 is written), divided by its length. A peak of 0 is passed by the very next
    round, so nothing is divided by 0.
    """
    rates = [
        math.fsum(abs(accuracies[peak] - a) for a in accuracies[peak : end + 1]) / accuracies[peak] / (end - peak)
        for peak, end in forgetting_intervals(accuracies)
    ]
    return 1 - math.fsum(rates) / len(rates) if rates else 1.0


def forgetting_intervals(accuracies: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Places from a record to the first later value that is at least as high, which is the next record.

    A record that is passed in the very next round lost nothing and is no interval, nor is the tail after the last one.
    """
    peak = 0
    for index in range(1, len(accuracies)):
        if accuracies[index] >= accuracies[peak]:
            if index - peak >= 2:
                yield peak, index
            peak = index


def backward_transfer(
    accuracies: Mapping[int, Mapping[str, float]], took_part: Mapping[int, Collection[str]]
) -> dict[int, float]:
    """By round, how much better the shared model is at the sites of earlier rounds than when they last took part.

    Eq. 10: the mean, over the sites that took part before round T, of the shared model's accuracy on the site's local
    test after round T less the same after the site's last round before T. Negative: forgotten. `accuracies` are by
    round and site. 0 where nobody took part before, as in the authors' code.
    """
    then: dict[str, float] = {}
    found = {}
    for round in sorted(accuracies):
        now = accuracies[round]
        changes = [now[site] - before for site, before in sorted(then.items()) if site in now]
        found[round] = math.fsum(changes) / len(changes) if changes else 0.0
        then |= {site: now[site] for site in took_part.get(round, ()) if site in now}
    return found


def settled_after(accuracies: Mapping[int, float]) -> int | None:
    """The first round (from 0) from which on the running mean of five stays within one point of its final value.

    The running mean of a measured round is over it and the four measured before it, or as many as there are. None
    where that holds for fewer than five measured rounds: the end of any course is near itself.
    """
    rounds = sorted(accuracies)
    values = [accuracies[round] for round in rounds]
    means = [_mean(values[max(0, end - WINDOW) : end]) for end in range(1, len(values) + 1)]
    settled = len(means)
    while settled and abs(means[settled - 1] - means[-1]) <= WITHIN:
        settled -= 1
    return rounds[settled] if len(means) - settled >= WINDOW else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
