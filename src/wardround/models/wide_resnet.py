"""WRN-16-2: a wide residual network with pre-activation (Zagoruyko & Komodakis 2016, arXiv:1605.07146)."""

from torch import Tensor, nn

from wardround.models.net import GlobalPool, StagedNet, activate
from wardround.models.shortcut import Shortcut

DEPTH, WIDENING = 16, 2


def wrn16_2(channels: int, classes: int, width: int = 16) -> StagedNet:
    """Three stages of two blocks, twice as wide as the original thin ResNet: 32, 64 and 128 maps over a stem of 16.

    In a pre-activation network nothing normalises the last sum, so a batch norm and a ReLU close the last stage.
    """
    stages: dict[str, nn.Module] = {"stem": nn.Conv2d(channels, width, 3, padding=1, bias=False)}
    inputs = width
    for number in range(3):
        outputs = width * WIDENING * 2**number
        blocks: list[nn.Module] = []
        for index in range((DEPTH - 4) // 6):
            blocks.append(PreActivationBlock(inputs, outputs, stride=2 if number > 0 and index == 0 else 1))
            inputs = outputs
        if number == 2:
            blocks += [nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)]
        stages[f"stage{number + 1}"] = nn.Sequential(*blocks)
    stages["pool"] = GlobalPool()
    return StagedNet(stages, inputs, classes)


class PreActivationBlock(nn.Module):
    """Batch norm and ReLU before each of two 3×3 convolutions.

    Where the shape changes, the shortcut is a 1×1 convolution of the activated input; elsewhere it is the raw input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else Shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both branches, not activated."""
        active = activate(self.bn1, x)
        h: Tensor = self.conv2(activate(self.bn2, self.conv1(active)))
        return h.add_(x if self.shortcut is None else self.shortcut(active))
