"""A study between real sites as an agreement: one TOML file that every party holds, and its short hash.

It says what is learned (classes in order, image size), how (method, model, schedule, seed), who takes part and with
which key, and how many answers a round needs. It never says where images are: that is each site's own matter.
Nothing in it is secret. Two parties who read out the same `id` hold the same agreement.
"""

from __future__ import annotations

import datetime
import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from wardround.errors import BadInput
from wardround.exchange.bundle import NAME
from wardround.files import disk_errors, write_atomically
from wardround.methods.base import Method
from wardround.methods.registry import make
from wardround.privacy.plan import check as check_privacy
from wardround.settings import (
    Count,
    Frozen,
    ModelSettings,
    Name,
    PrivacySettings,
    Seed,
    Settings,
    Share,
    TrainSettings,
    checked,
    read_study_file,
    validate,
)
from wardround.study import Study
from wardround.tensorfile import canonical
from wardround.tomltext import to_toml

COORDINATOR = "coordinator"  # no site may be called so
RESERVED = ("shared", COORDINATOR)
# A folder or file of such a name cannot be made on Windows, whatever follows a dot.
WINDOWS_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}
MOST_DAYS = 3650  # in a round
# Of a run's settings, what is each party's own matter and not agreed.
LOCAL_KEYS = {
    "name",
    "data",
    "device",
    "workers",
    "policies",
    "evaluate_every",
    "evaluate_trained",
    "evaluate_features",
}


class Task(Frozen):
    """What an image is and what it may be called; the order of the classes is the order of every model's outputs."""

    classes: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=64)], ...], Field(min_length=2)]
    size: Annotated[int, Field(ge=8, le=1024)]
    channels: Literal[1, 3]
    normalisation: Literal["pixels / 127.5 - 1"] = "pixels / 127.5 - 1"  # `learn.pixels`
    val_share: Share = 0.1  # of a site's training images, kept for validation
    by_patient: bool = False  # every site needs patient ids; a site that has them never splits a patient
    slices: str | None = None  # which pictures of volumes and films, such as "middle axial"

    @field_validator("classes")
    @classmethod
    def _distinct_and_printable(cls, classes: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(classes)) < len(classes) or not all(name.isprintable() for name in classes):
            raise ValueError("it should be a list of different names that can be printed")
        return classes


class Party(Frozen):
    """A site as the agreement knows it. The key is empty until the site has made one."""

    key: str = ""


class Terms(Frozen):
    """What all sites and the coordinator do: the part of a run's settings that is agreed."""

    method: str
    seed: Seed = 0
    rounds: Count | None = None
    participants: Annotated[float, Field(gt=0, le=1)] = 1.0
    init: Literal["common", "own"] = "common"
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    privacy: PrivacySettings = PrivacySettings()
    set: dict[str, Any] = Field(default_factory=dict)


class Agreement(Frozen):
    """The agreement. `deadline` is a number of days for each round, or one date; `quorum` None means all asked."""

    format: Literal[1] = 1
    name: Name
    coordinator: str
    quorum: Count | None = None
    deadline: Count | datetime.date | None = None
    task: Task
    sites: dict[str, Party] = Field(default_factory=dict)
    settings: Terms

    @field_validator("name")
    @classmethod
    def _fits_every_disk(cls, name: str) -> str:
        if not fits_every_disk(name):
            raise ValueError("no folder of Windows can have this name; choose another")
        return name

    @field_validator("deadline", mode="before")
    @classmethod
    def _days_are_days(cls, deadline: Any) -> Any:
        """A number is one of days: left to itself, 0 would be taken for a date of 1970."""
        if isinstance(deadline, int) and (isinstance(deadline, bool) or not 1 <= deadline <= MOST_DAYS):
            raise ValueError(f"it should be a number of days from 1 to {MOST_DAYS}, or a date such as 2027-03-31")
        return deadline

    @field_validator("sites")
    @classmethod
    def _names(cls, sites: dict[str, Party]) -> dict[str, Party]:
        for name in sites:
            if not NAME.fullmatch(name) or name.lower() in RESERVED or not fits_every_disk(name):
                raise ValueError(
                    f"{name!r} is no name for a site; use letters, digits, '.', '_' and '-', at most 64, no '.' at the "
                    f"end, and none of {', '.join(RESERVED)} or Windows' own (con, nul, com1, ...)"
                )
        if len({name.lower() for name in sites}) < len(sites):
            raise ValueError("two sites differ in capitals only, which a Windows disk does not tell apart; rename one")
        return dict(sorted(sites.items()))

    @field_validator("settings")
    @classmethod
    def _no_local_files(cls, settings: Terms) -> Terms:
        if settings.method.endswith(".py"):
            raise ValueError("a study between sites needs a built-in method, so that all sides run the same code")
        if settings.model.weights is not None:
            raise ValueError("model.weights names a file of one machine; real sites start from drawn weights")
        return settings

    @property
    def id(self) -> str:
        """A short hash over everything that is agreed."""
        return hashlib.sha256(canonical(self.model_dump(mode="json")).encode()).hexdigest()[:16]

    def method(self) -> Method:
        """The method with its agreed settings."""
        return make(self.settings.method, self.settings.set)

    def study(self) -> Study:
        """What the method sees; checked as far as it can be without images."""
        task = self.task
        if not self.sites:
            raise BadInput(f"study {self.name} has no sites yet; add them with: wardround study add-site")
        settings = validate({"name": self.name, **self.settings.model_dump(mode="json")})
        study = Study(settings, task.classes, task.channels, task.size, tuple(self.sites), self.id, self.id)
        unknown = sorted(set(settings.model.per_site) - set(self.sites))
        if unknown:
            raise BadInput(f"model.per_site names {unknown[0]!r}, which is no site of {self.name}; correct the study")
        if self.quorum is not None and self.quorum > len(self.sites):
            raise BadInput(f"the quorum of {self.quorum} is more than the {len(self.sites)} sites of {self.name}")
        for site in self.sites:
            study.spec(site)
        method = self.method()
        method.check(study)
        check_privacy(study, method)
        return study

    def complete(self) -> None:
        """Refuse an agreement that cannot start: a site has no key yet, or two parties have the same one."""
        missing = [name for name, party in self.sites.items() if not party.key]
        if missing:
            raise BadInput(
                f"{', '.join(missing)} has no key in study {self.name} yet; add it with: wardround study add-site"
            )
        for name, party in self.sites.items():
            if other := self._owner_of(party.key, but=name):
                raise BadInput(
                    f"{other} and {name} have the same key in study {self.name}; take out the wrong one there, and add "
                    "the site's own with: wardround study add-site"
                )

    def with_site(self, name: str, key: str) -> Agreement:
        """One more site, or the key of a site that had none. Nobody else may have that key."""
        if name in self.sites and self.sites[name].key:
            raise BadInput(
                f"{name} has a key in this study already; a lost one is replaced with: wardround study revoke-key"
            )
        if other := self._owner_of(key, but=name):
            raise key_of_another(other, name)
        return checked(Agreement, {**self._tree(), "sites": {**self._tree()["sites"], name: {"key": key}}})

    def _owner_of(self, key: str, but: str) -> str:
        """Which other party has a key; empty where none has it."""
        parties = {COORDINATOR: self.coordinator, **{name: party.key for name, party in self.sites.items()}}
        return next((name for name, theirs in parties.items() if theirs == key and name != but), "")

    def _tree(self) -> dict[str, Any]:
        return self.model_dump(mode="python", exclude_none=True)


def key_of_another(owner: str, name: str) -> BadInput:
    """The refusal of a key that a party of the study has already."""
    return BadInput(f"this is the key of {owner} already; {name} needs one of its own, made with: wardround key new")


def fits_every_disk(name: str) -> bool:
    """Whether files can be called after a site or study on Windows, too; the characters are looked at elsewhere."""
    return not name.endswith(".") and name.partition(".")[0].lower() not in WINDOWS_DEVICES


def agree_on(
    settings: Settings,
    *,
    name: str,
    task: Mapping[str, Any],
    coordinator: str,
    sites: tuple[str, ...] = (),
    quorum: int | None = None,
    deadline: int | datetime.date | None = None,
) -> Agreement:
    """An agreement from a run's settings, every default written out: another version may have others."""
    terms = settings.model_dump(mode="json", exclude=LOCAL_KEYS)
    if not settings.method.endswith(".py"):
        terms["set"] = make(settings.method, settings.set).settings.model_dump(mode="json", exclude_none=True)
    tree: dict[str, Any] = {
        "name": name,
        "coordinator": coordinator,
        "quorum": quorum,
        "deadline": deadline,
        "task": dict(task),
        "sites": {site: {} for site in sites},
        "settings": terms,
    }
    agreement = checked(Agreement, tree)
    if agreement.sites:
        agreement.study()
    return agreement


def write_agreement(path: Path, agreement: Agreement) -> None:
    """The TOML file, whole or not at all; refused where reading it again would not give the same agreement."""
    text = to_toml(agreement._tree())
    if checked(Agreement, tomllib.loads(text)).id != agreement.id:
        raise BadInput(f"the settings of {agreement.settings.method} cannot be written as TOML; leave out empty values")
    with disk_errors(path):
        write_atomically(path, text.encode())


def read_agreement(path: Path) -> Agreement:
    """The agreement in a TOML file."""
    tree = read_study_file(path)
    if "task" not in tree or "coordinator" not in tree:
        raise BadInput(f"{path} is not a study between sites; make one with: wardround study new")
    return checked(Agreement, tree)
