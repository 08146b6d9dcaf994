"""Which pictures of a stack are used: a volume or a film becomes images by a rule that somebody wrote down.

A rule is `middle`, `all` or `every N`, with a plane behind it where the stack is a volume: `middle axial`,
`every 4 coronal`. Without a plane the pictures are those that are stored, as they are stored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wardround.errors import BadInput

PLANES = ("axial", "coronal", "sagittal")
RULE = re.compile(rf"(?:(middle)|(all)|every\s+([1-9][0-9]{{0,5}}))(?:\s+({'|'.join(PLANES)}))?")
EXAMPLES = "middle, all or every 4, for a volume with a plane as in 'middle axial'"


@dataclass(frozen=True)
class SliceRule:
    """Every `step`-th picture of a stack, or with step 0 the middle one; `plane` is empty for the stored pictures."""

    step: int
    plane: str = ""

    @staticmethod
    def parse(text: str) -> SliceRule:
        """The rule that a person wrote."""
        found = RULE.fullmatch(" ".join(text.lower().split()))
        if not found:
            raise BadInput(f"{text!r} is no rule for slices; write {EXAMPLES}")
        middle, every, step, plane = found.groups()
        return SliceRule(0 if middle else 1 if every else int(step), plane or "")

    def chosen(self, n: int) -> range:
        """The places of the pictures used, of `n`; with `every N` the first is half a step in, as the last is."""
        if self.step == 0:
            return range(n // 2, n // 2 + 1) if n else range(0)
        return range(min((self.step - 1) // 2, max(n - 1, 0)), n, self.step)


@dataclass(frozen=True)
class Volume:
    """Values `(k, r, c)`: pictures of rows and columns, one after the other.

    `directions` has a column for each of the three axes: where it points in the patient, in DICOM's terms (x to the
    patient's left, y to the back, z to the head). None where the file does not say. `spacing` is in millimetres.
    """

    values: NDArray[np.generic]
    directions: NDArray[np.float64] | None
    spacing: tuple[float, float, float]


@dataclass(frozen=True)
class Plane:
    """One picture out of a volume, and the size of its pixels (rows, columns) in millimetres."""

    values: NDArray[np.generic]
    pixel: tuple[float, float]


def planes(volume: Volume, rule: SliceRule, name: str) -> list[Plane]:
    """The pictures that the rule chooses, as a radiologist hangs them.

    Axial: the patient's front is up and the patient's right is on the left. Coronal: head up, the patient's right on
    the left. Sagittal: head up, front on the left. Stored pictures (no plane named) stay as they are. `name` is for
    messages.
    """
    if not rule.plane:
        rows, columns = volume.spacing[1:]
        return [Plane(volume.values[k], (rows, columns)) for k in rule.chosen(len(volume.values))]
    if volume.directions is None:
        raise BadInput(f"{name} does not say how it lies in the patient; leave {rule.plane!r} out to use stored slices")
    axes, signs = _nearest_axes(volume.directions)
    values = np.transpose(volume.values, axes)  # turned by quarters: nothing is resampled
    values = values[tuple(slice(None, None, sign) for sign in signs)]
    z, y, x = (volume.spacing[axis] for axis in axes)
    if rule.plane == "axial":
        return [Plane(values[k], (y, x)) for k in rule.chosen(values.shape[0])]
    if rule.plane == "coronal":
        return [Plane(values[::-1, k], (z, x)) for k in rule.chosen(values.shape[1])]
    return [Plane(values[::-1, :, k], (z, y)) for k in rule.chosen(values.shape[2])]


def _nearest_axes(directions: NDArray[np.float64]) -> tuple[list[int], list[int]]:
    """For z, y and x in turn the axis of the values that runs nearest to it, and whether it runs the other way."""
    left = directions / np.linalg.norm(directions, axis=0)
    axis_of: dict[int, int] = {}
    signs: dict[int, int] = {}
    for _ in range(3):  # the clearest pair first, so that every axis is used once however oblique the volume is
        world, axis = (int(i) for i in np.unravel_index(np.abs(left).argmax(), left.shape))
        axis_of[world], signs[world] = axis, -1 if left[world, axis] < 0 else 1
        left = left.copy()
        left[world, :] = 0
        left[:, axis] = 0
    return [axis_of[world] for world in (2, 1, 0)], [signs[world] for world in (2, 1, 0)]
