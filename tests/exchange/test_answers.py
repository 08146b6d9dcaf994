"""Answers beyond a limit go to disk and come back the same."""

import errno
import gc
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wardround.errors import BadInput, RunFailed
from wardround.exchange.answers import Answers
from wardround.exchange.bundle import Bundle, Envelope
from wardround.methods.template import average


def answer(site: str, value: float = 0.0) -> Bundle:
    """Forty bytes of tensors in two groups."""
    groups = {
        "parameters": {"w": torch.full((2, 4), value)},
        "size": {"images": torch.tensor(3)},
    }
    return Bundle(Envelope("answer", "study", "toy", site, 0), groups)


def kept(in_memory_bytes: int = 1000) -> Answers:
    """The answers of the first round of `toy` in `study`."""
    return Answers("study", "toy", 0, in_memory_bytes)


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_few_stay_in_memory_and_are_handed_over_uncopied(spool: Path) -> None:
    answers, one = kept(40), answer("a")
    answers.add("a", one)
    assert answers["a"] is one
    assert files(spool) == []


def test_beyond_the_limit_they_are_files_with_the_same_tensors(spool: Path) -> None:
    answers = kept(100)
    sent = {f"site-{i}": answer(f"site-{i}", i / 3) for i in range(5)}
    for site, bundle in sent.items():
        answers.add(site, bundle)
    assert len(files(spool)) == 3  # two of forty bytes fit
    for site, bundle in sent.items():
        found = answers[site]
        assert found.envelope == bundle.envelope
        assert found.to_bytes() == bundle.to_bytes()
        assert torch.equal(found.group("parameters")["w"], bundle.group("parameters")["w"])


def test_a_small_answer_still_fits_after_a_large_one_did_not(spool: Path) -> None:
    answers = kept(20)
    answers.add("large", answer("large"))
    small = Bundle(Envelope("answer", "study", "toy", "small", 0), {"size": {"images": torch.tensor(1)}})
    answers.add("small", small)
    assert len(files(spool)) == 1
    assert answers["small"] is small


def test_they_are_in_the_order_of_site_names_wherever_they_are() -> None:
    answers = kept(80)
    for site in ("d", "b", "a", "c"):
        answers.add(site, answer(site))
    assert list(answers) == ["a", "b", "c", "d"]
    assert len(answers) == 4
    assert "b" in answers
    assert "e" not in answers


def test_none_is_false() -> None:
    assert not kept()


def test_an_unknown_site_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        kept()["nobody"]


def test_the_average_does_not_depend_on_where_they_are() -> None:
    def averaged(limit: int) -> Tensor:
        answers = kept(limit)
        for i, site in enumerate("abc"):
            answers.add(site, answer(site, i / 7))
        return average(answers, lambda bundle: 1.0)["w"]

    assert torch.equal(averaged(0), averaged(1000))


def test_the_files_go_with_the_answers(spool: Path) -> None:
    answers = kept(0)
    answers.add("a", answer("a"))
    assert len(files(spool)) == 1
    del answers
    gc.collect()
    assert list(spool.iterdir()) == []


@pytest.mark.parametrize("room", [0, 1000])
def test_a_second_answer_is_refused_and_the_first_stands(room: int) -> None:
    answers = kept(room)
    answers.add("a", answer("a", 1.0))
    with pytest.raises(BadInput, match=r"^a answered twice in round 1; its first answer stands$"):
        answers.add("a", answer("a", 2.0))
    assert len(answers) == 1
    assert answers["a"].to_bytes() == answer("a", 1.0).to_bytes()


@pytest.mark.parametrize(
    ("envelope", "words"),
    [
        (
            Envelope("answer", "study", "toy", "a", 3),
            r"^the answer of a in round 4 came in round 1; use the bundle of this round$",
        ),
        (
            Envelope("answer", "study", "toy", "b", 0),
            r"^the answer of b in round 1 came in place of the answer of a; send each where it belongs$",
        ),
        (Envelope("request", "study", "toy", "a", 0), r"^the request of a in round 1 came in place of the answer of a"),
        (Envelope("answer", "other", "toy", "a", 0), r"belongs to toy in study other, not toy in study$"),
        (Envelope("answer", "study", "fedavg", "a", 0), r"belongs to fedavg in study study, not toy in study$"),
    ],
)
def test_what_belongs_elsewhere_is_refused_by_name(envelope: Envelope, words: str) -> None:
    answers = kept()
    with pytest.raises(BadInput, match=words):
        answers.add("a", Bundle(envelope, answer("a").groups))
    assert list(answers) == []


def test_a_full_disk_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    answers = kept(0)
    with pytest.raises(RunFailed, match=r"answer of site-7 could not be kept .* No space left on device; make room"):
        answers.add("site-7", answer("site-7"))
    assert list(answers) == []
