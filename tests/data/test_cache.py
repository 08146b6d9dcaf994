"""The cache: the same images as in memory, built once, resumed after a kill, and never trusted unread."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from wardround.data import decode as decode_module
from wardround.data import reading as reading_module
from wardround.data.cache import FORMAT, IMAGES, INDEX, read_images
from wardround.data.mapped import gather, join, map_file
from wardround.data.reading import Source
from wardround.data.slices import SliceRule
from wardround.errors import BadInput, RunFailed
from wardround.progress import NO_PROGRESS


def sources(folder: Path, n: int = 6, colour: tuple[int, ...] = ()) -> list[Source]:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(n):
        shape = (16, 16, 3) if i in colour else (16, 16)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(folder / f"{i}.png")
    return [Source(folder / f"{i}.png") for i in range(n)]


def cached(of: list[Source], folder: Path, size: int | None = 8) -> tuple[torch.Tensor, list[int]]:
    return read_images("t", of, size, folder, NO_PROGRESS, most=0)


def decoded(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> list[str]:
    """The names of the files that are decoded from now on; the `stop_at`-th raises."""
    seen: list[str] = []
    real = decode_module.decode_whole

    def counted(path: Path, rule: SliceRule | None = None) -> Any:
        if stop_at is not None and len(seen) == stop_at:
            raise KeyboardInterrupt
        seen.append(path.name)
        return real(path, rule)

    for module in (decode_module, reading_module):
        monkeypatch.setattr(module, "decode_whole", counted)
    return seen


def the_cache(folder: Path) -> Path:
    (found,) = (entry for entry in folder.iterdir() if entry.is_dir())
    return found


@pytest.mark.parametrize("colour", [(), (0,), (4,), (0, 1, 2, 3, 4, 5)])
def test_the_same_images_as_in_memory(tmp_path: Path, colour: tuple[int, ...]) -> None:
    of = sources(tmp_path / "img", colour=colour)
    inside, counts = read_images("t", of, 8, tmp_path / "none", NO_PROGRESS)
    outside, same = cached(of, tmp_path / "cache")
    assert inside.shape == (6, 3 if colour else 1, 8, 8)
    assert outside.equal(inside)
    assert counts == same == [1] * 6
    assert not (tmp_path / "none").exists()


def test_built_once_and_without_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = sources(tmp_path / "Doe_Jane")
    first, _ = cached(of, tmp_path / "cache")
    seen = decoded(monkeypatch)
    again, _ = cached(of, tmp_path / "cache")
    assert again.equal(first)
    assert seen == []
    place = the_cache(tmp_path / "cache")
    assert b"Doe" not in (place / INDEX).read_bytes()
    assert (place / IMAGES).stat().st_size == 6 * 64
    assert sorted(entry.name for entry in place.iterdir()) == [IMAGES, INDEX]
    assert place.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("stop_at", [2, 4, 7])
def test_a_stopped_build_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int) -> None:
    of = sources(tmp_path / "img")
    with monkeypatch.context() as patch:
        decoded(patch, stop_at)
        with pytest.raises(KeyboardInterrupt):
            cached(of, tmp_path / "cache")
    place = the_cache(tmp_path / "cache")
    assert place.name.endswith(".part")
    done = len((place / INDEX).read_bytes().splitlines()) - 1
    with (place / INDEX).open("ab") as index:
        index.write(b'{"images":1,"pix')  # as a kill in the middle of a line leaves it
    with (place / IMAGES).open("ab") as images:
        images.write(b"half a picture")
    seen = decoded(monkeypatch)
    found, _ = cached(of, tmp_path / "cache")
    assert seen[1:] == [f"{i}.png" for i in range(done, 6)] if done else len(seen) == 8
    assert found.equal(read_images("t", of, 8, tmp_path, NO_PROGRESS)[0])


def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    of = sources(tmp_path / "img", 400)
    program = (
        "import sys, time; from pathlib import Path\n"
        "from wardround.data import cache\nfrom wardround.progress import NO_PROGRESS\n"
        "real = cache.decode\n"
        "def slow(*a):\n    time.sleep(0.005)\n    return real(*a)\n"
        "cache.decode = slow\n"
        "of = [cache.Source(Path(sys.argv[1]) / f'{i}.png') for i in range(400)]\n"
        "cache.read_images('t', of, 8, Path(sys.argv[2]), NO_PROGRESS, most=0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "img"), str(tmp_path / "cache")])
    index = None
    while index is None or len(index.read_bytes().splitlines()) < 20:
        time.sleep(0.02)
        assert process.poll() is None
        index = next((tmp_path / "cache").glob(f"*.part/{INDEX}"), None)
    process.kill()
    process.wait()
    found, counts = cached(of, tmp_path / "cache")
    assert len(counts) == 400
    assert found.equal(read_images("t", of, 8, tmp_path, NO_PROGRESS)[0])


def test_a_source_that_changed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = sources(tmp_path / "img")
    before, _ = cached(of, tmp_path / "cache")
    kept = before.clone()
    seen = decoded(monkeypatch)
    os.utime(of[3].path, ns=(1, 1))  # another time, the same content
    assert cached(of, tmp_path / "cache")[0].equal(kept)
    assert seen == []
    Image.new("L", (16, 16), 7).save(of[3].path)
    after, _ = cached(of, tmp_path / "cache")
    assert (after[3] == 7).all()
    assert before.equal(kept)  # whoever has the old one mapped keeps it


@pytest.mark.parametrize("damage", ["pixels", "cut", "index", "line"])
def test_damage_is_found_by_hash_and_mended(tmp_path: Path, damage: str) -> None:
    of = sources(tmp_path / "img")
    good = cached(of, tmp_path / "cache")[0].clone()
    place = the_cache(tmp_path / "cache")
    pixels = bytearray((place / IMAGES).read_bytes())
    if damage == "pixels":
        pixels[100] ^= 1
        (place / IMAGES).write_bytes(pixels)
    elif damage == "cut":
        (place / IMAGES).write_bytes(pixels[:-1])
    elif damage == "index":
        (place / INDEX).write_bytes(b"\0\0\0")
    else:
        (place / INDEX).write_bytes((place / INDEX).read_bytes().replace(b'"images":1', b'"images":-1'))
    assert cached(of, tmp_path / "cache")[0].equal(good)
    assert (place / IMAGES).read_bytes() == good.numpy().tobytes()


def test_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    of = sources(tmp_path / "img")
    cached(of, tmp_path / "cache")
    place = the_cache(tmp_path / "cache")
    first, *others = (place / INDEX).read_bytes().splitlines(keepends=True)
    head = {**json.loads(first), "format": FORMAT.replace("1", "7")}
    (place / INDEX).write_bytes(b"".join([json.dumps(head).encode() + b"\n", *others]))
    with pytest.raises(BadInput, match=r"a cache of another version \('wardround image cache 7'\); delete it"):
        cached(of, tmp_path / "cache")
    assert (place / IMAGES).exists()


def test_other_sizes_and_files_have_other_caches(tmp_path: Path) -> None:
    of = sources(tmp_path / "img")
    assert cached(of, tmp_path / "cache", 8)[0].shape[-1] == 8
    assert cached(of, tmp_path / "cache", 4)[0].shape[-1] == 4
    assert len(cached(of[:4], tmp_path / "cache", 8)[0]) == 4
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) == 3


def test_a_bad_file_is_named_and_the_rest_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = sources(tmp_path / "img")
    good = of[4].path.read_bytes()
    of[4].path.write_bytes(b"broken")
    with pytest.raises(BadInput, match=r"4\.png cannot be read as a picture"):
        cached(of, tmp_path / "cache")
    of[4].path.write_bytes(good)
    seen = decoded(monkeypatch)
    cached(of, tmp_path / "cache")
    assert seen[1:] == ["4.png", "5.png"]
    with pytest.raises(BadInput, match="cannot be resized to 0"):
        cached(of, tmp_path / "cache", 0)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    of = sources(tmp_path / "img")
    (tmp_path / "file").write_text("x")
    with pytest.raises((BadInput, RunFailed), match="cannot be written"):
        cached(of, tmp_path / "file" / "cache")


def test_gather_and_join_outside_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randint(0, 256, (50, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "x.u8"
    path.write_bytes(images.numpy().tobytes())
    mapped = map_file(path, images.shape)
    index = torch.randperm(50, generator=torch.Generator().manual_seed(1))[:31]
    assert mapped.equal(images)
    for most in (0, 10**9):
        assert gather(mapped, index, tmp_path / "scratch", most).equal(images[index])
        assert join([mapped, images[:3]], tmp_path / "scratch", most).equal(torch.cat([images, images[:3]]))
    assert list((tmp_path / "scratch").iterdir()) == []  # without a name from the start
    monkeypatch.setenv("WARDROUND_DATA", str(tmp_path / "data"))
    assert gather(mapped, index, most=0).equal(images[index])
    assert (tmp_path / "data" / "cache").is_dir()
