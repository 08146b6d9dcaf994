"""`wardround study`: make an agreement, show it in words, rehearse it, and replace a lost key."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from wardround.errors import BadInput
from wardround.remote.cli import COORDINATOR_KEY, STUDY, Device, as_typed, group, key_text, progress, read_study, say

app = group("study", "A study between sites: the agreement that everyone holds.")
StudyFile = Annotated[Path, typer.Argument(hidden=True)]
Word = Annotated[str, typer.Argument(hidden=True)]
OF_THE_TASK = {"slices", "val_share", "by_patient"}  # what all sites agree on of a run's `data`


@app.command("new")
def new(
    study: StudyFile = STUDY,
    classes: Annotated[str, typer.Option(help="class names in order, separated by commas")] = "",
    size: Annotated[int, typer.Option(help="height and width of an image in pixels")] = 28,
    channels: Annotated[int, typer.Option(help="1 for grey images, 3 for colour")] = 3,
    sites: Annotated[str, typer.Option(help="names of the sites, separated by commas; keys come later")] = "",
    name: Annotated[str | None, typer.Option(help="what to call it (default: the settings' or file's name)")] = None,
    settings: Annotated[Path | None, typer.Option(help="a settings file (TOML) as `wardround run` takes it")] = None,
    preset: Annotated[str | None, typer.Option(help="a named set of settings, or a TOML file of your own")] = None,
    method: Annotated[str | None, typer.Option(help="a name from `wardround methods`")] = None,
    model: Annotated[str | None, typer.Option(help="network: small, cnn4, resnet18, ...")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds of a multi-round method")] = None,
    epochs: Annotated[int | None, typer.Option(help="local epochs per round")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of everything that is drawn")] = None,
    quorum: Annotated[int | None, typer.Option(help="answers that a round needs (default: all that are asked)")] = None,
    deadline: Annotated[str | None, typer.Option(help="days for each round, or one date such as 2027-03-31")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting, such as train.lr=0.01")] = None,
) -> None:
    """Write a new STUDY file (study.toml) and, if there is none beside it, a key for the coordinator."""
    from wardround.agreement import agree_on, write_agreement
    from wardround.exchange.keys import PrivateKey
    from wardround.files import disk_errors

    flags = {"method": method, "model.name": model, "rounds": rounds, "train.epochs": epochs, "seed": seed}
    chosen = _settings(settings, preset, {key: value for key, value in flags.items() if value is not None}, set_ or [])
    if study.exists():
        raise BadInput(f"{study} exists already; choose another name")
    if not _names(classes):
        raise BadInput("--classes is missing; name the classes in order, such as: --classes benign,malignant")
    task = {"classes": _names(classes), "size": size, "channels": channels}
    task |= chosen.data.model_dump(include=OF_THE_TASK, exclude_none=True)
    terms: dict[str, Any] = {"sites": _different(_names(sites)), "quorum": quorum, "deadline": _deadline(deadline)}
    placeholder = agree_on(
        chosen, name=name or chosen.name or study.stem, task=task, coordinator="", **terms
    )  # before any file is written
    with disk_errors(study.parent):
        study.parent.mkdir(parents=True, exist_ok=True)
    path = study.with_name(COORDINATOR_KEY)
    if not path.exists():
        PrivateKey.generate().save(path)
    key = PrivateKey.load(path)
    agreement = placeholder.model_copy(update={"coordinator": key.public.text()})
    write_agreement(study, agreement)
    say(f"study:           {study} ({agreement.id})", f"coordinator key: {path} (never leaves this machine)")
    say(f"fingerprint:     {key.public.fingerprint}")
    if left_out := _left_out(chosen):
        say(f"Not agreed on, so left out: {', '.join(left_out)}. Each side names its own images and device.")
    path_typed = as_typed(study)
    say(f"Next: wardround study add-site {path_typed} NAME KEY, for every site; then give {study.name} to all of them.")


@app.command("add-site")
def add_site(study: StudyFile, name: Word, key: Word) -> None:
    """Add site NAME to STUDY with its public KEY: the line of text, or the .pub file that holds it."""
    from wardround.agreement import write_agreement
    from wardround.exchange.keys import PublicKey

    trust = read_study(study)
    agreement = trust.with_site(name, key_text(key))
    agreement.study()
    write_agreement(study, agreement)
    if name not in trust.agreement.sites:  # or the name of one that waits for its key was misspelt
        say(f"{name} is new in the study, which now has: {', '.join(agreement.sites)}.")
    public = PublicKey.parse(agreement.sites[name].key)
    say(f"{name}: {public.fingerprint}", "Compare this fingerprint with the site on the phone.")
    missing = [site for site, party in agreement.sites.items() if not party.key]
    say(f"Still without a key: {', '.join(missing)}" if missing else f"Study {agreement.name} is now {agreement.id}.")


@app.command("show")
def show(
    study: StudyFile = STUDY,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="as a Markdown page, to hand in")] = False,
) -> None:
    """Say in plain words what STUDY does: what leaves a hospital, what could be tried with it, what comes back."""
    from wardround.words import describe, markdown

    trust = read_study(study)
    agreement = trust.agreement
    sections = describe(agreement.study(), agreement.method(), quorum=agreement.quorum, deadline=agreement.deadline)
    if as_markdown:
        typer.echo(markdown(sections, f"Study {agreement.name} ({agreement.id})"), nl=False)
        return
    say(f"Study {agreement.name} ({agreement.id})")
    for section in sections:
        say("", section.heading.upper(), *section.paragraphs)
    say("", "KEYS", *_keys(trust))


@app.command("rehearse")
def rehearse(
    study: StudyFile = STUDY,
    data: Annotated[list[str] | None, typer.Option(help="NAME=PATH: the images of one site; once for each")] = None,
    out: Annotated[Path | None, typer.Option(help="directory to write; must not exist")] = None,
    device: Device = "auto",
) -> None:
    """Run STUDY on this one machine with images of every site: a dress rehearsal, without keys and parcels."""
    from rich.console import Console

    from wardround.learn.device import find_device
    from wardround.remote.rehearsal import simulate
    from wardround.show import result
    from wardround.sitedata import read_site

    agreement = read_study(study).agreement
    agreement.study()
    shown = progress()
    sites, files = [], {}
    for given in data or []:
        name, equals, path = given.partition("=")
        if not equals or name not in agreement.sites:
            raise BadInput(f"--data {given} is not SITE=PATH; sites are {', '.join(agreement.sites)}")
        sites.append(read_site(agreement, name, path, shown))
        files[name] = path
    target = out or study.with_name(f"{agreement.name}-rehearsal")
    found = simulate(agreement, sites, target, find_device(device), shown, files=files)
    result(Console(), found, target, brief=True)


@app.command("revoke-key")
def revoke_key(study: StudyFile, name: Word, key: Annotated[str, typer.Argument(hidden=True)] = "") -> None:
    """Stop trusting the key of NAME (a site, or coordinator) in STUDY on this machine; KEY is its new public key.

    The agreement stays as it is. Everyone who takes parcels of NAME does this on their own machine.
    """
    trust = read_study(study)
    changed = trust.replace(name, key_text(key) if key else "", datetime.datetime.now(datetime.UTC).date().isoformat())
    path = changed.save(study)
    say(f"revoked: {changed.revoked[-1].fingerprint} of {name}, in {path}")
    if key:
        say(f"new:     {changed.key_of(name).fingerprint}", "Compare this fingerprint with its owner on the phone.")
    else:
        say(f"Nothing of {name} is taken until its new key is entered with the same command.")


@app.command("practice")
def practice(
    folder: Annotated[Path, typer.Argument(hidden=True)],
    sites: Annotated[str, typer.Option(help="names of the hospitals, separated by commas")] = "north,south",
    images: Annotated[int, typer.Option(help="training images of each; a quarter as many to test")] = 200,
) -> None:
    """Draw images for a practice study: under FOLDER a folder of class folders for each hospital."""
    from wardround.remote.practice import draw_hospitals

    classes = draw_hospitals(folder, _names(sites), images, progress=progress())
    say(*(f"{folder / name}: {images} images" for name in _names(sites)), f"classes: {','.join(classes)}")


def _settings(file: Path | None, preset: str | None, flags: dict[str, Any], assignments: list[str]) -> Any:
    """Flags over preset, preset over file, as `wardround run` does it, with the method's own settings resolved."""
    from wardround.methods.registry import own_settings
    from wardround.settings import Settings, overlay, parse_assignment, put, read_preset, read_study_file, validate

    tree = read_study_file(file) if file else {}
    if preset:
        tree = overlay(tree, read_preset(preset))
    for key, value in flags.items():
        put(tree, key, value)
    for key, value in map(parse_assignment, assignments):
        put(tree, key if key.partition(".")[0] in Settings.model_fields else f"set.{key}", value)
    settings = validate(tree)
    return settings.model_copy(update={"set": own_settings(settings.set, settings.method)})


def _left_out(settings: Any) -> list[str]:
    """The keys that were set and that an agreement does not hold."""
    from wardround.agreement import LOCAL_KEYS

    given = settings.model_dump(mode="json", exclude_defaults=True, include=LOCAL_KEYS - {"name"})
    data = given.pop("data", {})
    return sorted([*given, *(f"data.{key}" for key in data if key not in OF_THE_TASK)])


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _different(names: list[str]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"--sites names {name} twice; give every site a name of its own")
    return tuple(names)


def _deadline(text: str | None) -> int | datetime.date | None:
    """Days, or a date that the hub would not call late at once; it goes by UTC, too."""
    from wardround.remote import register

    if text is None:
        return None
    try:
        if text.isascii() and text.isdigit():
            return int(text)
        day = datetime.date.fromisoformat(text)
    except ValueError as error:
        raise BadInput(f"--deadline {text} is neither a number of days nor a date such as 2027-03-31") from error
    today = datetime.datetime.fromisoformat(register.utc_now()).date()
    if day < today:
        raise BadInput(f"--deadline {text} has passed, as it is {today} (UTC); choose today, a later date, or days")
    return day


def _keys(trust: Any) -> list[str]:
    from wardround.agreement import COORDINATOR

    agreed = {COORDINATOR: trust.agreement.coordinator, **{n: p.key for n, p in trust.agreement.sites.items()}}
    lines = []
    for name, text in agreed.items():
        known = [r for r in trust.revoked if r.who == name]
        if not text:
            lines.append(f"{name}: none yet")
        elif known and not known[-1].replacement:
            lines.append(f"{name}: revoked, none in its place")
        else:
            lines.append(f"{name}: {trust.key_of(name).fingerprint}{' (a new key)' if known else ''}")
    return lines
