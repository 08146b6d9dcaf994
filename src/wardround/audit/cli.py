"""`wardround audit`: a site attacks what it sent, or is about to send."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wardround.errors import BadInput
from wardround.remote.cli import STUDY, Device, progress, say

if TYPE_CHECKING:
    from wardround.audit.report import AuditRecord
    from wardround.audit.target import Target
    from wardround.learn.device import Device as FoundDevice
    from wardround.progress import Silent

What = Annotated[Path, typer.Argument(hidden=True)]
Data = Annotated[str | None, typer.Option(help="the site's images; of a run, where its settings no longer find them")]
SiteNames = Annotated[list[str] | None, typer.Option("--site", help="a site of the run; again for more (default: all)")]
Attacks = Annotated[str | None, typer.Option(help="some attacks only, by name, with commas between them")]
Out = Annotated[
    Path | None,
    typer.Option(help="folder for audit.json and audit.html (default: in the run, or beside the study file)"),
]
StudyFile = Annotated[Path, typer.Option("--study", help="the study file of a parcel")]
Shadows = Annotated[int, typer.Option(min=1, help="shadow models of LiRA")]
DecoderEpochs = Annotated[int, typer.Option(min=1, help="epochs of the decoder")]
InversionSteps = Annotated[int, typer.Option(min=1, help="steps of the inversion")]
Most = Annotated[int, typer.Option(min=8, help="images of each kind that are used, at most")]
Seed = Annotated[int, typer.Option(min=0, help="seed of the audit")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no progress, no table")]


def audit_command(
    what: What,
    data: Data = None,
    site: SiteNames = None,
    attacks: Attacks = None,
    study: StudyFile = STUDY,
    out: Out = None,
    shadows: Shadows = 4,
    decoder_epochs: DecoderEpochs = 60,
    inversion_steps: InversionSteps = 200,
    most: Most = 2000,
    seed: Seed = 0,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Attack what left a site: WHAT is the directory of a finished run, or a site's parcel.

    Writes audit.json (figures) and audit.html (figures and patients' images: it stays at the site). A command that was
    stopped goes on when it is run again.
    """
    from wardround.audit.attacks import Effort, chosen
    from wardround.audit.work import PAGE, work
    from wardround.learn.device import find_device
    from wardround.progress import Silent

    wanted = chosen([name.strip() for name in attacks.split(",")] if attacks else [])
    if not what.exists():
        raise BadInput(f"there is no {what}; give the directory of a run, or a parcel")
    shown, found_device = Silent() if quiet else progress(), find_device(device)
    effort = Effort(shadows, decoder_epochs, inversion_steps, most=most)
    # Never beside a parcel: that is the outbox, whose files are carried out, and the page shows patients' images.
    folder = out or (what / "audit" if what.is_dir() else study.with_name(f"{what.stem}-audit"))
    if (folder / "audit.json").exists():
        raise BadInput(f"{folder} holds an audit already; choose another --out, or remove it")
    targets = _targets(what, study, data, site or [], found_device, shown)
    record = work(what.name, targets, wanted, effort, seed, folder, found_device, shown)
    if not quiet:
        say(*lines(record))
    say(
        f"{folder / PAGE} shows patients' images: it stays at the site.",
        f"{folder / 'audit.json'} holds the figures alone.",
    )


def _targets(
    what: Path, study: Path, data: str | None, names: list[str], device: FoundDevice, shown: Silent
) -> Iterable[Target]:
    """Everything about the input is checked here, before the first attack."""
    if what.is_dir():
        from wardround.audit.from_run import open_run, targets

        found = open_run(what, data, names[0] if len(names) == 1 else None, shown)
        for name in names:
            found.site(name)
        return targets(found, names or found.study.sites, device, shown)
    from wardround.audit.from_parcel import target_of_parcel

    if len(names) > 1:
        raise BadInput("a parcel is of one site; name one with --site, or leave it out")
    return [target_of_parcel(what, study, data, names[0] if names else None, shown)]


def lines(record: AuditRecord) -> list[str]:
    """The figures that one looks at first, and every finding."""
    found = []
    for audit in record.sites:
        found.append(f"{audit.site} ({audit.method}, {audit.images:,} images)")
        for group in audit.groups:
            if not group.attacks:
                found.append(f"  {group.group}: not judged, no attack here is made for it")
            for attack in group.attacks:
                found.append(f"  {group.group}, {attack.name}: {attack.in_short()}")
                found += [f"    {finding}" for finding in attack.findings]
        found += [f"  note: {note}" for note in record.notes.get(audit.site, ())]
    return found
