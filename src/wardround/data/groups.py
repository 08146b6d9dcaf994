"""Whose the images of an `.npz` file are, from a table of their own: for files that come without patient ids.

The table is CSV with a column `split` (train, val or test), a column `index` (the image's place in that part, from 0)
and one of `patient`, `patient_id`, `lesion` or `lesion_id`; others are not read. DermaMNIST's is made of HAM10000's
metadata (`lesion_id`, `image_id`) and a list of which image stands where.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from wardround.errors import BadInput

KEYS = ("patient", "patient_id", "lesion", "lesion_id")  # the widest group first: a patient may have two lesions
MOST_BYTES = 2**28


def read_groups(path: Path, lengths: Mapping[str, int]) -> dict[str, Tensor]:
    """For each part a number per image, the same for images that belong together. Every image must be listed once."""
    names: dict[str, list[str | None]] = {part: [None] * length for part, length in lengths.items()}
    for number, line in _lines(path):
        part, index, group = (line.get(key) or "" for key in ("split", "index", "group"))
        listed = names.get(part.lower())
        place = int(index) if index.isascii() and index.isdigit() and len(index) < 10 else -1
        if listed is None or not 0 <= place < len(listed) or not group:
            raise BadInput(f"{path} line {number} has no split, index and group of an image of the set; correct it")
        if listed[place] is not None:
            raise BadInput(f"{path} line {number} names image {place} of {part} again; keep one line per image")
        listed[place] = group
    for part, listed in names.items():
        if None in listed:
            raise BadInput(f"{path} does not say whose image {listed.index(None)} of {part} is; add a line for it")
    order = {name: number for number, name in enumerate(dict.fromkeys(g for part in names.values() for g in part))}
    return {part: torch.tensor([order[name] for name in listed]) for part, listed in names.items()}


def _lines(path: Path) -> list[tuple[int, dict[str, str]]]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadInput(f"{path} is larger than 256 MiB, which is no list of groups; check that it is the table")
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            columns = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            key = next((key for key in KEYS if key in columns), None)
            if key is None or not {"split", "index"} <= set(columns):
                raise BadInput(f"{path} needs the columns split, index and one of {', '.join(KEYS)}; name them so")
            return [
                (
                    reader.line_num,
                    {
                        "split": (row["split"] or "").strip(),
                        "index": (row["index"] or "").strip(),
                        "group": (row[key] or "").strip(),
                    },
                )
                for row in reader
            ]
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); check the path of data.groups") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path} is no CSV in UTF-8; save it as 'CSV UTF-8'") from error
