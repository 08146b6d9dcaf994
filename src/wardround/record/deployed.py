"""What a run's sites deploy: a file for each site's predictor, and what all of them deploy as one, `shared`.

Of a panel every site deploys the same networks, each with a prior of its own. They are written once, into
`networks.safetensors` beside the predictors, and a site's file says which of them are its own: fifty sites with a file
of fifty networks each would be 110 GB of ResNet-18.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wardround import tensorfile
from wardround.learn.predictor import Predictor, member_group
from wardround.tensorfile import Groups

SHARED = "shared"
NETWORKS = "networks.safetensors"


def keep(run: Path, site: str, predictor: Predictor, shared: Predictor | None) -> None:
    """A file for a site with a predictor of its own; sites that deploy the shared one have it in `shared`."""
    folder = run / "predictors"
    folder.mkdir(exist_ok=True)
    if shared is not None and predictor.identity() == shared.identity():
        if not _file(run, SHARED).exists():
            tensorfile.write(_file(run, SHARED), *shared.parts())
        return
    groups, record = predictor.parts()
    common = _places(predictor, shared)
    if shared is not None and any(place is not None for place in common):
        if not (run / NETWORKS).exists():
            tensorfile.write(run / NETWORKS, *_networks(shared))
        own = {member_group(i) for i, place in enumerate(common) if place is not None}
        groups = {name: tensors for name, tensors in groups.items() if name not in own}
        record = {**record, "networks": common}
    tensorfile.write(_file(run, site), groups, record)


def read(run: Path, site: str) -> Predictor | None:
    """What a site deploys: a predictor of its own, or the shared one; None where there is neither."""
    for name in (site, SHARED):
        if _file(run, name).is_file():
            groups, record = tensorfile.from_bytes(_file(run, name).read_bytes())
            common = record.get("networks", ())
            if common:
                networks, _ = tensorfile.from_bytes((run / NETWORKS).read_bytes())
                theirs = {
                    member_group(i): networks[member_group(place)]
                    for i, place in enumerate(common)
                    if place is not None
                }
                groups = {**groups, **theirs}
            return Predictor.from_parts(groups, record)
    return None


def _file(run: Path, name: str) -> Path:
    return run / "predictors" / f"{name}.safetensors"


def _places(predictor: Predictor, shared: Predictor | None) -> list[int | None]:
    """Which of the shared panel's networks each member is; None: another. One network is no panel."""
    if shared is None or len(shared.members) < 2:
        return [None] * len(predictor.members)
    places = {member.identity(): i for i, member in enumerate(shared.members)}
    return [places.get(member.identity()) for member in predictor.members]


def _networks(shared: Predictor) -> tuple[Groups, dict[str, Any]]:
    groups, record = shared.parts()
    names = {member_group(i) for i in range(len(shared.members))}
    return {name: tensors for name, tensors in groups.items() if name in names}, {"members": record["members"]}
