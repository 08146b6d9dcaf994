"""`result.json`: every figure of a run with its definition, derived from the event log and the ledger alone."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

from wardround import __version__
from wardround.data.federation import Federation
from wardround.exchange.bundle import KINDS
from wardround.exchange.ledger import totals
from wardround.learn.device import Device
from wardround.measure import Bin, calibration_error, course, headlines
from wardround.record.rundir import Log

SCHEMA_VERSION = 1
ROW_FIELDS = ("method", "seed", "site", "round", "split", "model", "metric", "value", "n")
FEATURE_FIELDS = ("site", "images", "distance", "relative", "by_class")
CLUSTER_FIELDS = ("clusters", "silhouettes", "weights", "similarity", "course")
ANSWER_FIELDS = ("method", "seed", "site", "round", "split", "model", "confusion", "bins")
PRIVACY_FIELDS = ("site", "epsilon", "delta")
PROJECTION_FIELDS = ("way", "shares", "sites", "points")
PARTS = (
    "rows",
    "headlines",
    "rounds",
    "answers",
    "features",
    "projections",
    "work",
    "clusters",
    "galleries",
    "privacy",
    "notes",
)  # lists that every method adds to


def environment(device: Device) -> dict[str, Any]:
    """Versions and machine, for whoever tries to repeat the run."""
    return {
        "wardround": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "device": str(device),
    }


def describe_data(federation: Federation) -> dict[str, Any]:
    """Sites, classes and protocols as the report shows them."""
    return {
        "provenance": federation.provenance,
        "classes": list(federation.classes),
        "partition_rule": federation.partition_rule,
        "partition_hash": federation.partition_hash,
        "local_protocol": federation.local_protocol,
        "global_protocol": federation.global_protocol,
        "test_sha256": federation.test.sha256(),
        "sites": [
            {
                "name": site.name,
                "train": len(site.train),
                "val": len(site.val),
                "test": len(site.test.images),
                "label_counts": site.train.counts().tolist(),
                "sha256": site.train.sha256(),
                "val_sha256": site.val.sha256(),
            }
            for site in federation.sites
        ],
    }


def is_of(federation: Federation, described: Mapping[str, Any]) -> bool:
    """Whether `describe_data` was of these images, by their hashes: a moved file has another provenance."""
    found = describe_data(federation)
    return {**found, "provenance": ""} == {**described, "provenance": ""}


def one_method(run: Path, method: str, data: dict[str, Any], within: Path | None = None) -> dict[str, Any]:
    """The part of a result that one method's run directory gives; files are named from the directory `within`."""
    rows, notes, seconds = [], [], None
    work, clusters, galleries, features, answers, projections = [], [], [], [], [], []
    privacy: dict[str, dict[str, Any]] = {}  # what each site has spent in the end
    ends: dict[int, float] = {}
    measuring: dict[int, float] = {}
    for event in Log(run / "events.jsonl").rows():
        if event["kind"] == "row":
            rows.append({name: event[name] for name in ROW_FIELDS})
        elif event["kind"] == "note":
            notes.append({"method": method, "text": event["text"]})
        elif event["kind"] == "end":
            seconds = event["seconds"]
        elif event["kind"] == "round":
            ends[event["round"]] = event["seconds"]
        elif event["kind"] == "measuring":
            measuring[event["round"]] = measuring.get(event["round"], 0.0) + event["seconds"]
        elif event["kind"] == "work":
            work.append({"method": method, **_timed(event["part"], event["steps"], event["seconds"])})
        elif event["kind"] == "features":
            features.append({"method": method, **{name: event[name] for name in FEATURE_FIELDS}})
        elif event["kind"] == "projection":
            projections.append({"method": method, **{name: event[name] for name in PROJECTION_FIELDS}})
        elif event["kind"] == "answers":
            error = calibration_error([Bin(*found) for found in event["bins"]])
            errors = {"calibration_error": error, "local_calibration_error": event.get("local_calibration_error")}
            answers.append({**{name: event[name] for name in ANSWER_FIELDS}, **errors})
        elif event["kind"] == "clusters":
            clusters.append({"method": method, **{name: event[name] for name in CLUSTER_FIELDS}})
        elif event["kind"] == "privacy":
            spent = event["spent"]
            privacy[spent["site"]] = {"method": method, **{name: spent[name] for name in PRIVACY_FIELDS}}
        elif event["kind"] == "gallery":
            file = (run / event["file"]).relative_to(within or run).as_posix()
            galleries.append({"method": method, "file": file})
    ledger = [{"method": method, **row} for row in sorted(Log(run / "ledger.jsonl").rows(), key=_place)]
    sites = [site["name"] for site in data["sites"]]
    protocols = data["local_protocol"], data["global_protocol"]
    rounds = course(rows, ledger, method, sites)
    return {
        "method": method,
        "rows": rows,
        "notes": notes,
        "headlines": [*headlines(rows, method, sites, *protocols), *rounds.headlines(*protocols)],
        "rounds": rounds.points(_working_seconds(ends, measuring)),
        "ledger": {
            "totals": [
                {"method": method, "direction": direction, "group": group, "bytes": count}
                for (direction, group), count in totals(ledger).items()
            ],
            "rows": ledger,
        },
        "seconds": {method: seconds},
        "answers": answers,
        "features": features,
        "projections": projections,
        "work": work,
        "clusters": clusters,
        "galleries": galleries,
        "privacy": [privacy[site] for site in sorted(privacy)],
    }


def _working_seconds(ends: dict[int, float], measuring: dict[int, float]) -> dict[int, float]:
    """By round, the seconds from the beginning to its end, without those that measuring took."""
    return {
        number: round(end - sum(spent for earlier, spent in measuring.items() if earlier <= number), 3)
        for number, end in ends.items()
    }


def _timed(part: str, steps: int, seconds: float) -> dict[str, Any]:
    """One part of the coordinator's work: in all, and one step of it."""
    ms_per_step = round(1000 * seconds / steps, 3) if steps else None
    return {"part": part, "steps": steps, "seconds": seconds, "ms_per_step": ms_per_step}


def _place(row: dict[str, Any]) -> tuple[int, int, str]:
    """Where a ledger row belongs; the log itself is in the order in which bundles happened to cross."""
    return row["round"], KINDS.index(row["kind"]), row["site"]


def whole(
    kind: str,
    name: str,
    command: str,
    settings: dict[str, Any],
    data: dict[str, Any],
    environment: dict[str, Any],
    parts: Iterable[dict[str, Any]],
) -> dict[str, Any]:
    """A result of one method or several."""
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "name": name,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "version": __version__,
        "command": command,
        "methods": [],
        "settings": settings,
        "data": data,
        "environment": environment,
        "ledger": {"totals": [], "rows": []},
        "seconds": {},
        **{key: [] for key in PARTS},
    }
    for part in parts:
        result["methods"].append(part["method"])
        for key in PARTS:
            result[key] += part[key]
        result["ledger"]["totals"] += part["ledger"]["totals"]
        result["ledger"]["rows"] += part["ledger"]["rows"]
        result["seconds"] |= part["seconds"]
    return result
