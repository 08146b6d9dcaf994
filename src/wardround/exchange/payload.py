"""What a method says may leave a site and come to it, before anything does.

A site's policy, the text for an ethics board and the check of every bundle are all made from this declaration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from wardround.errors import BadInput
from wardround.exchange.bundle import COUNTERS, PARAMETERS, SIZE, STATISTICS, Bundle
from wardround.models import NetSpec, spec_layout


@dataclass(frozen=True)
class Group:
    """One tensor group: what it is in plain words, and its limits.

    With `tensors` (name to shape and dtype) a bundle holds exactly these, or some of them where `partial` says so;
    without, only `max_bytes` binds. What is `occasional` goes whole or not at all, as there is something to send or
    not. So does what is `optional`: a site's policy that forbids it does not forbid the study.
    """

    name: str
    what: str
    max_bytes: int
    tensors: Mapping[str, tuple[tuple[int, ...], str]] | None = None
    partial: bool = False
    occasional: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Payload:
    """The groups a site sends up, is sent in a round, and takes home at the end; and who sees what it sends."""

    up: tuple[Group, ...] = ()
    down: tuple[Group, ...] = ()
    home: tuple[Group, ...] = ()
    seen_by: str = "the coordinator"

    def check(self, bundle: Bundle) -> None:
        """Refuse a bundle with anything undeclared, mis-shaped, too large or missing; names group and tensor."""
        declared = {"answer": self.up, "request": self.down, "delivery": self.home}[bundle.envelope.kind]
        groups = {group.name: group for group in declared}
        where = bundle.envelope
        for name, tensors in bundle.groups.items():
            group = groups.get(name)
            if group is None:
                allowed = ", ".join(groups) or "nothing"
                raise BadInput(
                    f"{where} holds group {name!r}, which {bundle.envelope.method} did not declare ({allowed})"
                )
            if bundle.bytes_by_group[name] > group.max_bytes:
                raise BadInput(
                    f"{where}: group {name!r} has {bundle.bytes_by_group[name]} bytes, declared are {group.max_bytes}"
                )
            if group.tensors is None:
                continue
            for tensor_name, tensor in tensors.items():
                found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                if group.tensors.get(tensor_name) != found:
                    expected = group.tensors.get(tensor_name, "no such tensor")
                    raise BadInput(f"{where}: {name}/{tensor_name} is {found}, declared is {expected}")
        for group in declared:
            missing = (group.tensors or {}).keys() - bundle.group(group.name).keys()
            left_out = (group.occasional or group.optional) and group.name not in bundle.groups
            if missing and not (group.partial or left_out):
                raise BadInput(f"{where} lacks {group.name}/{min(missing)}, which {bundle.envelope.method} declared")


@cache
def network_groups(spec: NetSpec, only: frozenset[str] | None = None) -> tuple[Group, ...]:
    """The three groups of a network's tensors (rule 5), all of them or those named in `only`."""
    layout = spec_layout(spec)
    words = {
        PARAMETERS: f"the weights of one {spec.name} network",
        STATISTICS: "batch-norm running means and variances: averages over this site's images, layer by layer",
        COUNTERS: "batch-norm step counters",
    }
    found = []
    for name, what in words.items():
        tensors = {
            tensor: (layout.shapes[tensor], str(layout.dtypes[tensor]).removeprefix("torch."))
            for tensor in layout.names
            if layout.groups[tensor] == name and (only is None or tensor in only)
        }
        if tensors:
            bytes_ = sum(math.prod(layout.shapes[tensor]) * layout.dtypes[tensor].itemsize for tensor in tensors)
            found.append(Group(name, what, bytes_, tensors))
    return tuple(found)


SIZE_GROUP = Group(SIZE, "how many images the site trained on", 8, {"images": ((), "int64")})
