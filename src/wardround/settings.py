"""What a user may set, with every default, limit and reason in one place.

Settings come from a study file (TOML, or the `settings.json` of an earlier run), then a preset, then flags; the later
wins. All of it is validated here before any work starts, and every complaint names the key.
"""

from __future__ import annotations

import datetime
import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from wardround.errors import BadInput
from wardround.files import read_text


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text):
        raise ValueError(
            "it should have letters, digits, '.', '_' and '-' only, at most 64, and begin with a letter or digit"
        )
    return text


Name = Annotated[str, AfterValidator(_name)]  # of a run or study, and so of its folder and files
Share = Annotated[float, Field(ge=0, lt=1)]
LARGEST = 1e30  # beyond it single precision overflows within a step or two
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Epochs = Annotated[int, Field(ge=0)]
# Which of the two is meant is told first, so that a complaint speaks of that one alone.
EpochsPerRound = Annotated[
    Annotated[Epochs, Tag("<number>")] | Annotated[tuple[Epochs, ...], Field(min_length=1), Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list | tuple) else "<number>"),
]
Record = TypeVar("Record", bound=BaseModel)
WANTED = {  # pydantic's complaints that name Python's types or its own workings, in a study's words
    "model_type": "It should be a table",
    "dict_type": "It should be a table",
    "string_type": "It should be text",
    "path_type": "It should be a path",
    "bool_type": "It should be true or false",
    "bool_parsing": "It should be true or false",
    "int_type": "It should be a whole number",
    "int_parsing": "It should be a whole number",
    "int_parsing_size": "It should be a smaller number",
    "int_from_float": "It should be a whole number",
    "float_type": "It should be a number",
    "float_parsing": "It should be a number",
    "tuple_type": "It should be a list",
    "too_short": "It should be a list of {min_length} or more",
}


class Frozen(BaseModel):
    """A settings record: closed, unchangeable, every number finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataSettings(Frozen):
    """Which images, and how they become sites."""

    source: str = "phantoms"
    folder: Path | None = None  # where named sets are; None: $WARDROUND_DATA or ~/.wardround/data
    size: Annotated[int, Field(ge=8, le=1024)] | None = None
    slices: str | None = None  # which pictures of volumes and films, such as "middle axial"
    groups: Path | None = None  # a table of whose the images of an .npz file are
    files: dict[str, str] = {}  # one file or folder per site, by site name; then `source` is not used
    sites: Annotated[int, Field(ge=0)] = 5  # 0 with natural sites: as many as there are
    partition: Literal["dirichlet", "iid", "shards", "natural"] = "dirichlet"
    alpha: Positive = 0.3
    capped: bool = True  # FedISCA's routine, which stops filling a site at n/N images
    classes_per_site: Count = 2
    min_size: Count = 10
    by_patient: bool | None = None  # None: wherever the images have patient ids
    partition_seed: Seed = 0
    partition_file: Path | None = None
    merge_val: bool = True
    val_share: Share = 0.1
    # None: the official test set weighted to the site's label mix; for natural sites and files, the site's own part
    test: Literal["weighted", "own", "balanced", "natural"] | None = None
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    shift: Literal["none", "fixed", "drawn"] = "none"
    shift_strength: NotNegative = 1.0


class ModelSettings(Frozen):
    """Which network; `per_site` names another one for some sites."""

    name: str = "small"
    width: Annotated[int, Field(ge=1, le=4096)] | None = None
    stem: Literal["small", "imagenet"] | None = None
    per_site: dict[str, str] = {}
    weights: Path | None = None  # a safetensors file to start from


class TrainSettings(Frozen):
    """How a site trains. `epochs` may be a list, one number per round."""

    epochs: EpochsPerRound = 2
    batch: Count = 64
    optimiser: Literal["sgd", "adam"] = "sgd"
    lr: Positive = 0.05
    momentum: Share = 0.9
    weight_decay: NotNegative = 1e-4
    schedule: Literal["constant", "step", "cosine"] = "constant"
    milestones: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.5, 0.75)
    gamma: Positive = 0.1
    round_decay: Positive = 0.95  # the learning rate is multiplied by this after every round
    clip_norm: Positive | None = None
    augment: bool = False
    augmentation: Literal["shift", "zoom"] = "shift"
    checkpointing: bool = False  # less memory, a third more work: activations are computed again for the gradient
    precision: Literal["fp32", "bf16"] = "fp32"
    keep: Literal["last", "best", "first-best"] = "last"


class PrivacySettings(Frozen):
    """What a site does to what leaves it, with noise from a secret of its own. Off unless something is set."""

    epsilon: Positive | None = None  # of DP-SGD over the whole study, for one image; None: ordinary training
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    clip: Positive = 1.0  # norm to which each image's gradient is cut
    noise: Positive | None = None  # noise multiplier; None: the least that keeps within epsilon
    counts_epsilon: Positive | None = None  # label counts are noised and binned, once a round at this cost
    feature_clip: Positive | None = None  # norm to which embeddings and prototypes are cut before they leave
    feature_noise: NotNegative = 0.0  # deviation of noise on them, over feature_clip


class Settings(Frozen):
    """Everything a run depends on, apart from the images themselves and the program's version."""

    name: Name | None = None
    method: str = "fedavg"
    seed: Seed = 0
    rounds: Count | None = None  # None: 20 for a multi-round method, one for those that talk once
    participants: Annotated[float, Field(gt=0, le=1)] = 1.0
    init: Literal["common", "own"] = "common"
    evaluate_every: Count = 1
    evaluate_trained: bool = False  # one more pass over a local test for every site that is asked
    evaluate_features: bool = False  # at the end, how far each site's features are from all sites'
    device: str = "auto"
    workers: Count | None = None
    policies: dict[str, Path] = {}  # by site: what it lets out, a file as docs/policy.md has it
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    privacy: PrivacySettings = PrivacySettings()
    set: dict[str, Any] = {}  # the method's own settings


def read_study_file(path: Path) -> dict[str, Any]:
    """The settings in a TOML study file, or in the settings.json that a run wrote."""
    kind = "JSON" if path.suffix == ".json" else "TOML"
    text = read_text(path, "study file")
    try:
        found = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not valid {kind}: {error}; correct it") from error
    if not isinstance(found, dict):
        raise BadInput(f"{path} holds no settings; a study file is a table of keys and values")
    return found


def preset_names() -> list[str]:
    """The presets that come with the package."""
    return sorted(
        p.name.removesuffix(".toml") for p in resources.files("wardround.presets").iterdir() if p.name.endswith(".toml")
    )


def read_preset(name: str) -> dict[str, Any]:
    """A named preset, or a TOML file of the user's own."""
    if name in preset_names():
        return tomllib.loads((resources.files("wardround.presets") / f"{name}.toml").read_text(encoding="utf-8"))
    if name.endswith(".toml"):
        return read_study_file(Path(name))
    known = f"one of {', '.join(preset_names())}, or " if preset_names() else ""
    raise BadInput(f"there is no preset {name!r}; use {known}the path of a TOML file")


def parse_assignment(text: str) -> tuple[str, Any]:
    """`train.lr=0.1` as (key, value); the value is read as TOML, and as plain text where it is none (or a date)."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise BadInput(f"--set {text!r} is not key=value; write for example --set train.lr=0.01")
    try:
        found = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        found = {}
    is_one_value = found.keys() == {"value"} and not isinstance(found["value"], datetime.date | datetime.time)
    return key.strip(), found["value"] if is_one_value else value


def put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `a.b.c` in nested tables."""
    *path, last = dotted.split(".")
    for key in path:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise BadInput(f"{dotted} cannot be set: {key} is a value, not a table")
    tree[last] = value


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables laid over one another; the top wins. A table over a value is refused, as it would hide a slip."""
    merged = dict(base)
    for key, value in top.items():
        under = merged.get(key, {})
        if isinstance(value, dict) and not isinstance(under, dict):
            raise BadInput(f"{key} = {_short(under)} cannot be used: it should be a table")
        merged[key] = overlay(under, value) if isinstance(value, dict) else value
    return merged


def validate(tree: Mapping[str, Any]) -> Settings:
    """Settings from nested tables, or one line that names the key that is wrong."""
    return checked(Settings, tree)


def checked(record: type[Record], tree: Mapping[str, Any], prefix: str = "") -> Record:
    """Validate against any settings record; the first complaint becomes a `BadInput`."""
    try:
        return record.model_validate(dict(tree))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        inner = [str(part) for part in first["loc"] if not str(part).startswith(("<", "constrained-", "function-"))]
        path = [*([prefix] if prefix else []), *inner]
        if first["type"] == "extra_forbidden":
            raise BadInput(_unknown_key(record, prefix, path)) from error
        if first["type"] == "missing":
            raise BadInput(f"{'.'.join(path)} is not set and has no default; set it") from error
        shown = "a table" if isinstance(first["input"], dict) else _short(first["input"])
        known = WANTED.get(first["type"], "").format(**first.get("ctx", {}))
        said = known or first["msg"].removeprefix("Value error, ")
        _, should, wanted = said.partition(" should ")  # "Input should be greater than 0", "String should have ..."
        reason = f"it should {wanted}" if should else said
        raise BadInput(f"{'.'.join(path)} = {shown} cannot be used: {reason}") from error


def _unknown_key(record: type[BaseModel], prefix: str, path: list[str]) -> str:
    known = list(dict.fromkeys([*keys(record, prefix), *keys(Settings)]))
    here = [key.rpartition(".")[2] for key in known if key.split(".")[:-1] == path[:-1]]
    others = f"known here are {', '.join(here)}" if here else f"{'.'.join(path[:-1])} has no settings of its own"
    return f"there is no setting {'.'.join(path)!r}; {hint('.'.join(path), known) or others}"


def keys(record: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key of a record, dotted, with those of the tables in it."""
    found = []
    for name, field in record.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        found.append(key)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += keys(field.annotation, key)
    return found


def hint(key: str, known: Iterable[str]) -> str:
    """`did you mean ...?`: a close name in the same table, or else in any; empty where there is none."""
    known = list(known)
    table, _, name = key.rpartition(".")
    for candidates in ([k for k in known if k.rpartition(".")[0] == table], known):
        by_name = {k.rpartition(".")[2]: k for k in reversed(candidates)}
        close = difflib.get_close_matches(name, by_name, 1)
        if close:
            return f"did you mean {by_name[close[0]]}?"
    return ""


def _short(value: Any) -> str:
    text = "nan" if isinstance(value, float) and math.isnan(value) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
