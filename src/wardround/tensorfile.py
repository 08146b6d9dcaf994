"""Groups of named tensors and one small JSON record, as safetensors bytes.

The byte form of everything that is kept or sent: bundles, server state, site memory, predictors. Two rules make equal
content give equal bytes: the record is one canonical JSON string under one metadata key (safetensors writes several
keys in no fixed order), and tensors are named `group/name`, so the library's own ordering is fixed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file
from torch import Tensor

from wardround.errors import BadInput
from wardround.files import whole_or_not

Groups = Mapping[str, Mapping[str, Tensor]]
RECORD = "wardround"
DTYPE_NAMES = {  # in the order in which safetensors lays tensors out
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LAYOUT_ORDER = {dtype: place for place, dtype in enumerate(DTYPE_NAMES)}


def flatten(groups: Groups) -> dict[str, Tensor]:
    """`{"parameters": {"w": t}}` as `{"parameters/w": t}`; names that `unflatten` could not take apart are refused."""
    for group, tensors in groups.items():
        if not group or "/" in group or "" in tensors:
            raise BadInput(f"group {group!r} cannot be written: groups and tensors need names, a group's without '/'")
    return {
        f"{group}/{name}": _of_known_type(tensor, f"{group}/{name}")
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }


def unflatten(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The inverse of `flatten`; a name without a group is refused."""
    groups: dict[str, dict[str, Tensor]] = {}
    for path in sorted(tensors):
        group, slash, name = path.partition("/")
        if not (group and slash and name):
            raise BadInput(f"tensor {path[:80]!r} belongs to no group; this is not a file that wardround wrote")
        groups.setdefault(group, {})[name] = _of_known_type(tensors[path], path)
    return groups


def _of_known_type(tensor: Tensor, path: str) -> Tensor:
    if tensor.dtype not in DTYPE_NAMES:
        raise BadInput(f"tensor {path[:80]!r} is {tensor.dtype}; tensor files hold {', '.join(DTYPE_NAMES.values())}")
    return tensor


def canonical(record: Mapping[str, Any]) -> str:
    """JSON with sorted keys and no spare space: equal records give equal text."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


def to_bytes(groups: Groups, record: Mapping[str, Any]) -> bytes:
    """Serialise."""
    return save(_savable(groups), {RECORD: canonical(record)})


def write(path: Path, groups: Groups, record: Mapping[str, Any]) -> None:
    """The bytes of `to_bytes` as a file, whole or not at all; without a second copy of them in memory."""
    with whole_or_not(path) as part:
        try:
            save_file(_savable(groups), part, {RECORD: canonical(record)})
        except SafetensorError as error:  # how it reports what the operating system refused
            raise OSError(_errno(error), str(error)) from error


def _errno(error: SafetensorError) -> int:
    """The operating system's number, which safetensors leaves in the text: "... (os error 28)"."""
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else 0


def _savable(groups: Groups) -> dict[str, Tensor]:
    """On the CPU, contiguous, and no two in the same memory, which safetensors refuses."""
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for path, tensor in flatten(groups).items():
        kept = tensor.detach().cpu().contiguous()
        address = kept.untyped_storage().data_ptr()
        tensors[path] = kept.clone() if address in storages else kept
        storages.add(address)
    return tensors


def from_bytes(data: bytes) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Parse bytes from anywhere; anything that is not ours is refused, nothing is ever unpickled."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        record = json.loads(header["__metadata__"][RECORD])
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:  # RecursionError is among them
        reason = str(error).partition("\n")[0][:200]  # torch adds a stack of its own frames
        raise BadInput(f"these bytes are not a wardround tensor file ({reason}); make the file again") from error
    if not isinstance(record, dict):
        raise BadInput("the record in this tensor file is not a JSON object; make the file again")
    return unflatten(tensors), record


def read_record(path: Path) -> dict[str, Any]:
    """The record of a file that this process or an earlier one wrote, without reading its tensors."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    record: dict[str, Any] = json.loads(header["__metadata__"][RECORD])
    return record


def tensor_bytes(groups: Groups) -> dict[str, int]:
    """Bytes of tensor data per group."""
    return {group: sum(t.numel() * t.element_size() for t in tensors.values()) for group, tensors in groups.items()}


def overhead_bytes(groups: Groups, record: Mapping[str, Any]) -> int:
    """Bytes that `to_bytes` adds to the tensors: length prefix and header, padded to eight.

    Worked out from names and shapes alone, so that the ledger is byte-exact without serialising; a property test
    compares it with the real length. Offsets grow in the order in which safetensors lays tensors out: by type (see
    `DTYPE_NAMES`), then by name.
    """
    tensors = sorted(flatten(groups).items(), key=lambda item: (_LAYOUT_ORDER[item[1].dtype], item[0]))
    header: dict[str, Any] = {"__metadata__": {RECORD: canonical(record)}}
    offset = 0
    for path, tensor in tensors:
        end = offset + tensor.numel() * tensor.element_size()
        header[path] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + -(-len(text) // 8) * 8
