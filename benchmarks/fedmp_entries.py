"""FedMP's experiments as data: protocol, entries with their settings, and the figures that the paper prints.

Zhou et al., "FedMP: Tackling Medical Feature Heterogeneity in Federated Learning from a Manifold Perspective", 2025,
section 4. Its images (chest X-rays of three places, TB; fundus images of three, DR) cannot be had here, and no
pretrained weights: it takes a ResNet-50 trained on ImageNet and images of 256 pixels, this a ResNet-18 from scratch and
28 pixels. So its figures are for orientation. Local epochs and rounds are not in the paper; they are those of its first
author's public benchmark (LMIAPC/Medical-FL-Benchmark).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from resumable import Entry, Plan, images_source, is_drawn, record_hash
from wardround.methods.registry import find, make
from wardround.settings import overlay, validate

Kind = Literal["natural", "shifted"]
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
    "natural": {"partition": "natural", "sites": 0, "test": "natural", "merge_val": True, "val_share": 0.0},
    # Five sites with like labels, each with a fixed acquisition shift: a stand-in on any set.
    "shifted": {"partition": "iid", "sites": 5, "shift": "fixed", "test": "weighted", "val_share": 0.0},
}
PHANTOM_SITES = 4  # drawn images belong to no place unless they are told how many there are
FEWSHOT_EPOCHS = (30, 60, 60)  # section 4.2.4
STAGE_UPLOAD = 128  # embeddings a site sends in the study of stages: all of stage 1 would be gigabytes a round

FEDAVG, FEDMP, FEWSHOT = Entry("fedavg", "fedavg"), Entry("fedmp", "fedmp"), "fedmp-fewshot"
ABLATIONS = (  # Table 3; its first line is FedAvg and its last FedMP. The last one here has Eq. 1's sign as printed.
    Entry("fedmp, SFMC only", "fedmp", {"cpgma": False}),
    Entry("fedmp, cPGMA only", "fedmp", {"sfmc": False}),
    Entry("fedmp, Eq. 1 as printed", "fedmp", {"weights": "literal"}),
)
STAGES = tuple(  # Table 2
    Entry(f"fedmp, stage {stage}", "fedmp", {"stage": stage, "upload": STAGE_UPLOAD}) for stage in (1, 2, 3, 4)
)
# Coefficients of the baselines are in a supplement that is not public. FedProx's is that of the public benchmark; the
# others are each method's own default. FedBN's shared model needs norm layers: their mean, as its authors advise.
BASELINES = (
    Entry("fedprox", "fedprox", {"mu": 0.01}),
    Entry("moon", "moon", {"mu": 1.0, "tau": 0.5}),
    Entry("fraug", "fraug"),
    Entry("fedbn", "fedbn", {"norms": "averaged"}),
    Entry("elastic", "elastic"),
    Entry("fedmr", "fedmr"),
    Entry("centralised", "centralised"),
    Entry("single", "single"),
)
PARTS = ("compare", "ablation", "stages", "fewshot", "baselines")

TABLE_1 = {  # accuracy in percent, mean of three seeds: TB, DR
    "centralised": (92.83, 81.49),
    "single": (69.75, 62.06),
    "fedavg": (84.45, 70.55),
    "fedprox": (85.84, 72.11),
    "moon": (84.45, 72.14),
    "fraug": (86.70, 73.12),
    "fedbn": (81.86, 72.35),
    "elastic": (86.53, 72.16),
    "fedmr": (85.41, 73.15),
    "fedmp": (88.08, 75.96),
}
TABLE_2 = {  # accuracy and rounds to convergence: TB, DR
    "fedmp, stage 1": ((89.12, 80), (77.13, 170)),
    "fedmp, stage 2": ((88.60, 80), (77.13, 150)),
    "fedmp, stage 3": ((88.60, 70), (76.65, 110)),
    "fedmp, stage 4": ((88.08, 60), (76.25, 95)),
    "fedavg": ((84.45, 65), (70.20, 90)),
}
TABLE_3 = {"fedavg": 70.20, "fedmp, SFMC only": 74.10, "fedmp, cPGMA only": 72.59, "fedmp": 75.61}  # DR, one seed
TABLE_4 = {  # TB: rounds to convergence, bytes until then in decimal GB, accuracy
    "fedavg": (65, 36.68, 84.45),
    "fedprox": (60, 33.86, 85.84),
    "fedbn": (35, 19.71, 81.86),
    "moon": (50, 28.21, 84.45),
    "fraug": (55, 163.92, 86.70),
    "elastic": (55, 31.04, 86.53),
    "fedmr": (45, 25.39, 85.41),
    "fedmp": (60, 34.38, 88.08),
    FEWSHOT: (3, 1.71, 85.49),
}


@dataclass(frozen=True)
class Cell:
    """One set of images, how it becomes sites, and a seed; sites are the same for all seeds."""

    source: Path
    kind: Kind
    seed: int

    @property
    def place(self) -> dict[str, Any]:
        """The cell as the results name it."""
        return {"set": set_name(self.source, self.kind), "seed": self.seed}

    @property
    def folder(self) -> str:
        """The cell as a folder's name."""
        return f"{self.source.stem}-{self.kind}-seed{self.seed}"


def set_name(source: Path, kind: Kind) -> str:
    """The name of a set in the results."""
    return source.stem if kind == "natural" else f"{source.stem}, shifted"


def chosen(parts: Sequence[str], fewshot_epochs: Sequence[int] = FEWSHOT_EPOCHS) -> list[Entry]:
    """The entries of some parts; FedAvg and FedMP belong to all."""
    few = Entry(FEWSHOT, FEWSHOT, {"shots": len(fewshot_epochs), "epochs": list(fewshot_epochs)})
    of = {"compare": (), "ablation": ABLATIONS, "stages": STAGES, "fewshot": (few,), "baselines": BASELINES}
    return [FEDAVG, FEDMP, *(entry for part in PARTS if part in parts for entry in of[part])]


def study_tree(kind: Kind, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The protocol for sites of one kind, with flags over it; the images are the cell's."""
    tree = overlay({**PROTOCOL, "data": DATA[kind]}, flags)
    validate(tree)
    return tree


def plan(tree: Mapping[str, Any], entry: Entry, cell: Cell, images: str) -> Plan:
    """Check an entry's settings and name it by everything its figures depend on; `images` is what they are known by."""
    drawn = {"sites": PHANTOM_SITES} if is_drawn(cell.source) and cell.kind == "natural" else {}
    data = {**tree["data"], "source": images_source(cell.source), **drawn}
    settings = validate({**tree, "data": data, "method": entry.method, "seed": cell.seed, "set": dict(entry.own)})
    record = {
        "entry": entry.label,
        "method": find(entry.method).name,
        "settings": make(entry.method, dict(entry.own)).settings.model_dump(mode="json"),
    }
    recipe = record_hash(record)
    depends = {"study": header(tree), "recipe": recipe, "images": images, **cell.place}
    return Plan(cell, entry, settings, record, recipe, record_hash(depends))


def header(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The study's settings in full, but for what an entry, a cell or the machine decides."""
    found = validate(tree).model_dump(mode="json")
    for key in ("name", "method", "seed", "device", "workers", "set"):
        del found[key]
    for key in ("source", "folder"):
        del found["data"][key]
    return found
