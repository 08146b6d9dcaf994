"""A site's secret: kept once, never shown, and enough of it used."""

import stat
from pathlib import Path

import pytest

from wardround.errors import BadInput
from wardround.privacy.secret import Secret, keep_secret


def test_a_secret_is_made_once_and_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "site" / "privacy.secret"
    first = keep_secret(path)
    assert keep_secret(path) == first
    assert len(first.key) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["privacy.secret"]
    assert keep_secret(tmp_path / "other") != first


def test_a_file_that_is_no_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"short")
    with pytest.raises(BadInput, match="5 bytes, not 32"):
        keep_secret(path)


def test_a_secret_does_not_show_itself() -> None:
    assert "\\x07" not in repr(Secret(bytes([7] * 32)))


def test_streams_differ_in_every_part_and_in_late_bits_of_the_key() -> None:
    key = bytes(32)
    draws = {
        s.numpy(*args).integers(2**63).item()
        for s, *args in [
            (Secret(key),),
            (Secret(key), "a"),
            (Secret(key), "a", "site"),
            (Secret(key), "a", "site", 1),
            (Secret(key), "a", "site", 0, 1),
            (Secret(key[:-1] + b"\x01"), "a"),
        ]
        for args in [args or ["none"]]
    }
    assert len(draws) == 6


def test_two_studies_share_no_noise() -> None:
    secret = Secret(bytes(32))
    first, second = (secret.within(study).numpy("counts").integers(2**63) for study in ("a", "b"))
    assert first != second
    assert first == secret.within("a").numpy("counts").integers(2**63)
