"""DICOM files of 512×512 read, checked and cached in one pass: `wardround data check FOLDER --cache`.

There is no baseline but a limit: 150 files a second on two cores, memory of all processes together under 1 GiB (Linux
only). Files are drawn: 12-bit noise on a gradient, every second one with a window, four to a patient.

    python benchmarks/dicom_pass.py [--files 10000] [--out results/dicom_pass.json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from common import report

SIDE = 512
LEAST_RATE, MOST_MIB = 150, 1024


def write_dicoms(folder: Path, count: int) -> None:
    """Two classes of files; no two show the same, and none was ever of a patient."""
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    rng = np.random.default_rng(0)
    noise = rng.integers(0, 1024, (SIDE, SIDE), dtype=np.uint16)
    for i in range(count):
        coarse = rng.integers(0, 2048, (8, 8), dtype=np.uint16)
        picture = np.roll(noise, 37 * i) + np.kron(coarse, np.ones((SIDE // 8, SIDE // 8), np.uint16))
        meta = FileMetaDataset()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = CTImageStorage, generate_uid()
        made = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
        made.PatientName, made.PatientID, made.Rows, made.Columns = "None^At all", str(i // 4), SIDE, SIDE
        made.SamplesPerPixel, made.PhotometricInterpretation, made.PixelRepresentation = 1, "MONOCHROME2", 0
        made.BitsAllocated, made.BitsStored, made.HighBit = 16, 12, 11
        made.RescaleSlope, made.RescaleIntercept = 1, -1024
        if i % 2:
            made.WindowCenter, made.WindowWidth = 500, 3000
        made.PixelData = picture.tobytes()
        place = folder / "ab"[i // 4 % 2]
        place.mkdir(exist_ok=True)
        made.save_as(place / f"{i:05}.dcm", enforce_file_format=True)


def memory(process: int) -> int:
    """Bytes that a process and those it started hold now; pages of files, which the system may drop, left out."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except (OSError, ValueError):
            continue
        if str(process) in (fields["Pid"].strip(), fields["PPid"].strip()) and "RssAnon" in fields:
            total += int(fields["RssAnon"].split()[0]) * 1024
    return total


def measure(folder: Path) -> tuple[float, int, str]:
    """Seconds of the command from start to end, the most memory seen meanwhile, and what it said."""
    command = [sys.executable, "-m", "wardround", "data", "check", str(folder / "set"), "--cache"]
    where = ["--folder", str(folder / "data"), "--out", str(folder / "page.html")]
    began = time.perf_counter()
    process = subprocess.Popen([*command, *where], stdout=subprocess.PIPE, text=True)
    peak = 0

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            time.sleep(0.25)

    watcher = threading.Thread(target=watch)
    watcher.start()
    said, _ = process.communicate()
    seconds = time.perf_counter() - began
    watcher.join()
    if process.returncode or "cached in" not in said:
        raise SystemExit(f"the check ended with {process.returncode}:\n{said}")
    return seconds, peak, said


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "set").mkdir()
        write_dicoms(Path(place) / "set", options.files)
        seconds, peak, said = measure(Path(place))
    rate = options.files / seconds
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = used.ru_utime + used.ru_stime
    rows = [
        ("files read, checked and cached a second", f"{rate:.0f} (n = {options.files:,}, limit {LEAST_RATE})"),
        ("the same a second of processor time", f"{options.files / processor:.0f}"),
        ("peak memory of all processes", f"{peak / 2**20:.0f} MiB (limit {MOST_MIB:,})"),
    ]
    print(json.dumps(said.splitlines()[:6], indent=1))
    figures = {"files": options.files, "seconds": seconds, "processor_seconds": processor, "peak_bytes": peak}
    report("dicom_pass", rows, options.out, files_a_second=rate, **figures)


if __name__ == "__main__":
    main()
