"""Many files at once: the same as one after the other, in their order, and no process left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dicoms import write_dicom
from wardround.data import reading
from wardround.data.reading import Decoder, Source, Wish, read_all, read_one
from wardround.data.slices import SliceRule
from wardround.errors import BadInput

ALL = Wish(8, hashed=True, looked_at=True)


def files(folder: Path, n: int = 70) -> list[Source]:
    """Pictures of two kinds, a film, one that is broken and one that is gone."""
    rng = np.random.default_rng(0)
    for i in range(n):
        shape = (12, 10, 3) if i % 3 else (12, 10)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(folder / f"ä {i}.png")
    (folder / "ä 7.png").write_bytes(b"broken")
    film = write_dicom(folder / "film.dcm", rng.integers(0, 256, (4, 9, 9), dtype=np.uint8))
    return [*(Source(folder / f"ä {i}.png") for i in range(n)), Source(film, SliceRule(1)), Source(folder / "gone.png")]


def test_processes_give_what_one_after_the_other_gives(tmp_path: Path) -> None:
    sources = files(tmp_path)
    plain = [read_one(source, ALL) for source in sources]
    for count in (2, 3):
        for a, b in zip(plain, read_all(sources, ALL, count), strict=True):
            assert (a.stamps, a.sha256, a.looks, a.error) == (b.stamps, b.sha256, b.looks, b.error)
            assert len(a.pictures) == len(b.pictures)
            assert all(np.array_equal(p, q) for p, q in zip(a.pictures, b.pictures, strict=True))
    assert [i for i, read in enumerate(plain) if read.error] == [7, 71]
    assert plain[7].error.endswith("ä 7.png cannot be read as a picture; mend it or move it out")
    assert [picture.shape for picture in plain[70].pictures] == [(8, 8)] * 4
    assert (plain[70].looks[0].width, plain[1].looks[0].channels) == (9, 3)


def test_only_what_is_wished(tmp_path: Path) -> None:
    (read,) = read_all(files(tmp_path)[:1], Wish(pixels=False))
    assert (read.pictures, read.sha256, read.looks) == ([], "", [])


def test_who_stops_early_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Decoder] = []

    class Noted(Decoder):
        def __init__(self, wish: Wish) -> None:
            super().__init__(wish)
            started.append(self)

    monkeypatch.setattr(reading, "Decoder", Noted)
    reads = read_all(files(tmp_path), ALL, 2)
    next(reads)
    reads.close()  # type: ignore[attr-defined]
    assert [decoder.process.poll() is not None for decoder in started] == [True, True]


def test_a_decoder_that_falls_over_is_told_with_the_file(tmp_path: Path) -> None:
    sources = files(tmp_path)
    decoder = Decoder(ALL)
    decoder.process.kill()
    decoder.process.wait()
    decoder.ask(sources[0])
    with pytest.raises(BadInput, match=r"ä 0\.png made its decoder fall over"):
        decoder.answer(sources[0])
    decoder.end()


def test_decoders_are_small(tmp_path: Path) -> None:
    code = "import sys, wardround.data.decoder; print([m for m in ('torch', 'rich', 'pydantic') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, env=os.environ)
    assert found.stdout.strip() == "[]"


NOISY = """
import os
from wardround.data import decoder
plain = decoder.read_one
def noisy(source, wish):
    os.write(1, b"a codec has something to say\\n")
    print("and Python, too", flush=True)
    return plain(source, wish)
decoder.read_one = noisy
decoder.main()
"""


def test_what_a_codec_prints_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    source = files(tmp_path)[0]
    asked = json.dumps([str(source.path), None]).encode() + b"\n"
    command = [sys.executable, "-c", NOISY, json.dumps(vars(Wish(pixels=False)))]
    done = subprocess.run(command, input=asked, capture_output=True, check=True)
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["error"] == ""
    assert b"a codec has something to say" in done.stderr


def test_a_decoder_whose_asker_was_killed_ends_without_a_word(tmp_path: Path) -> None:
    sources = files(tmp_path)[:3]
    process = subprocess.Popen(
        [sys.executable, "-m", "wardround.data.decoder", json.dumps(vars(ALL))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    questions = b"".join(json.dumps([str(source.path), None]).encode() + b"\n" for source in sources)
    assert process.communicate(questions)[1] == b""
    assert process.returncode == 0
