"""Keys: what is signed holds for that and nothing else, and a private key is nobody's but its owner's."""

import os
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wardround.errors import BadInput
from wardround.exchange.keys import FINGERPRINT, PrivateKey, PublicKey

KEY = PrivateKey(bytes(range(32)))
LINE = "wardround-key-1 A6EHv_POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg"
on_posix = pytest.mark.skipif(os.name != "posix", reason="Windows keeps permissions in another way")


def test_the_public_key_is_that_of_the_standard() -> None:
    """RFC 8032, section 7.1, test 1: a seed, its public key, and the signature of nothing."""
    key = PrivateKey(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    assert key.public.raw.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    signature = (
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24"
        "655141438e7a100b"
    )
    assert key.sign(b"").hex() == signature


def test_a_public_key_is_one_line_of_text() -> None:
    assert KEY.public.text() == LINE
    assert PublicKey.parse(LINE) == KEY.public
    assert PublicKey.parse(f"  {LINE}\r\n") == KEY.public
    assert len({KEY.public, PublicKey.parse(LINE), PrivateKey.generate().public}) == 2


def test_the_fingerprint_stays_what_people_wrote_down() -> None:
    assert KEY.public.fingerprint == "N838-RAXF-X8JR-89HP-94T7-QD85"


@settings(deadline=None, max_examples=25)
@given(st.binary(min_size=32, max_size=32), st.integers(0, 255))
def test_fingerprints_are_readable_and_differ_with_every_bit(raw: bytes, bit: int) -> None:
    found = PublicKey(raw).fingerprint
    assert FINGERPRINT.fullmatch(found)
    assert [len(group) for group in found.split("-")] == [4] * 6
    assert not set(found) & set("01OILZSGBU")
    other = (int.from_bytes(raw, "big") ^ (1 << bit)).to_bytes(32, "big")
    assert PublicKey(other).fingerprint != found


@settings(deadline=None, max_examples=25)
@given(st.binary(max_size=100), st.data())
def test_a_signature_holds_for_what_was_signed_and_nothing_else(data: bytes, draw: st.DataObject) -> None:
    signature = KEY.sign(data)
    assert len(signature) == 64
    assert signature == KEY.sign(data)
    assert KEY.public.verify(signature, data)
    assert not KEY.public.verify(signature, data + b"\0")
    assert not PrivateKey.generate().public.verify(signature, data)
    flipped = bytearray(signature)
    flipped[draw.draw(st.integers(0, 63))] ^= 1 << draw.draw(st.integers(0, 7))
    assert not KEY.public.verify(bytes(flipped), data)


@pytest.mark.parametrize("signature", [b"", b"short", bytes(64), bytes(65)])
def test_what_is_no_signature_does_not_hold(signature: bytes) -> None:
    assert not KEY.public.verify(signature, b"data")
    assert not PublicKey(b"\xff" * 32).verify(signature, b"data")  # 32 bytes, but no point of the curve


@settings(deadline=None, max_examples=25)
@given(st.binary(min_size=32, max_size=32))
def test_every_public_key_survives_being_text(raw: bytes) -> None:
    assert PublicKey.parse(PublicKey(raw).text()).raw == raw


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "one line that begins with wardround-key-1"),
        (LINE[:-1], "one line that begins with wardround-key-1"),
        (LINE + "A", "one line that begins with wardround-key-1"),
        (LINE.replace("-1 ", "-2 "), "one line that begins with wardround-key-1"),
        (LINE.replace(" ", "\x1b[2J "), "one line that begins with wardround-key-1"),
        (LINE + "\n" + LINE, "one line that begins with wardround-key-1"),
        (LINE[:-1] + "h", "its last character is wrong"),
        (LINE.replace("-key-", "-private-key-"), "the other half of a pair"),
    ],
)
def test_refuses_what_is_no_public_key(text: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason) as refusal:
        PublicKey.parse(text)
    assert str(refusal.value).isprintable()
    assert not text or text not in str(refusal.value)


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=80) | st.from_regex(r"wardround-key-1 [A-Za-z0-9_-]{40,46}"))
def test_any_text_is_a_key_that_writes_itself_or_refused(text: str) -> None:
    try:
        found = PublicKey.parse(text)
    except BadInput:
        return
    assert found.text() == text.strip()


def test_a_private_key_is_kept_and_found_again(tmp_path: Path) -> None:
    key = PrivateKey.generate()
    key.save(tmp_path / "site.key")
    assert PrivateKey.load(tmp_path / "site.key") == key
    assert PrivateKey.load(tmp_path / "site.key").public == key.public
    assert os.listdir(tmp_path) == ["site.key"]


def test_a_private_key_is_in_no_text_of_its_own() -> None:
    assert repr(KEY) == "PrivateKey()"


@on_posix
def test_only_the_owner_can_read_a_private_key(tmp_path: Path) -> None:
    KEY.save(tmp_path / "site.key")
    assert stat.S_IMODE((tmp_path / "site.key").stat().st_mode) == 0o600


@on_posix
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o777])
def test_refuses_a_private_key_that_others_can_get_at(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "site.key"
    KEY.save(path)
    path.chmod(mode)
    with pytest.raises(BadInput, match=r"others on this machine may read or change .*site\.key; run chmod 600"):
        PrivateKey.load(path)


def test_a_private_key_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "site.key"
    KEY.save(path)
    with pytest.raises(BadInput, match="exists, and a lost private key cannot be made again"):
        PrivateKey.generate().save(path)
    assert PrivateKey.load(path) == KEY


@on_posix
def test_a_private_key_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "site.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="exists"):
        KEY.save(tmp_path / "site.key")
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"site\.key cannot be written"):
        KEY.save(tmp_path / "nowhere" / "site.key")


def private(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "one line that begins with wardround-private-key-1"),
        (b"\xff\x00secret", "one line that begins with wardround-private-key-1"),
        (b"-----BEGIN PRIVATE KEY-----\n", "one line that begins with wardround-private-key-1"),
        (LINE.encode(), "this is not a private key but the other half"),
        (b" " * 10**6 + b"wardround-private-key-1 " + b"A" * 43, "one line that begins with wardround-private-key-1"),
    ],
)
def test_refuses_what_is_no_private_key_without_quoting_it(tmp_path: Path, data: bytes, reason: str) -> None:
    with pytest.raises(BadInput, match=reason) as refusal:
        PrivateKey.load(private(tmp_path / "site.key", data))
    assert "site.key" in str(refusal.value)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("name", ["nothing.key", "zero\0byte.key"])
def test_a_missing_private_key_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"cannot read .*key: .*check the path") as refusal:
        PrivateKey.load(tmp_path / name)
    assert str(refusal.value).isprintable()


def test_a_folder_is_no_private_key(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a file"):
        PrivateKey.load(tmp_path)


@on_posix
def test_a_pipe_is_no_private_key(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(BadInput, match="is not a file"):
        PrivateKey.load(tmp_path / "pipe")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadInput, match=r"pip install 'wardround\[sites\]'"):
        _ = PrivateKey.generate().public
    with pytest.raises(BadInput, match=r"pip install 'wardround\[sites\]'"):
        PublicKey.parse(LINE).verify(bytes(64), b"")
