"""`wardround site`: what a hospital runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wardround.errors import BadInput
from wardround.remote.cli import (
    POLICY,
    SITE_KEY,
    STUDY,
    Device,
    Key,
    StudyOption,
    as_typed,
    contents,
    group,
    progress,
    read_study,
    say,
    site_policy,
)

if TYPE_CHECKING:
    from wardround.remote.site import SiteDesk

app = group("site", "At a hospital: train, look at what would leave, receive.")
StudyFile = Annotated[Path, typer.Argument(hidden=True)]
ParcelFile = Annotated[Path, typer.Argument(hidden=True)]
Data = Annotated[str | None, typer.Option(help="this site's images: a folder of class folders, or an .npz file")]
PolicyFile = Annotated[Path | None, typer.Option(help="this site's rules, if not policy.toml beside the study file")]


@app.command("train")
def train(
    study: StudyFile = STUDY,
    data: Data = None,
    key: Key = None,
    policy: PolicyFile = None,
    again: Annotated[bool, typer.Option("--again", help="answer a round that the coordinator redoes")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="train once more, in the place of the answer that is there")
    ] = False,
    device: Device = "auto",
) -> None:
    """Answer the open request of STUDY (study.toml) with this site's images; leaves one parcel in outbox/.

    A command that was stopped goes on from its last epoch when it is run again.
    """
    from wardround.exchange.parcel import read_manifest
    from wardround.sitedata import read_site

    desk = _desk(study, key, policy, device)
    site = read_site(desk.agreement, desk.name, _given(data), desk.progress)
    parcel = desk.train(site, again, replace)
    own = {desk.key.public.fingerprint: desk.key.public}
    say(f"{desk.name} would send {parcel}:", *contents(read_manifest(parcel, own)))
    say(f"Look closer with: wardround site inspect {as_typed(parcel)}{_with_study(study)}")
    say("Nothing leaves unless you carry it to the coordinator.")


@app.command("inspect")
def inspect(
    parcel: ParcelFile,
    study: StudyOption = STUDY,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
) -> None:
    """Show everything that is in PARCEL, and check it: signature, hash, what the method declares, every number."""
    from wardround.exchange.bundle import SIZE
    from wardround.remote.inspection import read_any

    manifest, bundle = read_any(parcel, read_study(study))
    images = bundle.group(SIZE).get("images")
    say(f"{parcel}, verified:", *contents(manifest, None if images is None else int(images)))
    if tensors:
        for group_name, table in sorted(manifest.groups.items()):
            for name, (shape, dtype) in sorted(table.items()):
                say(f"  {group_name}/{name}  {'x'.join(map(str, shape)) or 'one number'}  {dtype}")


@app.command("receive")
def receive(
    parcel: ParcelFile,
    data: Data = None,
    study: StudyOption = STUDY,
    key: Key = None,
    policy: PolicyFile = None,
    device: Device = "auto",
) -> None:
    """Take a PARCEL of the coordinator's: a request to train on, or what this site takes home.

    What is taken home is made this site's own with its images, measured on its test images, and exported to models/.
    """
    from wardround.sitedata import read_site

    desk = _desk(study, key, policy, device)
    manifest = desk.receive(parcel)
    if manifest.kind == "request":
        say(f"This is a request of round {manifest.round + 1}, stored.")
        say(f"Next: wardround site train {as_typed(study)} --data YOUR-IMAGES")
        return
    site = read_site(desk.agreement, desk.name, _given(data), desk.progress)
    home = desk.take_home(site)
    say(
        f"{desk.name}: accuracy {100 * home.accuracy:.1f} %, balanced accuracy {100 * home.balanced_accuracy:.1f} % "
        f"on its own {home.images:,} test images"
    )
    exported = desk.deploy(site, home)
    say(*exported.lines, f"Use it with: wardround predict {as_typed(exported.folder)} IMAGES")


@app.command("policy")
def policy(study: StudyOption = STUDY, file: PolicyFile = None) -> None:
    """Write policy.toml, this site's rules, to begin with; or check the one that is there against the study."""
    from wardround.agreement import COORDINATOR
    from wardround.exchange.policy import default_policy_text, read_policy
    from wardround.files import disk_errors, write_atomically
    from wardround.privacy.plan import agreed_promise

    path = file or study.with_name(POLICY)
    if not os.path.lexists(path):
        with disk_errors(path):
            write_atomically(path, default_policy_text().encode())
        say(f"{path} holds the rules that hold without it; change what you want to have otherwise.")
        return
    rules = read_policy(path)
    say(f"{path} can be used.")
    if study.exists():
        trust = read_study(study)
        agreed, method = trust.agreement.study(), trust.agreement.method()
        coordinator = trust.key_of(COORDINATOR).fingerprint
        promised = agreed_promise(agreed.settings.privacy)
        stay: dict[str, str] = {}
        for site in agreed.sites:
            stay |= rules.check_plan(agreed, method, method.payload(agreed, site), coordinator, None, promised)
        say(f"It lets study {trust.agreement.name} pass; what would really leave is checked again.")
        say(*(f"Without {name}, which the study can do without: {reason}." for name, reason in sorted(stay.items())))


def _desk(study: Path, key: Path | None, policy: Path | None, device: str) -> SiteDesk:
    from wardround.exchange.keys import PrivateKey
    from wardround.learn.device import find_device
    from wardround.remote.site import SiteDesk

    trust = read_study(study)
    own = PrivateKey.load(key or study.with_name(SITE_KEY))
    return SiteDesk(study.parent, trust, own, site_policy(study, policy), find_device(device), progress())


def _with_study(study: Path) -> str:
    """What a further command needs to be told of the study, where it is not the one that is looked for."""
    return "" if study == STUDY else f" --study {as_typed(study)}"


def _given(data: str | None) -> str:
    if not data:
        raise BadInput("this needs your images; name them with --data, a folder of class folders or an .npz file")
    return data
