"""A method that leaves everything that a method may leave about its own work."""

from collections.abc import Iterator, Mapping

import torch

from wardround.exchange.bundle import Bundle
from wardround.methods.base import Context
from wardround.methods.fedavg import FedAvg
from wardround.methods.state import State
from wardround.synthesis.gallery import Trail

WORK = {"synthesis": {"steps": 500, "seconds": 4.1}, "adaptation": {"steps": 0, "seconds": 0.0}}
CLUSTERS = [["site-1", "site-3"], ["site-2"]]
COURSE = [[[0.5, 0.5], [0.5, 0.5]], [[0.75, 0.25], [0.5, 0.5]]]


class Painter(FedAvg):
    """FedAvg that says of itself what a method that makes images would say."""

    name = "painter"
    paper = summary = "a toy"

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        for found in super().absorb(ctx, state, answers):
            trail = Trail([0, 1, 2, 3], classes="abcd", steps=2)
            for step in range(2):
                trail.see(step, torch.full((4, 3, 8, 8), step - 1.0))
            found_out = {"clusters": CLUSTERS, "silhouettes": {"2": 0.25}, "course": COURSE}
            facts = {"work": WORK, **found_out, **trail.facts()}
            cross = {"cross": {"weights": torch.tensor([[0.75, 0.25], [0.5, float("nan")]], dtype=torch.float64)}}
            yield State({**found.groups, **trail.groups(), **cross}, {**found.facts, **facts})
