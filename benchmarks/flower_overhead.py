"""What a round over Flower costs beyond the same round in-process: three nodes on loopback, TLS, ResNet-18 parcels.

The baseline is the in-process run of the same agreement, on the same images, in the same minute: a round's share of its
seconds. Each site trains one step on eight images, so that a round is mostly the way there and back: 45 MB down and 45
MB up for each of three sites. Everything runs on this machine, so three nodes share its cores; at hospitals they would
not. A node looks for calls once a second, and each call starts a process that loads torch.

    python benchmarks/flower_overhead.py [--rounds 6] [--out flower_overhead.json]
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from common import report
from wardround.agreement import COORDINATOR, Agreement, agree_on, write_agreement
from wardround.exchange.keys import PrivateKey
from wardround.learn.device import find_device
from wardround.remote.flower import launch
from wardround.remote.flower.certificates import CA, make_certificates, make_node_key
from wardround.remote.flower.project import CONNECTION, HOME, wait_for_superlink, write_project
from wardround.remote.rehearsal import simulate
from wardround.settings import validate
from wardround.sitedata import read_site

SITES = ("site-1", "site-2", "site-3")
IMAGES, SIZE = 8, 28


def agreement(keys: dict[str, PrivateKey], rounds: int) -> Agreement:
    """FedAvg with a ResNet-18 among three sites."""
    settings = {
        "method": "fedavg",
        "rounds": rounds,
        "model": {"name": "resnet18"},
        "train": {"epochs": 1, "batch": IMAGES},
    }
    task = {"classes": ["a", "b"], "size": SIZE, "channels": 3, "val_share": 0.0}
    agreed = agree_on(validate(settings), name="bench", task=task, coordinator=keys[COORDINATOR].public.text())
    for name in SITES:
        agreed = agreed.with_site(name, keys[name].public.text())
    return agreed


def prepare(root: Path, rounds: int) -> Agreement:
    """A folder for everyone, and a few images of noise for each site."""
    keys = {name: PrivateKey.generate() for name in (*SITES, COORDINATOR)}
    agreed = agreement(keys, rounds)
    for name, key in keys.items():
        (root / name).mkdir()
        write_agreement(root / name / "study.toml", agreed)
        key.save(root / name / ("coordinator.key" if name == COORDINATOR else "site.key"))
    for number, name in enumerate(SITES):
        pixels = np.random.default_rng(number).integers(0, 256, (IMAGES, SIZE, SIZE, 3), dtype=np.uint8)
        labels = np.arange(IMAGES) % 2
        np.savez(root / f"{name}.npz", train_images=pixels, train_labels=labels, test_images=pixels, test_labels=labels)
    return agreed


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rounds_over_flower(root: Path) -> list[float]:
    """Seconds from the beginning of each round to the beginning of the next one, or of the delivery."""
    port, project, certificates = free_port(), root / "app", root / "certificates"
    make_certificates(certificates, [])
    address = f"127.0.0.1:{port}"
    write_project(project, root / COORDINATOR / "study.toml", address, certificates / CA, 3600.0, True)
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], home: Path) -> None:
        home.mkdir(exist_ok=True)
        with (home / "log").open("wb") as log:
            environment = {**launch.environment(home), "OMP_NUM_THREADS": "1"}
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    try:
        start(launch.superlink(certificates, "127.0.0.1", port, root / "superlink.db"), root / "superlink")
        wait_for_superlink(project)
        for name in SITES:
            public = make_node_key(root / f"{name}.node.key")
            command = launch.flwr("supernode", "register", str(public), CONNECTION)
            subprocess.run(command, env=launch.environment(project / HOME), check=True, capture_output=True)
            home = root / f"{name}.home"
            config = launch.write_node_config(
                home / "node.toml", root / name / "study.toml", str(root / f"{name}.npz"), device="cpu"
            )
            start(launch.node(config, address, certificates / CA, root / f"{name}.node.key", free_port()), home)
        return _time_rounds(project)
    finally:
        for process in started:
            process.kill()
            process.wait()


def _time_rounds(project: Path) -> list[float]:
    """By what the run says, as it says it."""
    began: list[float] = []
    is_over = False
    command = launch.flwr("run", str(project), CONNECTION, "--stream")
    with subprocess.Popen(command, env=launch.environment(project / HOME), stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout or ():
            if re.match(r"round \d+:", line) or ("to take home" in line and not is_over):
                began.append(time.perf_counter())
                is_over = "to take home" in line
    return [after - before for before, after in pairwise(began)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        agreed = prepare(root, options.rounds)
        sites = [read_site(agreed, name, str(root / f"{name}.npz")) for name in SITES]
        began = time.perf_counter()
        simulate(agreed, sites, root / "run", find_device("cpu"))
        baseline = (time.perf_counter() - began) / options.rounds
        first, *others = rounds_over_flower(root)
        parcel = max(file.stat().st_size for file in (root / SITES[0] / "outbox").glob("*.parcel"))
    median = statistics.median(others)
    is_busy = load > 0.5 * cores
    rows = [
        ("baseline: a round in-process", f"{baseline:.2f} s"),
        ("a round over Flower", f"{median:.2f} s, {min(others):.2f} to {max(others):.2f}"),
        ("beyond in-process", f"{median - baseline:.2f} s a round"),
        ("the first round, in which nodes may still be joining", f"{first:.2f} s"),
        ("a parcel", f"{parcel:,} bytes; three go down and three come up in a round"),
        ("n", f"median of {len(others)} rounds, the first left out"),
        ("load of the machine before", f"{load:.1f} on {cores} cores{': busy, these are upper bounds' * is_busy}"),
    ]
    report(
        "flower_overhead",
        rows,
        options.out,
        n=len(others),
        in_process_s=baseline,
        flower_s=median,
        flower_all_s=others,
        first_s=first,
        beyond_s=median - baseline,
        parcel_bytes=parcel,
        load_before=load,
        is_busy=is_busy,
    )


if __name__ == "__main__":
    main()
