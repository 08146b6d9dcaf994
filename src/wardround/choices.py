"""From what a person chose to settings: a study file, a preset, a few named choices, and any other key.

The later wins. `gather` needs no torch, which takes seconds to load: a slip is told at once. What belongs to a method
can be told only when the methods are known, so it comes out apart and `for_methods` puts it in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wardround.errors import BadInput
from wardround.settings import (
    Settings,
    hint,
    keys,
    overlay,
    parse_assignment,
    put,
    read_preset,
    read_study_file,
    validate,
)

SHORTHANDS = {  # what commands and functions take by a short name, and the key that it sets
    "method": "method",
    "data": "data.source",
    "sites": "data.sites",
    "alpha": "data.alpha",
    "partition": "data.partition",
    "partition_seed": "data.partition_seed",
    "model": "model.name",
    "rounds": "rounds",
    "epochs": "train.epochs",
    "seed": "seed",
    "device": "device",
}
BUILT_IN = "demo"  # the preset of the built-in study, which runs where neither a study nor images are named
Assignments = Sequence[tuple[str, Any]]


def gather(
    study: Path | None, preset: str | None, chosen: Mapping[str, Any], assignments: Iterable[tuple[str, Any]]
) -> tuple[Settings, Assignments]:
    """The settings, and every assignment that is not of a study's key, so it must be a method's.

    `chosen` holds values by their short names; those that are None were not chosen.
    """
    tree = read_study_file(study) if study else {}
    if study is None and chosen.get("data") is None:
        preset = preset or BUILT_IN
    if preset:
        tree = overlay(tree, read_preset(preset))
    named: dict[str, Any] = {}
    for name, key in SHORTHANDS.items():
        if chosen.get(name) is not None:
            put(named, key, chosen[name])
    tree = overlay(tree, named)
    others = []
    for key, value in assignments:
        if key.partition(".")[0] in Settings.model_fields:
            put(tree, key, value)
        else:
            others.append((key, value))
    return validate(tree), others


def overruled(study: Path | None, preset: str | None, settings: Settings) -> str:
    """What a preset has changed of a study file, in words: a file that says three rounds must not quietly get one."""
    if study is None or preset is None:
        return ""
    in_file, in_preset = _flat(read_study_file(study)), _flat(read_preset(preset))
    now = _flat(settings.model_dump(mode="json"))
    changed = [
        f"{key} = {value} and not {in_file[key]}"
        for key, value in in_preset.items()
        if in_file.get(key, value) != value and now.get(key) == value
    ]
    return f"the preset wins over the study file: {', '.join(changed)}; a flag or --set wins over both" * bool(changed)


def _flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Values by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return found


def assigned(texts: Sequence[str] | None) -> list[tuple[str, Any]]:
    """`--set key=value`, each read."""
    return [parse_assignment(text) for text in texts or ()]


def for_methods(own: Mapping[str, Any], others: Assignments, methods: Sequence[str], bare: str = "") -> dict[str, Any]:
    """A method's key under its name (fedprox.mu), or bare (mu) for the one method that runs."""
    tree = overlay({}, own)
    for key, value in others:
        if key.partition(".")[0] in methods:
            put(tree, key, value)
        elif bare and "." not in key:
            put(tree, f"{bare}.{key}", value)
        else:
            near = hint(key, keys(Settings)) or "write a study's key such as train.lr, or METHOD.key"
            raise BadInput(f"--set {key}: no study and no method that runs here has this setting; {near}")
    return tree
