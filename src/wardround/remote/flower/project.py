"""The Flower project of a study: one file that names our two apps, and no code.

`flwr run` sends a project to every node that takes part. This one holds nothing that could run: the apps that it names
are those of the wardround that each side has installed. A node that was started with `wardround flower node` takes no
other (`gate.py`).
"""

from __future__ import annotations

import math
import socket
import time
import tomllib
from pathlib import Path
from typing import Any

from wardround import __version__
from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.tomltext import to_toml

CONNECTION = "local-deployment"  # what `flwr` calls the SuperLink
HOME = "flwr"  # a folder in the project for Flower's own files, in the place of ~/.flwr
COMPONENTS = {
    "serverapp": "wardround.remote.flower.server_app:app",
    "clientapp": "wardround.remote.flower.client_app:app",
}


def write_project(
    folder: Path, study: Path, superlink: str, ca: Path, round_seconds: float, wait_for_all: bool
) -> Path:
    """The project of a study, and how `flwr` reaches the SuperLink."""
    if not study.exists():
        raise BadInput(f"there is no {study}; make the study first with: wardround study new")
    if not ca.exists():
        raise BadInput(f"there is no {ca}; make it first with: wardround flower certificates")
    if not 0 < round_seconds < math.inf:
        raise BadInput(f"a round cannot wait for {round_seconds:g} seconds; use a number above 0, such as 86400")
    home = folder / HOME
    connection = {"address": superlink, "root-certificates": str(ca.resolve())}
    with disk_errors(folder):
        home.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "pyproject.toml", to_toml(_project(study, round_seconds, wait_for_all)).encode())
        config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
        write_atomically(home / "config.toml", to_toml(config).encode())
    return folder / "pyproject.toml"


def wait_for_superlink(folder: Path, seconds: float = 60.0) -> None:
    """Wait until something listens where the project's SuperLink should be."""
    address = str(_read(folder / HOME / "config.toml")["superlink"][CONNECTION]["address"])
    host, _, port = address.rpartition(":")
    ends = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except (OSError, ValueError) as error:
            if time.monotonic() > ends:
                raise BadInput(f"nothing answers at {address}; start it with: wardround flower superlink") from error
            time.sleep(0.2)
        else:
            return


def is_over(folder: Path) -> bool:
    """Whether the hub of the project's study has closed its last round."""
    from wardround.remote.hubrecord import HubRecord  # loads torch, which a node itself does without
    from wardround.remote.register import Register

    study = Path(str(_read(folder / "pyproject.toml")["tool"]["flwr"]["app"]["config"]["study"]))
    record = Register(study.parent / "hub", HubRecord, "hub.json").read()
    return record is not None and record.current is None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read; write the project with: wardround flower app") from error


def _project(study: Path, round_seconds: float, wait_for_all: bool) -> dict[str, Any]:
    app = {
        "publisher": "wardround",
        "fab-include": ["pyproject.toml"],
        "components": COMPONENTS,
        "config": {"study": str(study.resolve()), "round-seconds": round_seconds, "wait-for-all": wait_for_all},
    }
    project = {
        "name": "wardround-study",
        "version": __version__,
        "description": "a study between sites",
        "license": "Apache-2.0",
        "dependencies": [],
    }
    return {"project": project, "tool": {"flwr": {"app": app}}}
