"""Images from a generator: a small network from codes to images, trained until the teachers like what it makes.

What DENSE, Co-Boosting and DAFL have in common. The network is theirs: a linear layer to maps of a quarter of the image
size, doubled twice by nearest neighbour, with 3×3 convolutions, batch norm and leaky ReLU between. It works in
training mode always, so batch norm keeps no running statistics and the parameters are its whole state. Everything that
changes does so in place, so that one captured step serves all epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from wardround.errors import Diverged
from wardround.learn.replay import Replay, each
from wardround.synthesis.student import Student
from wardround.synthesis.teachers import Precision, Teachers, View
from wardround.synthesis.trained import Trained

Output = Literal["sigmoid", "tanh"]
Start = Literal["normal", "uniform"]
MAPS = 64  # of the last layer but one; twice as many before
SPREAD = 0.02  # of weights drawn "normal"
DAFL_EPSILON = 0.8  # meant as a momentum in DAFL's code, where it stands in the place of batch norm's ε


class GeneratorNet(nn.Module):
    """Codes `(n, codes)` to images `(n, channels, size, size)` in the networks' value range.

    Any size of 8 or more: a size that four does not divide is made at the next multiple and cut out of its middle.
    `sigmoid` (DENSE, Co-Boosting): pixels in 0..1, then normalised as real ones are, to -1..1. `tanh` (DAFL's own):
    each channel standardised over the batch, so values may leave -1..1, and a large ε within.
    """

    def __init__(self, codes: int, shape: tuple[int, int, int], output: Output = "sigmoid") -> None:
        super().__init__()
        channels, size, _ = shape
        self.shape = shape
        self.quarter = math.ceil(size / 4)
        self.margin = (4 * self.quarter - size) // 2
        self.output = output
        epsilon = DAFL_EPSILON if output == "tanh" else 1e-5
        self.start = nn.Linear(codes, 2 * MAPS * self.quarter**2)
        self.grow = nn.Sequential(
            nn.BatchNorm2d(2 * MAPS, track_running_stats=False),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * MAPS, 2 * MAPS, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * MAPS, epsilon, track_running_stats=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * MAPS, MAPS, 3, padding=1, bias=False),
            nn.BatchNorm2d(MAPS, epsilon, track_running_stats=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(MAPS, channels, 3, padding=1),
        )
        self.standardise = nn.BatchNorm2d(channels, affine=False, track_running_stats=False)

    def forward(self, codes: Tensor) -> Tensor:
        """Images, float32 and channels last."""
        maps = self.start(codes).unflatten(1, (2 * MAPS, self.quarter, self.quarter))
        middle = slice(self.margin, self.margin + self.shape[1])
        raw = self.grow(maps.contiguous(memory_format=torch.channels_last))[:, :, middle, middle].float()
        images = self.standardise(raw.tanh()) if self.output == "tanh" else 2 * raw.sigmoid() - 1
        return cast(Tensor, images.contiguous(memory_format=torch.channels_last))

    def draw(self, generator: torch.Generator, start: Start) -> None:
        """New parameters in the place of the old ones, drawn from `generator` alone in the order of the layers.

        `normal`: weights from N(0, 0.02), batch-norm weights from N(1, 0.02), no bias; what DENSE's and Co-Boosting's
        code resets to. `uniform`: as PyTorch's layers begin, in ±1/√fan_in.
        """
        for layer in self.modules():
            norm = isinstance(layer, nn.BatchNorm2d)
            for name, parameter in layer.named_parameters(recurse=False):
                centre = 1.0 if norm and name == "weight" else 0.0
                drawn = torch.full(parameter.shape, centre)
                if start == "normal" and name == "weight":
                    drawn.normal_(centre, SPREAD, generator=generator)
                elif start == "uniform" and not norm:
                    bound = 1 / math.sqrt(cast(Tensor, layer.weight)[0].numel())
                    drawn.uniform_(-bound, bound, generator=generator)
                parameter.data.copy_(drawn)


class ImageGenerator(Trained):
    """A generator in training: the network, its Adam, and where `learned` > 0 so many codes that are trained with it.

    `clip` is the largest norm of the network's gradient; codes are not clipped.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        codes: int,
        device: torch.device,
        *,
        lr: float,
        beta: float = 0.5,
        output: Output = "sigmoid",
        learned: int = 0,
        clip: float | None = None,
        precision: Precision = "fp32",
    ) -> None:
        with torch.device("meta"):  # PyTorch's layers draw from the global generator when made on a real device
            net = GeneratorNet(codes, shape, output)
        self.net = net.to_empty(device=device)
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.codes = torch.zeros((learned, codes), device=device).requires_grad_(learned > 0)
        self.device, self.clip, self.bf16 = device, clip, precision == "bf16"
        self.trained = {**dict(self.net.named_parameters()), **({"codes": self.codes} if learned else {})}
        cuda = device.type == "cuda"
        self.optimiser = torch.optim.Adam(self.trained.values(), lr=lr, betas=(beta, 0.999), capturable=cuda)
        for tensor in self.trained.values():  # made here, so that a captured step finds them where they will always be
            self.optimiser.state[tensor] = {
                "step": torch.zeros((), device=device if cuda else None),
                "exp_avg": torch.zeros_like(tensor, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(tensor, requires_grad=False),
            }

    def begin(self, generator: torch.Generator, start: Start) -> None:
        """New parameters, new codes from N(0, 1), and an Adam that remembers nothing."""
        self.net.draw(generator, start)
        with torch.no_grad():
            self.codes.copy_(torch.randn(self.codes.shape, generator=generator))
        for memory in self.optimiser.state.values():
            for tensor in memory.values():
                tensor.zero_()

    def images(self, codes: Tensor) -> Tensor:
        """What the network makes of codes, differentiable in both."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            return self.net(codes)  # type: ignore[no-any-return]

    def step(self, loss: Tensor) -> None:
        """One step of Adam down the loss; no other network that the loss passed through gets a gradient."""
        for tensor, gradient in zip(
            self.trained.values(), torch.autograd.grad(loss, list(self.trained.values())), strict=True
        ):
            tensor.grad = gradient
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.optimiser.step()


class BatchMaker:
    """A batch of images by a generator that begins anew for each; those of lowest loss are given back.

    `begin`, `step` as often as wanted, `made`; between steps it may be kept in a state. `loss(images, ...)` is what the
    generator goes down, with whatever tensors each step brings along.
    """

    def __init__(self, generator: ImageGenerator, loss: Callable[..., Tensor]) -> None:
        self.generator, self.loss = generator, loss
        blank = torch.zeros((len(generator.codes), *generator.net.shape), device=generator.device)
        self.best = blank.contiguous(memory_format=torch.channels_last)
        self.lowest, self.latest = torch.zeros((2,), device=generator.device)
        self.replay = Replay(self._step, generator.device)

    def begin(self, generator: torch.Generator) -> None:
        """Forget the last batch."""
        self.generator.begin(generator, "normal")
        self.lowest.fill_(torch.inf)

    def step(self, *inputs: Tensor) -> None:
        """One step down the loss."""
        self.latest.copy_(self.replay(*inputs))

    def made(self) -> Tensor:
        """The images of lowest loss out of all steps; a copy. A loss that is not finite in the end is an error."""
        require_finite(self.latest)
        return self.best.clone()

    def state(self) -> dict[str, Tensor]:
        """To go on from here."""
        own = {"best": self.best, "lowest": self.lowest, "latest": self.latest}
        return {**self.generator.state(), **{name: tensor.clone() for name, tensor in own.items()}}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        self.generator.restore(state)
        for name, tensor in (("best", self.best), ("lowest", self.lowest), ("latest", self.latest)):
            tensor.copy_(state[name])

    def _step(self, *inputs: Tensor) -> Tensor:
        images = self.generator.images(self.generator.codes)
        loss = self.loss(images, *inputs)
        self.generator.step(loss)
        self.best.copy_(torch.where(loss < self.lowest, images, self.best).detach())
        self.lowest.copy_(torch.minimum(loss, self.lowest).detach())
        return loss.detach()


def require_finite(loss: Tensor) -> None:
    """Stop a run whose generator has diverged, or whose student has so far that the generator's loss shows it.

    Waits for the device.
    """
    if not bool(loss.isfinite()):
        raise Diverged(
            "the generator diverged: its loss is no longer finite; use a smaller generator_lr, or a smaller lr"
        )


# What a generator's loss asks the networks ----------------------------------------------------------------------------


def view(teachers: Teachers, pixels: Tensor, statistics: bool) -> View:
    """What the teachers say, differentiable in the pixels, and only where it is asked for how far their statistics are.

    Networks without batch norm have none.
    """
    if statistics:
        return teachers.view(pixels)
    return View(tuple(logits for _, logits in outputs(teachers, pixels)), ())


def outputs(teachers: Teachers, pixels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Features and logits of every teacher, float32, differentiable in the pixels."""
    pixels = pixels.bfloat16() if teachers.bf16 else pixels
    return each([partial(teacher.outputs, pixels) for teacher in teachers.teachers])


def settled_logits(student: Student, pixels: Tensor) -> Tensor:
    """What the student says as it would be deployed: batch norm uses its running statistics and leaves them alone."""
    student.net.eval()
    try:
        return student.logits(pixels)
    finally:
        student.net.train()
