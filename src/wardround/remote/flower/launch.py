"""Flower's programs with the settings that a hospital wants: TLS, known nodes only, nothing sent home or installed.

Flower reports usage and looks for updates unless its environment says otherwise, and installs what a project names.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.remote.flower.certificates import CA, SERVER, SERVER_KEY
from wardround.remote.flower.project import HOME
from wardround.tomltext import to_toml

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def environment(home: Path) -> dict[str, str]:
    """The environment of this process, with telemetry off, and Flower's own files in `home`.

    Flower starts its helpers by name, so the folder that this Python's programs lie in comes first.
    """
    programs = str(Path(sys.executable).parent)
    path = os.pathsep.join([programs, os.environ.get("PATH", "")])
    return {**os.environ, **QUIET, "FLWR_HOME": str(home.resolve()), "PATH": path}


def superlink(certificates: Path, host: str, port: int, database: Path) -> list[str]:
    """The command of a SuperLink behind our door: TLS, known nodes only, and it goes on where it was stopped."""
    program("flower-superlink")
    return [
        sys.executable,
        *("-m", "wardround.remote.flower.door"),
        *("--host", host, "--port", str(port)),
        *("--ssl-ca-certfile", str(_there(certificates / CA))),
        *("--ssl-certfile", str(_there(certificates / SERVER))),
        *("--ssl-keyfile", str(_there(certificates / SERVER_KEY))),
        *("--database", str(database)),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]


def node(config: Path, address: str, ca: Path, key: Path, port: int) -> list[str]:
    """The command of a site's node: a SuperNode behind our gate."""
    program("flower-supernode")
    return [
        sys.executable,
        *("-m", "wardround.remote.flower.gate"),
        *("--superlink", address, "--root-certificates", str(_there(ca))),
        *("--auth-supernode-private-key", str(_there(key))),
        *("--port", str(port), "--node-config", str(_there(config))),
    ]


def write_node_config(path: Path, study: Path, data: str, **others: str) -> Path:
    """What the site tells its node, as a file: Flower's own command line cannot quote every path."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, to_toml({"study": str(_there(study).resolve()), "data": data, **others}).encode())
    return path


def flwr(*arguments: str) -> list[str]:
    """A command of `flwr` itself."""
    return [program("flwr"), *arguments]


def program(name: str) -> str:
    """Where one of Flower's programs is; refused, with what to do, where Flower is not installed."""
    found = shutil.which(name, path=environment(Path(HOME))["PATH"])
    if found is None:
        raise BadInput(f"there is no {name} here; install it with: pip install 'wardround[flower]'")
    return found


def _there(path: Path) -> Path:
    if not path.exists():
        raise BadInput(f"there is no {path}; check the path")
    return path
