"""Images unlike the others of their class: turned, inverted, shown through another window, written on.

All of it is suspicion by comparison. A class with enough images, or else the set, has a mean thumbnail; an image that
correlates with it far better when it is turned, or correlates negatively, is named. Where images have no common look (a
cell lies as it fell) the typical correlation is low, and nothing is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wardround.data.check.inspected import Inspected
from wardround.data.greys import Pixels

ENOUGH = 20  # images that a mean is taken of
TYPICAL = 0.5  # correlation with the mean, in the middle of the set: below it there is no common look
TURNED_GAIN, TURNED_LEAST = 0.35, 0.6
INVERTED = -0.5
NARROW, USUAL_RANGE = 64, 160  # grey levels from darkest to brightest
CLIPPED_MORE = 0.3  # of the pixels at black or white, more than is usual in the set
FAR = 6.0  # median absolute deviations of the mean grey
WRITTEN_OFTEN = 0.02  # of the images: a corner that is written in fewer may be chance

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Odd:
    """A suspicion, and the images that raise it."""

    kind: str
    text: str
    places: list[int]


def odd_ones(seen: Inspected) -> Iterator[Odd]:
    """All suspicions."""
    if not seen.items:
        return
    for odd in (*_posture(seen), *_window(seen), *_text(seen)):
        if odd.places:
            yield odd


def _posture(seen: Inspected) -> Iterator[Odd]:
    turned: list[int] = []
    inverted: list[int] = []
    counts = np.bincount(seen.labels, minlength=len(seen.classes))
    groups = [np.flatnonzero(seen.labels == c) for c in np.flatnonzero(counts >= ENOUGH)]
    if len(seen.items) >= ENOUGH and (rest := np.flatnonzero(counts[seen.labels] < ENOUGH)).size:
        groups.append(rest)
    for members in groups:
        alike = members if len(members) >= ENOUGH else np.arange(len(seen.items))
        own, best = _correlations(seen.thumbs[members], seen.thumbs[alike])
        if np.median(own) < TYPICAL:
            continue
        is_turned = (best - own >= TURNED_GAIN) & (best >= TURNED_LEAST) & (best > -own)  # -own: of its negative
        turned += members[is_turned].tolist()
        inverted += members[(own <= INVERTED) & ~is_turned].tolist()
    yield Odd("suspected wrong orientation", "turned or mirrored, it would look far more like its class", turned)
    yield Odd("suspected inversion", "the negative of what its class looks like", inverted)


def _correlations(thumbs: Pixels, alike: Pixels) -> tuple[Floats, Floats]:
    """With the mean of the `alike`: of each image as it is, and at best in the seven other postures."""
    mean = _unit(alike.astype(np.float64).mean(axis=0)[None])[0]
    postures = []
    for turn in range(4):
        for mirror in (False, True):
            view = np.rot90(thumbs, turn, axes=(1, 2))
            postures.append(_unit(view[:, :, ::-1] if mirror else view) @ mean)
    return postures[0], np.max(postures[1:], axis=0)


def _unit(thumbs: NDArray[np.generic]) -> Floats:
    vectors = thumbs.reshape(len(thumbs), -1).astype(np.float64)
    vectors -= vectors.mean(axis=1, keepdims=True)
    result: Floats = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    return result


def _window(seen: Inspected) -> Iterator[Odd]:
    """Greys unlike the set's: a window too wide or too narrow, or none where others have one."""
    if len(seen.items) < ENOUGH:
        return
    looks = [item.look for item in seen.items]
    ranges = np.array([look.high - look.low for look in looks])
    means = np.array([look.mean for look in looks])
    deviation = max(float(np.median(np.abs(means - np.median(means)))), 3.0)
    odd = np.abs(means - np.median(means)) > FAR * deviation
    if np.median(ranges) >= USUAL_RANGE:
        odd |= ranges <= NARROW
    for share in (np.array([look.black for look in looks]), np.array([look.white for look in looks])):
        odd |= share > np.median(share) + CLIPPED_MORE
    odd &= ranges > 0  # constant pictures are a finding of their own
    text = "far darker, brighter, flatter or more clipped than the set's middle"
    yield Odd("suspected windowing", text, np.flatnonzero(odd).tolist())


def _text(seen: Inspected) -> Iterator[Odd]:
    corners = Counter(corner for item in seen.items for corner in item.look.text)
    often = {corner for corner, n in corners.items() if n >= max(1, WRITTEN_OFTEN * len(seen.items))}
    places = [place for place, item in enumerate(seen.items) if often & set(item.look.text)]
    where = ", ".join(sorted(often))
    yield Odd("suspected text in the picture", f"thin bright strokes on a dark ground, {where}: names?", places)
