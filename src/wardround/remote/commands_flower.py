"""`wardround flower`: a study over a network, with Flower as the post."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from wardround.remote.cli import (
    SITE_KEY,
    STUDY,
    Device,
    Key,
    StudyOption,
    as_typed,
    group,
    read_study,
    say,
    site_policy,
)
from wardround.remote.commands_site import PolicyFile

app = group("flower", "Over a network: a SuperLink at the coordinator, a node at each hospital.")
Folder = Annotated[Path, typer.Argument(hidden=True)]
File = Annotated[Path, typer.Argument(hidden=True)]
StudyFile = Annotated[Path, typer.Argument(hidden=True)]
Certificates = Annotated[Path, typer.Option(help="the folder that `flower certificates` made")]
Authority = Annotated[Path, typer.Option("--ca", help="the consortium's ca.crt")]
Address = Annotated[str, typer.Option("--superlink", help="where the SuperLink is reached: HOST:PORT")]
HOME = ".flwr"


@app.command("certificates")
def certificates(
    folder: Folder = Path("certificates"),
    host: Annotated[list[str] | None, typer.Option(help="a name or address of the SuperLink; may be repeated")] = None,
) -> None:
    """Make the consortium's own authority and the SuperLink's certificate in FOLDER; run again to renew the latter."""
    from wardround.remote.flower.certificates import make_certificates

    made = make_certificates(folder, host or [])
    say(*(f"written: {path}" for path in made))
    say("Give every hospital ca.crt. The two .key files stay here, ca.key best on no machine with a network.")


@app.command("node-key")
def node_key(path: File = Path("node.key")) -> None:
    """Make the key by which the SuperLink knows this hospital's node: PATH (node.key), and a .pub beside it."""
    from wardround.remote.flower.certificates import make_node_key

    public = make_node_key(path)
    say(f"private key: {path} (never leaves this machine)", f"public key:  {public} (for the coordinator)")


@app.command("superlink")
def superlink(
    certificates: Certificates = Path("certificates"),
    host: Annotated[str, typer.Option(help="the address to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="the one port that hospitals connect to")] = 9443,
    database: Annotated[Path, typer.Option(help="where it keeps nodes and messages")] = Path("superlink.db"),
) -> None:
    """Start the coordinator's SuperLink: TLS, known nodes only, no telemetry, nothing installed at run time."""
    from wardround.remote.flower import launch

    _become(launch.superlink(certificates, host, port, database), launch.environment(Path(HOME)))


@app.command("app")
def project(
    folder: Folder,
    study: StudyOption = STUDY,
    superlink: Address = "127.0.0.1:9443",
    ca: Authority = Path("certificates/ca.crt"),
    round_seconds: Annotated[float, typer.Option(help="how long a round waits for the missing ones")] = 86400.0,
    wait_for_all: Annotated[bool, typer.Option(help="until then wait for everyone, or go on at the quorum")] = True,
) -> None:
    """Write the Flower project of a study to FOLDER: settings only, no code."""
    from wardround.remote.flower.project import write_project

    say(f"written: {write_project(folder, study, superlink, ca, round_seconds, wait_for_all)}")
    typed = as_typed(folder)
    say(f"Next: wardround flower register {typed} NODE.pub, for every node; then wardround flower run {typed}")


@app.command("register")
def register(folder: Folder, keys: Annotated[list[Path], typer.Argument(hidden=True)]) -> None:
    """Let the SuperLink of the project in FOLDER know these nodes' public KEYS; no other node may connect."""
    from wardround.remote.flower import launch
    from wardround.remote.flower.project import CONNECTION, HOME, wait_for_superlink

    commands = [launch.flwr("supernode", "register", str(key), CONNECTION) for key in keys]
    wait_for_superlink(folder)
    for command in commands:
        _run(command, launch.environment(folder / HOME))


@app.command("run")
def run(folder: Folder) -> None:
    """Start the study of the project in FOLDER, or go on with it, and show what happens."""
    from wardround.errors import RunFailed
    from wardround.remote.flower import launch
    from wardround.remote.flower.project import CONNECTION, HOME, is_over, wait_for_superlink

    command = launch.flwr("run", str(folder), CONNECTION, "--stream")
    wait_for_superlink(folder)
    _run(command, launch.environment(folder / HOME))
    if not is_over(folder):
        raise RunFailed("the study is not over; the lines above say why: run the same command again to go on")


@app.command("node")
def node(
    study: StudyFile = STUDY,
    data: Annotated[str, typer.Option(help="this site's images: a folder of class folders, or an .npz file")] = "",
    superlink: Address = "127.0.0.1:9443",
    ca: Authority = Path("ca.crt"),
    node_key: Annotated[Path, typer.Option(help="what `flower node-key` made")] = Path("node.key"),
    key: Key = None,
    policy: PolicyFile = None,
    device: Device = "auto",
    port: Annotated[int, typer.Option(help="a free port of this machine, for the node's own helpers")] = 9094,
) -> None:
    """Take part in STUDY (study.toml) as a hospital: connect to the SuperLink and answer until it is stopped.

    Only connections that go out are needed. A project that brings code is not taken.
    """
    from wardround.errors import BadInput
    from wardround.remote.flower import launch

    if not data:
        raise BadInput("this needs your images; name them with --data, a folder of class folders or an .npz file")
    source = str(Path(data).resolve()) if Path(data).exists() else data
    others = {name: str(path.resolve()) for name, path in (("key", key), ("policy", policy)) if path is not None}
    home = study.parent / HOME
    config = launch.write_node_config(home / "node.toml", study, source, device=device, **others)
    command = launch.node(config, superlink, ca, node_key, port)
    _check_site(study, key, policy)
    _become(command, launch.environment(home))


def _check_site(study: Path, key: Path | None, policy: Path | None) -> None:
    """Refuse here what every call would be refused for: nobody may look into a node's log for days."""
    from wardround.exchange.keys import PrivateKey

    trust = read_study(study)
    trust.agreement.complete()
    site = trust.site_of(PrivateKey.load(key or study.with_name(SITE_KEY)).public)
    site_policy(study, policy)
    say(f"{site} takes part in study {trust.agreement.name} ({trust.agreement.id})")


def _run(command: list[str], environment: dict[str, str]) -> None:
    code = subprocess.run(command, env=environment, check=False).returncode  # noqa: S603 - our own command line
    if code:
        raise typer.Exit(code)


def _become(command: list[str], environment: dict[str, str]) -> None:
    """Run a program in the place of this one, so that whoever stops this process stops that one."""
    say(f"$ {subprocess.list2cmdline(command)}")
    if os.name == "posix":
        os.execve(command[0], command, environment)  # noqa: S606 - our own command line
    _run(command, environment)
