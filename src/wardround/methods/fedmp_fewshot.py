"""`fedmp-fewshot`: FedMP in three exchanges (Zhou et al. 2025, Section 3.4), and an ensemble at the end.

Sites train for 30 epochs and send model, embeddings and prototypes; the average, other sites' embeddings and the
prototypes come back, and they train for 60 epochs with both of FedMP's terms; the same once more. The third models are
not averaged: the mean of their softmax decides. So models travel three times each way and embeddings twice, which is
what Table 4's 1.71 GB come to; the last answer carries the model alone.

The schedule: 30, 60 and 60 epochs are Section 4.2.4's. The method's own `shots` and `epochs` win over the study's
`rounds` and `train.epochs`, and these over the paper's: `rounds` where it is set at all, `train.epochs` where it is a
list or another number than the program's own default.

What the paper leaves open: how the ensemble combines (here the mean softmax) and who takes it home (here every site
every model). Where not all sites take part in the last exchange, the ensemble is of those that do. Everything else, and
what is done with batch norm, is as `fedmp` says. With one shot this is an ensemble of models trained alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from wardround.data.federation import Site
from wardround.exchange.bundle import Bundle
from wardround.exchange.payload import Payload
from wardround.learn.predictor import Predictor
from wardround.methods.base import Context, Work
from wardround.methods.ensemble import Ensemble, panel_members
from wardround.methods.fedmp import FedMP
from wardround.methods.oneshot import trained_models
from wardround.methods.state import State
from wardround.settings import Count, EpochsPerRound, TrainSettings
from wardround.study import Study

SHOTS = 3
EPOCHS = (30, 60, 60)
PANEL = Ensemble()  # what travels home, and how, is what an ensemble's is


class FedMPFewShot(FedMP):
    """Two exchanges of FedMP, then the ensemble of what the sites make of them."""

    name = "fedmp-fewshot"
    paper = "Zhou et al., FedMP, 2025, Section 3.4"
    summary = "FedMP in three exchanges of 30, 60 and 60 epochs; the sites' last models decide together"

    class Settings(FedMP.Settings):
        """FedMP's, and the schedule."""

        shots: Count | None = None  # exchanges; None: as `rounds` says where it is set, else 3
        epochs: EpochsPerRound | None = None  # of each; None: train.epochs where that is set, else 30, 60, 60

    def rounds(self, study: Study) -> int:
        """Three, unless said otherwise."""
        return int(self.settings.shots or study.settings.rounds or SHOTS)

    def epochs_in(self, study: Study, round: int) -> int:
        """Local epochs of an exchange; a list's last number holds for those after it."""
        agreed = study.settings.train.epochs
        chosen = EPOCHS if agreed == TrainSettings().epochs else agreed
        epochs = chosen if self.settings.epochs is None else self.settings.epochs
        return epochs if isinstance(epochs, int) else epochs[min(round, len(epochs) - 1)]

    def exchanges(self, ctx: Context) -> bool:
        """Not in the last round: nobody trains on them afterwards."""
        return not self._last(ctx)

    def payload(self, study: Study, site: str) -> Payload:
        """As `fedmp`; every site takes every model home, so every site sees every site's last model."""
        home = PANEL.payload(study, site).home
        embeddings = "; before, random samples of the embeddings, with labels" if self.settings.sfmc else ""
        seen_by = f"the coordinator; the last model by every other site{embeddings}"
        return replace(super().payload(study, site), home=home, seen_by=seen_by)

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """FedMP's step, but the last models are kept as they are, each in a group of its site's name."""
        if self._last(ctx):
            yield State(trained_models(ctx, answers), {"panel": True})
        else:
            yield from super().absorb(ctx, state, answers)

    def deliver(self, ctx: Context, state: State) -> dict[str, Bundle]:
        """All models to all sites."""
        return PANEL.deliver(ctx, state)

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """The ensemble, rebuilt from what was delivered."""
        return self._ensemble(ctx, PANEL.delivered_state(delivered))
        yield  # a Work that asks for no fit

    def predictor(self, ctx: Context, state: State) -> Predictor | None:
        """The average, and after the last exchange the ensemble."""
        return self._ensemble(ctx, state) if state.facts.get("panel") else super().predictor(ctx, state)

    def _ensemble(self, ctx: Context, state: State) -> Predictor:
        return Predictor(len(ctx.study.classes), panel_members(ctx.study, state), "softmax")

    def _last(self, ctx: Context) -> bool:
        return ctx.round + 1 >= self.rounds(ctx.study)
