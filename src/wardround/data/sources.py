"""From what a study calls its images to the images: drawn cells, a file, a table, a folder, or a set by its name."""

import os
from dataclasses import dataclass
from pathlib import Path

from wardround.data.cifar import is_cifar, is_pickled_cifar, read_cifar
from wardround.data.download import SIZES, file_name
from wardround.data.folder import read_folder
from wardround.data.imageset import Dataset
from wardround.data.listing import Row, read_rows
from wardround.data.medmnist import OFFICIAL, official_name, read_medmnist, refuse_multi_label
from wardround.data.phantoms import MORPHOLOGIES, phantoms
from wardround.data.slices import SliceRule
from wardround.data.table import SUFFIXES as TABLES
from wardround.data.table import read_table
from wardround.data.tree import is_medical_tree, read_tree
from wardround.errors import BadInput
from wardround.progress import NO_PROGRESS, Silent

PHANTOMS = "phantoms"
CACHE = "cache"  # in the data folder: sets that are too large for memory
NAME_PATIENTS = "and name patients in the column patient of a table of the files"
PHANTOM_IMAGES = 4000  # for training; a quarter as many for testing


@dataclass(frozen=True)
class SourceInfo:
    """A line of `wardround data list`; `present` says whether a study that names the set can run now."""

    name: str
    classes: int
    channels: int
    what: str
    present: bool


def default_data_folder() -> Path:
    """Where named sets are looked up: `$WARDROUND_DATA`, or `~/.wardround/data`."""
    return Path(os.path.expanduser(os.environ.get("WARDROUND_DATA") or "~/.wardround/data"))


def known(data_folder: Path | None = None) -> list[SourceInfo]:
    """The sets that have a name, phantoms first."""
    folder = data_folder or default_data_folder()
    drawn = SourceInfo(PHANTOMS, len(MORPHOLOGIES), 3, "drawn blood cells, built in", present=True)
    return [drawn] + [
        SourceInfo(name, len(o.classes), o.channels, o.what, present=(folder / file_name(name)).is_file())
        for name, o in OFFICIAL.items()
    ]


def load(
    source: str,
    data_folder: Path,
    size: int | None = None,
    phantom_sites: int = 0,
    progress: Silent = NO_PROGRESS,
    slices: str | None = None,
    groups: Path | None = None,
    by_patient: bool = True,
) -> Dataset:
    """The images that `source` means.

    `source` is `phantoms` or `phantoms:N` (N training images, N // 4 test images), a path to an `.npz` file, a table or
    a folder, a MedMNIST name, or the name of any other `.npz` file in `data_folder`. No seed of a study has a part in
    it. `phantom_sites` gives phantoms site ids; `slices` says which pictures of volumes and films are used; `groups` is
    a table of whose the images of an `.npz` file are. With `by_patient` a test share that is drawn splits no patient.
    """
    if slices is not None:
        SliceRule.parse(slices)
    kind, _, count = source.partition(":")
    if kind == PHANTOMS:
        n_train = _count(source, count)
        if n_train < 4:
            raise BadInput(
                f"{n_train} phantoms are too few; ask for 4 or more, of which a quarter again is drawn to test"
            )
        refuse_groups(source, groups, "since phantoms have no patients")
        side = 28 if size is None else size
        return phantoms(n_train, 0, n_train // 4, side, sites=phantom_sites, progress=progress)
    path = Path(os.path.expanduser(source))  # Path.expanduser raises where there is no such user
    if path.suffix.lower() == ".npz":
        return _of_size(read_medmnist(path, groups), size)
    name = official_name(source)
    refuse_multi_label(name)
    if name in OFFICIAL:
        if size is not None and size not in SIZES:
            raise BadInput(
                f"{name} comes in {', '.join(map(str, SIZES))} pixels, not {size}; choose one of these sizes"
            )
        return _of_size(read_medmnist(data_folder / file_name(name, 28 if size is None else size), groups), size)
    if path.suffix.lower() in TABLES or path.is_dir():
        refuse_groups(source, groups)
    rows = named_rows(path, slices)
    if rows is not None:
        place = data_folder / CACHE
        return read_rows(rows_name(path), rows, size, place, progress, by_patient)
    if path.is_dir():
        if is_cifar(path):
            return _of_size(read_cifar(path), size)
        return read_folder(path, size, progress, data_folder / CACHE)
    if path.name == source and (data_folder / f"{source}.npz").is_file():
        return _of_size(read_medmnist(data_folder / f"{source}.npz", groups), size)
    raise BadInput(
        f"{source!r} is no folder, table or .npz file and no known set; known are {PHANTOMS}, {', '.join(OFFICIAL)}: "
        "`wardround data get NAME` downloads one"
    )


def refuse_groups(source: str, groups: Path | None, instead: str = NAME_PATIENTS) -> None:
    """Whose images they are is read from such a table for an `.npz` file only; elsewhere it would be passed over."""
    if groups is not None:
        raise BadInput(f"data.groups is for .npz files and cannot be used with {source}; leave it out, {instead}")


def named_rows(path: Path, slices: str | None) -> list[Row] | None:
    """The files that a table or a folder with DICOM or NIfTI files names; None for any other source."""
    if path.suffix.lower() in TABLES:
        return read_table(path, slices)
    if not path.is_dir() or is_cifar(path):
        return None
    if is_pickled_cifar(path):
        raise BadInput(f"{path} is CIFAR-10's Python version, a pickle, which is never read; get the binary version")
    return read_tree(path, slices) if is_medical_tree(path) else None


def rows_name(path: Path) -> str:
    """What a set of files is called."""
    return path.resolve().name if path.is_dir() else path.stem


def _count(source: str, count: str) -> int:
    if source == PHANTOMS:
        return PHANTOM_IMAGES
    if not (count.isascii() and count.isdigit()):
        raise BadInput(f"{source!r} does not say how many phantoms; write {PHANTOMS}:1000 for 1,000 training images")
    return int(count)


def _of_size(data: Dataset, size: int | None) -> Dataset:
    if size is not None and data.train.size != size:
        raise BadInput(
            f"{data.name} holds images of {data.train.size}x{data.train.size}, not {size}; leave the size out, or get "
            "the set in that size"
        )
    return data
