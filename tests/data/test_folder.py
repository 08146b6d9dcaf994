"""Folders of pictures: layouts, kinds of files, sizes, and each way in which a folder can be wrong."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from wardround.data.cache import Cache
from wardround.data.check.inspected import inspect
from wardround.data.folder import read_folder
from wardround.data.greys import stretched
from wardround.data.sources import load
from wardround.data.tree import read_tree
from wardround.errors import BadInput


def picture(path: Path, grey: int = 0, size: tuple[int, int] = (8, 8), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, grey).convert(mode).save(path)


def two_classes(root: Path, n: int = 5) -> Path:
    """Classes `a` (values 0 to n-1) and `b` (values 100 to 100+n-1), each image one grey value."""
    for i in range(n):
        picture(root / "a" / f"{i:02}.png", i)
        picture(root / "b" / f"{i:02}.png", 100 + i)
    return root


def refusal(path: Path, size: int | None = None) -> str:
    with pytest.raises(BadInput) as caught:
        read_folder(path, size)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_classes_side_by_side(tmp_path: Path) -> None:
    data = read_folder(two_classes(tmp_path / "cells"))
    assert data.name == "cells"
    assert data.val is None
    assert data.train.classes == ("a", "b")
    assert data.train.images.shape == (8, 1, 8, 8)
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4
    assert data.test.labels.tolist() == [0, 1]
    values = sorted([*data.train.images[:, 0, 0, 0].tolist(), *data.test.images[:, 0, 0, 0].tolist()])
    assert values == [0, 1, 2, 3, 4, 100, 101, 102, 103, 104]
    expected = "folder cells: 8 train, 2 test images of 8x8; test share 0.2 drawn per class with data seed 0"
    assert data.provenance == expected


@pytest.mark.parametrize(("n", "tested"), [(2, 1), (7, 1), (8, 2), (12, 2), (13, 3), (20, 4)])
def test_the_share_is_stratified_disjoint_and_always_the_same(tmp_path: Path, n: int, tested: int) -> None:
    """A fifth of each class, a half rounded up: at least one picture."""
    root = two_classes(tmp_path, n)
    data, again = read_folder(root), read_folder(root)
    train, test = (set(part.images[:, 0, 0, 0].tolist()) for part in (data.train, data.test))
    assert not train & test
    assert len(train | test) == 2 * n
    assert data.test.counts().tolist() == [tested, tested]
    assert data.test.sha256() == again.test.sha256()


def test_parts_as_the_folder_has_them(tmp_path: Path) -> None:
    for part, grey in (("train", 10), ("val", 20), ("test", 30)):
        picture(tmp_path / part / "a" / "x.png", grey)
        picture(tmp_path / part / "b" / "x.png", grey + 1)
    data = read_folder(tmp_path)
    assert data.val is not None
    for part_set, grey in ((data.train, 10), (data.val, 20), (data.test, 30)):
        assert part_set.images[:, 0, 0, 0].tolist() == [grey, grey + 1]
        assert part_set.labels.tolist() == [0, 1]
    assert data.provenance.endswith("parts as the folder has them")


def test_a_part_may_lack_a_class_but_not_add_one(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "test/b"):
        picture(tmp_path / name / "x.png")
    assert read_folder(tmp_path).test.labels.tolist() == [1]
    picture(tmp_path / "test" / "c" / "x.png")
    assert "no class of that name in train" in refusal(tmp_path)


@pytest.mark.parametrize("suffix", ["png", "jpg", "JPEG", "bmp", "tif", "tiff"])
def test_kinds_of_files(tmp_path: Path, suffix: str) -> None:
    for name in ("a", "b"):
        picture(tmp_path / name / f"0.{suffix}", 128)
        picture(tmp_path / name / f"1.{suffix}", 128)
    assert read_folder(tmp_path).train.images[0, 0, 4, 4] == 128


def test_one_colour_file_makes_all_colour(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    assert read_folder(root).train.channels == 1
    Image.new("RGB", (8, 8), (1, 2, 3)).save(root / "a" / "00.png")
    data = read_folder(root)
    values = np.concatenate([data.train.images[:, :, 0, 0].numpy(), data.test.images[:, :, 0, 0].numpy()]).tolist()
    assert [1, 2, 3] in values
    assert [104, 104, 104] in values


@pytest.mark.parametrize(("mode", "channels"), [("1", 1), ("LA", 1), ("P", 3), ("RGBA", 3)])
def test_other_modes(tmp_path: Path, mode: str, channels: int) -> None:
    for name in ("a/0", "a/1", "b/0", "b/1"):
        picture(tmp_path / f"{name}.png", 255, mode=mode)
    train = read_folder(tmp_path).train
    assert train.channels == channels
    assert set(train.images.flatten().tolist()) == {255}


def test_a_turned_photograph_is_put_upright(tmp_path: Path) -> None:
    two_classes(tmp_path, 2)
    turned = Image.new("L", (8, 8), 0)
    turned.paste(255, (0, 0, 8, 4))  # bright above
    exif = Image.Exif()
    exif[0x0112] = 3  # the camera was held upside down
    for name in ("a/00", "a/01"):
        turned.save(tmp_path / f"{name}.png", exif=exif)
    image = read_folder(tmp_path).train.images[0, 0]
    assert image[:, 0].tolist() == [0] * 4 + [255] * 4


def test_centre_crop_and_antialiased_resize(tmp_path: Path) -> None:
    wide = np.zeros((8, 24), np.uint8)
    wide[:, 8:16] = np.indices((8, 8)).sum(0) % 2 * 255  # a chequered middle square, black beside it
    for name in ("a/0", "a/1", "b/0", "b/1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(wide).save(tmp_path / f"{name}.png")
    train = read_folder(tmp_path, size=2).train
    assert train.images.shape == (2, 1, 2, 2)
    assert all(110 <= value <= 145 for value in train.images.flatten().tolist())  # grey: the squares are averaged


def test_sizes_must_agree_without_a_size(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    picture(root / "b" / "99.png", size=(9, 9))
    assert "99.png is 9x9, not 8x8 as the first; set data.size" in refusal(root)
    assert read_folder(root, size=4).train.size == 4


def test_pictures_must_be_square_without_a_size(tmp_path: Path) -> None:
    for name in ("a/0", "a/1", "b/0", "b/1"):
        picture(tmp_path / f"{name}.png", size=(10, 6))
    assert "is 10x6, not a square; set data.size" in refusal(tmp_path)


def test_hidden_files_and_litter_are_passed_over(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    expected = read_folder(root).train.sha256()
    for name in (".DS_Store", ".git/config", "a/.hidden.png", "a/Thumbs.db", "b/desktop.ini", "notes.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("x")
    assert read_folder(root).train.sha256() == expected


def test_a_size_that_cannot_be(tmp_path: Path) -> None:
    assert "resized to 0" in refusal(two_classes(tmp_path), 0)


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    assert "is not a folder" in refusal(tmp_path / "none")
    assert "holds no folders" in refusal(tmp_path)
    picture(tmp_path / "a" / "0.png")
    picture(tmp_path / "b" / "0.png")
    assert "holds one picture" in refusal(tmp_path)
    (tmp_path / "c").mkdir()
    assert f"{tmp_path / 'c'} holds no pictures" in refusal(tmp_path)


@pytest.mark.parametrize("names", [("train/a", "val/a"), ("Train/a", "Test/a"), ("train/a", "a")])
def test_parts_by_half_are_not_taken_for_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        picture(tmp_path / name / "x.png")
    assert "not both train and test; name the parts" in refusal(tmp_path)
    with pytest.raises(BadInput) as caught:
        read_tree(tmp_path)
    assert "not both train and test; name the parts" in str(caught.value)


def test_a_folder_is_read_from_the_cache_that_a_check_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "set"
    for c in range(11):  # in the order of names, not of numbers
        for i in range(4):
            picture(root / str(c) / f"{i}.png", 10 * c + i)
    expected = read_folder(root, size=4)
    inspect(str(root), tmp_path / "data", size=4, keep=True)
    monkeypatch.setattr(Cache, "_build", None)
    monkeypatch.setattr("wardround.data.reading.decode_whole", None)  # everything must be there already
    data = load(str(root), tmp_path / "data", size=4)
    assert data.train.classes == ("0", "1", "10", "2", "3", "4", "5", "6", "7", "8", "9")
    assert (data.train.sha256(), data.test.sha256()) == (expected.train.sha256(), expected.test.sha256())


def test_a_stray_folder_beside_the_parts(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "test/b", "extra/a"):
        picture(tmp_path / name / "x.png")
    assert "extra beside train and test" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"), [("x.dcm", "export it again"), ("x.png", "cannot be read"), ("x.gif", "convert it")]
)
def test_files_that_are_no_pictures(tmp_path: Path, name: str, says: str) -> None:
    root = two_classes(tmp_path)
    (root / "a" / name).write_bytes(b"GIF89a nothing")
    message = refusal(root)
    assert says in message
    assert str(root / "a" / name) in message


def test_a_folder_inside_a_class(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    (root / "a" / "deeper").mkdir()
    assert "folder inside a class" in refusal(root)


def test_a_file_cut_short(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    Image.fromarray(noise).save(root / "b" / "00.png")
    path = root / "b" / "00.png"
    path.write_bytes(path.read_bytes()[:2000])
    assert f"{path} cannot be read" in refusal(root, size=8)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_deep_grey_is_stretched_as_in_a_table(tmp_path: Path, suffix: str) -> None:
    values = np.linspace(1000, 3000, 64).astype(np.uint16).reshape(8, 8)
    for name in ("a/0", "a/1", "b/0", "b/1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(values).save(tmp_path / f"{name}.{suffix}")
    train = read_folder(tmp_path).train
    assert train.images[0, 0].tolist() == stretched(values).tolist()
    assert (train.images.min(), train.images.max()) == (0, 255)


def test_real_numbers_are_stretched_too(tmp_path: Path) -> None:
    values = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    for name in ("a/0", "a/1", "b/0", "b/1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(values).save(tmp_path / f"{name}.tif")
    assert read_folder(tmp_path).train.images[0, 0].tolist() == stretched(values).tolist()


def test_sixteen_bit_colour_is_refused(tmp_path: Path) -> None:
    """Pillow cannot write such a file, so its chunks are put together here."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)  # 8x8, 16 bits, colour
    rows = (b"\0" + b"\x12\x34" * 24) * 8
    root = two_classes(tmp_path)
    (root / "a" / "z.png").write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )
    assert "more than 8 bits" in refusal(root)


def test_several_pages_are_refused(tmp_path: Path) -> None:
    root = two_classes(tmp_path)
    pages = [Image.new("L", (8, 8), i) for i in range(3)]
    pages[0].save(root / "a" / "z.tif", save_all=True, append_images=pages[1:])
    assert "several pictures" in refusal(root)


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = two_classes(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)  # 64 pixels are then over the warning, 128 over the error
    assert "far too many pixels" in refusal(root)
    picture(root / "a" / "00.png", size=(20, 20))
    assert "far too many pixels" in refusal(root)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's remarks on what it finds in the damaged file
@settings(deadline=None, max_examples=150)
@given(data=st.data(), kind=st.sampled_from(["png", "tif", "jpg", "bmp"]))
def test_damaged_bytes_are_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: str
) -> None:
    root = tmp_path_factory.getbasetemp() / f"damaged-{kind}"
    if not root.exists():
        two_classes(root, 2)
    buffer = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(
        buffer, {"jpg": "jpeg", "tif": "tiff"}.get(kind, kind)
    )
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (root / "a" / f"z.{kind}").write_bytes(content)
    message = ""
    try:
        read_folder(root, size=8)
    except BadInput as error:
        message = str(error)
    assert "\n" not in message
