"""CIFAR-10 from its binary version: a folder of six files, each 10,000 times one label byte and 3,072 pixel bytes.

Reference: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; the layout is that of
https://www.cs.toronto.edu/~kriz/cifar.html. The Python version of the set is a pickle and is never read.
"""

from pathlib import Path

import numpy as np
import torch

from wardround.data.imageset import Dataset, ImageSet
from wardround.errors import BadInput

TRAIN, TEST = tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE
MOST_RECORDS = 10_000


def is_cifar(path: Path) -> bool:
    """Whether a folder holds the binary version, or a part of it."""
    return any((path / name).is_file() for name in (*TRAIN, *TEST))


def is_pickled_cifar(path: Path) -> bool:
    """Whether a folder holds the Python version."""
    return (path / "data_batch_1").is_file() and (path / "batches.meta").is_file()


def read_cifar(path: Path) -> Dataset:
    """The official training and test part."""
    train, test = (_part(path, names) for names in (TRAIN, TEST))
    counts = f"{len(train)} train, {len(test)} test images of {SIDE}x{SIDE}"
    return Dataset("cifar10", train, None, test, f"CIFAR-10, binary version: {counts}")


def _part(path: Path, names: tuple[str, ...]) -> ImageSet:
    records = np.concatenate([_records(path / name) for name in names])
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, SIDE, SIDE)
    return ImageSet(torch.from_numpy(images), torch.from_numpy(records[:, 0].astype(np.int64)), CLASSES)


def _records(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    try:
        size = path.stat().st_size
        if size == 0 or size % RECORD or size > RECORD * MOST_RECORDS:
            raise BadInput(f"{path} has {size:,} bytes, not 10,000 records of {RECORD:,}; download the set again")
        data = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, RECORD)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); unpack cifar-10-binary.tar.gz again") from error
    if data[:, 0].max() >= len(CLASSES):
        raise BadInput(f"{path} has a label above 9; it is not CIFAR-10's binary version")
    return data
