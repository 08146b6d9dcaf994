"""What a user may set, with every default, limit and reason in one place.

Settings come from a study file (TOML, or the `settings.json` of an earlier run), then a preset, then flags; the later
wins. All of it is validated here before any work starts, and every complaint names the key.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from wardround.errors import BadInput

Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Record = TypeVar("Record", bound=BaseModel)


class Frozen(BaseModel):
    """A settings record: closed and unchangeable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class DataSettings(Frozen):
    """Which images, and how they become sites."""

    source: str = "phantoms"
    folder: Path | None = None  # where named sets are; None: $WARDROUND_DATA or ~/.wardround/data
    size: Annotated[int, Field(ge=8, le=1024)] | None = None
    files: dict[str, str] = {}  # one file or folder per site, by site name; then `source` is not used
    sites: Annotated[int, Field(ge=0)] = 5  # 0 with natural sites: as many as there are
    partition: Literal["dirichlet", "iid", "shards", "natural"] = "dirichlet"
    alpha: Positive = 0.3
    capped: bool = True  # FedISCA's routine, which stops filling a site at n/N images
    classes_per_site: Count = 2
    min_size: Count = 10
    by_patient: bool = False
    partition_seed: int = 0
    partition_file: Path | None = None
    merge_val: bool = True
    val_share: Share = 0.1
    # None: the official test set weighted to the site's label mix; for natural sites and files, the site's own part
    test: Literal["weighted", "own", "balanced", "natural"] | None = None
    test_share: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.2
    shift: Literal["none", "fixed", "drawn"] = "none"
    shift_strength: NotNegative = 1.0


class ModelSettings(Frozen):
    """Which network; `per_site` names another one for some sites."""

    name: str = "small"
    width: Count | None = None
    stem: Literal["small", "imagenet"] | None = None
    per_site: dict[str, str] = {}
    weights: Path | None = None  # a safetensors file to start from


class TrainSettings(Frozen):
    """How a site trains. `epochs` may be a list, one number per round."""

    epochs: Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=0)], ...] = 2
    batch: Count = 64
    optimiser: Literal["sgd", "adam"] = "sgd"
    lr: Positive = 0.02
    momentum: Share = 0.9
    weight_decay: NotNegative = 1e-4
    schedule: Literal["constant", "step", "cosine"] = "constant"
    milestones: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.5, 0.75)
    gamma: Positive = 0.1
    round_decay: Positive = 1.0  # the learning rate is multiplied by this after every round
    clip_norm: Positive | None = None
    augment: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"
    keep: Literal["last", "best"] = "last"


class Settings(Frozen):
    """Everything a run depends on, apart from the images themselves and the program's version."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    method: str = "fedavg"
    seed: int = 0
    rounds: Count = 5
    participants: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    init: Literal["common", "own"] = "common"
    evaluate_every: Count = 1
    device: str = "auto"
    workers: Count | None = None
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    set: dict[str, Any] = {}  # the method's own settings

    @field_validator("seed")
    @classmethod
    def _seed_is_small(cls, seed: int) -> int:
        if not 0 <= seed < 2**63:
            raise ValueError("must be a whole number from 0 to 2^63 - 1")
        return seed


def read_study_file(path: Path) -> dict[str, Any]:
    """The settings in a TOML study file, or in the settings.json that a run wrote."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read study file {path}: {error}; check the path") from error
    try:
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise BadInput(f"{path} is not valid {path.suffix.lstrip('.').upper() or 'TOML'}: {error}") from error
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
    raise BadInput(f"there is no preset {name!r}; use one of {', '.join(preset_names())}, or the path of a TOML file")


def parse_assignment(text: str) -> tuple[str, Any]:
    """`train.lr=0.1` as (key, value); the value is read as TOML, and as plain text where it is none."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise BadInput(f"--set {text!r} is not key=value; write for example --set train.lr=0.01")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `a.b.c` in nested tables."""
    *path, last = dotted.split(".")
    for key in path:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise BadInput(f"{dotted} cannot be set: {key} is a value, not a table")
    tree[last] = value


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables laid over one another; the top wins."""
    merged = dict(base)
    for key, value in top.items():
        under = merged.get(key)
        merged[key] = overlay(under, value) if isinstance(value, dict) and isinstance(under, dict) else value
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
        path = [str(part) for part in first["loc"] if not str(part).startswith(("constrained-", "function-"))]
        key = ".".join([*([prefix] if prefix else []), *path])
        if first["type"] == "extra_forbidden":
            raise BadInput(_unknown_key(record, key, path)) from error
        shown = first["input"] if not isinstance(first["input"], dict) else "a table"
        reason = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        raise BadInput(
            f"{key} = {_short(shown)} cannot be used: it should be {reason.removeprefix('must be ')}"
        ) from error


def _unknown_key(record: type[BaseModel], key: str, path: list[str]) -> str:
    fields: Mapping[str, Any] = record.model_fields
    for part in path[:-1]:
        inner = fields[part].annotation if part in fields else None
        fields = inner.model_fields if isinstance(inner, type) and issubclass(inner, BaseModel) else {}
    close = difflib.get_close_matches(path[-1], fields, 1)
    hint = f"did you mean {close[0]}?" if close else f"known here are {', '.join(fields) or 'none'}"
    return f"there is no setting {key!r}; {hint}"


def _short(value: Any) -> str:
    text = "nan" if isinstance(value, float) and math.isnan(value) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
