"""The attacker's decoder: a network from the features of any stage back to images, trained with squared error.

FedMP says "deconvolutional layers" and no more; the layers are ours. Features are standardised by the mean and
deviation of the auxiliary ones, channel by channel, so that one learning rate serves every stage of every network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wardround.audit.similarity import unit
from wardround.errors import BadInput, RunFailed
from wardround.streams import Streams

VECTOR_START = 7  # pixels: a feature vector becomes a map of at most this side first
WIDEST = 128
DECODED_AT_ONCE = 256


@dataclass(frozen=True)
class DecoderTraining:
    """Adam with a rate that a cosine takes to zero; `width` is the number of maps at full size, doubled per halving."""

    epochs: int = 60
    batch: int = 32
    lr: float = 2e-3
    width: int = 32


class Decoder(nn.Module):
    """Features of one image, of `shape` `(c,)` or `(c, h, w)`, to pixels from 0 to 1."""

    def __init__(self, shape: tuple[int, ...], channels: int, size: int, width: int) -> None:
        super().__init__()
        self.shape = shape
        sides = _sides(size, shape)
        widths = [min(WIDEST, width * 2**level) for level in range(len(sides))][::-1]
        self.sides = sides
        if len(shape) == 1:
            self.entry: nn.Module = nn.Linear(shape[0], widths[0] * sides[0] ** 2)
        else:
            self.entry = nn.Conv2d(shape[0], widths[0], 3, padding=1)
        self.mix = nn.Conv2d(widths[0], widths[0], 3, padding=1)
        self.doubling = nn.ModuleList(
            nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1) for inputs, outputs in pairwise(widths)
        )
        self.exit = nn.Conv2d(widths[-1], channels, 3, padding=1)
        spread = (1, shape[0]) + (1,) * (len(shape) - 1)
        self.register_buffer("mean", torch.zeros(spread))
        self.register_buffer("deviation", torch.ones(spread))

    def forward(self, features: Tensor) -> Tensor:
        """Flattened features `(n, width)` to images `(n, channels, size, size)`."""
        mean, deviation = cast(Tensor, self.mean), cast(Tensor, self.deviation)
        maps = self.entry((features.reshape(-1, *self.shape) - mean) / deviation)
        if maps.ndim == 2:
            maps = maps.reshape(len(maps), -1, self.sides[0], self.sides[0])
        elif maps.shape[-1] != self.sides[0]:
            maps = F.interpolate(maps, size=self.sides[0], mode="bilinear", align_corners=False)
        maps = self.mix(F.relu(maps))
        for side, double in zip(self.sides[1:], self.doubling, strict=True):
            maps = double(F.relu(maps))[..., :side, :side]
        return torch.sigmoid(self.exit(F.relu(maps)))

    def standardise(self, features: Tensor) -> None:
        """Remember the mean and deviation of these features, channel by channel; a constant channel stays as it is."""
        channels = features.reshape(-1, *self.shape).transpose(0, 1).flatten(1).double()
        deviation = channels.std(dim=1, unbiased=False)
        for name, values in (("mean", channels.mean(dim=1)), ("deviation", torch.where(deviation > 0, deviation, 1))):
            buffer = self.get_buffer(name)
            buffer.copy_(values.reshape(buffer.shape))

    def reconstruct(self, features: Tensor) -> Tensor:
        """Images from features, float32 on the CPU."""
        device = self.exit.weight.device
        with torch.no_grad():
            return torch.cat([self(batch.to(device)).cpu() for batch in torch.split(features, DECODED_AT_ONCE)])


def train_decoder(
    features: Tensor,
    images: Tensor,
    shape: tuple[int, ...],
    how: DecoderTraining,
    streams: Streams,
    device: torch.device,
    on_epoch: Callable[[], None] = lambda: None,
) -> Decoder:
    """A decoder for features `(n, width)` whose 8-bit images the attacker has."""
    if len(features) != len(images) or features[:1].numel() != math.prod(shape):
        raise BadInput(
            f"{len(features)} features of {features[:1].numel()} numbers do not fit {len(images)} images and the shape "
            f"{shape}; give one row per image, of the stage that is named"
        )
    if len(images) < 2:
        raise BadInput(f"{len(images)} auxiliary images are too few to train a decoder; give more images")
    if min(how.epochs, how.batch, how.width) < 1:
        raise BadInput("a decoder needs at least one epoch, one image a batch and one map; raise the number that is 0")
    decoder = _drawn(shape, images.shape[1], images.shape[2], how.width, streams.torch("audit decoder"))
    decoder.standardise(features)
    decoder.to(device)
    optimiser = torch.optim.Adam(decoder.parameters(), lr=how.lr)
    steps = how.epochs * -(-len(images) // how.batch)
    course = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    total = torch.zeros((), device=device)
    for epoch in range(how.epochs):
        order = torch.randperm(len(images), generator=streams.torch("audit decoder shuffle", index=epoch))
        total.zero_()
        for index in torch.split(order, how.batch):
            loss = F.mse_loss(decoder(features[index].to(device)), unit(images[index].to(device)))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            course.step()
            total += loss.detach()
        on_epoch()
    if not bool(total.isfinite()):
        raise RunFailed(f"the decoder's training diverged; use a smaller rate than {how.lr:g}")
    return decoder.requires_grad_(False).eval()


def _sides(size: int, shape: tuple[int, ...]) -> list[int]:
    """Map sides from the first to the image's own, each the double of the one before or one pixel less."""
    sides = [size]
    while (sides[-1] > VECTOR_START) if len(shape) == 1 else (-(-sides[-1] // 2) >= shape[-1] and sides[-1] > 1):
        sides.append(-(-sides[-1] // 2))
    return sides[::-1]


def _drawn(shape: tuple[int, ...], channels: int, size: int, width: int, generator: torch.Generator) -> Decoder:
    """A decoder whose weights come from the generator alone: made on the meta device, where nothing is drawn."""
    with torch.device("meta"):
        decoder = Decoder(shape, channels, size, width)
    decoder.to_empty(device="cpu")
    decoder.get_buffer("mean").zero_()
    decoder.get_buffer("deviation").fill_(1)
    for layer in decoder.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            terms = layer.weight[0].numel()
            if isinstance(layer, nn.ConvTranspose2d):  # with stride 2, a quarter of the 4×4 kernel meets each pixel
                terms = layer.in_channels * 4
            bound = math.sqrt(6 / terms)
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            nn.init.zeros_(cast(Tensor, layer.bias))
    return decoder
