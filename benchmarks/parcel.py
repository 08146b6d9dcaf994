"""A ResNet-18 in a parcel: its size over the raw tensors, the seconds to write and to verify it, the memory of many.

Baselines: the bytes of the tensors themselves; the same bundle as a plain safetensors file, written whole and read
back; for memory, a process that collects one parcel against one that collects a hundred (Linux only). Limits: 1 % over
the tensors, a second to write, a second to verify, memory for one.

    python benchmarks/parcel.py [--out parcel.json]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from common import median, report
from wardround.exchange.bundle import COUNTERS, PARAMETERS, SIZE, STATISTICS, Bundle, Envelope
from wardround.exchange.keys import PrivateKey, PublicKey
from wardround.exchange.parcel import copy_verified, read_manifest, read_parcel, write_parcel
from wardround.exchange.payload import SIZE_GROUP, Payload, network_groups
from wardround.models import NetSpec, fresh, spec_layout
from wardround.streams import Streams

MANY = 100
MIB = 2**20
SPEC = NetSpec("resnet18", 3, 8, 28)
ENVELOPE = Envelope("answer", "0123456789abcdef", "fedavg", "site-1", 0)
PAYLOAD = Payload(up=(*network_groups(SPEC), SIZE_GROUP))


def answer() -> Bundle:
    """What a site sends: a network in its three groups, and how many images it has."""
    weights, groups = fresh(SPEC, Streams(0).torch("init")), spec_layout(SPEC).groups
    parts = {
        part: {name: tensor for name, tensor in weights.items() if groups[name] == part}
        for part in (PARAMETERS, STATISTICS, COUNTERS)
    }
    return Bundle(ENVELOPE, {**parts, SIZE: {"images": torch.tensor(1000)}})


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def resident(field: str) -> float:
    """Resident MiB of this process: `VmRSS` now, `VmHWM` at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    """Let the kernel measure the peak from here on: that of importing torch would hide what comes after."""
    Path("/proc/self/clear_refs").write_text("5")


def collect(path: Path, key: str, count: int) -> None:
    """Store one parcel as often as if it were so many, and print by how many MiB memory grew at most."""
    public = PublicKey.parse(key)
    signers = {public.fingerprint: public}
    read_manifest(path, signers)
    forget_peak()
    before = resident("VmRSS")
    for number in range(count):
        target = path.with_name(f"collected-{number}.parcel")
        copy_verified(path, target, signers)
        target.unlink()  # a hundred of them need 4.5 GB of disk
    print(resident("VmHWM") - before)


def growth(path: Path, key: PublicKey, count: int) -> float:
    """MiB by which the memory of a process of its own grew at most while it collected."""
    command = [sys.executable, __file__, "--collect", str(path), "--key", key.text(), "--count", str(count)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=15)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--collect", type=Path)
    parser.add_argument("--key")
    parser.add_argument("--count", type=int)
    options = parser.parse_args()
    if options.collect:
        collect(options.collect, options.key, options.count)
        return
    bundle, key, n = answer(), PrivateKey.generate(), options.n
    signers = {key.public.fingerprint: key.public}
    with tempfile.TemporaryDirectory() as folder:
        path, plain = Path(folder) / "x.parcel", Path(folder) / "x.safetensors"
        writing = median(lambda: seconds(lambda: write_parcel(path, bundle, key, made="2026-01-01T00:00:00Z")), n)
        plain_writing = median(lambda: seconds(lambda: bundle.write(plain)), n)
        verifying = median(lambda: seconds(lambda: read_parcel(path, signers, PAYLOAD, ENVELOPE)), n)
        plain_reading = median(lambda: seconds(lambda: Bundle.from_bytes(plain.read_bytes())), n)
        copying = median(lambda: seconds(lambda: copy_verified(path, plain, signers)), n)
        size, raw = path.stat().st_size, sum(bundle.bytes_by_group.values())
        one, many = growth(path, key.public, 1), growth(path, key.public, MANY)
    rows = [
        ("baseline: the tensors", f"{raw} bytes"),
        ("the parcel", f"{size} bytes, {100 * (size / raw - 1):.3f} % over (limit 1)"),
        ("baseline: write a plain safetensors file", f"{plain_writing:.3f} s"),
        ("write and sign the parcel", f"{writing:.3f} s, {writing / plain_writing:.2f} times (limit 1 s)"),
        ("baseline: read a plain safetensors file", f"{plain_reading:.3f} s"),
        ("verify and read the parcel", f"{verifying:.3f} s, {verifying / plain_reading:.2f} times (limit 1 s)"),
        ("verify and copy the parcel", f"{copying:.3f} s"),
        ("baseline: memory to collect one", f"{one:.1f} MiB"),
        (f"memory to collect {MANY}", f"{many:.1f} MiB (limit {size / MIB:.1f}: one parcel)"),
        ("n", f"median of {n}; one process each for memory"),
    ]
    report(
        "parcel",
        rows,
        options.out,
        n=n,
        tensor_bytes=raw,
        parcel_bytes=size,
        write_s=writing,
        plain_write_s=plain_writing,
        verify_s=verifying,
        plain_read_s=plain_reading,
        copy_s=copying,
        collect_one_growth_mib=one,
        collect_many_growth_mib=many,
    )


if __name__ == "__main__":
    main()
