"""A folder of pictures, one sub-folder per class: how a hospital's own images usually lie on a disk.

Either `folder/CLASS/picture` and a test share is drawn per class, or `folder/train/CLASS/picture` with `test` (and
`val`) beside `train`, and these are the parts. Pictures are read and kept as those of a table are.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wardround.data.imageset import Dataset
from wardround.data.listing import DATA_SEED, PARTS, TEST_SHARE, Plan, Row, counted_parts, plan_of, read_plan
from wardround.data.picture import entries
from wardround.errors import BadInput
from wardround.progress import NO_PROGRESS, Silent
from wardround.streams import Streams


def read_folder(
    path: Path,
    size: int | None = None,
    progress: Silent = NO_PROGRESS,
    cache_folder: Path | None = None,
) -> Dataset:
    """Read all pictures; grey if every file is grey, else colour.

    Without `size` all pictures must be squares of one size; with it each is cut to its central square and resized.
    Without a `cache_folder` all pictures must fit into memory.
    """
    if not path.is_dir():
        raise BadInput(f"{path} is not a folder; give the folder that holds one sub-folder per class")
    plan = folder_plan(path, folder_rows(path))
    name = path.resolve().name
    sets = read_plan(name, plan, size, cache_folder, progress)
    return Dataset(
        name, sets["train"], sets.get("val"), sets["test"], f"folder {counted_parts(name, sets)}; {plan.how}"
    )


def folder_rows(path: Path) -> list[Row]:
    """A row for every file in a class's folder, in the order of names; nothing is opened."""
    parts = part_folders(path)
    if not parts:
        return _class_rows(path, "")
    classes = [folder.name for folder in _folders(path / "train")]
    for part in parts:
        strange = [folder for folder in _folders(path / part) if folder.name not in classes]
        if strange:
            raise BadInput(f"{strange[0]} has no class of that name in train; name the folders alike")
    return [row for part in parts for row in _class_rows(path / part, part)]


def folder_plan(path: Path, rows: list[Row]) -> Plan:
    """Which picture is for what. Classes are in the order of their folders' names."""
    classes = tuple(sorted({row.label for row in rows}))
    labels = np.array([classes.index(row.label) for row in rows])
    if rows[0].part:
        parts, how = np.array([PARTS.index(row.part) for row in rows]), "parts as the folder has them"
    else:
        parts = np.where(_drawn_test(path, classes, labels), PARTS.index("test"), 0)
        how = f"test share {TEST_SHARE:g} drawn per class with data seed {DATA_SEED}"
    return plan_of(rows, classes, labels, parts, how)


def part_folders(path: Path) -> list[str]:
    """Which parts a folder has as sub-folders; empty where its sub-folders are classes."""
    names = [entry.name for entry in entries(path) if entry.is_dir()]
    named = [name for name in names if name.lower() in PARTS]
    if not named:
        return []
    if not {"train", "test"} <= set(names):
        raise BadInput(f"{path} holds {named[0]}, but not both train and test; name the parts train, test and val")
    others = [name for name in names if name not in PARTS]
    if others:
        raise BadInput(f"{path} holds {others[0]} beside train and test; move it out, or put all classes side by side")
    return [part for part in PARTS if part in names]


def _folders(path: Path) -> list[Path]:
    folders = [entry for entry in entries(path) if entry.is_dir()]
    if not folders:
        raise BadInput(f"{path} holds no folders; put the pictures of each class into a sub-folder named as the class")
    return folders


def _class_rows(path: Path, part: str) -> list[Row]:
    rows = []
    for folder in _folders(path):
        files = entries(folder)
        if not files:
            raise BadInput(f"{folder} holds no pictures; add some or remove the folder")
        for file in files:
            if file.is_dir():
                raise BadInput(f"{file} is a folder inside a class; put pictures directly into the class's folder")
            rows.append(Row(file, folder.name, part=part))
    return rows


def _drawn_test(path: Path, classes: tuple[str, ...], labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which pictures are for testing: of each class the same share, at least one picture and never all."""
    test = np.zeros(len(labels), dtype=bool)
    for c, name in enumerate(classes):
        members = np.flatnonzero(labels == c)
        if len(members) < 2:
            raise BadInput(f"{path / name} holds one picture; two are needed, one to train on and one to test on")
        share = min(max(int(TEST_SHARE * len(members) + 0.5), 1), len(members) - 1)
        test[Streams(DATA_SEED).numpy("folder test share", index=c).permutation(members)[:share]] = True
    return test
