"""A SuperLink and a node for each hospital of a study on this machine, with TLS and authentication, and their end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from flower import starter
from remote.parties import KEYS, OPEN
from wardround.agreement import COORDINATOR, Agreement, write_agreement
from wardround.remote.flower import launch
from wardround.remote.flower.certificates import CA, make_certificates, make_node_key
from wardround.remote.flower.gate import POLL
from wardround.remote.flower.project import CONNECTION, HOME, write_project
from wardround.tomltext import to_toml

PATIENCE = 240.0  # seconds; a busy machine is slow, a hung one is not waited for
# A node looks for calls, and Flower's helpers look for work, once a second; a round here is shorter than that.
HURRY = {
    POLL: "0.3",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def children(pid: int) -> list[int]:
    """Every process below this one, however deep."""
    found, parents = [], {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    waiting = [pid]
    while waiting:
        above = waiting.pop()
        below = [child for child, parent in parents.items() if parent == above]
        found += below
        waiting += below
    return found


def write_images(path: Path, number: int) -> None:
    """The images of hospital `number`: noise of eight pixels whose brightness follows the class."""
    labels = np.arange(24 - 4 * number) % 4
    noise = np.random.default_rng(number).integers(0, 120, (len(labels), 8, 8, 3))
    pixels = (noise + 40 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(path, train_images=pixels, train_labels=labels, test_images=pixels, test_labels=labels)


class Deployment:
    """A coordinator and its hospitals, each in a folder under one root, and the processes that were started.

    The nodes join once. A folder is given to the next study when the last one is over; a node reads it at each call.
    """

    def __init__(self, root: Path, sites: tuple[str, ...], is_plain: bool = False) -> None:
        self.root, self.sites, self.is_plain = root, sites, is_plain
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.certificates, self.project = root / "certificates", root / "app"
        self.address = f"127.0.0.1:{free_port()}"

    def prepare(self, agreed: Agreement) -> None:
        """The SuperLink, and the nodes that it knows."""
        if not self.is_plain:
            starter.install(self.root / "bin")
            self._start("starter", [sys.executable, starter.__file__, str(self.root / "door")], self.root / "starter")
        make_certificates(self.certificates, ["127.0.0.1", "localhost"])
        host, port = self.address.split(":")
        command = launch.superlink(self.certificates, host, int(port), self.root / "superlink.db")
        self._start("superlink", command, self.root / "superlink")
        self.begin(agreed)
        until(lambda: self.is_plain or (self.root / "door").exists(), "the starter")
        until(lambda: self._listens(int(port)), "the SuperLink to listen")
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._register, self.sites))
        for name in self.sites:
            self.join(name)

    def begin(self, agreed: Agreement, *, wait_for_all: bool = True, round_seconds: float = PATIENCE) -> None:
        """Everyone's folder with a study that nobody has begun."""
        for name in (*self.sites, COORDINATOR):
            shutil.rmtree(self.root / name, ignore_errors=True)
            (self.root / name).mkdir()
            write_agreement(self.root / name / "study.toml", agreed)
            KEYS[name].save(self.root / name / ("coordinator.key" if name == COORDINATOR else "site.key"))
        for number, name in enumerate(self.sites):
            (self.root / name / "policy.toml").write_text(to_toml(OPEN.model_dump(mode="json")))
            write_images(self.images(name), number)
        study = self.root / COORDINATOR / "study.toml"
        write_project(self.project, study, self.address, self.certificates / CA, round_seconds, wait_for_all)

    def images(self, name: str) -> Path:
        return self.root / f"{name}.npz"

    def join(self, name: str) -> None:
        """A hospital's node."""
        home = self.root / f"{name}.home"
        config = launch.write_node_config(
            home / "node.toml", self.root / name / "study.toml", str(self.images(name)), device="cpu"
        )
        key = self.root / f"{name}.node.key"
        self._start(name, launch.node(config, self.address, self.certificates / CA, key, free_port()), home)

    def run(self, name: str) -> str:
        """The study to its end; what the run said."""
        self.launch(name).wait(PATIENCE)
        return self.said(name)

    def launch(self, name: str) -> subprocess.Popen[bytes]:
        """Start the study."""
        return self._start(name, self._flwr("run", str(self.project), CONNECTION, "--stream"), self.project / HOME)

    def said(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def helpers(self, name: str) -> list[int]:
        """The processes that a node has started."""
        return children(self.started[name].pid)

    def kill(self, name: str) -> None:
        """SIGKILL of one process alone; those that it started find out by themselves."""
        process = self.started.pop(name)
        process.kill()
        process.wait(30)

    def kill_server_app(self, run: str) -> None:
        """SIGKILL of the app beside the SuperLink, and of the command that watches it."""
        os.kill(int((self.root / "flwr-serverapp.pid").read_text()), signal.SIGKILL)
        self.kill(run)

    def _register(self, name: str) -> None:
        public = make_node_key(self.root / f"{name}.node.key")
        command = self._flwr("supernode", "register", str(public), CONNECTION)
        environment = self._environment(self.project / HOME)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def _flwr(self, *arguments: str) -> list[str]:
        program, *rest = launch.flwr(*arguments)
        return [program if self.is_plain else str(self.root / "bin" / "flwr"), *rest]

    def _start(self, name: str, command: list[str], home: Path) -> subprocess.Popen[bytes]:
        home.mkdir(parents=True, exist_ok=True)
        with (self.root / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=self._environment(home), cwd=home, stdout=log, stderr=subprocess.STDOUT
            )
        self.started[name] = process
        return process

    def _environment(self, home: Path) -> dict[str, str]:
        environment = {**launch.environment(home), **HURRY}
        if not self.is_plain:
            environment["PATH"] = os.pathsep.join([str(self.root / "bin"), environment["PATH"]])
            environment[starter.PLACE] = str(self.root / "door")
        return environment

    def _listens(self, port: int) -> bool:
        assert self.started["superlink"].poll() is None, self.said("superlink")
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def end(self) -> None:
        """Nothing that was started here is left."""
        everyone = [pid for process in self.started.values() for pid in (process.pid, *children(process.pid))]
        for pid in everyone:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.started.values():
            process.wait(30)


@contextmanager
def deployed(root: Path, agreed: Agreement, is_plain: bool = False) -> Iterator[Deployment]:
    deployment = Deployment(root, tuple(agreed.sites), is_plain)
    try:
        deployment.prepare(agreed)
        yield deployment
    finally:
        deployment.end()


def until(is_so: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    ends = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < ends, f"waited too long for {what}"
        time.sleep(0.1)
