"""Blood-like cells, drawn: eight classes of stained cells for tests, demonstrations and machines without a download.

The classes differ as white cells do under a microscope: by the form of the nucleus (lobes, bend, size against the
cell), by granules, by the texture of chromatin, by nucleoli and vacuoles. Position, size, rotation, stain, light, focus
and neighbours vary freely in every class, so pixels taken one by one say little: a linear model stays under 75 % and a
small convolutional network passes 90 % (4,000 training images; `tests/data/test_phantoms.py` holds this claim).

Coordinates run from -1 to 1 across the image, so a picture is the same at every size. Colour follows Beer and Lambert:
each structure holds amounts of two dyes, azure and eosin, and light passes as exp(-Σ amount · absorbance).

Images are drawn in blocks of 64, each from its own stream: image i of a (seed, part) does not depend on how many are
asked for. All arithmetic is float64, so that rounding to 8 bits hides the last digits in which maths libraries differ.
"""

from dataclasses import astuple, dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from wardround.data.imageset import Dataset, ImageSet
from wardround.errors import BadInput
from wardround.progress import NO_PROGRESS, Silent
from wardround.streams import Streams

Array = NDArray[np.float64]
Range = tuple[float, float]

BLOCK = 64
LOBES = 5  # the most lobes that a nucleus has
AZURE = np.array([1.05, 1.45, 0.50])  # absorbance of the blue-violet dye in red, green, blue light
EOSIN = np.array([0.12, 0.72, 0.70])  # absorbance of the pink dye
LATTICE = 16  # granules repeat after this many, more than a cell is wide


@dataclass(frozen=True)
class Morphology:
    """The form of one cell type: each pair is a range from which every cell draws its own value.

    Lengths of the nucleus are shares of the cell's radius. Overlap between the types is meant: it is what makes them
    hard to tell apart by size or colour alone. The defaults are a plain cell, without granules or spots to see.
    """

    cell: Range  # radius, where the image is 2 wide
    lobes: Range  # how many, both ends included
    lobe: Range  # radius of a lobe
    bend: Range  # radius of the arc on which the lobes lie
    span: Range  # angle of that arc
    bridge: Range  # thickness between lobes as a share of the lobe
    eccentric: Range  # how far the nucleus lies from the middle of the cell
    azure: Range  # in the cytoplasm
    eosin: Range  # in the cytoplasm
    density: Range = (0.85, 1.15)  # azure in the nucleus
    clumps: Range = (0.10, 0.25)  # contrast of chromatin
    nucleoli: Range = (0, 0)  # paleness of spots in the nucleus
    vacuoles: Range = (0, 0.1)  # paleness of spots in the cytoplasm
    pitch: Range = (0.11, 0.15)  # distance between granules
    granule_azure: Range = (0, 0.05)  # added to the cytoplasm's
    granule_eosin: Range = (0, 0.1)
    veil: Range = (0, 0)  # how far granules also cover the nucleus


MORPHOLOGIES = {
    "neutrophil": Morphology(
        cell=(0.50, 0.70), lobes=(3, 5), lobe=(0.24, 0.32), bend=(0.46, 0.56), span=(3.0, 4.6), bridge=(0.10, 0.30),
        eccentric=(0, 0.15), azure=(0.12, 0.32), eosin=(0.10, 0.40), granule_azure=(0.05, 0.15), granule_eosin=(0, 0.2),
    ),
    "band cell": Morphology(
        cell=(0.50, 0.70), lobes=(5, 5), lobe=(0.21, 0.29), bend=(0.42, 0.54), span=(2.4, 4.2), bridge=(0.90, 1.00),
        eccentric=(0, 0.15), azure=(0.12, 0.32), eosin=(0.10, 0.40), granule_azure=(0.05, 0.15), granule_eosin=(0, 0.2),
    ),
    "eosinophil": Morphology(
        cell=(0.50, 0.70), lobes=(2, 3), lobe=(0.32, 0.42), bend=(0.42, 0.52), span=(1.9, 2.8), bridge=(0.15, 0.50),
        eccentric=(0.1, 0.3), azure=(0.12, 0.30), eosin=(0.20, 0.50),
        pitch=(0.18, 0.24), granule_azure=(-0.1, 0), granule_eosin=(0.5, 1.0), veil=(0, 0.1),
    ),
    "basophil": Morphology(
        cell=(0.48, 0.68), lobes=(2, 4), lobe=(0.32, 0.44), bend=(0.30, 0.45), span=(1.9, 3.2), bridge=(0.60, 0.90),
        eccentric=(0, 0.2), azure=(0.14, 0.34), eosin=(0.10, 0.40), density=(0.55, 0.90),
        pitch=(0.16, 0.24), granule_azure=(0.4, 0.8), granule_eosin=(0, 0.2), veil=(0.3, 0.7),
    ),
    "lymphocyte": Morphology(
        cell=(0.40, 0.60), lobes=(1, 2), lobe=(0.76, 0.90), bend=(0, 0.06), span=(1.0, 2.0), bridge=(1, 1),
        eccentric=(0, 0.12), azure=(0.20, 0.45), eosin=(0.05, 0.30), clumps=(0.16, 0.32),
    ),
    "monocyte": Morphology(
        cell=(0.55, 0.76), lobes=(4, 5), lobe=(0.34, 0.44), bend=(0.30, 0.42), span=(1.8, 2.8), bridge=(0.90, 1.00),
        eccentric=(0, 0.25), azure=(0.18, 0.42), eosin=(0.05, 0.30), density=(0.65, 1.00), clumps=(0.15, 0.35),
        nucleoli=(0, 0.1), vacuoles=(0.4, 0.9), granule_azure=(0, 0.1),
    ),
    "blast": Morphology(
        cell=(0.52, 0.74), lobes=(1, 2), lobe=(0.74, 0.88), bend=(0, 0.08), span=(1.0, 2.0), bridge=(1, 1),
        eccentric=(0, 0.12), azure=(0.25, 0.50), eosin=(0.05, 0.30), density=(0.65, 0.95), clumps=(0.05, 0.12),
        nucleoli=(0.5, 0.9),
    ),
    "erythroblast": Morphology(
        cell=(0.42, 0.64), lobes=(1, 1), lobe=(0.44, 0.62), bend=(0, 0.05), span=(1.0, 2.0), bridge=(1, 1),
        eccentric=(0, 0.35), azure=(0.12, 0.40), eosin=(0.10, 0.40), density=(0.95, 1.25), clumps=(0.12, 0.28),
    ),
}  # fmt: skip
RANGES = np.array([astuple(morphology) for morphology in MORPHOLOGIES.values()])  # (classes, traits, 2)


def phantoms(
    n_train: int = 4000,
    n_val: int = 0,
    n_test: int = 1000,
    size: int = 28,
    seed: int = 0,
    sites: int = 0,
    progress: Silent = NO_PROGRESS,
) -> Dataset:
    """A set of drawn cells; where `sites` > 0 every image also says at which of that many sites it was taken."""
    if n_train < 1 or n_test < 1 or n_val < 0:
        raise BadInput(f"phantoms need training and test images, not {n_train} and {n_test} (validation {n_val})")
    if not 28 <= size <= 224:
        raise BadInput(f"phantoms are drawn at 28 to 224 pixels, not {size}; choose a size in that range")
    if sites < 0:
        raise BadInput(f"the number of sites cannot be {sites}; 0 means that images carry no site")
    streams = Streams(seed)
    return Dataset(
        name="phantoms",
        train=_part(streams, "train", n_train, size, sites, progress),
        val=_part(streams, "val", n_val, size, sites, progress) if n_val else None,
        test=_part(streams, "test", n_test, size, sites, progress),
        provenance=f"phantoms: drawn blood cells, no patients; {n_train} train, {n_val} val, {n_test} test images of "
        f"{size}x{size}, data seed {seed}",
    )


def _part(streams: Streams, part: str, n: int, size: int, sites: int, progress: Silent) -> ImageSet:
    blocks = -(-n // BLOCK)  # the last one is drawn whole and then cut
    labels = _dealt(streams.numpy(f"phantoms {part} labels"), blocks * BLOCK, len(MORPHOLOGIES))
    images = [
        _draw(streams.numpy(f"phantoms {part}", index=block), classes, size)
        for block, classes in progress.track(list(enumerate(np.split(labels, blocks))), f"drawing phantoms, {part}")
    ]
    return ImageSet(
        torch.from_numpy(np.concatenate(images)[:n]),
        torch.from_numpy(labels[:n]),
        tuple(MORPHOLOGIES),
        sites=torch.from_numpy(_dealt(streams.numpy(f"phantoms {part} sites"), n, sites)) if sites else None,
    )


def _dealt(rng: np.random.Generator, n: int, kinds: int) -> NDArray[np.int64]:
    """`n` numbers below `kinds`, shuffled hand by hand as cards are dealt: balanced, and stable when `n` grows."""
    hands = rng.random((-(-n // kinds), kinds)).argsort(axis=1)
    return hands.ravel()[:n].astype(np.int64)


class _Dice:
    """Uniform draws for a block of images, shaped to multiply an image plane."""

    def __init__(self, rng: np.random.Generator, n: int):
        self.rng, self.n = rng, n

    def between(self, low: float | Array, high: float | Array, *more: int) -> Array:
        """One value per image (and per entry of `more`): shape `(*more, n, 1, 1)`."""
        return low + (high - low) * self.rng.random((*more, self.n, 1, 1))

    def angle(self, *more: int) -> Array:
        return self.between(-np.pi, np.pi, *more)


def _draw(rng: np.random.Generator, labels: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
    """Images `(n, 3, size, size)` of cells of the given classes."""
    dice = _Dice(rng, len(labels))
    trait = dict(zip((f.name for f in fields(Morphology)), _traits(dice, labels), strict=True))
    axis = (np.arange(size) + 0.5) * 2 / size - 1
    x, y = axis[None, None, :], axis[None, :, None]
    # An edge is never sharper than a pixel, nor than this image's focus.
    soft: Array = np.maximum(dice.between(0.05, 0.11), 2 / size)

    azure, eosin = _red_cells(dice, x, y, soft)
    azure = _platelets(dice, x, y, soft, azure)
    radius = trait["cell"]
    x, y = x - dice.between(-0.14, 0.14), y - dice.between(-0.14, 0.14)
    turn = dice.angle()
    x, y = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    stretch = dice.between(0.92, 1.08)
    x, y = x * stretch, y / stretch

    body = _inside(_wobbly(dice, x, y, radius), soft)
    nucleus = _inside(_nucleus(dice, x, y, trait), soft) * body
    granules = _granules(dice, x, y, trait["pitch"], soft)
    chromatin = _clouds(dice, size, 14)
    spots = _spots(dice, x, y, radius, soft)
    cytoplasm = np.maximum(1 + 0.25 * _clouds(dice, size, 7) - trait["vacuoles"] * spots, 0)
    flesh = np.maximum(trait["density"] * (1 + trait["clumps"] * chromatin - 0.55 * trait["nucleoli"] * spots), 0.1)

    shown = granules * (1 - nucleus * (1 - trait["veil"]))
    azure = _over(azure, trait["azure"] * cytoplasm, body)
    eosin = _over(eosin, trait["eosin"] * cytoplasm, body)
    azure = _over(azure, flesh, nucleus)
    eosin = _over(eosin, 0.25 * flesh, nucleus)
    azure = azure + body * shown * trait["granule_azure"]
    eosin = eosin + body * shown * trait["granule_eosin"]
    return _photograph(dice, azure, eosin, size)


def _traits(dice: _Dice, labels: NDArray[np.int64]) -> Array:
    """Each image's own value of each trait of its class: `(traits, n, 1, 1)`."""
    low, high = RANGES[labels].transpose(2, 1, 0)[..., None, None]
    return dice.between(low, high, len(low))


def _inside(distance: Array, soft: Array) -> Array:
    """1 within a shape, 0 outside, smooth across its edge: smoothstep of a signed distance."""
    t: Array = np.clip(0.5 - distance / (2 * soft), 0, 1)
    return t * t * (3 - 2 * t)


def _over(below: Array, above: Array, cover: Array) -> Array:
    """One layer of dye above another, seen through a cover of 0 to 1."""
    return below + (above - below) * cover


def _red_cells(dice: _Dice, x: Array, y: Array, soft: Array) -> tuple[Array, Array]:
    """Neighbours: pale-centred discs around the middle, some of them cut by the image's edge."""
    cover = np.zeros(1)
    for _ in range(7):
        way, far = dice.angle(), dice.between(0.75, 1.35)
        radius, there = dice.between(0.24, 0.36), dice.between(0, 1) < 0.75
        away = np.hypot(x - far * np.cos(way), (y - far * np.sin(way)) * dice.between(0.8, 1.25))
        disc = _inside(away - radius, soft) * there
        pallor = dice.between(0.2, 0.8) * _inside(away - 0.45 * radius, 2 * soft)
        cover = np.maximum(cover, disc * (1 - pallor))
    return cover * dice.between(0.10, 0.20), cover * dice.between(0.20, 0.45)


def _platelets(dice: _Dice, x: Array, y: Array, soft: Array, azure: Array) -> Array:
    """Azure with up to two dark specks laid over it."""
    for _ in range(2):
        radius, there = dice.between(0.06, 0.11), dice.between(0, 1) < 0.35
        speck = _inside(np.hypot(x - dice.between(-1, 1), y - dice.between(-1, 1)) - radius, soft)
        azure = _over(azure, dice.between(0.4, 0.8), speck * there)
    return azure


def _wobbly(dice: _Dice, x: Array, y: Array, radius: Array) -> Array:
    """Signed distance to a cell's outline, a circle bent by three low harmonics."""
    angle = np.arctan2(y, x)
    bent = sum(dice.between(0, 0.05) * np.cos(k * angle + dice.angle()) for k in (2, 3, 5))
    return np.hypot(x, y) - radius * (1 + bent)


def _nucleus(dice: _Dice, x: Array, y: Array, trait: dict[str, Array]) -> Array:
    """Signed distance to a chain of lobes on an arc, joined by bridges; one lobe, or a bend of 0, makes it round."""
    cell, last = trait["cell"], np.floor(trait["lobes"] + 0.5) - 1
    # Lobes beyond the last lie upon it and make it a little uneven.
    step = np.minimum(np.arange(LOBES)[:, None, None, None], last) / np.maximum(last, 1)
    angle = trait["span"] * (step - 0.5) + dice.between(-0.12, 0.12, LOBES)
    bend = trait["bend"] * dice.between(0.85, 1.15, LOBES)
    # The arc's own middle is pulled back to the middle of the cell, as a bent nucleus lies across it.
    lobe_x = cell * (bend * np.cos(angle) - 0.5 * trait["bend"] * np.sinc(trait["span"] / (2 * np.pi)))
    lobe_y = cell * bend * np.sin(angle)
    way = dice.angle()
    lobe_x, lobe_y = lobe_x + trait["eccentric"] * cell * np.cos(way), lobe_y + trait["eccentric"] * cell * np.sin(way)
    radius = cell * trait["lobe"] * dice.between(0.88, 1.12, LOBES)
    wobble = 1 + dice.between(0, 0.06) * np.cos(3 * np.arctan2(y, x) + dice.angle())
    distance: Array = np.hypot(x - lobe_x[0], y - lobe_y[0]) - radius[0] * wobble
    for i in range(1, LOBES):
        lobe = np.hypot(x - lobe_x[i], y - lobe_y[i]) - radius[i] * wobble
        bridge = _from_segment(x, y, lobe_x[i - 1 : i + 1], lobe_y[i - 1 : i + 1]) - trait["bridge"] * radius[i]
        distance = np.minimum(distance, np.minimum(lobe, bridge))
    return distance


def _from_segment(x: Array, y: Array, ends_x: Array, ends_y: Array) -> Array:
    """Distance from each pixel to the straight line between two points."""
    along_x, along_y = ends_x[1] - ends_x[0], ends_y[1] - ends_y[0]
    x, y = x - ends_x[0], y - ends_y[0]
    share = np.clip((x * along_x + y * along_y) / np.maximum(along_x**2 + along_y**2, 1e-12), 0, 1)
    away: Array = np.hypot(x - share * along_x, y - share * along_y)
    return away


def _granules(dice: _Dice, x: Array, y: Array, pitch: Array, soft: Array) -> Array:
    """Round grains on a jittered lattice (cellular noise, Worley 1996): 1 in a grain, 0 between."""
    u, v = x / pitch + LATTICE, y / pitch + LATTICE
    column, row = np.floor(u).astype(np.int64), np.floor(v).astype(np.int64)
    jitter_x, jitter_y, grain = dice.rng.random((3, dice.n, LATTICE, LATTICE))
    image = np.arange(dice.n)[:, None, None]
    nearest = np.full(u.shape, np.inf)
    for i in (0, 1):
        for j in (0, 1):
            at = image, (row + j) % LATTICE, (column + i) % LATTICE
            away = np.hypot(u - column - i - 0.6 * (jitter_x[at] - 0.5), v - row - j - 0.6 * (jitter_y[at] - 0.5))
            nearest = np.minimum(nearest, away - 0.18 - 0.27 * grain[at])
    return _inside(nearest, 0.5 * soft / pitch)


def _clouds(dice: _Dice, size: int, cells: int) -> Array:
    """Smooth noise about 0 of scale 1: random values on a grid, spread by Gaussian weights of one grid step."""
    grid = dice.rng.standard_normal((dice.n, cells, cells))
    at = (np.arange(size) + 0.5) / size * cells - 0.5
    weights = np.exp(-(((at[:, None] - np.arange(cells)) / 0.8) ** 2))
    weights /= np.sqrt((weights**2).sum(axis=1, keepdims=True))
    cloud: Array = weights @ grid @ weights.T
    return cloud.clip(-2, 2)


def _spots(dice: _Dice, x: Array, y: Array, cell: Array, soft: Array) -> Array:
    """A few small discs within the cell: nucleoli where they lie in the nucleus, vacuoles where they do not."""
    cover = np.zeros(1)
    for start in (0, 2.1, 4.2):
        way, far = start + dice.between(0, 1.6), cell * dice.between(0.15, 0.75)
        radius = cell * dice.between(0.12, 0.20)
        cover = np.maximum(cover, _inside(np.hypot(x - far * np.cos(way), y - far * np.sin(way)) - radius, soft))
    return cover


def _photograph(dice: _Dice, azure: Array, eosin: Array, size: int) -> NDArray[np.uint8]:
    """Light through the dyes onto a camera: lamp, stain strength and uneven light of each image, then sensor noise."""
    axis = (np.arange(size) + 0.5) * 2 / size - 1
    way = dice.angle()
    slope = dice.between(0, 0.08) * (np.cos(way) * axis[None, None, :] + np.sin(way) * axis[None, :, None])
    light = dice.between(0.86, 1.02) * (1 + slope)
    azure, eosin = azure * dice.between(0.75, 1.25), eosin * dice.between(0.7, 1.3)
    channels = []
    for lamp, azure_absorbs, eosin_absorbs in zip((0.98, 0.92, 0.86), AZURE, EOSIN, strict=True):
        passed = lamp * dice.between(0.97, 1.03) * light * np.exp(-azure_absorbs * azure - eosin_absorbs * eosin)
        channels.append(passed + 0.012 * dice.rng.standard_normal((dice.n, size, size)))
    picture: Array = np.stack(channels, axis=1).clip(0, 1)
    return np.rint(picture * 255).astype(np.uint8)
