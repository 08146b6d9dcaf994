"""MedMNIST's `.npz` files, the official ones and any other of that layout.

A file holds `train_images`, `train_labels` and the same for `val_` and `test_`: images uint8 `(n, s, s)` or
`(n, s, s, 3)`, labels `(n,)` or `(n, 1)`. Two kinds of ids may come with them: `*_site`, where an image was taken, and
`*_patient` or `*_lesion`, which images belong together. Reference: Yang et al., "MedMNIST v2", Scientific Data 10:41
(2023). Nothing is unpickled: an array that would need it is refused.
"""

import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wardround.data.groups import KEYS, read_groups
from wardround.data.imageset import Dataset, ImageSet
from wardround.data.likeness import like_across, thumbnails
from wardround.errors import BadInput

PARTS = ("train", "val", "test")
SITE_KEYS = ("site", "site_id")

# What zipfile and numpy raise for a file that is damaged, encrypted, or no zip of arrays.
DAMAGE = (OSError, EOFError, ValueError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error)

Numbers = NDArray[np.int64]
Parts = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Official:
    """What MedMNIST publishes about one of its sets (its `info.py`, version 3.0.2)."""

    channels: int
    what: str
    classes: tuple[str, ...]


_ORGANS = (
    "bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver", "lung-left", "lung-right",
    "pancreas", "spleen",
)  # fmt: skip
OFFICIAL = {
    "pathmnist": Official(
        3,
        "colorectal tissue, histology",
        (
            "adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa",
            "cancer-associated stroma", "colorectal adenocarcinoma epithelium",
        ),
    ),
    "dermamnist": Official(
        3,
        "pigmented skin lesions, dermatoscopy",
        (
            "actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma", "benign keratosis-like lesions",
            "dermatofibroma", "melanoma", "melanocytic nevi", "vascular lesions",
        ),
    ),
    "octmnist": Official(
        1, "retina, optical coherence tomography",
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    ),
    "pneumoniamnist": Official(1, "children's chests, X-ray", ("normal", "pneumonia")),
    "retinamnist": Official(3, "diabetic retinopathy in five grades, fundus camera", ("0", "1", "2", "3", "4")),
    "breastmnist": Official(1, "breast, ultrasound", ("malignant", "normal, benign")),
    "bloodmnist": Official(
        3,
        "blood cells, microscope",
        (
            "basophil", "eosinophil", "erythroblast",
            "immature granulocytes(myelocytes, metamyelocytes and promyelocytes)",
            "lymphocyte", "monocyte", "neutrophil", "platelet",
        ),
    ),
    "tissuemnist": Official(
        1,
        "kidney cortex cells, microscope",
        (
            "Collecting Duct, Connecting Tubule", "Distal Convoluted Tubule", "Glomerular endothelial cells",
            "Interstitial endothelial cells", "Leukocytes", "Podocytes", "Proximal Tubule Segments",
            "Thick Ascending Limb",
        ),
    ),
    "organamnist": Official(1, "abdominal organs, CT, axial", _ORGANS),
    "organcmnist": Official(1, "abdominal organs, CT, coronal", _ORGANS),
    "organsmnist": Official(1, "abdominal organs, CT, sagittal", _ORGANS),
}  # fmt: skip
SHARED_LESIONS = ("dermamnist", "Abhishek et al., Scientific Data 12:196, 2025")
MULTI_LABEL = "chestmnist"  # each of its images may show several findings at once


def official_name(name: str) -> str:
    """The set's full name for a short or a cased one: `blood` and `BloodMNIST` mean `bloodmnist`."""
    name = name.lower()
    return name if name.endswith("mnist") else f"{name}mnist"


def refuse_multi_label(name: str) -> None:
    """Stop at ChestMNIST, whose labels no classifier here can learn."""
    if name == MULTI_LABEL:
        raise BadInput(
            f"{MULTI_LABEL} gives each image several labels at once; wardround learns one label per image: "
            "choose another set"
        )


def read_medmnist(path: Path, groups: Path | None = None) -> Dataset:
    """The parts of a file, checked; class names are the published ones where the file is named as an official set.

    `groups` is a table (see `groups.py`) of which images belong together; it wins over ids in the file.
    """
    refuse_multi_label(_set_of(path))
    arrays = _arrays(path)
    parts = [p for p in PARTS if p != "val" or len(arrays.get("val_images", ()))]
    for part in parts:
        _check_images(path, part, arrays)
    _check_one_shape(path, parts, arrays)
    labels = {part: _labels(path, part, arrays) for part in parts}
    classes = _classes(path, labels)
    sites, site_names, is_text = _ids(path, parts, arrays, SITE_KEYS)
    patients, *_ = _ids(path, parts, arrays, KEYS)
    if groups is not None:
        patients = read_groups(groups, {part: len(labels[part]) for part in parts})
    sets = {
        part: ImageSet(
            _channels_first(arrays[f"{part}_images"]),
            torch.from_numpy(labels[part]),
            classes,
            sites=sites.get(part),
            patients=patients.get(part),
        )
        for part in parts
    }
    size = sets["train"].size
    counts = ", ".join(f"{len(sets[part])} {part}" for part in parts)
    key = "; sites " + ", ".join(f"{i} = {site}" for i, site in enumerate(site_names)) if is_text else ""
    return Dataset(
        name=path.stem,
        train=sets["train"],
        val=sets.get("val"),
        test=sets["test"],
        provenance=f"{path.name}: {counts} images of {size}x{size}{key}",
        notes=_known_leaks(path, sets),
        site_names=site_names,
    )


def _known_leaks(path: Path, sets: Mapping[str, ImageSet]) -> tuple[str, ...]:
    """DermaMNIST's official split has lesions in several parts (see `SHARED_LESIONS`): said wherever figures are.

    With lesion ids they are counted where sites are made; without, what can be counted is images that look alike.
    """
    if _set_of(path) != SHARED_LESIONS[0] or sets["test"].patients is not None:
        return ()
    train, test = (thumbnails(sets[part].images) for part in ("train", "test"))
    alike = len(like_across(test, train))
    return (
        f"{SHARED_LESIONS[0]}'s official split shows lesions in several parts ({SHARED_LESIONS[1]}), so accuracies "
        f"on it are too good: {alike:,} test images have a near duplicate in training; with lesion ids (data.groups) "
        "they are kept together and counted",
    )


def _set_of(path: Path) -> str:
    """The name of the set in an official file, whose larger sizes are named as `bloodmnist_64.npz`."""
    return re.sub(r"_(64|128|224)$", "", path.stem.lower())


def _how_to_get(path: Path) -> str:
    name, _, size = path.stem.lower().partition("_")
    if _set_of(path) not in OFFICIAL:
        return "check the path"
    return f"run `wardround data get {name}{f' --size {size}' if size else ''}`, or copy the file there"


def _arrays(path: Path) -> Parts:
    """The arrays of this layout that the file holds; other arrays in it are not read."""
    if not path.exists():
        raise BadInput(f"{path} does not exist: {_how_to_get(path)}")
    if not (path.is_file() or path.is_dir()):
        raise BadInput(f"{path} is a pipe or a device, which has no end; give a plain file")
    kinds = ("images", "labels", *SITE_KEYS, *KEYS)
    wanted = [f"{part}_{kind}" for part in PARTS for kind in kinds]
    try:
        if not zipfile.is_zipfile(path):
            raise BadInput(f"{path} is not an .npz file (a zip of arrays), or is cut short; copy or download it again")
        with np.load(path, allow_pickle=False) as archive:
            found = {name: _array(f"{name} in {path}", archive, name) for name in wanted if name in archive.files}
    except DAMAGE as error:
        raise BadInput(f"{path} cannot be read ({_one_line(error)}); copy or download it again") from error
    missing = [f"{p}_{k}" for p in ("train", "test") for k in ("images", "labels") if f"{p}_{k}" not in found]
    if "val_images" in found and "val_labels" not in found:
        missing.append("val_labels")
    if missing:
        raise BadInput(f"{path} lacks {', '.join(missing)}; a MedMNIST file has images and labels of train and test")
    return found


def _array(name: str, archive: Mapping[str, NDArray[np.generic]], key: str) -> NDArray[np.generic]:
    try:
        array = archive[key]
    except MemoryError as error:
        raise BadInput(f"{name} does not fit into memory ({_one_line(error)}); use images of a smaller size") from error
    except DAMAGE as error:
        if "allow_pickle" in str(error):
            raise BadInput(
                f"{name} holds Python objects, which are never unpickled; store numbers or fixed-width text"
            ) from error
        raise BadInput(f"{name} is damaged ({_one_line(error)}); copy or download the file again") from error
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise BadInput(f"{name} is not an array with one entry per image; write the file again")
    return array.reshape(len(array)) if array.ndim == 2 and array.shape[1] == 1 else array


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_images(path: Path, part: str, arrays: Parts) -> None:
    name, images, labels = f"{part}_images in {path}", arrays[f"{part}_images"], arrays[f"{part}_labels"]
    if images.dtype != np.uint8:
        if images.dtype.kind == "f" and not np.isfinite(images.astype(np.float64)).all():
            raise BadInput(f"{name} holds pixels that are not numbers (NaN or infinite); mend them and store uint8")
        raise BadInput(f"{name} is {images.dtype}; store 8-bit images (uint8, 0 to 255)")
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise BadInput(f"{name} has shape {images.shape}; it must be (n, s, s) for grey or (n, s, s, 3) for colour")
    if images.shape[1] != images.shape[2]:
        raise BadInput(f"{name} has images of {images.shape[1]}x{images.shape[2]}; crop or pad them to squares")
    if not images.size:
        raise BadInput(f"{name} is empty; a file needs training and test images")
    if len(labels) != len(images):
        raise BadInput(f"{name} has {len(images)} images but {len(labels)} labels; they must be as many")


def _check_one_shape(path: Path, parts: list[str], arrays: Parts) -> None:
    shapes = {part: arrays[f"{part}_images"].shape[1:] for part in parts}
    if len(set(shapes.values())) > 1:
        text = ", ".join(f"{part} {shape}" for part, shape in shapes.items())
        raise BadInput(f"{path} has images of different shapes ({text}); give all parts one size and kind")


def _labels(path: Path, part: str, arrays: Parts) -> Numbers:
    name, labels = f"{part}_labels in {path}", arrays[f"{part}_labels"]
    if labels.ndim != 1:
        raise BadInput(f"{name} has shape {labels.shape}, several labels per image; one label per image is needed")
    if labels.dtype.kind not in "iu":
        raise BadInput(f"{name} is {labels.dtype}; store whole numbers from 0")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= 2**31:
        raise BadInput(f"{name} runs from {low} to {high}; number the classes from 0")
    return labels.astype(np.int64)


def _classes(path: Path, labels: dict[str, Numbers]) -> tuple[str, ...]:
    highest = max(int(part.max()) for part in labels.values())
    official = OFFICIAL.get(_set_of(path))
    if official:
        if highest >= len(official.classes):
            raise BadInput(
                f"{path} has label {highest}, but {_set_of(path)} has {len(official.classes)} classes (0 to "
                f"{len(official.classes) - 1}); rename the file if it is another set"
            )
        return official.classes
    if highest >= sum(len(part) for part in labels.values()):
        raise BadInput(f"{path} has label {highest} but fewer images than that; number the classes 0, 1, 2 and on")
    return tuple(f"class {c}" for c in range(highest + 1))


def _ids(
    path: Path, parts: list[str], arrays: Parts, keys: tuple[str, ...]
) -> tuple[dict[str, Tensor], tuple[str, ...], bool]:
    """Ids of each part that has them, numbered from 0 alike in all; what the file calls each; whether that is text."""
    key = next((k for k in keys if any(f"{part}_{k}" in arrays for part in parts)), None)
    found = {part: arrays[f"{part}_{key}"] for part in parts if f"{part}_{key}" in arrays}
    if not found:
        return {}, (), False
    for part, ids in found.items():
        name = f"{part}_{key} in {path}"
        if ids.dtype.kind not in "iuU" or ids.ndim != 1:
            raise BadInput(f"{name} is {ids.dtype} of shape {ids.shape}; store one whole number or text per image")
        if len(ids) != len(arrays[f"{part}_images"]):
            raise BadInput(f"{name} has {len(ids)} ids for {len(arrays[f'{part}_images'])} images; one each is needed")
    text = [ids.dtype.kind == "U" for ids in found.values()]
    if any(text) and not all(text):
        raise BadInput(f"*_{key} in {path} is text in one part and numbers in another; use one kind for all parts")
    values, dense = np.unique(np.concatenate(list(found.values())), return_inverse=True)
    cuts = np.cumsum([len(ids) for ids in found.values()])[:-1]
    numbered = {p: torch.from_numpy(i.astype(np.int64)) for p, i in zip(found, np.split(dense, cuts), strict=True)}
    return numbered, tuple(map(str, values)), all(text)


def _channels_first(images: NDArray[np.generic]) -> Tensor:
    stack = images[:, None] if images.ndim == 3 else np.moveaxis(images, 3, 1)
    return torch.from_numpy(np.ascontiguousarray(stack))
