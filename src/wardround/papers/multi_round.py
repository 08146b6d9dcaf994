"""What the tables of many rounds (FedKPer, FedMP) share: how a line becomes a plan, and what is kept of its rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from wardround.methods.registry import find, make
from wardround.papers.cells import Cell, Plan, named, study_record
from wardround.papers.runs import short
from wardround.papers.schema import Line
from wardround.settings import overlay, validate


def plan(tree: Mapping[str, Any], entry: Line, where: Cell, images: str, data: Mapping[str, Any] | None = None) -> Plan:
    """Check an entry's settings and name it by everything its figures depend on.

    `images` is what they are known by; `data` is what the cell alone decides, which the file's head does not have.
    """
    own = dict(entry.settings)
    of_entry = {"data": data or {}, "method": entry.method, "seed": where.place["seed"]}
    settings = validate({**overlay(tree, of_entry), "set": own})
    record = {
        "entry": entry.label,
        "method": find(entry.method).name,
        "settings": make(entry.method, own).settings.model_dump(mode="json"),
    }
    return named(where, settings, record, header(tree), images)


def header(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The study's settings in full, but for what an entry, a cell or the machine decides."""
    return study_record(validate(tree))


def by_round(result: Mapping[str, Any], series: Iterable[str]) -> dict[str, list[Any]]:
    """A list over the measured rounds of every series."""
    return {key: [short(point[key]) for point in result["rounds"]] for key in series}
