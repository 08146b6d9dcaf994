"""VGG with batch norm (Simonyan & Zisserman 2015; batch norm after Ioffe & Szegedy 2015), with one linear head.

VGG-8 is the one-convolution-per-block variant of knowledge-distillation work; FedISCA's sites with different networks
use VGG-8 and VGG-11 in its code, VGG-16 in its text. Averaging the last maps replaces the two wide hidden layers, so
that any image size fits; a convolution followed by batch norm has no bias, which the norm would take away again.
"""

from torch import nn

from wardround.models.net import GlobalPool, StagedNet

CONVOLUTIONS = {8: (1, 1, 1, 1, 1), 11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3)}
WIDENING = (1, 2, 4, 8, 8)


def vgg(depth: int, channels: int, classes: int, width: int = 64) -> StagedNet:
    """VGG-8, -11 or -16; stages block1 to block5, pool. `width` is the first block's."""
    stages: dict[str, nn.Module] = {}
    inputs = channels
    for number, (count, factor) in enumerate(zip(CONVOLUTIONS[depth], WIDENING, strict=True), 1):
        outputs = width * factor
        layers: list[nn.Module] = []
        for _ in range(count):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
            layers += [nn.ReLU(inplace=True)]
            inputs = outputs
        # Rounding up lets 28 pixels be halved five times: 28, 14, 7, 4, 2, 1.
        stages[f"block{number}"] = nn.Sequential(*layers, nn.MaxPool2d(2, ceil_mode=True))
    stages["pool"] = GlobalPool()
    return StagedNet(stages, inputs, classes)
