"""Generators of images and the pool: the network against plain arithmetic, what a step changes, what a reset resets."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wardround.errors import RunFailed
from wardround.learn.pixels import augment
from wardround.learn.predictor import Member
from wardround.methods.state import State
from wardround.models import NetSpec, fresh
from wardround.synthesis.generator import (
    BatchMaker,
    GeneratorNet,
    ImageGenerator,
    Output,
    Start,
    outputs,
    require_finite,
    settled_logits,
    view,
)
from wardround.synthesis.pool import Augmentation, Pool, cropped, draw_crops
from wardround.synthesis.student import Student
from wardround.synthesis.teachers import Teachers

CPU = torch.device("cpu")
SHAPE = (3, 8, 8)


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes(n: int = 6, size: int = 5, seed: int = 9) -> Tensor:
    return torch.randn(n, size, generator=stream(seed))


def network(shape: tuple[int, int, int] = SHAPE, output: Output = "sigmoid", start: Start = "uniform") -> GeneratorNet:
    with torch.device("meta"):
        net = GeneratorNet(5, shape, output)
    net = net.to_empty(device=CPU)
    net.draw(stream(), start)
    return net


def make(learned: int = 6, lr: float = 0.01, seed: int = 0, clip: float | None = None) -> ImageGenerator:
    found = ImageGenerator(SHAPE, 5, CPU, lr=lr, learned=learned, clip=clip)
    found.begin(stream(seed), "normal")
    return found


def batch_norm(x: Tensor, scale: Tensor | None, shift: Tensor | None, epsilon: float) -> Tensor:
    mean, variance = x.mean(dim=(0, 2, 3), keepdim=True), x.var(dim=(0, 2, 3), keepdim=True, unbiased=False)
    x = (x - mean) / (variance + epsilon).sqrt()
    return x if scale is None or shift is None else x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


def doubled(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


def by_hand(p: dict[str, Tensor], z: Tensor, quarter: int, epsilon: float = 1e-5) -> Tensor:
    """The maps before the last squashing, at four times `quarter`."""
    x = (z @ p["start.weight"].T + p["start.bias"]).reshape(len(z), 128, quarter, quarter)
    x = doubled(batch_norm(x, p["grow.0.weight"], p["grow.0.bias"], 1e-5))
    x = F.conv2d(x, p["grow.2.weight"], padding=1)
    x = batch_norm(x, p["grow.3.weight"], p["grow.3.bias"], epsilon)
    x = doubled(torch.where(x > 0, x, 0.2 * x))
    x = batch_norm(F.conv2d(x, p["grow.6.weight"], padding=1), p["grow.7.weight"], p["grow.7.bias"], epsilon)
    return F.conv2d(torch.where(x > 0, x, 0.2 * x), p["grow.9.weight"], p["grow.9.bias"], padding=1)


# The network ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["normal", "uniform"])
def test_pixels_of_zero_to_one_become_minus_one_to_one(start: Start) -> None:
    net = network(start=start)
    raw = by_hand(dict(net.named_parameters()), codes(), 2)
    torch.testing.assert_close(net(codes()), (raw.sigmoid() - 0.5) / 0.5, rtol=1e-4, atol=1e-5)


def test_dafls_output_is_standardised_by_channel() -> None:
    net = network(output="tanh")
    expected = batch_norm(by_hand(dict(net.named_parameters()), codes(), 2, 0.8).tanh(), None, None, 1e-5)
    found = net(codes())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.mean(dim=(0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.var(dim=(0, 2, 3), unbiased=False), torch.ones(3), rtol=0.05, atol=0)


@pytest.mark.parametrize("output", ["sigmoid", "tanh"])
@pytest.mark.parametrize("size", [8, 9, 10, 11, 28])
@pytest.mark.parametrize("channels", [1, 3])
def test_any_size_and_number_of_channels(size: int, channels: int, output: Output) -> None:
    found = network((channels, size, size), output)(codes(2))
    assert found.shape == (2, channels, size, size)
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)
    if output == "sigmoid":
        assert found.abs().max() < 1


@pytest.mark.parametrize(("size", "margin"), [(9, 1), (10, 1), (11, 0), (12, 0)])
def test_odd_sizes_are_the_middle_of_the_next_multiple_of_four(size: int, margin: int) -> None:
    whole, part = network((3, 12, 12)), network((3, size, size))
    cut = slice(margin, margin + size)
    torch.testing.assert_close(part(codes()), whole(codes())[:, :, cut, cut], rtol=0, atol=1e-6)


def test_normal_weights_come_from_the_passed_generator_alone() -> None:
    before = torch.get_rng_state()
    net = make().net
    parameters = dict(net.named_parameters())
    assert torch.equal(torch.get_rng_state(), before)
    draw = stream()
    for name, parameter in parameters.items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        else:
            mean = 1.0 if parameter.dim() == 1 else 0.0
            assert torch.equal(parameter, torch.empty(parameter.shape).normal_(mean, 0.02, generator=draw)), name
    assert parameters["grow.2.weight"].std().item() == pytest.approx(0.02, rel=0.02)


def test_uniform_weights_are_as_pytorch_begins() -> None:
    parameters = dict(network().named_parameters())
    for name, fan_in in (("start.weight", 5), ("start.bias", 5), ("grow.2.weight", 128 * 9), ("grow.9.weight", 64 * 9)):
        bound = 1 / math.sqrt(fan_in)
        assert parameters[name].abs().max() <= bound
        assert parameters[name].std().item() > 0.3 * bound
    assert parameters["grow.9.bias"].abs().max() <= 1 / math.sqrt(64 * 9)
    assert parameters["grow.9.bias"].all()
    assert set(parameters["grow.0.weight"].tolist()) == {1.0}
    assert set(parameters["grow.7.bias"].tolist()) == {0.0}


# Training -------------------------------------------------------------------------------------------------------------


def test_the_first_step_of_adam_moves_everything_by_the_rate() -> None:
    """m/√v is the gradient's sign after one step: each entry with a gradient far above ε moves by lr."""
    made = make(lr=0.01)
    before = {name: t.detach().clone() for name, t in made.trained.items()}
    made.step(made.images(made.codes).square().sum() * 1e4)
    assert set(before) == {*dict(made.net.named_parameters()), "codes"}
    for name in ("codes", "grow.9.weight", "start.weight"):
        moved = (made.trained[name] - before[name]).abs()
        assert moved.max().item() == pytest.approx(0.01, rel=1e-3), name
        assert moved.median().item() == pytest.approx(0.01, rel=1e-2), name


def test_two_steps_of_adam_written_out() -> None:
    made = make(lr=0.01)
    plain = {name: t.detach().clone() for name, t in made.trained.items()}
    first = {name: torch.zeros_like(t) for name, t in plain.items()}
    second = {name: torch.zeros_like(t) for name, t in plain.items()}
    for step in (1, 2):
        made.step(made.images(made.codes)[:, 0].mean() * 100)
        leaves = {name: t.requires_grad_(True) for name, t in plain.items()}
        image = by_hand(leaves, leaves["codes"], 2).sigmoid() * 2 - 1
        gradients = torch.autograd.grad(image[:, 0].mean() * 100, list(leaves.values()))
        with torch.no_grad():
            for (name, t), g in zip(leaves.items(), gradients, strict=True):
                first[name] = 0.5 * first[name] + 0.5 * g
                second[name] = 0.999 * second[name] + 0.001 * g * g
                scale = (second[name] / (1 - 0.999**step)).sqrt() + 1e-8
                plain[name] = t.detach() - 0.01 * first[name] / (1 - 0.5**step) / scale
    for name in ("codes", "start.weight", "grow.9.bias"):
        torch.testing.assert_close(made.trained[name].detach(), plain[name], rtol=1e-2, atol=1e-3)


def test_only_the_networks_gradient_is_clipped() -> None:
    free, clipped = make(), make(clip=1e-3)
    for made in (free, clipped):
        made.step(made.images(made.codes).square().sum())
    parameters = [p.grad for p in clipped.net.parameters() if p.grad is not None]
    assert torch.stack([g.norm() for g in parameters]).norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert clipped.codes.grad is not None
    assert free.codes.grad is not None
    assert torch.equal(clipped.codes.grad, free.codes.grad)


def test_without_learned_codes_the_network_alone_is_trained() -> None:
    made = make(learned=0)
    assert set(made.trained) == set(dict(made.net.named_parameters()))
    assert made.images(codes(4)).shape == (4, 3, 8, 8)


def train(made: ImageGenerator, steps: int = 3) -> None:
    for step in range(steps):
        made.step((made.images(made.codes) - 0.1 * step).square().sum())


def test_to_begin_anew_is_to_be_new_in_the_same_place() -> None:
    used, new = make(seed=1), make(seed=2)
    train(used)
    places = {name: t.data_ptr() for name, t in used._tensors().items()}
    used.begin(stream(2), "normal")
    assert {name: t.data_ptr() for name, t in used._tensors().items()} == places
    train(used)
    train(new)
    assert all(torch.equal(t, new.state()[name]) for name, t in used.state().items())


def test_a_restored_generator_continues_exactly() -> None:
    """Through a file, which keeps no memory layout."""
    straight = make()
    train(straight)
    filed = State.from_bytes(State({"generator": straight.state()}).to_bytes()).groups["generator"]
    other = make(seed=5)
    other.restore(filed)
    train(straight)
    train(other)
    assert all(torch.equal(t, other.state()[name]) for name, t in straight.state().items())


def test_what_is_given_out_is_a_copy() -> None:
    made = make()
    given_out = made.state()
    kept = {name: t.clone() for name, t in given_out.items()}
    train(made)
    assert all(torch.equal(given_out[name], t) for name, t in kept.items())
    assert not torch.equal(made.state()["codes"], kept["codes"])


def test_no_other_network_gets_a_gradient_or_moves() -> None:
    spec = NetSpec("small", 3, 4, 8, width=2)
    student = Student(spec, fresh(spec, stream()), CPU, 0.9, 0.0)
    before = student.weights()
    made = make()
    made.step(settled_logits(student, made.images(made.codes)).square().sum())
    assert student.net.training
    assert all(p.grad is None for p in student.net.parameters())
    assert all(torch.equal(t, before[name]) for name, t in student.weights().items())


def test_the_student_answers_with_running_statistics() -> None:
    spec = NetSpec("small", 3, 4, 8, width=2)
    student = Student(spec, fresh(spec, stream()), CPU, 0.9, 0.0)
    pixels = torch.randn(4, 3, 8, 8, generator=stream(1))
    alone = torch.cat([settled_logits(student, pixels[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(settled_logits(student, pixels), alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(student.logits(pixels), alone, atol=1e-3)


def test_teachers_are_viewed_with_and_without_statistics() -> None:
    members = [Member(spec, fresh(spec, stream(i))) for i, spec in enumerate([NetSpec("small", 3, 4, 8, width=2)] * 2)]
    teachers = Teachers(members, CPU)
    pixels = torch.randn(4, 3, 8, 8, generator=stream(1)).requires_grad_(True)
    measured, plain = view(teachers, pixels, True), view(teachers, pixels, False)
    assert len(measured.gaps) == 2
    assert plain.gaps == ()
    torch.testing.assert_close(plain.mean, measured.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain.mean, teachers.logits(pixels), rtol=1e-4, atol=1e-5)
    assert torch.autograd.grad(plain.mean.sum(), pixels)[0].any()


def test_teachers_without_batch_norm_and_of_other_widths_answer() -> None:
    specs = [NetSpec("cnn4", 3, 4, 8, width=2), NetSpec("small", 3, 4, 8, width=3)]
    teachers = Teachers([Member(spec, fresh(spec, stream())) for spec in specs], CPU)
    found = outputs(teachers, torch.randn(2, 3, 8, 8, generator=stream(1)))
    assert len({features.shape[1] for features, _ in found}) == 2
    assert {logits.shape for _, logits in found} == {(2, 4)}


# One batch ------------------------------------------------------------------------------------------------------------


def made(maker: BatchMaker, draw: torch.Generator, inputs: list[tuple[Tensor, ...]]) -> Tensor:
    maker.begin(draw)
    for tensors in inputs:
        maker.step(*tensors)
    return maker.made()


@pytest.mark.parametrize(("losses", "best"), [((3.0, 1.0, 2.0), 1), ((1.0, 1.0, 5.0), 0), ((3.0, 2.0, -1.0), 2)])
def test_the_images_of_lowest_loss_are_kept(losses: tuple[float, ...], best: int) -> None:
    seen: list[Tensor] = []

    def loss(images: Tensor, value: Tensor) -> Tensor:
        seen.append(images.detach().clone())
        return images.sum() - images.sum().detach() + value

    maker = BatchMaker(ImageGenerator(SHAPE, 5, CPU, lr=0.1, learned=6), loss)
    for _ in range(2):  # the second call begins anew, and forgets what the first found
        seen.clear()
        found = made(maker, stream(), [(torch.tensor(value),) for value in losses])
        assert len({float(images.sum()) for images in seen}) == 3
        assert torch.equal(found, seen[best])


def test_a_batch_that_was_made_is_not_overwritten_by_the_next() -> None:
    maker = BatchMaker(ImageGenerator(SHAPE, 5, CPU, lr=0.1, learned=6), lambda images: images.sum())
    first = made(maker, stream(0), [()] * 2)
    kept = first.clone()
    assert not torch.equal(made(maker, stream(1), [()] * 2), kept)
    assert torch.equal(first, kept)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_run(value: float) -> None:
    require_finite(torch.tensor(1e9))
    with pytest.raises(RunFailed, match=r"^the generator diverged: .* use a smaller generator_lr, or a smaller lr$"):
        require_finite(torch.tensor(value))
    maker = BatchMaker(ImageGenerator(SHAPE, 5, CPU, lr=0.1, learned=6), lambda images: images.sum() * value)
    with pytest.raises(RunFailed):
        made(maker, stream(), [()] * 2)


# The pool -------------------------------------------------------------------------------------------------------------


def test_values_become_bytes_and_come_back() -> None:
    pool = Pool(2, (1, 1, 3), CPU)
    pool.add(torch.tensor([-1.0, 0.2, 1.0]).view(1, 1, 1, 3), torch.tensor([3]))
    assert pool.images[0].flatten().tolist() == [0, 153, 255]
    assert pool.count == 1
    middle = draw_crops(1, "none", stream())
    found = pool.pixels(torch.tensor([0]), middle)
    assert found.flatten().tolist() == pytest.approx([-1.0, 0.2, 1.0])
    assert found.is_contiguous(memory_format=torch.channels_last)


def filled(batches: int, capacity: int = 12) -> Pool:
    """Image i is i/100 everywhere, batches of three."""
    pool = Pool(capacity, (1, 8, 8), CPU)
    for b in range(batches):
        numbers = torch.arange(3 * b, 3 * b + 3)
        pool.add((numbers / 127.5 - 1).view(3, 1, 1, 1).expand(3, 1, 8, 8), numbers % 4)
    return pool


@settings(deadline=None, max_examples=25)
@given(batches=st.integers(0, 4), most=st.integers(0, 5), seed=st.integers(0, 99))
def test_a_pass_meets_every_image_once(batches: int, most: int, seed: int) -> None:
    pool = filled(batches)
    found = pool.one_pass(3, most, "crop", stream(seed))
    assert len(found) == (min(batches, most) if most else batches)
    assert all(index.shape == (3,) and crops.shape == (3, 3) for index, crops in found)
    met = [i for index, _ in found for i in index.tolist()]
    assert len(set(met)) == len(met)
    if len(found) == batches:
        assert sorted(met) == list(range(3 * batches))


def test_passes_differ_by_generator_and_by_nothing_else() -> None:
    pool = filled(4)
    one, same, other = (pool.one_pass(3, 0, "crop", stream(seed)) for seed in (0, 0, 1))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(one, other, strict=True))


def test_images_and_labels_stay_together() -> None:
    pool = filled(3)
    for index, crops in pool.one_pass(3, 0, "crop", stream()):
        numbers = ((pool.pixels(index, crops)[:, 0, 0, 0] + 1) * 127.5).round().long()
        assert numbers.tolist() == index.tolist()
        assert pool.labels[index].tolist() == (numbers % 4).tolist()


def test_a_state_is_a_value_and_restores() -> None:
    pool = filled(2)
    state = pool.state()
    kept = {name: t.clone() for name, t in state.items()}
    pool.add(torch.ones(3, 1, 8, 8), torch.zeros(3, dtype=torch.int64))
    assert all(torch.equal(state[name], t) for name, t in kept.items())
    other = Pool(12, (1, 8, 8), CPU)
    other.restore(State.from_bytes(State({"pool": state}).to_bytes()).groups["pool"])
    assert other.count == 6
    assert torch.equal(other.images[:6], kept["images"])
    assert torch.equal(other.labels[:6], kept["labels"])
    other.restore({})
    assert other.count == 0


@pytest.mark.parametrize(
    ("how", "crops", "flips"), [("crop", True, True), ("flip", False, True), ("none", False, False)]
)
def test_what_is_drawn_for_each_augmentation(how: Augmentation, crops: bool, flips: bool) -> None:
    draws = draw_crops(200, how, stream())
    assert set(draws[:, 0].tolist()) == (set(range(9)) if crops else {4})
    assert set(draws[:, 1].tolist()) == (set(range(9)) if crops else {4})
    assert set(draws[:, 2].tolist()) == ({0, 1} if flips else {0})


def test_a_crop_by_hand_and_its_gradient() -> None:
    """One row of 5 values, moved three to the left of the middle: the first value fills the edge, the last three go."""
    row = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    images = row.expand(2, 1, 5, 5).clone().requires_grad_(True)
    found = cropped(images, torch.tensor([[4, 1, 0], [4, 1, 1]]))
    assert found[0, 0, 0].tolist() == [1.0, 1.0, 1.0, 1.0, 2.0]
    assert found[1, 0, 0].tolist() == [2.0, 1.0, 1.0, 1.0, 1.0]
    assert found.is_contiguous(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(found.sum(), images)
    assert gradient[0, 0, 0].tolist() == gradient[1, 0, 0].tolist() == [4.0, 1.0, 0.0, 0.0, 0.0]


def test_crops_of_made_images_are_those_of_real_ones() -> None:
    """By `gather` what `augment` does by indexing, and the same way back."""
    images = torch.randn(40, 3, 9, 6, generator=stream()).contiguous(memory_format=torch.channels_last)
    crops, weigh = draw_crops(40, "crop", stream()), torch.randn(40, 3, 9, 6, generator=stream())
    ours, plain = images.clone().requires_grad_(), images.clone().requires_grad_()
    torch.testing.assert_close(cropped(ours, crops), augment(plain, crops), rtol=0, atol=0)
    (back,) = torch.autograd.grad((cropped(ours, crops) * weigh).sum(), ours)
    (as_plain,) = torch.autograd.grad((augment(plain, crops) * weigh).sum(), plain)
    torch.testing.assert_close(back, as_plain)
