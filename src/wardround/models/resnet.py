"""ResNet-18, -34 and -50 (He et al. 2016) with a stem for small images or for large ones.

FedISCA and FedBiCross train ResNet-18 on 28-pixel images with the "small" stem of CIFAR code: one 3×3 convolution and
no pooling, so that the first stage sees every pixel. FedMP's ResNet-50 on 256-pixel images has the "imagenet" stem: a
7×7 convolution with stride 2, then max-pooling. In the bottleneck block the 3×3 convolution has the stride, as in the
variant that most published weights use. Layers inside a stage have the names that those weights give them.
"""

from collections import OrderedDict

from torch import Tensor, nn

from wardround.models.net import GlobalPool, StagedNet, activate, twin
from wardround.models.shortcut import Shortcut

STEMS = ("small", "imagenet")
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


def resnet(depth: int, channels: int, classes: int, width: int = 64, stem: str = "small") -> StagedNet:
    """A ResNet of 18, 34 or 50 layers; stages stem, stage1 to stage4, pool. `width` is the stem's."""
    block = BottleneckBlock if depth == 50 else BasicBlock
    stages: dict[str, nn.Module] = {"stem": _stem(stem, channels, width)}
    inputs = width
    for number, count in enumerate(BLOCKS[depth]):
        mid = width * 2**number
        blocks: list[nn.Module] = []
        for index in range(count):
            blocks.append(block(inputs, mid, stride=2 if number > 0 and index == 0 else 1))
            inputs = mid * block.expansion
        stages[f"stage{number + 1}"] = nn.Sequential(*blocks)
    stages["pool"] = GlobalPool()
    return StagedNet(stages, inputs, classes)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, mid: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, mid, 3, stride)
        self.bn1 = nn.BatchNorm2d(mid)
        self.conv2 = _conv(mid, mid, 3)
        self.bn2 = nn.BatchNorm2d(mid)
        self.downsample = _downsample(inputs, mid * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The rectified sum of both branches."""
        h, beside = activate(self.bn1, self.conv1(x)), twin(x)
        return activate(self.bn2, self.conv2(h), beside if self.downsample is None else self.downsample(beside))


class BottleneckBlock(nn.Module):
    """A 1×1 convolution down, a 3×3 with the stride, a 1×1 up to four times the width, around a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, mid: int, stride: int) -> None:
        super().__init__()
        outputs = mid * self.expansion
        self.conv1 = _conv(inputs, mid, 1)
        self.bn1 = nn.BatchNorm2d(mid)
        self.conv2 = _conv(mid, mid, 3, stride)
        self.bn2 = nn.BatchNorm2d(mid)
        self.conv3 = _conv(mid, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _downsample(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The rectified sum of both branches."""
        h, beside = activate(self.bn1, self.conv1(x)), twin(x)
        h = activate(self.bn2, self.conv2(h))
        return activate(self.bn3, self.conv3(h), beside if self.downsample is None else self.downsample(beside))


def _stem(kind: str, channels: int, width: int) -> nn.Sequential:
    norm, relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    if kind == "small":
        return nn.Sequential(OrderedDict(conv1=_conv(channels, width, 3), bn1=norm, relu=relu))
    conv = _conv(channels, width, 7, stride=2)
    return nn.Sequential(OrderedDict(conv1=conv, bn1=norm, relu=relu, maxpool=nn.MaxPool2d(3, stride=2, padding=1)))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """A projection where the shortcut changes shape (He et al.'s option B), nothing where it does not."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(Shortcut(inputs, outputs, stride), nn.BatchNorm2d(outputs))
