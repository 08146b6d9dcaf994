"""What a run's sites deploy: a file for each site's predictor, and what all of them deploy as one, `shared`.

Of a panel every site deploys the same networks, each with a prior of its own. They are written once, into
`networks.safetensors` beside the predictors, and a site's file says which of them are its own: fifty sites with a file
of fifty networks each would be 110 GB of ResNet-18.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from wardround import tensorfile
from wardround.errors import BadInput
from wardround.learn.fit import weights_hash
from wardround.learn.predictor import Predictor, member_group
from wardround.tensorfile import Groups

SHARED = "shared"
NETWORKS = "networks.safetensors"


def keep(run: Path, site: str, predictor: Predictor, shared: Predictor | None) -> None:
    """A file for a site with a predictor of its own; sites that deploy the shared one have it in `shared`."""
    folder = run / "predictors"
    folder.mkdir(parents=True, exist_ok=True)
    if shared is not None and predictor.identity() == shared.identity():
        if not _file(run, SHARED).exists():
            tensorfile.write(_file(run, SHARED), *shared.parts())
        return
    groups, record = predictor.parts()
    common = _places(predictor, shared)
    if shared is not None and any(place is not None for place in common):
        if not (run / NETWORKS).exists():
            tensorfile.write(run / NETWORKS, *_networks(shared))
        of = tensorfile.read_record(run / NETWORKS)["id"]
        own = {member_group(i) for i, place in enumerate(common) if place is not None}
        groups = {name: tensors for name, tensors in groups.items() if name not in own}
        record = {**record, "networks": {"id": of, "places": common}}
    tensorfile.write(_file(run, site), groups, record)


def read(run: Path, site: str) -> Predictor | None:
    """What a site deploys: a predictor of its own, or the shared one; None where there is neither."""
    for name in (site, SHARED):
        if _file(run, name).is_file():
            groups, record = tensorfile.from_bytes(_file(run, name).read_bytes())
            if "networks" in record:
                groups = {**groups, **_in_common(run, **record["networks"])}
            return Predictor.from_parts(groups, record)
    return None


def _in_common(run: Path, id: str, places: Sequence[int | None]) -> dict[str, dict[str, Tensor]]:
    """The networks of a site's predictor that lie in the file for all of them."""
    file = run / NETWORKS
    networks, record = tensorfile.from_bytes(file.read_bytes()) if file.is_file() else ({}, {})
    if record.get("id") != id:
        found = "holds networks of another run" if record else "is missing"
        raise BadInput(f"{file} {found}, and the predictors beside it need it; copy the run as a whole")
    return {member_group(i): networks[member_group(place)] for i, place in enumerate(places) if place is not None}


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
    hashes = "".join(weights_hash(member.weights) for member in shared.members)
    own = {"members": record["members"], "id": hashlib.sha256(hashes.encode()).hexdigest()}
    return {name: tensors for name, tensors in groups.items() if name in names}, own
