"""Coverage-guided fuzzing of the parcel's parser, for whoever has atheris installed (`pip install atheris`).

    PYTHONPATH=tests python tests/fuzz/parcel_atheris.py -runs=100000 [corpus folder]

The first byte of an input says what the rest is: a whole file, a manifest to be signed, or a body to be hashed and
signed. Anything but a parcel read or a `BadInput` stops it with the input that did it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["wardround.exchange", "wardround.tensorfile"]):
    from wardround.exchange import body, manifest, outside, parcel  # noqa: F401 - what is to be covered

from forge import BODY, ENVELOPE, PAYLOAD, SIGNERS, TEXT, WHOLE, around, signed
from wardround.errors import BadInput
from wardround.exchange.parcel import read_parcel

FOLDER = tempfile.TemporaryDirectory()
MAKERS = [lambda rest: rest, signed, around]
SEEDS = [WHOLE, TEXT, BODY]


def one_input(data: bytes) -> None:
    """Read what an input makes."""
    if not data:
        return
    path = Path(FOLDER.name) / "x.parcel"
    path.write_bytes(MAKERS[data[0] % len(MAKERS)](data[1:]))
    try:
        read_parcel(path, SIGNERS, PAYLOAD, ENVELOPE)
    except BadInput as refusal:
        if not str(refusal).isprintable():
            raise AssertionError("a refusal with control characters") from refusal


def main() -> None:
    """Start from one right input of each sort."""
    corpus = Path(FOLDER.name) / "seeds"
    corpus.mkdir()
    for number, seed in enumerate(SEEDS):
        (corpus / str(number)).write_bytes(bytes([number]) + seed)
    atheris.Setup([*sys.argv, str(corpus)], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
