"""`wardround hub`: what the coordinator runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wardround.errors import BadInput
from wardround.remote.cli import COORDINATOR_KEY, STUDY, Device, Key, StudyOption, group, progress, read_study, say
from wardround.show import size

if TYPE_CHECKING:
    from wardround.remote.hub import Hub

app = group("hub", "At the coordinator: collect, look who is missing, go on.")
Site = Annotated[str, typer.Argument(hidden=True)]


@app.command("collect")
def collect(
    parcels: Annotated[list[Path], typer.Argument(hidden=True)],
    study: StudyOption = STUDY,
    key: Key = None,
    replace: Annotated[bool, typer.Option("--replace", help="in the place of what a site sent before")] = False,
) -> None:
    """Verify and store PARCELS of the sites: files, or folders of them. One that is here already is told so."""
    from wardround.exchange.outside import shown

    hub = _hub(study, key, "cpu")
    refused = 0
    files = _files(parcels)
    for file in files:
        try:
            receipt, is_new = hub.collect(file, replace)
        except BadInput as error:
            refused += 1
            name = shown(file)
            say(f"refused: {error}" if name in str(error) else f"refused: {error} ({name})")
            continue
        word = "stored" if is_new else "already here"
        claimed = "" if receipt.images is None else f"says {receipt.images:,} images, "
        say(f"{word}: {receipt.site}, round {receipt.round + 1}, {claimed}{size(receipt.bytes)}, receipt {receipt.id}")
        say(*(f"  figure {name} = {value:g}" for name, value in sorted(receipt.metrics.items()) if is_new))
    _show(hub)
    if refused:
        rest = "; the others are stored" if refused < len(files) else ", and nothing is stored"
        raise BadInput(f"{refused} of {len(files)} parcels refused{rest}")


@app.command("status")
def status(study: StudyOption = STUDY, key: Key = None) -> None:
    """Say who has answered, who is missing, and what comes next."""
    _show(_hub(study, key, "cpu"))


@app.command("step")
def step(
    study: StudyOption = STUDY,
    key: Key = None,
    now: Annotated[
        bool, typer.Option("--now", help="do not wait for the missing ones; the quorum must be met")
    ] = False,
    device: Device = "auto",
) -> None:
    """Close the open round: combine what came, and write one signed parcel for every site to outbox/.

    A command that was stopped goes on when it is run again.
    """
    hub = _hub(study, key, device)
    written = hub.step(now)
    say(*(f"for a site: {path}" for path in written))
    _show(hub)


@app.command("withdraw")
def withdraw(
    site: Site,
    study: StudyOption = STUDY,
    key: Key = None,
    redo: Annotated[bool, typer.Option("--redo", help="open the last closed round again, without the site")] = False,
) -> None:
    """Let SITE leave the study: what it sent is deleted here, and it is asked no more."""
    hub = _hub(study, key, "cpu")
    record = hub.withdraw(site, redo)
    say(f"{site} has withdrawn; what it sent is deleted.")
    previous = record.previous
    if previous is not None and any((r.site, r.round) == (site, previous.number) for r in record.history):
        say(
            "The last closed round was made with it. To take it out: wardround hub reopen, then wardround hub step. "
            "Rounds before that cannot be undone."
        )
    _show(hub)


@app.command("reopen")
def reopen(study: StudyOption = STUDY, key: Key = None) -> None:
    """Open the last closed round again, for a late parcel or without a site that withdrew."""
    hub = _hub(study, key, "cpu")
    hub.reopen()
    say("Requests that were written since then no longer hold, nor do answers to them.")
    _show(hub)


def _hub(study: Path, key: Path | None, device: str) -> Hub:
    from wardround.exchange.keys import PrivateKey
    from wardround.learn.device import find_device
    from wardround.remote.hub import Hub

    trust = read_study(study)
    own = PrivateKey.load(key or study.with_name(COORDINATOR_KEY))
    return Hub(study.parent, trust, own, find_device(device), progress())


def _files(given: list[Path]) -> list[Path]:
    """Folders stand for the answers in them: not every shell writes names out, and a stick goes both ways.

    A copy may have got another name, such as `x-answer (1).parcel`.
    """
    files = [file for path in given for file in (sorted(path.glob("*-answer*.parcel")) if path.is_dir() else [path])]
    if not files:
        raise BadInput("there is no answer in what was named; their names end in -answer.parcel")
    return files


def _show(hub: Hub) -> None:
    found = hub.standing()
    asked = sum(word == "missing" for word in found.sites.values()) + found.answers
    need = "" if found.needed == asked else f", {found.needed} needed"
    where = "over" if found.round is None else f"round {found.round + 1}: {found.answers} of {asked} answers{need}"
    say(f"study {hub.agreement.name} ({hub.agreement.id}), {where}")
    width = max(map(len, found.sites))
    say(*(f"  {site:{width}}  {word}" for site, word in found.sites.items()))
    if found.last_day is not None:
        say(f"  last day of this round: {found.last_day}{' (over)' if found.is_late else ''}")
    say(*(f"note: {note}" for note in found.notes))
    if found.round is None:
        say("The study is over here: bring every site its parcel from the outbox.")
    else:
        say("Next: wardround hub step" if found.refusal is None else str(found.refusal))
