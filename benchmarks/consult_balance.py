"""The table of balance in docs/consult.md: `consult` and its closest rivals on every set and level of skew.

Balance is the mean of local and global accuracy of one and the same predictor. A rival that was run on fewer seeds is
compared on those alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from one_shot_entries import ENTRIES
from one_shot_summary import NONE
from wardround.papers.summaries import cells, headed

OURS = "consult"
SHOWN = 3  # rivals

Entry = Mapping[str, Any]


class Rival(NamedTuple):
    """Another method in the cells that both have: its balance and ours, in percent."""

    name: str
    theirs: float
    ours: float
    seeds: int


def balance_table(entries: Sequence[Entry]) -> str:
    """A line for each set and level: what sites deploy by `consult`, its shared predictor, and who comes closest."""
    head = ["set", "α", "seeds", "at the site", "shared", "a fixed ¼ of the prior", "the closest others"]
    text = headed(head)
    for images, alpha in sorted({(e["set"], e["alpha"]) for e in entries if e["entry"] == OURS}):
        here = [e for e in entries if (e["set"], e["alpha"]) == (images, alpha)]
        own, quarter = (
            {e["seed"]: e["figures"] for e in here if e["entry"] == n} for n in (OURS, f"{OURS}, prior 0.25")
        )
        shared = mean((f["shared_local_accuracy"] + f["shared_global_accuracy"]) / 2 for f in own.values())
        a_quarter = f"{100 * _balance(quarter.values()):.1f}" if quarter.keys() == own.keys() else NONE
        figures = [f"{100 * value:.1f}" for value in (_balance(own.values()), shared)]
        closest = "; ".join(_words(rival, len(own)) for rival in rivals(here)[:SHOWN])
        text.append(cells([images, f"{alpha:g}", str(len(own)), *figures, a_quarter, closest]))
    return "\n".join(text)


def rivals(here: Sequence[Entry]) -> list[Rival]:
    """Every other whole method of one set and level, that which comes closest to `consult` at the site first."""
    by: dict[str, dict[int, Mapping[str, float]]] = {}
    for entry in here:
        by.setdefault(entry["entry"], {})[entry["seed"]] = entry["figures"]
    found = []
    for name in {line.label for line in ENTRIES} & by.keys():
        seeds = by[name].keys() & by[OURS].keys()
        if not seeds:
            continue
        theirs, ours = (100 * _balance(by[of][seed] for seed in seeds) for of in (name, OURS))
        found.append(Rival(name, theirs, ours, len(seeds)))
    return sorted(found, key=lambda rival: (rival.ours - rival.theirs, rival.name))


def _balance(figures: Iterable[Mapping[str, float]]) -> float:
    return mean(one["balance"] for one in figures)


def _words(rival: Rival, seeds: int) -> str:
    fewer = f" (of {rival.seeds} seed{'' if rival.seeds == 1 else 's'}, `{OURS}` there {rival.ours:.1f})"
    return f"{rival.name} {rival.theirs:.1f}{'' if rival.seeds == seeds else fewer}"
