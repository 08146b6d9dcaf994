"""`model.safetensors`: a predictor with the record that says how to use it, checked when written and when read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from wardround import tensorfile
from wardround.deploy.about import LARGEST_SIDE, ModelRecord, Task, parsed
from wardround.errors import BadInput
from wardround.learn.predictor import EXTRAS, Combine, Member, Predictor
from wardround.models import spec_layout
from wardround.settings import Count, Frozen

NEEDS = {"pairs": ("trust", "member_log_prior", "votes"), "chain": ("trust", "member_log_prior")}
COMBINE = "combine"  # the group of what members are combined with, as `Predictor.parts` names it
AGAIN = "export the model again"


class NetworkRecord(Frozen):
    """A `NetSpec` from outside, within bounds: the size of what is built follows from it."""

    name: Annotated[str, Field(max_length=64)]
    channels: Annotated[int, Field(ge=1, le=3)]
    classes: Annotated[int, Field(ge=2, le=10_000)]
    size: Annotated[int, Field(ge=1, le=LARGEST_SIDE)]
    width: Annotated[int, Field(ge=1, le=4096)] | None = None
    stem: Annotated[str, Field(max_length=64)] | None = None


class PredictorRecord(Frozen):
    """What `Predictor.parts` says beside the tensors."""

    classes: Count
    combine: Combine
    members: Annotated[tuple[NetworkRecord, ...], Field(max_length=1000)]


class FileRecord(ModelRecord):
    """The whole record of the file."""

    predictor: PredictorRecord


def write_model(path: Path, predictor: Predictor, record: ModelRecord) -> None:
    """The file, whole or not at all."""
    check_fit(predictor, record.task)
    groups, own = predictor.parts()
    whole = parsed(FileRecord, {**record.model_dump(), "predictor": own}, "the model")
    tensorfile.write(path, groups, whole.model_dump(mode="json"))


def read_model(data: bytes, name: str) -> tuple[ModelRecord, Predictor]:
    """The record and the predictor in the bytes of the file `name`, of which nothing is trusted."""
    try:
        groups, found = tensorfile.from_bytes(data)
        if "format" not in found:
            raise BadInput("this is no exported model, it does not name its classes; give a file that export wrote")
        record = parsed(FileRecord, found, "the record")
        own = record.predictor.model_dump()
        wanted = {f"member-{i:03d}" for i in range(len(own["members"]))}
        strange = (wanted ^ groups.keys()) - {COMBINE} | groups.get(COMBINE, {}).keys() - set(EXTRAS)
        if strange:
            raise BadInput(f"its tensors and its record differ in {min(strange)[:80]!r}; {AGAIN}")
        predictor = Predictor.from_parts(groups, own)
        check_fit(predictor, record.task)
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from error
    return ModelRecord(task=record.task, origin=record.origin), predictor


def check_fit(predictor: Predictor, task: Task) -> None:
    """Refuse a predictor that is not for this task, whose tensors are not its networks', or that is not finite."""
    classes = len(task.classes)
    if predictor.classes != classes:
        raise BadInput(f"the model has {predictor.classes} classes, but {classes} are named; {AGAIN}")
    for member in predictor.members:
        spec = member.spec
        if (spec.classes, spec.channels, spec.size) != (classes, task.channels, task.size):
            raise BadInput(
                f"a network of the model is {spec.describe()}, but the model is said to take "
                f"{task.channels}×{task.size}×{task.size} images and to know {classes} classes; {AGAIN}"
            )
        _check_weights(member)
    _check_extras(predictor)


def _check_weights(member: Member) -> None:
    layout, network = spec_layout(member.spec), member.spec.describe()
    strange = member.weights.keys() ^ set(layout.names)
    if strange:
        raise BadInput(f"the model's tensors are not those of {network}: they differ in {min(strange)[:80]!r}; {AGAIN}")
    for name in layout.names:
        tensor = member.weights[name]
        if (tuple(tensor.shape), tensor.dtype) != (layout.shapes[name], layout.dtypes[name]):
            raise BadInput(
                f"{name} of the model is {tuple(tensor.shape)} {tensor.dtype}, but that of {network} is "
                f"{layout.shapes[name]} {layout.dtypes[name]}; {AGAIN}"
            )
        _check_finite(name, tensor)


def _check_extras(predictor: Predictor) -> None:
    """Weights and priors are broadcast: of a wrong shape they may give answers all the same, and wrong ones."""
    members, classes = len(predictor.members), predictor.classes
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "trust": ((members,), (members, classes)),
        "log_prior": ((classes,),),
        "member_log_prior": ((members, classes),),
        "votes": ((2,),),
        "voices": ((members,),),
        "sharpness": ((),),
        "least_familiar": ((),),
    }
    if predictor.combine in NEEDS:
        shapes["trust"] = ((members, classes),)
    for name in NEEDS.get(predictor.combine, ()):
        if getattr(predictor, name) is None:
            raise BadInput(f"a model combined by {predictor.combine} needs {name}, and it is not there; {AGAIN}")
    if predictor.combine == "chain" and members != 2:
        raise BadInput(f"a model combined by chain has two networks, and this one has {members}; {AGAIN}")
    for name in EXTRAS:
        tensor: torch.Tensor | None = getattr(predictor, name)
        if tensor is None:
            continue
        if tuple(tensor.shape) not in shapes[name]:
            raise BadInput(
                f"{name} of the model has shape {tuple(tensor.shape)}, which does not fit {members} networks and "
                f"{classes} classes; {AGAIN}"
            )
        _check_finite(name, tensor)
        if name == "trust" and bool((tensor < 0).any()):
            raise BadInput(f"a network of the model is trusted less than not at all; {AGAIN}")
        if name in ("votes", "voices", "sharpness") and bool((tensor <= 0).any()):
            raise BadInput(f"{name} of the model holds a number that is not above 0; {AGAIN}")


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise BadInput(f"{name} of the model holds NaN or infinite values; its training diverged, use an earlier one")
