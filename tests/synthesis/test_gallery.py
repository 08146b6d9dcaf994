"""Trails: which images of which steps are kept, and as which pixels."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wardround.learn.pixels import normalise
from wardround.methods.state import State
from wardround.synthesis.gallery import Trail, merged, one_of_each, spread, to_pixels, trail_of_epochs


def batch(step: int, n: int = 6) -> Tensor:
    """Images of two pixels that say where they come from: image i at a step has the grey values 10·step + i."""
    grey = torch.tensor([10.0 * step + i for i in range(n)])
    return (grey / 127.5 - 1).reshape(n, 1, 1, 1).expand(n, 1, 1, 2)


def kept(trail: Trail) -> list[list[int]]:
    """By frame, the grey value of each image."""
    pictures = trail.groups()["gallery"]["images"]
    assert (pictures.dtype, pictures.shape[2:]) == (torch.uint8, (1, 1, 2))
    found: list[list[int]] = pictures[..., 0, 0, 0].tolist()
    return found


def shown(trail: Trail, steps: int) -> Trail:
    for step in range(steps):
        trail.see(step, batch(step))
    return trail


def test_the_first_image_of_each_class_at_steps_from_first_to_last() -> None:
    trail = shown(Trail(torch.tensor([2, 0, 2, 1, 0, 1]), classes="abc", steps=9, frames=3), 9)
    assert kept(trail) == [[1, 3, 0], [41, 43, 40], [81, 83, 80]]
    assert trail.facts() == {"gallery": {"labels": [0, 1, 2], "steps": [1, 5, 9], "left_out": []}}


def test_a_class_that_is_not_in_the_batch_is_left_out_or_grey() -> None:
    labels = torch.tensor([2, 0, 2, 2, 0, 2])
    assert kept(shown(Trail(labels, classes="abc", steps=2, frames=2), 2)) == [[1, 0], [11, 10]]
    whole = shown(Trail(labels, classes="abc", steps=2, frames=2, whole=True), 2)
    assert kept(whole) == [[1, 128, 0], [11, 128, 10]]
    assert whole.facts()["gallery"]["labels"] == [0, 1, 2]


def test_classes_beyond_twelve_are_left_out_and_said_and_absent_ones_are_neither() -> None:
    trail = Trail([c for c in range(16) if c != 3], classes="abcdefghijklmnop", steps=1)
    trail.see(0, batch(0, 15))
    assert trail.facts()["gallery"] == {
        "labels": [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        "steps": [1],
        "left_out": [13, 14, 15],
    }


@pytest.mark.parametrize(
    ("count", "wanted", "places"),
    [
        (500, 6, [0, 100, 200, 299, 399, 499]),
        (3, 6, [0, 1, 2]),
        (6, 6, [0, 1, 2, 3, 4, 5]),
        (9, 2, [0, 8]),
    ],
)
def test_frames_are_spread_evenly(count: int, wanted: int, places: list[int]) -> None:
    assert spread(count, wanted) == places


@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 600), wanted=st.integers(2, 20))
def test_frames_are_as_many_as_wanted_and_hold_both_ends(count: int, wanted: int) -> None:
    places = spread(count, wanted)
    assert len(set(places)) == len(places) == min(count, wanted)
    assert (places[0], places[-1]) == (0, count - 1)
    assert places == sorted(places)


def test_pixels_are_rounded_clipped_and_grey_where_there_is_no_number() -> None:
    values = torch.tensor([-1.0, 1.0, 0.0, -1.5, 3.0, math.nan, math.inf, -math.inf, -1 + 1.6 / 127.5])
    assert to_pixels(values).tolist() == [0, 255, 128, 0, 255, 128, 255, 0, 2]
    assert to_pixels(values.bfloat16()).dtype == torch.uint8


def test_pixels_undo_what_networks_are_given() -> None:
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    assert torch.equal(to_pixels(normalise(every)), every)


def test_a_step_that_is_no_frame_is_not_looked_at() -> None:
    trail = Trail([0, 1], classes="ab", steps=9, frames=2)
    trail.see(4, None)  # type: ignore[arg-type]
    assert trail.groups() == {}
    assert trail.facts() == {}


def test_what_is_kept_is_a_copy_without_a_gradient() -> None:
    images = torch.zeros((2, 1, 1, 2), requires_grad=True)
    trail = Trail([0, 1], classes="ab", steps=1)
    trail.see(0, images)
    with torch.no_grad():
        images.fill_(1.0)
    assert kept(trail) == [[128, 128]]


def test_the_last_trajectory_shown_remains() -> None:
    trail = Trail([0], classes="a", steps=2)
    shown(trail, 2)
    for step in range(2):
        trail.see(step, batch(step + 5))
    assert kept(trail) == [[50], [60]]


def test_a_resumed_trail_keeps_what_it_had() -> None:
    before = shown(Trail([1, 0], classes="ab", steps=7, frames=3), 7)
    state = State.from_bytes(State(before.groups(), before.facts()).to_bytes())
    after = Trail([1, 0], classes="ab", steps=7, frames=3)
    after.load(state)
    assert torch.equal(after.groups()["gallery"]["images"], before.groups()["gallery"]["images"])
    assert after.facts() == before.facts()
    after.load(State())
    assert after.facts() == before.facts()


def test_the_trails_of_clusters_are_one_gallery() -> None:
    trails = {f"cluster {k}": shown(Trail([0, 1], classes="ab", steps=4, frames=2), 4) for k in (1, 2)}
    groups, facts = merged(trails)
    assert list(groups["gallery"]) == ["cluster 1", "cluster 2"]
    assert facts == trails["cluster 1"].facts()
    again = Trail([0, 1], classes="ab", steps=4, frames=2)
    again.load(State(groups, facts), "cluster 2")
    assert kept(again) == [[0, 1], [30, 31]]
    assert merged({}) == ({}, {})


def test_trails_that_do_not_belong_together_are_refused() -> None:
    one, other = shown(Trail([0], "a", steps=4), 4), shown(Trail([0], "a", steps=3), 3)
    with pytest.raises(ValueError, match="same classes at the same steps"):
        merged({"a": one, "b": other})


def test_one_image_of_each_class_and_grey_where_there_is_none() -> None:
    found = to_pixels(one_of_each(batch(1), [2, 0, 2, 0, 4, 0], 5))
    assert found[:, 0, 0, 0].tolist() == [11, 128, 10, 128, 14]


def test_a_trail_of_epochs_goes_on_after_a_stop() -> None:
    trail = trail_of_epochs("abc", 4, State())
    for epoch in range(2):
        trail.see(epoch, one_of_each(batch(epoch), [0, 1, 2, 0, 1, 2], 3))
    again = trail_of_epochs("abc", 4, State(trail.groups(), trail.facts()))
    again.see(2, one_of_each(batch(2), [2, 1, 0, 0, 1, 2], 3))
    assert kept(again) == [[0, 1, 2], [10, 11, 12], [22, 21, 20]]
