"""The file of a stopped fit: whose it is, what becomes of a damaged one, when it is written and when it goes."""

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bare_loop import BN, CPU, PLAIN, a_fit, images, taught_fit
from learn.stopping import STEPS, Stopped, Watch, assert_same, finished, stopped, the_best
from wardround import tensorfile
from wardround.errors import BadInput, RunFailed, SiteFailed
from wardround.learn import resumable
from wardround.learn.fit import Fit, Fitted, Objective, Recipe, Teacher
from wardround.learn.resumable import progress_key, train_resumable
from wardround.learn.trainer import train_one
from wardround.methods.fedprox import Proximal

# Which fit it is ------------------------------------------------------------------------------------------------------


def otherwise() -> dict[str, Fit]:
    """`replace(taught_fit(False), objective=Proximal(...))` with one thing changed."""
    fit = a_known_fit()
    (first, second), start = fit.teachers, dict(fit.start)
    start["head.bias"] = start["head.bias"] + 1e-6
    anchor = {**fit.start, "head.bias": fit.start["head.bias"] + 1}
    taught = Teacher(first.spec, {**first.weights, "head.bias": first.weights["head.bias"] + 1})
    return {
        "start": replace(fit, start=start),
        "seed": replace(fit, seed=12),
        "recipe": replace(fit, recipe=replace(fit.recipe, epochs=4)),
        "data": replace(fit, data=images(20, seed=12)),
        "validation": replace(fit, validation=images(3)),
        "frozen": replace(fit, frozen=frozenset({"head.bias"})),
        "objective": replace(fit, objective=Objective()),
        "a number of the objective": replace(fit, objective=Proximal(0.2, fit.start)),
        "a tensor of the objective": replace(fit, objective=Proximal(0.1, anchor)),
        "a teacher": replace(fit, teachers=(taught, second)),
        "the order of teachers": replace(fit, teachers=(second, first)),
        "no teachers": replace(fit, teachers=()),
    }


def a_known_fit() -> Fit:
    fit = taught_fit(augment=False)
    return replace(fit, objective=Proximal(0.1, fit.start))


def test_every_ingredient_changes_the_key() -> None:
    keys = {name: progress_key(fit) for name, fit in otherwise().items()}
    salted = {progress_key(a_known_fit(), salt) for salt in [("study", "site-1", 0, 0), ("study", "site-1", 0, 1)]}
    assert len({progress_key(a_known_fit()), *keys.values(), *salted}) == len(keys) + 3


def test_equal_fits_have_equal_keys_whatever_they_are_called() -> None:
    fit = a_known_fit()
    renamed = replace(a_known_fit(), label="another name", reusable=True)
    assert progress_key(fit) == progress_key(renamed) == progress_key(fit, ())


@pytest.mark.parametrize("other", otherwise())
def test_the_file_of_another_fit_is_not_gone_on_from(other: str, tmp_path: Path) -> None:
    stopped(otherwise()[other], tmp_path / "progress", STEPS + 1)
    assert (tmp_path / "progress").exists()
    found, steps = finished(a_known_fit(), tmp_path / "progress")
    assert steps == 3 * STEPS
    assert_same(found, train_one(a_known_fit(), CPU))


def test_another_version_of_the_program_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(a_fit(BN), tmp_path / "progress", STEPS + 1)
    monkeypatch.setattr(resumable, "__version__", "99.0")
    assert finished(a_fit(BN), tmp_path / "progress")[1] == 3 * STEPS


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, 0),
        (0, 0.0),
        (0, False),
        (0.0, -0.0),
        ("1", 1),
        ([1, 2], (1, 2)),
        ([[1], 2], [[1, 2]]),
        (["ab"], ["a", "b"]),
        ({"a": 1}, {"b": 1}),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(1), torch.zeros(())),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        (Recipe(1), Recipe(2)),
    ],
)
def test_different_contents_have_different_fingerprints(one: object, other: object) -> None:
    assert resumable._fingerprint(one) == resumable._fingerprint(one)
    assert None not in (resumable._fingerprint(one), resumable._fingerprint(other))
    assert resumable._fingerprint(one) != resumable._fingerprint(other)


@pytest.mark.parametrize("value", [print, torch.nn.Linear(1, 1), object(), Recipe, {"deep": [object()]}])
def test_what_cannot_be_looked_into_has_no_fingerprint(value: object) -> None:
    assert resumable._fingerprint(value) is None


# Damage ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight() -> Fitted:
    return train_one(the_best(), CPU)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file after two epochs of six."""
    file = tmp_path_factory.mktemp("saved") / "progress"
    stopped(the_best(), file, 2 * STEPS + 1)
    return file.read_bytes()


def from_bytes(data: bytes, file: Path) -> tuple[Fitted, int]:
    file.write_bytes(data)
    return finished(the_best(), file)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.9999])
def test_a_truncated_file_starts_over(share: float, saved: bytes, straight: Fitted, tmp_path: Path) -> None:
    found, steps = from_bytes(saved[: int(share * len(saved))], tmp_path / "progress")
    assert steps == 6 * STEPS
    assert_same(found, straight)


@settings(max_examples=25, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), in_header=st.booleans(), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_starts_over(
    place: float, in_header: bool, bit: int, saved: bytes, straight: Fitted, tmp_path_factory: pytest.TempPathFactory
) -> None:
    header, data = 8 + int.from_bytes(saved[:8], "little"), bytearray(saved)
    begin, end = (0, header) if in_header else (header, len(saved))
    data[begin + int(place * (end - begin))] ^= 1 << bit
    found, steps = from_bytes(bytes(data), tmp_path_factory.mktemp("flipped") / "progress")
    assert steps == 6 * STEPS
    assert_same(found, straight)


def edited(data: bytes, **changes: Any) -> bytes:
    groups, record = tensorfile.from_bytes(data)
    return tensorfile.to_bytes(groups, {**record, **changes})


@pytest.mark.parametrize("changes", [{"best_epoch": 0}, {"best_right": 1}, {"sha256": None}, {"fit": [1]}], ids=str)
def test_a_record_that_was_edited_starts_over(
    changes: dict[str, Any], saved: bytes, straight: Fitted, tmp_path: Path
) -> None:
    found, steps = from_bytes(edited(saved, **changes), tmp_path / "progress")
    assert steps == 6 * STEPS
    assert_same(found, straight)


def test_the_file_as_it_was_is_gone_on_from(saved: bytes, straight: Fitted, tmp_path: Path) -> None:
    found, steps = from_bytes(edited(saved), tmp_path / "progress")
    assert steps == 4 * STEPS
    assert_same(found, straight)


@pytest.mark.parametrize("data", [b"not a tensor file", tensorfile.to_bytes({"a": {"b": torch.ones(1)}}, {"x": 1})])
def test_something_else_in_its_place_is_replaced(data: bytes, straight: Fitted, tmp_path: Path) -> None:
    (tmp_path / "progress").write_bytes(data)
    stopped(the_best(), tmp_path / "progress", 2 * STEPS + 1)
    found, steps = finished(the_best(), tmp_path / "progress")
    assert steps == 4 * STEPS
    assert_same(found, straight)


def test_what_a_killed_process_had_begun_to_write_is_swept_away(tmp_path: Path) -> None:
    (tmp_path / ".progress.123.part").write_bytes(b"half")
    (tmp_path / ".another.123.part").write_bytes(b"half")
    finished(a_fit(BN), tmp_path / "progress")
    assert [file.name for file in tmp_path.iterdir()] == [".another.123.part"]


def test_a_place_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadInput, match=r"progress cannot be written.*; choose another place"):
        train_resumable(a_fit(BN), CPU, tmp_path / "file" / "progress", every_seconds=0.0)


def test_a_full_disk_is_said_and_what_was_saved_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    stopped(a_fit(BN), tmp_path / "progress", STEPS + 1)
    with monkeypatch.context() as patch:
        patch.setattr(resumable, "write_atomically", full)
        with pytest.raises(RunFailed, match="the disk is full"):
            train_resumable(a_fit(BN), CPU, tmp_path / "progress", every_seconds=0.0)
    assert finished(a_fit(BN), tmp_path / "progress")[1] == 2 * STEPS


# When it is written, and when it goes ---------------------------------------------------------------------------------


class Clock:
    """A second for every step."""

    def __init__(self, patch: pytest.MonkeyPatch, file: Path) -> None:
        self.now, self.file, self.saved = 0.0, file, set[int]()
        patch.setattr(resumable, "time", SimpleNamespace(monotonic=lambda: self.now))

    def __call__(self) -> None:
        self.now += 1.0
        if self.file.exists():
            groups, _ = tensorfile.from_bytes(self.file.read_bytes())
            self.saved.add(len(groups["losses"]["epochs"]))


def test_it_is_written_no_more_often_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs of three seconds, written every five: after the second, the fourth and the sixth of seven."""
    clock = Clock(monkeypatch, tmp_path / "progress")
    train_resumable(a_fit(BN, epochs=7), CPU, clock.file, clock, every_seconds=5.0)
    assert clock.saved == {2, 4, 6}


def test_what_takes_long_to_write_is_written_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing takes a second, twice what is long: so every ten seconds, which here is every fourth epoch."""
    clock, write = Clock(monkeypatch, tmp_path / "progress"), resumable.write_atomically

    def slow(path: Path, data: bytes) -> None:
        write(path, data)
        clock.now += 1.0

    monkeypatch.setattr(resumable, "write_atomically", slow)
    train_resumable(a_fit(BN, epochs=13), CPU, clock.file, clock, every_seconds=5.0)
    assert clock.saved == {2, 6, 10}


def test_seconds_are_those_of_the_work_that_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six seconds were saved, the seventh was lost, the pause does not count; then three more."""
    clock, watch = Clock(monkeypatch, tmp_path / "progress"), Watch(7)
    with pytest.raises(Stopped):
        train_resumable(a_fit(BN), CPU, clock.file, lambda: (clock(), watch())[0], every_seconds=0.0)
    clock.now += 1000.0
    assert train_resumable(a_fit(BN), CPU, clock.file, clock, every_seconds=0.0).seconds == 9.0


def test_a_finished_fit_can_be_kept_and_is_not_trained_twice(tmp_path: Path) -> None:
    for make in (the_best, lambda: a_fit(BN)):
        first, steps = finished(make(), tmp_path / "progress", keep_finished=True, every_seconds=1e9)
        again, no_steps = finished(make(), tmp_path / "progress", keep_finished=True)
        assert (steps, no_steps) == (STEPS * make().recipe.epochs, 0)
        assert_same(again, first)
        assert (tmp_path / "progress").exists()
    assert finished(a_fit(BN), tmp_path / "progress")[1] == 0
    assert not (tmp_path / "progress").exists()


@pytest.mark.parametrize("keep", [False, True])
def test_a_fit_that_diverges_says_so_every_time(keep: bool, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(SiteFailed, match="training diverged"):
            train_resumable(a_fit(PLAIN, lr=1e20), CPU, tmp_path / "progress", keep_finished=keep)
        assert (tmp_path / "progress").exists() == keep
