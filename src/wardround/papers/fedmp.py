"""The runs of FedMP's tables: which settings, and what is kept of a run.

Section 4. Local epochs and rounds are not in the paper; they are those of its first author's public benchmark
(LMIAPC/Medical-FL-Benchmark). The paper's network is a ResNet-50 trained on ImageNet, on images of 256 pixels, which
the files of its tables say; the protocol here is the one for small images, a ResNet-18 from scratch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from wardround import tensorfile
from wardround.learn.predictor import Predictor
from wardround.learn.stages import stage_name, stage_width
from wardround.methods.registry import find, make
from wardround.papers.cells import Cell, Plan, images_source, is_drawn, named, study_record
from wardround.papers.runs import SECONDS, Runs, headlines, short
from wardround.papers.schema import Line
from wardround.settings import overlay, validate

NAME = "fedmp_tables"
SAME = ("studies",)
Kind = Literal["natural", "iid", "shifted"]
PROTOCOL: dict[str, Any] = {
    "rounds": 100,
    "evaluate_features": True,
    "model": {"name": "resnet18"},  # its stem is the small one
    "train": {
        "epochs": 5,
        "batch": 64,
        "optimiser": "adam",
        "lr": 1e-4,
        "weight_decay": 5e-4,
        "schedule": "constant",
        "round_decay": 1.0,
    },
}
DATA: dict[Kind, dict[str, Any]] = {
    # Each place of acquisition is a site, as in TB and DR; the test images of all are merged.
    "natural": {
        "partition": "natural",
        "sites": 0,
        "test": "natural",
        "merge_val": True,
        "val_share": 0.0,
        "by_patient": False,
    },
    # Five like sites, as COVID-QU-Ex, BUSI and NeoJaundice become.
    "iid": {"partition": "iid", "sites": 5, "test": "weighted", "val_share": 0.0, "by_patient": False},
    # Five sites with like labels, each with a fixed acquisition shift: a stand-in on any set.
    "shifted": {
        "partition": "iid",
        "sites": 5,
        "shift": "fixed",
        "test": "weighted",
        "val_share": 0.0,
        "by_patient": False,
    },
}
PHANTOM_SITES = 4  # drawn images belong to no place unless they are told how many there are
MEASURES = {
    "shared_global_accuracy": "the shared model on the merged test after the last round",
    "best_round_shared_global_accuracy": "the same in its best round, chosen on the test set and so optimistic",
    "mean_shared_global_accuracy": "the same, mean over rounds",
    "global_balanced_accuracy": "mean recall of the classes of what sites deploy on the merged test, mean over sites",
    "shared_local_accuracy": "the shared model on each site's own test, mean over sites",
    "worst_site_accuracy": "what a site deploys on its own test, the lowest of the sites",
    "rounds_to_convergence": "first round from which the running mean of five stays within a point of its final value",
    "bytes": "up and down in all rounds, without what sites take home",
    "bytes_to_convergence": "the same up to the round of convergence",
    "feature_distance": "FedMP's Eq. 4 at the end: the distance of a site's features to all sites' of the class over "
    "their spread, mean over classes and sites",
    "embedding_width": "numbers in one embedding that sites share",
}
SERIES = {
    "shared_global_accuracy": "the shared model on the merged test after each round",
    "seconds": "of work from the beginning to the round's end, without measuring",
    "bytes": "from the beginning to the round's end",
}


def cell(source: Path, kind: Kind, seed: int) -> Cell:
    """One set of images, how it becomes sites, and a seed; sites are the same for all seeds."""
    return Cell(source, {"set": set_name(source, kind), "seed": seed}, f"{source.stem}-{kind}-seed{seed}")


def set_name(source: Path, kind: Kind) -> str:
    """The name of a set in the results."""
    return f"{source.stem}, shifted" if kind == "shifted" else source.stem


def study_tree(kind: Kind, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The protocol for sites of one kind, with flags over it; the images are the cell's."""
    tree = overlay({**PROTOCOL, "data": DATA[kind]}, flags)
    validate(tree)
    return tree


def plan(tree: Mapping[str, Any], entry: Line, where: Cell, images: str) -> Plan:
    """Check an entry's settings and name it by everything its figures depend on; `images` is what they are known by."""
    natural = tree["data"]["partition"] == "natural"
    drawn = {"sites": PHANTOM_SITES} if is_drawn(where.source) and natural else {}
    data = {**tree["data"], "source": images_source(where.source), **drawn}
    own = dict(entry.settings)
    settings = validate({**tree, "data": data, "method": entry.method, "seed": where.place["seed"], "set": own})
    record = {
        "entry": entry.label,
        "method": find(entry.method).name,
        "settings": make(entry.method, own).settings.model_dump(mode="json"),
    }
    return named(where, settings, record, header(tree), images)


def header(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The study's settings in full, but for what an entry, a cell or the machine decides."""
    return study_record(validate(tree))


def head(studies: Mapping[str, Any]) -> dict[str, Any]:
    """What begins a file of results; it holds several sets of images."""
    return {"benchmark": NAME, "studies": studies, "measures": {**MEASURES, "seconds": SECONDS}, "series": SERIES}


class FedMP(Runs):
    """Entries with their figures, and the rounds themselves."""

    family = "fedmp"
    benchmark, same, measures = NAME, SAME, MEASURES

    def figures(self, planned: Plan, run: Path, result: Mapping[str, Any]) -> dict[str, Any]:
        """Every measure, and a list by round of every series."""
        values = headlines(result)
        rounds = {key: [short(point[key]) for point in result["rounds"]] for key in SERIES}
        converged = values.get("rounds_to_convergence")
        reaches = [row["relative"] for row in result["features"] if row["relative"] is not None]
        values |= {
            "bytes": rounds["bytes"][-1],
            "bytes_to_convergence": None if converged is None else rounds["bytes"][int(converged) - 1],
            "feature_distance": sum(reaches) / len(reaches) if reaches else None,
            "embedding_width": _embedding_width(run, planned.record["settings"]),
        }
        return {"figures": {key: short(values.get(key)) for key in MEASURES}, "rounds": rounds}


def _embedding_width(run: Path, settings: Mapping[str, Any]) -> int | None:
    """How many numbers a shared embedding has, where the method shares some."""
    shared = run / "predictors" / "shared.safetensors"
    if "stage" not in settings or not shared.is_file():
        return None
    spec = Predictor.from_parts(*tensorfile.from_bytes(shared.read_bytes())).members[0].spec
    return stage_width(spec, stage_name(spec, settings["stage"]))
