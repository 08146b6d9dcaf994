"""A hub and three or five hospitals in folders of their own, with eight-pixel images and a clock that stands still."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny import BASE, CPU, QUICK, SIZES, federation
from wardround.agreement import COORDINATOR, Agreement, agree_on
from wardround.data.federation import Site
from wardround.exchange.keys import PrivateKey
from wardround.exchange.policy import OF_SINGLE_IMAGES, ORDINARY, Policy
from wardround.learn.device import Device
from wardround.learn.predictor import Predictor
from wardround.methods.state import State
from wardround.remote.hub import Hub
from wardround.remote.site import SiteDesk
from wardround.remote.trust import Trust
from wardround.settings import overlay, validate
from wardround.tensorfile import to_bytes

TIME = "2026-03-02T10:00:00+00:00"
FIVE = ("site-1", "site-2", "site-3", "site-4", "site-5")
SITES = FIVE[:3]
IMAGES = (*SIZES, 9, 7)  # that they train on
DEVICE = Device(CPU, 1)
TASK: dict[str, Any] = {"classes": ["ash", "birch", "cedar", "durmast"], "size": 8, "channels": 3}
# A site that lets everything out, so that every method can be compared.
OPEN = Policy(
    groups=(*ORDINARY, *OF_SINGLE_IMAGES),
    never_groups=(),
    min_images_per_class=0,
    seen_by_other_sites=True,
    metrics="all",
    max_bytes_per_round=2**63,
    max_bytes_per_study=2**70,
)
KEYS = {name: PrivateKey(hashlib.sha256(name.encode()).digest()) for name in (*FIVE, COORDINATOR)}


def agreement(
    method: str = "fedavg",
    /,
    *,
    sites: tuple[str, ...] = SITES,
    quorum: int | None = None,
    deadline: Any = None,
    **changes: Any,
) -> Agreement:
    """The tiny study between these sites, every one with its key."""
    tree = overlay(BASE, {"method": method, "set": QUICK.get(method, {}), **changes})
    public = {name: key.public.text() for name, key in KEYS.items()}
    agreed = agree_on(
        validate(tree), name="tiny", task=TASK, coordinator=public[COORDINATOR], quorum=quorum, deadline=deadline
    )
    for name in sites:
        agreed = agreed.with_site(name, public[name])
    return agreed


@dataclass
class Parties:
    """Everyone who takes part in one agreement, each in a folder under `root`."""

    root: Path
    agreed: Agreement
    time: str = TIME
    policy: Policy = OPEN

    def trust(self) -> Trust:
        return Trust(self.agreed)

    def hub(self, trust: Trust | None = None) -> Hub:
        return Hub(self.root / "hub", trust or self.trust(), KEYS[COORDINATOR], DEVICE, clock=lambda: self.time)

    def desk(self, name: str, trust: Trust | None = None, policy: Policy | None = None) -> SiteDesk:
        return SiteDesk(
            self.root / name, trust or self.trust(), KEYS[name], policy or self.policy, DEVICE, clock=lambda: self.time
        )

    @property
    def sites(self) -> dict[str, Site]:
        return {site.name: site for site in federation(IMAGES[: len(self.agreed.sites)]).sites}

    def answer(self, name: str, again: bool = False) -> Path:
        """What a site does in a round."""
        return self.desk(name).train(self.sites[name], again)

    def collect(self, *names: str) -> None:
        """Train at these sites and bring their parcels to the hub."""
        for name in names:
            self.hub().collect(self.answer(name))

    def step(self, now: bool = False) -> dict[str, Path]:
        """Let the hub go on, and bring its parcels to the sites; those by site."""
        written = {path.name.split("-round")[0].removeprefix("tiny-"): path for path in self.hub().step(now)}
        for name, parcel in written.items():
            self.desk(name).receive(parcel)
        return written

    def play(self) -> dict[str, Path]:
        """To the end, everyone answering; the deliveries."""
        while True:
            standing = self.hub().standing()
            if standing.round is None:
                return self.step()
            self.collect(*(site for site, word in standing.sites.items() if word == "missing"))
            written = self.step()
            if self.hub().standing().round is None:
                return written


def predictor_hash(predictor: Predictor) -> str:
    return hashlib.sha256(to_bytes(*predictor.parts())).hexdigest()


def tree(path: Path) -> Mapping[str, bytes]:
    """Every file under a folder that a kill may not change, with its content; of a state not the seconds in it."""

    def content(file: Path) -> bytes:
        data = file.read_bytes()
        if not file.name.startswith("state-"):
            return data
        state = State.from_bytes(data)
        return State(state.groups, {key: fact for key, fact in state.facts.items() if key != "work"}).to_bytes()

    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != ".lock"]
    return {str(file.relative_to(path)): content(file) for file in files}


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))
