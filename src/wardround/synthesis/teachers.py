"""The uploaded models as frozen teachers: their mean answer, and how far an image is from what they were trained on.

Batch-norm running statistics are the synthesis signal: each layer remembers the mean and variance of the real images'
feature maps, and an image is plausible when it reproduces them (FedISCA Eq. 6). Parameters are frozen, so a backward
pass goes to the image alone and costs a third less than one that also visits them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wardround.learn import nets
from wardround.learn.predictor import Member
from wardround.learn.replay import each
from wardround.models import StagedNet, build
from wardround.synthesis.fused_norm import FusedNorm, replace_norms, widened
from wardround.synthesis.stem import replace_stems

Adaptation = Literal["ema", "batch"]
Precision = Literal["fp32", "bf16"]
Mean = Literal["logits", "probabilities"]
NOT_FELT: dict[Precision, float] = {"fp32": 2.0**-24, "bf16": 2.0**-16}  # shares of statistics; see `felt`


def common_answer(logits: Sequence[Tensor], mean: Mean) -> Tensor:
    """What teachers say together, as logits: the mean of theirs (Eq. 3), or the logarithm of their mean probability."""
    if mean == "logits":
        return torch.stack(tuple(logits)).mean(dim=0)
    return torch.stack([said.log_softmax(dim=-1) for said in logits]).logsumexp(dim=0) - math.log(len(logits))


class View(NamedTuple):
    """What the teachers make of images: each one's logits, and the summed distance of its batch-norm statistics."""

    logits: tuple[Tensor, ...]
    gaps: tuple[Tensor, ...]
    of: Mean = "logits"

    @property
    def mean(self) -> Tensor:
        """Their common answer."""
        return common_answer(self.logits, self.of)


class Teacher:
    """One frozen network and the stand-ins of its batch-norm layers."""

    def __init__(self, member: Member, device: torch.device, precision: Precision) -> None:
        self.net = _frozen(member, device, precision)
        self.norms = replace_norms(self.net)
        replace_stems(self.net)
        self.net.eval()

    def logits(self, pixels: Tensor) -> Tensor:
        """What it says."""
        return self.outputs(pixels)[1]

    def outputs(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """What it sees and what it says: features and logits."""
        features, logits = self.net.outputs(pixels)
        return widened(features), widened(logits)

    def view(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and Σ_l ‖μ_l(x) − μ_l‖ + ‖σ²_l(x) − σ²_l‖ (Eq. 6).

        All layers at once: a norm per layer would be some hundred kernels of a few numbers each. A distance of zero
        has gradient zero, as a norm's.
        """
        variance, sum_by_layer = self._stored
        for norm in self.norms:
            norm.measuring = True
        logits = self.logits(pixels)
        for norm in self.norms:
            norm.measuring = False
        gaps = torch.cat([norm.moments[0] for norm in self.norms])
        spreads = torch.cat([norm.moments[1] for norm in self.norms])
        squares = torch.stack([gaps, spreads - variance]).square() @ sum_by_layer
        return logits, squares.clamp_min(torch.finfo(squares.dtype).tiny).sqrt().sum()

    @cached_property
    def _stored(self) -> tuple[Tensor, Tensor]:
        """The stored variances of all layers in a row, and a matrix that sums such a row layer by layer."""
        variances = [norm.running_var for norm in self.norms if norm.running_var is not None]
        owner = torch.cat([torch.full_like(v, place) for place, v in enumerate(variances)]).long()
        row = torch.cat(variances)
        return row, F.one_hot(owner, len(variances)).to(row.dtype)


class Teachers:
    """Frozen networks that answer together, by the mean of their logits or of their probabilities.

    In bf16 the convolutions and the head are kept in it; batch-norm parameters and statistics, and what comes out,
    stay float32.
    """

    def __init__(
        self,
        members: Sequence[Member],
        device: torch.device,
        precision: Precision = "fp32",
        mean: Mean = "logits",
    ) -> None:
        self.teachers = [Teacher(member, device, precision) for member in members]
        self.bf16 = precision == "bf16"
        self.mean = mean

    @property
    def nets(self) -> list[StagedNet]:
        """The networks, in the order of the members."""
        return [teacher.net for teacher in self.teachers]

    def logits(self, pixels: Tensor) -> Tensor:
        """Their common answer, without a gradient."""
        pixels = pixels.bfloat16() if self.bf16 else pixels
        with torch.no_grad():
            return common_answer(each([partial(teacher.logits, pixels) for teacher in self.teachers]), self.mean)

    def view(self, pixels: Tensor) -> View:
        """Logits and statistics in one pass, differentiable in the pixels."""
        pixels = pixels.bfloat16() if self.bf16 else pixels
        found = each([partial(teacher.view, pixels) for teacher in self.teachers])
        return View(tuple(logits for logits, _ in found), tuple(gap for _, gap in found), self.mean)


class AdaptedTeachers(Teachers):
    """Copies whose batch-norm statistics follow the images they are shown (Eq. 7), for noise that real ones never met.

    `ema`, as the papers say: running statistics move by 1 − momentum with every batch, and answers use them. `batch`,
    as FedISCA's public code does: answers use the statistics of the very batch that is asked about, so `follow` has
    no effect.
    """

    def __init__(
        self,
        members: Sequence[Member],
        device: torch.device,
        adaptation: Adaptation = "ema",
        momentum: float = 0.9,
        precision: Precision = "fp32",
        mean: Mean = "logits",
    ) -> None:
        super().__init__(members, device, precision, mean)
        self.adaptation = adaptation
        for layer in self._layers():
            layer.momentum = 1 - momentum

    def follow(self, pixels: Tensor) -> None:
        """Eq. 7 on one batch."""
        if self.adaptation == "batch":
            return
        pixels = pixels.bfloat16() if self.bf16 else pixels
        with self._batch_statistics(recorded=True), torch.no_grad():
            each([partial(net.features, pixels) for net in self.nets])

    def logits(self, pixels: Tensor) -> Tensor:
        """Their common answer with adapted statistics, without a gradient."""
        if self.adaptation == "ema":
            return super().logits(pixels)
        with self._batch_statistics(recorded=False):
            return super().logits(pixels)

    def statistics(self) -> dict[str, Tensor]:
        """The adapted statistics of all teachers, to be kept in a state."""
        return {
            f"{i:03d}.{name}": buffer.detach().clone()
            for i, net in enumerate(self.nets)
            for name, buffer in net.named_buffers()
            if buffer.is_floating_point()
        }

    def restore(self, statistics: Mapping[str, Tensor]) -> None:
        """The inverse of `statistics`."""
        for i, net in enumerate(self.nets):
            for name, buffer in net.named_buffers():
                if buffer.is_floating_point():
                    buffer.copy_(statistics[f"{i:03d}.{name}"])

    def _layers(self) -> list[FusedNorm]:
        return [norm for teacher in self.teachers for norm in teacher.norms]

    @contextmanager
    def _batch_statistics(self, recorded: bool) -> Iterator[None]:
        """Within the block, batch norm uses each batch's own statistics; running ones and counters move if recorded."""
        for layer in self._layers():
            layer.train()
            layer.track_running_stats = recorded
        try:
            yield
        finally:
            for layer in self._layers():
                layer.eval()
                layer.track_running_stats = True


def felt(momentum: float, precision: Precision) -> int:
    """How many of the last batches that running statistics follow are felt in them.

    A share of 2⁻²⁴ changes no float32. Of maps in bf16 each value is rounded by up to a share of 2⁻⁹, and a hundredth
    of that is far less than what their statistics are out by anyway.
    """
    return math.ceil(math.log(NOT_FELT[precision]) / math.log(momentum)) if momentum > 0 else 1


def _frozen(member: Member, device: torch.device, precision: Precision) -> StagedNet:
    net = build(member.spec).to(device)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    nets.load(net, member.weights)
    if precision == "bf16":
        for module in net.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.to(torch.bfloat16)
    return net.requires_grad_(False).eval()
