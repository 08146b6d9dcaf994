"""The convolution of a residual block's shortcut: 1×1, and where the block halves the image, every other pixel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

NARROW = 8  # channels in a vector of AVX2


class Shortcut(nn.Conv2d):
    """A plain 1×1 convolution without bias, which narrow networks on a CPU do in another order.

    PyTorch 2.13 on a CPU that has AVX2 and not AVX-512 writes beyond its memory in the backward pass of a strided 1×1
    convolution over fewer than eight channels, channels last, and the process dies. To skip pixels first and then
    convolve those that are left is the same and takes another way.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The projection of the pixels that are kept."""
        if x.is_cuda or self.in_channels >= NARROW:
            return super().forward(x)
        down, right = self.stride
        return F.conv2d(x[:, :, ::down, ::right], self.weight)
