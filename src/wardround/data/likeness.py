"""Which images look alike: near duplicates by the correlation of small grey versions.

An image becomes a grey thumbnail of 16×16 pixels, brought to mean 0 and deviation 1. In a set of some size the mean of
the set's thumbnails is taken away then, since all chests look alike: what counts is what is special about an image. Two
images are near duplicates where the correlation of what remains is `NEAR` or more. The limit was set on two sets with
ids: on DermaMNIST's official split all 13 pairs that it finds across training and test are of one lesion, and on an OCT
set whose parts share no patient it finds none. Copies that were resized, compressed again or made brighter are found;
crops and turned copies are not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from wardround.data.greys import Pixels
from wardround.data.looks import SIDE, as_picture, thumbnail

NEAR = 0.995
MEAN_FROM = 50  # images: the mean of fewer would be made of the very copies that are looked for
FLAT = 1.0  # grey levels: below this deviation nothing is left to compare
BLOCK = 2048
MOST_PAIRS = 100_000

Floats = NDArray[np.float32]
Pairs = NDArray[np.int64]


def thumbnails(images: Tensor) -> Pixels:
    """Of images `(n, channels, side, side)`: uint8 `(n, 16, 16)`."""
    found = np.empty((len(images), SIDE, SIDE), np.uint8)
    for place, image in enumerate(images.numpy()):
        found[place] = thumbnail(as_picture(image))
    return found


def described(thumbs: Pixels) -> Floats:
    """A vector of length 1 for each, whose products are correlations; zero for an image without structure."""
    vectors = thumbs.reshape(len(thumbs), SIDE * SIDE).astype(np.float32)
    vectors -= vectors.mean(axis=1, keepdims=True)
    deviations = np.maximum(vectors.std(axis=1, keepdims=True), 1e-6)
    vectors /= deviations  # before the mean is taken away: else a brighter copy would keep some of it
    if len(vectors) >= MEAN_FROM:
        vectors -= vectors.mean(axis=0)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors /= np.maximum(lengths, 1e-6)
    vectors[(deviations[:, 0] < FLAT) | ((lengths * deviations)[:, 0] < FLAT)] = 0
    return vectors


def near_pairs(vectors: Floats) -> Pairs:
    """All pairs (i < j) of near duplicates, `(k, 2)`; block by block, so that memory does not grow with their square.

    Stops at `MOST_PAIRS`: a set with more is one picture many times over, and that is clear by then.
    """
    found, count = [np.empty((0, 2), np.int64)], 0
    for start in range(0, len(vectors), BLOCK):
        for other in range(start, len(vectors), BLOCK):
            i, j = np.nonzero(vectors[start : start + BLOCK] @ vectors[other : other + BLOCK].T >= NEAR)
            pairs = np.stack([i + start, j + other], axis=1)
            found.append(pairs[pairs[:, 0] < pairs[:, 1]])
            count += len(found[-1])
            if count > MOST_PAIRS:
                return np.concatenate(found)[:MOST_PAIRS]
    return np.concatenate(found)


def like_across(some: Pixels, others: Pixels) -> NDArray[np.int64]:
    """Which thumbnails of `some` have a near duplicate among `others`."""
    vectors = described(np.concatenate([some, others]))
    here, there = vectors[: len(some)], vectors[len(some) :]
    alike = np.zeros(len(some), bool)
    for start in range(0, len(there), BLOCK):
        alike |= (here @ there[start : start + BLOCK].T >= NEAR).any(axis=1)
    return np.flatnonzero(alike)
