"""The commands of a study between real sites, and what they share: `wardround key`, `study`, `site`, `hub`, `flower`.

Nothing but `flower` touches a network. Every command ends by saying what to do next.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wardround.errors import BadInput
from wardround.show import printable

if TYPE_CHECKING:
    from wardround.exchange.manifest import Manifest
    from wardround.exchange.policy import Policy
    from wardround.progress import Silent
    from wardround.remote.trust import Trust

STUDY = Path("study.toml")
COORDINATOR_KEY, SITE_KEY, POLICY = "coordinator.key", "site.key", "policy.toml"

StudyOption = Annotated[Path, typer.Option("--study", help="the study file; its folder is where this side works")]
Key = Annotated[Path | None, typer.Option(help="your private key, if it does not lie beside the study file")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]


def mount(app: typer.Typer) -> None:
    """Add the commands to the program's."""
    from wardround.remote import commands_flower, commands_hub, commands_key, commands_site, commands_study

    for commands in (commands_key, commands_study, commands_site, commands_hub, commands_flower):
        app.add_typer(commands.app)


def group(name: str, help: str) -> typer.Typer:
    """A named group of commands that prints its help where no command is given."""
    app = typer.Typer(name=name, rich_markup_mode=None)

    @app.callback(invoke_without_command=True, help=help)
    def show_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    return app


def say(*lines: str) -> None:
    """Print lines in which nothing can steer the terminal, indented as they are."""
    for line in lines:
        typer.echo(" " * (len(line) - len(line.lstrip(" "))) + printable(line))


def as_typed(path: Path) -> str:
    """A path as this machine's shell wants it in a command: one with a space in it would be two."""
    return subprocess.list2cmdline([str(path)]) if os.name == "nt" else shlex.quote(str(path))


def progress() -> Silent:
    """Bars on a terminal; elsewhere notes alone: what was left out by a rule must not be lost in a log."""
    from rich.console import Console

    from wardround.progress import Bars, Lines

    console = Console(stderr=True)
    return Bars(console) if console.is_terminal else Lines()


def read_study(path: Path) -> Trust:
    """The study file and the keys that count beside it."""
    from wardround.agreement import read_agreement
    from wardround.remote.trust import Trust

    if not path.exists():
        raise BadInput(f"there is no {path} here; go to the folder of your study, or name it with --study")
    return Trust.beside(path, read_agreement(path))


def site_policy(study: Path, given: Path | None) -> Policy:
    """The rules that a site named, or those in policy.toml beside its study file, or the default ones.

    A link that leads nowhere is not "no policy": the site has rules, and they are out of reach.
    """
    from wardround.exchange.policy import read_policy

    beside = study.with_name(POLICY)
    return read_policy(given or (beside if os.path.lexists(beside) else None))


def key_text(given: str) -> str:
    """A public key given as its line of text, or as the file that holds it; parsed and written out again."""
    from wardround.exchange.keys import PublicKey

    path = Path(given)
    if given.lower().endswith(".pub"):
        try:
            given = path.read_text(encoding="utf-8-sig")  # Windows' editors put a mark in front
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"cannot read the public key {path}; check the path") from error
    return PublicKey.parse(given).text()


def contents(manifest: Manifest, images: int | None = None) -> Iterable[str]:
    """What is in a parcel: where it belongs, every group of tensors, every figure.

    `images` is how many it was trained on, where that is known: it tells what δ is worth.
    """
    from wardround.exchange.manifest import tensor_bytes
    from wardround.privacy.account import delta_notes
    from wardround.show import size

    yield f"  {manifest.kind} of {manifest.site}, round {manifest.round + 1}, method {manifest.method}"
    yield f"  study {manifest.study}; signed by {manifest.sender}; wardround {manifest.program}; {manifest.made}"
    width = max([len(name) for name in manifest.groups], default=0)
    for name, tensors in sorted(manifest.groups.items()):
        total = sum(map(tensor_bytes, tensors.values()))
        yield f"  {name:{width}}  {len(tensors):4d} tensors  {total:>13,} bytes"
    if not manifest.groups:
        yield "  no tensors"
    for name, value in sorted(manifest.privacy.items()):
        yield f"  privacy spent so far: {name} = {value:g}"
    if images is not None and "delta" in manifest.privacy:
        yield from (f"  note: {text}" for text in delta_notes(manifest.privacy["delta"], {manifest.site: images}))
    for name, value in sorted(manifest.metrics.items()):
        yield f"  figure {name} = {value:g}"
    if not manifest.metrics:
        yield "  no figures"
    yield f"  {size(manifest.bytes)} in all, SHA-256 {manifest.sha256}"
