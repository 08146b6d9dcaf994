"""The lines of `fedmp_table.py`: FedMP's Tables 1 to 4.

Its images (chest X-rays of three places, TB; fundus images of three, DR) cannot be had here, and no pretrained weights:
it takes a ResNet-50 trained on ImageNet and images of 256 pixels, this a ResNet-18 from scratch and 28 pixels. So its
figures are for orientation.
"""

from __future__ import annotations

from collections.abc import Sequence

from wardround.papers.library import table
from wardround.papers.schema import Line

STAGE_UPLOAD = 128  # embeddings a site sends in the study of stages: all of stage 1 would be gigabytes a round
FEWSHOT, FEWSHOT_EPOCHS = "fedmp-fewshot", (30, 60, 60)  # section 4.2.4
FEDAVG, FEDMP = (line for line in table("fedmp-1").entries if line.label in ("fedavg", "fedmp"))
BASELINES = tuple(line for line in table("fedmp-1").entries if line not in (FEDAVG, FEDMP))
ABLATIONS = tuple(line for line in table("fedmp-3").entries if "," in line.label)
STAGES = tuple(line for line in table("fedmp-2").entries if "," in line.label)
PARTS = ("compare", "ablation", "stages", "fewshot", "baselines")


def published(id: str, label: str, dataset: str) -> list[str] | None:
    """What one of FedMP's tables prints for a line of ours on a data set, column by column."""
    found = table(id)
    return found.printed(label, dataset, found.axes.sites[0], found.axes.levels[0])


def chosen(parts: Sequence[str], fewshot_epochs: Sequence[int] = FEWSHOT_EPOCHS) -> list[Line]:
    """The entries of some parts; FedAvg and FedMP belong to all."""
    own = {"shots": len(fewshot_epochs), "epochs": list(fewshot_epochs)}
    few = Line(label=FEWSHOT, method=FEWSHOT, settings=own)
    of = {"compare": (), "ablation": ABLATIONS, "stages": STAGES, "fewshot": (few,), "baselines": BASELINES}
    return [FEDAVG, FEDMP, *(line for part in PARTS if part in parts for line in of[part])]
