"""What a site's images span, in a few directions, and how far apart two sites are by that.

PACFL (Vahidian et al., Efficient Distribution Similarity Identification in Clustered Federated Learning via Principal
Angles Between Client Data Subspaces, AAAI 2023): a site sends the first p left singular vectors of its data matrix, one
image a column, and the coordinator clusters sites by the principal angles between these subspaces: here by the smallest
one (the paper also has their sum). Images are not centred, so the first direction is close to the site's mean image:
what is sent looks like images, though like no patient's alone.

The paper's code takes the vectors of every class by themselves, side by side: `torch.cat` of a signature per class is
that. Its smallest angle is the one between two vectors, which depends on their signs; here it is the principal angle of
the paper's text, that of the two subspaces whatever vectors they are given by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wardround.errors import BadInput

DIRECTIONS = 3
NOTHING = 1e-6  # of the largest singular value: what is below is no direction
AT_ONCE = 2**22  # numbers of the data matrix that are floats at a time
RIGHT_ANGLE = 90.0

Matrix = npt.NDArray[np.float64]


def signature(images: Tensor, directions: int = DIRECTIONS) -> Tensor:
    """The first left singular vectors of uint8 images `(n, ...)`: float32 `(features, directions)`.

    Columns are orthonormal, and zero where the images do not span as many directions. The entry of largest size in each
    is positive, so that equal images give equal signatures.
    """
    if directions < 1:
        raise BadInput(f"a subspace has one direction or more, not {directions}")
    if images.dtype != torch.uint8 or images.ndim < 2:
        raise BadInput(f"images must be uint8 and several, not {images.dtype} of shape {tuple(images.shape)}")
    rows = images.flatten(1).cpu()
    count, features = rows.shape
    found = torch.zeros((features, directions), dtype=torch.float64)
    if count:
        vectors = _by_images(rows, directions) if count < features else _by_features(rows, directions)
        found[:, : vectors.shape[1]] = vectors
    largest = found.gather(0, found.abs().argmax(dim=0, keepdim=True))
    return (found * torch.where(largest < 0, -1.0, 1.0)).float()


def proximity(signatures: Sequence[Tensor]) -> Matrix:
    """The smallest angles between all pairs of sites in degrees, `(N, N)`, symmetric, zero on the diagonal.

    A site without images is at right angles to every other site.
    """
    if len({len(each) for each in signatures}) > 1:
        raise BadInput("signatures of images of different sizes cannot be compared; resize the images first")
    bases = [_basis(each) for each in signatures]
    found = np.zeros((len(bases), len(bases)))
    for i, one in enumerate(bases):
        for j, other in enumerate(bases[:i]):
            found[i, j] = found[j, i] = principal_angles(one, other).min(initial=RIGHT_ANGLE)
    return found


def principal_angles(one: Tensor, other: Tensor) -> Matrix:
    """Between two subspaces, given by orthonormal columns, in degrees, from the smallest up.

    By sines and cosines together (Björck and Golub 1973): a cosine alone cannot tell small angles apart, nor a sine
    those near 90°.
    """
    wide, narrow = (one, other) if one.shape[1] >= other.shape[1] else (other, one)
    if narrow.shape[1] == 0:
        return np.zeros(0)
    shared = wide.T @ narrow
    cosines = torch.linalg.svdvals(shared)
    sines = torch.linalg.svdvals(narrow - wide @ shared).flip(0)
    angles: Matrix = torch.rad2deg(torch.atan2(sines, cosines)).numpy()
    return angles


def _basis(of: Tensor) -> Tensor:
    """Orthonormal columns in double precision that span what the signature's columns do."""
    vectors, values, _ = torch.linalg.svd(of.double(), full_matrices=False)
    spanned: Tensor = vectors[:, values > NOTHING * max(1.0, float(values.max()))]
    return spanned


def _by_features(rows: Tensor, directions: int) -> Tensor:
    """Eigenvectors of XXᵀ, features by features."""
    gram = torch.zeros((rows.shape[1], rows.shape[1]), dtype=torch.float64)
    for part in _floats(rows):
        gram += part.T @ part
    return _leading(gram, directions)[0]


def _by_images(rows: Tensor, directions: int) -> Tensor:
    """Through the eigenvectors of XᵀX, images by images, where these are fewer."""
    gram = torch.zeros((len(rows), len(rows)), dtype=torch.float64)
    for part in _floats(rows.T):
        gram += part.T @ part
    vectors, values = _leading(gram, directions)
    return torch.cat([part @ vectors for part in _floats(rows.T)]) / values.sqrt()


def _leading(gram: Tensor, directions: int) -> tuple[Tensor, Tensor]:
    """The eigenvectors of the largest eigenvalues, largest first, without those of none."""
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0)[:directions], vectors.flip(1)[:, :directions]
    kept = values > NOTHING**2 * values.max()
    return vectors[:, kept], values[kept]


def _floats(rows: Tensor) -> Iterator[Tensor]:
    """Parts of a matrix as numbers from 0 to 1: eight times as much memory as its bytes, so not all at once."""
    for part in torch.split(rows, max(1, AT_ONCE // rows.shape[1])):
        yield part.double() / 255
