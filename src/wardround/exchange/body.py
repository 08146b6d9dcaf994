"""The body of a parcel: safetensors bytes that must be exactly what the signed manifest says.

The bytes have their own header, which names every tensor once more. It is compared with the manifest's table before a
tensor is made, so that what a person saw in the manifest is what a method gets, and no offset is followed that points
elsewhere.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from wardround.errors import BadInput
from wardround.exchange.bundle import COUNTERS, LABEL_COUNTS, SIZE, STATISTICS, Bundle
from wardround.exchange.manifest import TYPES, Manifest, strict_json, tensor_bytes
from wardround.tensorfile import RECORD

COUNTS = (SIZE, COUNTERS, LABEL_COUNTS)
VARIANCE = "running_var"  # how the name of a running variance ends
MOST_HEADER_BYTES = 16 * 2**20  # a table of tensors, as in the manifest, with an offset for each


def unpack_body(data: bytes, manifest: Manifest) -> Bundle:
    """The bundle in a body whose hash is the manifest's; any disagreement with the manifest is refused."""
    length = int.from_bytes(data[:8], "little")
    if length > min(MOST_HEADER_BYTES, len(data) - 8):
        raise BadInput("the body's header is longer than it may be")
    header = strict_json(data[8 : 8 + length], "body's header")
    if not isinstance(header, dict):
        raise BadInput("the body's header is not a JSON object")
    _check_record(header.pop("__metadata__", None), manifest)
    _check_tensors(header, manifest)
    _check_offsets(header, len(data) - 8 - length)
    bundle = Bundle.from_bytes(data)
    refuse_impossible(bundle)
    return bundle


def refuse_impossible(bundle: Bundle) -> None:
    """Refuse numbers that nothing can have, by the tensor's name: one of them spoils every average it enters.

    NaN and infinity; fewer images or steps than none, which would take another site's part away; a variance below 0,
    of which batch norm makes NaN at every site.
    """
    for group, tensors in bundle.groups.items():
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor):
                raise BadInput(f"{bundle.envelope}: {group}/{name} holds NaN or infinite values")
            if _is_never_negative(group, name) and bool((tensor < 0).any()):
                raise BadInput(f"{bundle.envelope}: {group}/{name} holds numbers below 0, which it cannot have")


def _is_never_negative(group: str, name: str) -> bool:
    return group in COUNTS or (group == STATISTICS and name.endswith(VARIANCE))


def _is_finite(tensor: Tensor) -> bool:
    """By the smallest and the largest number, either of which is NaN where any is: no second tensor is needed."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _check_record(metadata: Any, manifest: Manifest) -> None:
    if not isinstance(metadata, dict) or metadata.keys() != {RECORD} or not isinstance(metadata[RECORD], str):
        raise BadInput("the body does not say where it belongs")
    record = strict_json(metadata[RECORD].encode(errors="replace"), "body's record")
    if record != asdict(manifest.envelope):
        raise BadInput("the body belongs elsewhere than its manifest says")


def _check_tensors(header: dict[str, Any], manifest: Manifest) -> None:
    """Every tensor of the manifest, of the same form, and no other."""
    declared = {f"{group}/{name}": form for group, t in manifest.groups.items() for name, form in t.items()}
    for path in sorted(declared.keys() ^ header.keys()):
        if path in declared:
            raise BadInput(f"the body lacks tensor {path}, which its manifest lists")
        raise BadInput(f"the body holds tensor {path[:80]!a}, which its manifest does not list")
    for path, (shape, dtype) in declared.items():
        entry = header[path]
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise BadInput(f"the body does not say of tensor {path} what it should: type, shape and place")
        if entry["dtype"] != TYPES[dtype] or not _same(entry["shape"], list(shape)):
            raise BadInput(f"tensor {path} has another shape or type in the body than in its manifest")
        start, end = _place(entry["data_offsets"], path)
        if end - start != tensor_bytes((shape, dtype)):
            raise BadInput(f"tensor {path} has more or fewer bytes in the body than its shape needs")


def _check_offsets(header: dict[str, Any], size: int) -> None:
    """One tensor after the other, without overlaps and gaps, up to the end."""
    reached = 0
    for start, end in sorted(entry["data_offsets"] for entry in header.values()):
        if start != reached:
            raise BadInput("the body's tensors overlap, or there are gaps between them")
        reached = end
    if reached != size:
        raise BadInput("the body does not end where its last tensor ends")


def _place(offsets: Any, path: str) -> tuple[int, int]:
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(o) is int and o >= 0 for o in offsets)):
        raise BadInput(f"the body does not say where tensor {path} is")
    return offsets[0], offsets[1]


def _same(found: Any, shape: list[int]) -> bool:
    """Equal as whole numbers: to Python 1, 1.0 and True are the same."""
    return isinstance(found, list) and all(type(side) is int for side in found) and found == shape
