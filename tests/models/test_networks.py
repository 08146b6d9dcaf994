"""The networks against the sizes that their papers and public code give."""

import itertools

import pytest
import torch
from torch import nn

from wardround.models import NetSpec, build, fresh, names, spec_layout
from wardround.models.resnet import BasicBlock, BottleneckBlock
from wardround.models.shortcut import Shortcut
from wardround.models.wide_resnet import PreActivationBlock


@pytest.mark.parametrize("name", names())
def test_any_channels_classes_and_size(name: str) -> None:
    for channels, classes, size in itertools.product((1, 3), (2, 9), (28, 64)):
        spec = NetSpec(name, channels, classes, size, width=2)
        net = build(spec)
        features, logits = net.outputs(torch.zeros(2, channels, size, size))
        assert features.shape == (2, net.feature_size)
        assert logits.shape == (2, classes)


@pytest.mark.parametrize("name", names())
def test_large_images_and_full_width(name: str) -> None:
    """On the meta device, where shapes are real and nothing is computed."""
    net = build(NetSpec(name, 3, 5, 224)).to("meta")
    assert net(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 5)


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (NetSpec("cnn4", 3, 8, 28), 1_663_944),
        (NetSpec("small", 3, 8, 28), 33_496),
        (NetSpec("resnet18", 3, 1000, 224, stem="imagenet"), 11_689_512),
        (NetSpec("resnet34", 3, 1000, 224, stem="imagenet"), 21_797_672),
        (NetSpec("resnet50", 3, 1000, 224, stem="imagenet"), 25_557_032),
        (NetSpec("resnet50", 3, 2, 256, stem="imagenet"), 23_512_130),  # FedMP Table 4's bytes follow from it
        # The stem has 3·3·3·64 weights instead of 7·7·3·64, the head 8·513 numbers instead of 1000·513.
        (NetSpec("resnet18", 3, 8, 28), 11_689_512 - (49 - 9) * 3 * 64 - (1000 - 8) * 513),
        (NetSpec("wrn16-2", 3, 10, 32), 691_674),
        # Convolutions 27·64 + 9·(64·128 + 128·256 + 256·512 + 512·512), two per map for batch norm, head 10·513.
        (NetSpec("vgg8", 3, 10, 32), 1_728 + 9 * 434_176 + 2 * 1_472 + 5_130),
        (NetSpec("vgg11", 3, 10, 32), 9_217_728 + 2 * 2_752 + 5_130),
        (NetSpec("vgg16", 3, 10, 32), 14_710_464 + 2 * 4_224 + 5_130),
    ],
    ids=lambda value: value.describe() if isinstance(value, NetSpec) else str(value),
)
def test_parameter_counts(spec: NetSpec, count: int) -> None:
    assert spec_layout(spec).parameter_count == count
    assert sum(p.numel() for p in build(spec).parameters()) == count


@pytest.mark.parametrize(
    ("name", "layers"),
    [("cnn4", 0), ("small", 4), ("resnet18", 20), ("resnet34", 36), ("resnet50", 53), ("wrn16-2", 13), ("vgg16", 13)],
)
def test_batch_norm_layer_counts(name: str, layers: int) -> None:
    layout = spec_layout(NetSpec(name, 3, 8, 28))
    assert len(layout.in_group("counters")) == layers
    assert layout.has_batch_norm == (layers > 0)


def test_stage_sizes_of_fedmp_table_2() -> None:
    net = build(NetSpec("resnet50", 3, 2, 256, stem="imagenet")).to("meta")
    x = torch.empty(1, 3, 256, 256, device="meta")
    sizes = {stage: net.upto(stage, x).numel() for stage in ("stage1", "stage2", "stage3", "pool")}
    assert sizes == {"stage1": 256 * 64 * 64, "stage2": 512 * 32 * 32, "stage3": 1024 * 16 * 16, "pool": 2048}


def sides(name: str, size: int, stem: str | None = None) -> list[int]:
    """Height of the maps that leave each stage before pooling."""
    net = build(NetSpec(name, 3, 2, size, width=1, stem=stem)).to("meta")
    x = torch.empty(2, 3, size, size, device="meta")
    return [net.upto(stage, x).shape[-1] for stage in net.stage_names[:-1]]


def test_map_sizes() -> None:
    assert sides("resnet18", 28) == [28, 28, 14, 7, 4]
    assert sides("resnet18", 28, "imagenet") == [7, 7, 4, 2, 1]
    assert sides("resnet50", 224, "imagenet") == [56, 56, 28, 14, 7]
    assert sides("wrn16-2", 28) == [28, 28, 14, 7]
    assert sides("vgg16", 28) == [14, 7, 4, 2, 1]
    assert sides("vgg8", 224) == [112, 56, 28, 14, 7]
    assert sides("small", 28) == [14, 7, 7, 4]
    assert sides("cnn4", 28) == [14, 7]


@pytest.mark.parametrize("name", names())
def test_the_smallest_image_works(name: str) -> None:
    least = {"small": 4, "cnn4": 4, "wrn16-2": 4}.get(name, 16 if name.startswith("vgg") else 8)
    net = build(NetSpec(name, 1, 2, least, width=2))
    assert net(torch.zeros(2, 1, least, least)).shape == (2, 2)


def zeroed(block: nn.Module) -> nn.Module:
    """With every convolution zero, only the shortcut is left."""
    for layer in block.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.zeros_(layer.weight)
    return block.eval()


def test_shortcuts() -> None:
    x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(zeroed(BasicBlock(4, 4, 1))(x), x.relu())
    assert torch.equal(zeroed(BottleneckBlock(4, 1, 1))(x), x.relu())
    assert torch.equal(zeroed(PreActivationBlock(4, 4, 1))(x), x)
    assert BasicBlock(4, 8, 2)(x).shape == (2, 8, 3, 3)


@pytest.mark.parametrize("inputs", [1, 3, 7, 8, 12])
@pytest.mark.parametrize("size", [(8, 8), (7, 5), (1, 1)])
def test_a_shortcut_is_a_plain_convolution_however_narrow(inputs: int, size: tuple[int, int]) -> None:
    """Values and both gradients, channels last, of a 1×1 convolution of every other pixel written out as a product."""
    draw = torch.Generator().manual_seed(0)
    layer = Shortcut(inputs, 5, 2).to(memory_format=torch.channels_last)
    x = torch.randn(4, inputs, *size, generator=draw).contiguous(memory_format=torch.channels_last).requires_grad_()
    found = layer(x)
    expected = torch.einsum("nchw,oc->nohw", x[:, :, ::2, ::2], layer.weight[:, :, 0, 0])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weigh = torch.randn(found.shape, generator=draw)
    ours, plain = (torch.autograd.grad((y * weigh).sum(), [x, layer.weight]) for y in (found, expected))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_pre_activation_projects_the_activated_input() -> None:
    """A projection that copies its maps shows what reaches it: the rectified, normalised input."""
    block = zeroed(PreActivationBlock(2, 3, 1))
    shortcut = block.get_submodule("shortcut")
    assert isinstance(shortcut, nn.Conv2d)
    with torch.no_grad():
        shortcut.weight.copy_(torch.eye(3, 2)[:, :, None, None])
    x = torch.tensor([[-4.0], [3.0]]).reshape(1, 2, 1, 1)
    expected = torch.tensor([0.0, 3.0 / (1 + 1e-5) ** 0.5, 0.0]).reshape(1, 3, 1, 1)
    torch.testing.assert_close(block(x), expected)


def test_the_bottleneck_has_its_stride_in_the_middle() -> None:
    block = BottleneckBlock(4, 2, 2)
    assert [conv.stride for conv in (block.conv1, block.conv2, block.conv3)] == [(1, 1), (2, 2), (1, 1)]


def test_the_small_network_learns_in_a_few_steps() -> None:
    """Horizontal and vertical stripes of random phase and contrast, in noise: chance is one half."""
    generator = torch.Generator().manual_seed(0)

    def stripes(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(2, (count,), generator=generator)
        phase = 6.3 * torch.rand(count, 1, 1, generator=generator)
        wave = (torch.arange(28) * 1.2 + phase).sin().expand(count, 28, 28)
        wave = torch.where(labels.bool()[:, None, None], wave, wave.transpose(1, 2))
        noise = 0.5 * torch.randn(count, 3, 28, 28, generator=generator)
        return wave[:, None] * torch.rand(count, 1, 1, 1, generator=generator) + noise, labels

    spec = NetSpec("small", 3, 2, 28)
    net = build(spec)
    net.load_state_dict(fresh(spec, generator))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(30):
        x, y = stripes(64)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    x, y = stripes(500)
    with torch.no_grad():
        right = (net.eval()(x).argmax(1) == y).float().mean()
    assert right > 0.85
