"""Training on large images and large sets: zooming, checkpointing, batches brought over; numbers that do not change."""

import math
from pathlib import Path

import pytest
import torch

from wardround.data.imageset import ImageSet
from wardround.data.mapped import map_file
from wardround.learn import trainer as trainer_module
from wardround.learn.device import Device
from wardround.learn.fit import Fit, Fitted, Objective, Outputs, Recipe, Teacher
from wardround.learn.pixels import LEAST_AREA, MOST_DEGREES, augment, draw_augmentation, normalise
from wardround.learn.side_by_side import train_many
from wardround.learn.trainer import fits_device, train_one
from wardround.models import NetSpec, StagedNet, fresh

CPU = torch.device("cpu")


def images(n: int = 24, size: int = 16, seed: int = 0) -> ImageSet:
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, 3, size, size), generator=draw, dtype=torch.uint8)
    return ImageSet(pixels, torch.arange(n) % 3, ("a", "b", "c"))


def trained(spec: NetSpec, data: ImageSet, recipe: Recipe, **more: object) -> Fitted:
    start = fresh(spec, torch.Generator().manual_seed(1))
    return train_one(Fit("a fit", spec, start, data, recipe, seed=3, **more), CPU)  # type: ignore[arg-type]


def equal(a: Fitted, b: Fitted) -> bool:
    return a.losses == b.losses and all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


# Checkpointing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "resnet18", "resnet50", "wrn16-2", "cnn4", "vgg11"])
def test_checkpointing_gives_the_same_numbers(name: str) -> None:
    spec = NetSpec(name, 3, 3, 16, width=2)
    plain, again = (trained(spec, images(), Recipe(2, batch=8, checkpointing=on)) for on in (False, True))
    assert equal(plain, again)


def test_frozen_statistics_and_a_cut_network_too() -> None:
    spec = NetSpec("resnet18", 3, 3, 16, width=2)
    frozen = frozenset(n for n in fresh(spec, torch.Generator()) if "stem" in n)
    plain, again = (
        trained(spec, images(), Recipe(1, batch=8, checkpointing=on), frozen=frozen, objective=Cut())
        for on in (False, True)
    )
    assert equal(plain, again)


class Cut(Objective):
    """Runs the network in two pieces, as methods do that mix features in."""

    def outputs(self, net: StagedNet, pixels: torch.Tensor) -> Outputs:
        return Outputs(*net.after("stage2", net.upto("stage2", pixels)))


def test_less_is_kept_and_the_next_fit_is_not_touched() -> None:
    kept: dict[bool, int] = {}
    spec = NetSpec("resnet18", 3, 3, 16, width=2)
    for on in (False, True):
        count = Count()
        trained(spec, images(), Recipe(1, batch=24, checkpointing=on), objective=count)
        kept[on] = count.bytes
        assert count.net is not None
        assert not count.net.checkpointing
    assert kept[True] < 0.6 * kept[False]


class Count(Objective):
    """Counts the bytes that the forward pass keeps for the gradient."""

    bytes = 0
    net: StagedNet | None = None

    def outputs(self, net: StagedNet, pixels: torch.Tensor) -> Outputs:
        self.net = net

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            self.bytes += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return super().outputs(net, pixels)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("captured", [False, True])
def test_on_a_gpu_with_and_without_graphs(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = NetSpec("resnet18", 3, 3, 32, width=16)
    gpu = Device(torch.device("cuda", 0), 1)
    found = []
    for checkpointing, resident in ((False, True), (True, True), (True, False)):
        monkeypatch.setattr(trainer_module, "fits_device", lambda size, device, there=resident: there)
        objective = Objective()
        objective.capturable = captured
        recipe = Recipe(30, batch=8, lr=1e-3, checkpointing=checkpointing)
        start = fresh(spec, torch.Generator().manual_seed(1))
        (fitted,) = train_many([Fit("a fit", spec, start, images(size=32), recipe, seed=3, objective=objective)], gpu)
        assert isinstance(fitted, Fitted)
        found.append(fitted)
    for other in found[1:]:
        assert other.losses == pytest.approx(found[0].losses, rel=2e-2, abs=1e-3)
        counters = [name for name in other.weights if name.endswith("num_batches_tracked")]
        assert all(torch.equal(other.weights[name], found[0].weights[name]) for name in counters)


# Sets that stay where they are ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [False, True])
def test_batches_brought_over_give_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, augment: bool
) -> None:
    spec = NetSpec("small", 3, 3, 16, width=2)
    inside, validation = images(), images(9, seed=1)
    (tmp_path / "images.u8").write_bytes(inside.images.numpy().tobytes())
    outside = ImageSet(map_file(tmp_path / "images.u8", inside.images.shape), inside.labels, inside.classes)
    recipe = Recipe(3, batch=7, augment=augment, keep="best")
    teacher = Teacher(spec, fresh(spec, torch.Generator().manual_seed(9)))
    expected = trained(spec, inside, recipe, validation=validation, teachers=(teacher,))
    brought: list[int] = []
    monkeypatch.setattr(trainer_module, "fits_device", lambda size, device: brought.append(size) or False)
    assert equal(trained(spec, outside, recipe, validation=validation, teachers=(teacher,)), expected)
    assert brought == [inside.images.numel()]


def test_half_of_what_is_free_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fits_device(2**60, CPU)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 4000))
    cuda = torch.device("cuda", 0)
    assert fits_device(500, cuda)
    assert not fits_device(501, cuda)


# Zoom -----------------------------------------------------------------------------------------------------------------


def test_zoom_of_the_whole_is_the_image_and_of_a_mirror_its_mirror() -> None:
    some = images(2).images
    whole = torch.tensor([[1.0, 0, 0], [0, 1, 0]]).repeat(2, 1, 1)
    assert torch.allclose(augment(some, whole), some.float(), atol=1e-3)
    mirror = torch.tensor([[-1.0, 0, 0], [0, 1, 0]]).repeat(2, 1, 1)
    assert torch.allclose(augment(some, mirror), some.flip(3).float(), atol=1e-3)
    quarter = torch.tensor([[0.5, 0, -0.5], [0, 0.5, -0.5]]).repeat(2, 1, 1)
    corner = torch.nn.functional.interpolate(some[:, :, :8, :8].float(), 16, mode="bilinear", align_corners=False)
    assert torch.allclose(augment(some, quarter)[:, :, :15, :15], corner[:, :, :15, :15], atol=1e-3)


def test_zoom_draws_stay_within_their_limits() -> None:
    draws = draw_augmentation(4000, torch.Generator().manual_seed(0), "zoom")
    assert draws.shape == (4000, 2, 3)
    assert torch.equal(draws, draw_augmentation(4000, torch.Generator().manual_seed(0), "zoom"))
    matrix, shift = draws[:, :, :2], draws[:, :, 2].abs()
    area = torch.linalg.det(matrix).abs()
    assert LEAST_AREA * 0.8 < float(area.min()) < LEAST_AREA + 0.02
    assert float(area.max()) <= 1.0001
    angle = torch.atan2(-matrix[:, 0, 1], matrix[:, 1, 1])
    assert float(angle.abs().max()) <= math.radians(MOST_DEGREES) + 1e-5
    size = matrix.square().sum(dim=1).sqrt()  # of the part: its width and height
    assert bool((shift + size <= 1.0001).all())
    flips = torch.linalg.det(matrix) < 0
    assert 1800 < int(flips.sum()) < 2200


def test_training_with_zoom_is_repeatable_and_leaves_the_images_alone() -> None:
    data, before = images(), images().images.clone()
    spec = NetSpec("small", 3, 3, 16, width=2)
    one, two = (trained(spec, data, Recipe(2, batch=8, augment=True, augmentation="zoom")) for _ in range(2))
    assert equal(one, two)
    assert not equal(one, trained(spec, data, Recipe(2, batch=8, augment=True)))
    assert torch.equal(data.images, before)


def test_normalising_floats_copies() -> None:
    floats = torch.full((1, 1, 2, 2), 255.0).to(memory_format=torch.channels_last)
    assert torch.equal(normalise(floats), torch.ones(1, 1, 2, 2))
    assert float(floats.max()) == 255
