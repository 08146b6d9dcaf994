"""Sets larger than memory: training from a mapped cache against training from memory.

The baseline is the same fit on the same images in memory, epochs in turn with those from the cache (224x224, colour, a
tiny network, so that fetching images weighs as much as it can). `dicom_pass.py` times how a cache is made.

    python benchmarks/cache.py [--images 1000] [--repeats 7] [--out cache.json]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from common import report
from wardround.data.cache import read_images
from wardround.data.imageset import ImageSet
from wardround.data.reading import Source
from wardround.learn.fit import Fit, Recipe
from wardround.learn.trainer import train_one
from wardround.models import NetSpec, fresh
from wardround.progress import NO_PROGRESS
from wardround.streams import Streams

SIDE = 224


def training(images: int, repeats: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of one epoch, in memory and from the cache in turn: the processor's, since the machine may be shared."""
    rng = np.random.default_rng(0)
    for i in range(images):
        Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(folder / f"{i}.bmp")
    sources = [Source(folder / f"{i}.bmp") for i in range(images)]
    mapped, _ = read_images("benchmark", sources, None, folder / "cache", NO_PROGRESS, most=0)
    labels = torch.arange(images) % 2
    sets = {
        "memory": ImageSet(mapped.clone(), labels, ("a", "b")),
        "cache": ImageSet(mapped, labels, ("a", "b")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sets}
    spec = NetSpec("small", 3, 2, SIDE, 4)
    for repeat in range(repeats + 1):
        for name in sorted(sets, reverse=bool(repeat % 2)):
            fit = Fit(name, spec, fresh(spec, Streams(0).torch("init")), sets[name], Recipe(1), seed=repeat)
            began = time.process_time()
            train_one(fit, torch.device("cpu"))
            if repeat:  # the first round warms up
                seconds[name].append(time.process_time() - began)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        seconds = training(options.images, options.repeats, Path(place))
    ratio = statistics.median(c / m for c, m in zip(seconds["cache"], seconds["memory"], strict=True))
    rows = [("an epoch from the cache over one in memory", f"{ratio:.3f} (n = {options.repeats} pairs, limit 1.10)")]
    report("cache", rows, options.out, ratio=ratio, seconds=seconds, images=options.images)


if __name__ == "__main__":
    main()
