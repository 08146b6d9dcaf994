"""Flower's short processes, forked from one that has loaded torch: loading takes seconds, and each call is a process.

Started as `starter.py SOCKET` it serves; started under the name of one of Flower's programs it passes its arguments,
environment and output on to the server, and waits. Only tests start apps so; in most soak tests Flower does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

PLACE = "WARDROUND_TEST_STARTER"
PROGRAMS = {
    "flwr": ("flwr.cli.app", "app"),
    "flwr-clientapp": ("flwr.supernode.cli", "flwr_clientapp"),
    "flwr-serverapp": ("flwr.superlink.cli", "flwr_serverapp"),
}


def install(folder: Path) -> None:
    """Programs of these names that ask the server; the folder belongs in front of the path."""
    folder.mkdir()
    for name in PROGRAMS:
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{__file__}" --as {name} "$@"\n')
        script.chmod(0o755)


def ask(arguments: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ[PLACE])
        order = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
        socket.send_fds(line, [json.dumps(order).encode()], [1, 2])
        return int(line.recv(16) or b"1")


def serve(place: str) -> None:
    import importlib

    import torch

    from wardround.methods.registry import known

    for module in ("remote.site", "sitedata", "remote.flower.client_app", "remote.flower.server_app"):
        importlib.import_module(f"wardround.{module}")
    programs = {name: getattr(importlib.import_module(place), main) for name, (place, main) in PROGRAMS.items()}
    known()
    importlib.import_module("sklearn.cluster")
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # the first optimiser loads seconds of modules
    sys.modules["onnx"] = None  # type: ignore[assignment]  # tests/deploy has ONNX; making it takes seconds
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(place)
        door.listen()
        while True:
            line, _ = door.accept()
            if os.fork() == 0:
                door.close()
                start(line, programs)
            line.close()


def start(line: socket.socket, programs: dict) -> None:  # type: ignore[type-arg]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, outputs, _, _ = socket.recv_fds(line, 2**20, 2)
    order = json.loads(data)
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.argv = order["arguments"]
    Path(os.environ[PLACE]).with_name(f"{sys.argv[0]}.pid").write_text(str(os.getpid()))
    code = 1
    try:
        programs[sys.argv[0]]()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        line.send(str(code).encode())
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "--as":
        sys.exit(ask(sys.argv[2:]))
    serve(sys.argv[1])
