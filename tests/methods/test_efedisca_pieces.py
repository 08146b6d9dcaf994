"""The pieces of `efedisca`: noise levels, mixtures, what is remembered; settings, and those that it refuses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import study
from wardround.errors import BadInput
from wardround.methods.efedisca import EFedISCA, Snapshots, falling, mixture, rising
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.synthesis.inversion import Iterate

ABLATIONS: list[dict[str, Any]] = [
    {"noise": "none", "adaptation": "none"},
    {"synthesis": False, "adaptation": "none"},
    {"adaptation": "none"},
    {"synthesis": False},
    {},
]


def method(**changes: Any) -> EFedISCA:
    found = make("efedisca", changes)
    assert isinstance(found, EFedISCA)
    return found


def test_noise_levels_are_the_papers() -> None:
    assert rising(4) == [0.25, 0.5, 0.75, 1.0]
    assert falling(4) == [0.75, 0.5, 0.25, 0.0]
    assert (rising(1), falling(1)) == ([1.0], [0.0])


def values(of: Tensor) -> set[float]:
    return set(of.flatten().tolist())


@pytest.mark.parametrize(("level", "expected"), [(0.0, 2.0), (0.25, 4.0), (1.0, 10.0)])
def test_equation_9(level: float, expected: float) -> None:
    images: Callable[[torch.Generator], Tensor] = lambda _: torch.full((2, 3, 4, 4), 2.0)  # noqa: E731
    noise: Callable[[torch.Generator], Tensor] = lambda _: torch.full((2, 3, 4, 4), 10.0)  # noqa: E731
    assert values(mixture(images, noise, level, torch.Generator())) == {expected}
    assert values(mixture(images, None, level, torch.Generator())) == {2.0}
    assert values(mixture(None, noise, level, torch.Generator())) == {10.0}


LOSSES = [90.0, 40.0, 60.0, 30.0, 70.0, 20.0, 80.0]


@pytest.mark.parametrize(
    ("room", "threshold", "kept"),
    [
        (3, None, [4, 5, 6]),
        (3, 50.0, [1, 3, 5]),
        (2, 50.0, [3, 5]),  # the latest below
        (5, 50.0, [1, 3, 4, 5, 6]),  # completed with the latest others
        (4, 10.0, [3, 4, 5, 6]),  # none below: the latest
        (3, 20.0, [4, 5, 6]),  # below, not at
        (9, 50.0, [0, 1, 2, 3, 4, 5, 6]),
        (9, None, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_which_snapshots_are_remembered(room: int, threshold: float | None, kept: list[int]) -> None:
    """Also where the synthesis is stopped after every step and goes on from a file."""
    whole, stopped = Snapshots(room, threshold), Snapshots(room, threshold)
    for step, loss in enumerate(LOSSES):
        iterate = iterate_of(step, torch.full((2, 1, 2, 2), float(step)), loss)
        whole.add(iterate)
        stopped.add(iterate)
        state, stopped = State(stopped.groups()), Snapshots(room, threshold)
        stopped.restore(State.from_bytes(state.to_bytes()).groups, torch.device("cpu"))
    for found in (whole.kept(), stopped.kept()):
        assert list(found) == [f"{step:06d}" for step in kept]
        assert [values(snapshot) for snapshot in found.values()] == [{step} for step in kept]
        assert {snapshot.dtype for snapshot in found.values()} == {torch.float16}


def iterate_of(step: int, images: Tensor, loss: float) -> Iterate:
    return Iterate(step, images, torch.tensor(loss), torch.empty(0), torch.empty(0))


def test_a_snapshot_is_a_copy() -> None:
    """What a captured step returns is overwritten by the next."""
    pixels, snapshots = torch.zeros(1, 1, 2, 2), Snapshots(3, None)
    for step in range(3):
        snapshots.add(iterate_of(step, pixels.fill_(step), 0.0))
    assert [float(t.max()) for t in snapshots.kept().values()] == [0, 1, 2]


def test_defaults_are_the_papers() -> None:
    s = EFedISCA().settings
    large = s.at(224)
    assert (large.steps, large.batch, large.jitter) == (2000, 96, 30)
    s = s.at(128)
    assert (s.steps, s.batch, s.memory, s.threshold, s.epochs, s.follow) == (1000, 256, 500, None, 100, 0.9)
    assert (s.noise, s.synthesis, s.adaptation, s.kd_steps, s.temperature, s.lr) == (
        "stylegan",
        True,
        "ema",
        500,
        20.0,
        1e-3,
    )


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise": "none", "synthesis": False, "adaptation": "none"}, "has no images with noise = none and synthesis"),
        ({"noise": "none"}, "adapts to noise, and there is none; set efedisca.adaptation to none"),
        ({"batch": 3}, r"efedisca\.batch is 3, too small for each of 4 classes"),
    ],
)
def test_settings_that_make_no_sense_together_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        method(**changes).check(study(method="efedisca"))
    assert "\n" not in str(caught.value)


def test_every_ablation_passes_the_check() -> None:
    for changes in ABLATIONS:
        method(**changes).check(study(method="efedisca"))


def test_structured_noise_for_two_channels_is_refused() -> None:
    two = replace(study(method="efedisca"), channels=2)
    with pytest.raises(BadInput, match=r"1 or 3 channels, the images have 2; set efedisca\.noise to gaussian"):
        method().check(two)
    method(noise="gaussian").check(two)


@pytest.mark.parametrize(
    ("key", "value"),
    [("kd_steps", 0), ("memory", 0), ("threshold", 0), ("noise", "perlin"), ("noise_images", 0), ("follow", 1)],
)
def test_settings_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(BadInput, match=key):
        method(**{key: value})
