"""Sets larger than memory: training from the cache against memory, and DICOM files read, hashed and cached in one pass.

Baselines: the same fit on the same images in memory, epochs in turn with those from the cache (224x224, colour, a tiny
network, so that fetching images weighs as much as it can). Reading has a limit instead: 150 files of 512x512 a second
on two cores, memory under 1 GiB (Linux only).

    python benchmarks/cache.py [--images 1000] [--repeats 7] [--dicoms 10000] [--out cache.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
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

SIDE, DICOM_SIDE = 224, 512
READ = """
import json, re, sys, time
from pathlib import Path
from wardround.data.sources import load
began, cpu = time.perf_counter(), time.process_time()
data = load(str(Path(sys.argv[1]) / "table.csv"), Path(sys.argv[2]))
seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps({"images": len(data.train) + len(data.test), "seconds": seconds, "peak": peak,
                  "cpu": cpu}))
"""


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


def write_dicoms(folder: Path, count: int) -> None:
    """Files of 12-bit noise, every second one with a window, and the table that names them."""
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    noise = np.random.default_rng(0).integers(0, 4096, (DICOM_SIDE, DICOM_SIDE), dtype=np.uint16)
    lines = ["path,label"]
    for i in range(count):
        meta = FileMetaDataset()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = CTImageStorage, generate_uid()
        made = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
        made.PatientName, made.PatientID, made.Rows, made.Columns = "None^At all", str(i // 4), DICOM_SIDE, DICOM_SIDE
        made.SamplesPerPixel, made.PhotometricInterpretation, made.PixelRepresentation = 1, "MONOCHROME2", 0
        made.BitsAllocated, made.BitsStored, made.HighBit = 16, 12, 11
        made.RescaleSlope, made.RescaleIntercept = 1, -1024
        if i % 2:
            made.WindowCenter, made.WindowWidth = 40, 400
        made.PixelData = np.roll(noise, 37 * i).tobytes()
        made.save_as(folder / f"{i:05}.dcm", enforce_file_format=True)
        lines.append(f"{i:05}.dcm,{'ab'[i // 4 % 2]}")
    (folder / "table.csv").write_text("\n".join(lines))


def main() -> None:
    """Measure both and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dicoms", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        seconds = training(options.images, options.repeats, Path(place))
    ratio = statistics.median(c / m for c, m in zip(seconds["cache"], seconds["memory"], strict=True))
    with tempfile.TemporaryDirectory() as place:
        write_dicoms(Path(place), options.dicoms)
        command = [sys.executable, "-c", READ, place, str(Path(place) / "data")]
        built, again = (json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(2))
    rate, again_rate = (options.dicoms / found["seconds"] for found in (built, again))
    rows = [
        ("an epoch from the cache over one in memory", f"{ratio:.3f} (n = {options.repeats} pairs, limit 1.10)"),
        ("DICOM files read, hashed and cached a second", f"{rate:.0f} (n = {options.dicoms:,}, limit 150)"),
        ("the same a second of one processor", f"{options.dicoms / built['cpu']:.0f}"),
        ("peak memory meanwhile", f"{built['peak'] / 2**20:.0f} MiB (limit 1024)"),
        ("checked and opened again, files a second", f"{again_rate:.0f}"),
    ]
    report("cache", rows, options.out, ratio=ratio, seconds=seconds, images=options.images, reading=built, again=again)


if __name__ == "__main__":
    main()
