"""FedMP's Table 5 in kind: how well a decoder rebuilds images from the features of each of four stages.

One network is trained by `fedmp` over the places of acquisition that the file names. Then, site by site and stage by
stage, a decoder is trained with squared error on half of the site's images against the frozen network, and rebuilds
the other half (`wardround.audit.reconstruction`). Figures are means over sites, as the paper's are over its three. The
training is a run in `--work` and goes on where it was stopped; every site's figures go into `--out` when they are
there, and what `--out` holds is never done again.

The paper's images (DR, 256 pixels, ResNet-50) are not public in its form, and its FID needs an Inception network: so
the order of the stages can be compared, not the values.

    python benchmarks/fedmp_privacy.py dermamnist.npz --out papers/fedmp_table5.json
    python benchmarks/fedmp_privacy.py dermamnist.npz --smoke --out smoke.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from common import keep, machine, stored, told
from wardround import run, tensorfile
from wardround.audit.decoder import DecoderTraining
from wardround.audit.frechet import random_network
from wardround.audit.reconstruction import rebuild_from_stage
from wardround.data.federation import Site
from wardround.errors import BadInput
from wardround.learn.device import Device, find_device, one_thread_per_worker
from wardround.learn.predictor import Member, Predictor
from wardround.learn.stages import stage_name, stage_shape
from wardround.papers.library import table
from wardround.papers.schema import value
from wardround.papers.summaries import cells, headed
from wardround.progress import Silent
from wardround.settings import overlay, validate
from wardround.streams import Streams

NAME = "fedmp_table5"
STAGES = (1, 2, 3, 4)
PUBLISHED = {  # DR, ResNet-50, mean over three clients
    str(stage): dict(zip(("fid", "max_ssim", "min_l2"), map(value, row.figures["dr"].split()), strict=True))
    for stage, row in zip(STAGES, table("fedmp-5").published, strict=True)
}
FIGURES = (
    *("frechet", "max_ssim", "mean_ssim", "min_l2", "mean_l2", "share_below_0.1", "identified"),
    *("control_max_ssim", "control_min_l2", "control_frechet"),
)
SHOWN = {"frechet": 3, "max_ssim": 4, "min_l2": 4, "identified": 3}  # of these, with so many digits
FULL: dict[str, Any] = {
    "method": "fedmp",
    "rounds": 20,
    "data": {"partition": "natural", "sites": 0, "test": "natural"},
    "model": {"name": "resnet18"},
    "train": {"epochs": 2, "batch": 64, "optimiser": "adam", "lr": 1e-3, "weight_decay": 5e-4, "momentum": 0.0},
}
SMOKE: dict[str, Any] = {"rounds": 2, "model": {"name": "resnet18", "width": 8}, "train": {"epochs": 1}}


def study(source: str, smoke: bool, seed: int, device: str) -> dict[str, Any]:
    """All settings of the training."""
    tree = overlay(FULL, {"data": {"source": source}, "seed": seed, "device": device})
    return overlay(tree, SMOKE) if smoke else tree


def trained(work: Path, tree: Mapping[str, Any], progress: Silent) -> tuple[Member, tuple[Site, ...]]:
    """The network of a run in `work` that is begun, gone on with, or finished; and its sites."""
    settings = validate(tree)
    job = run.reopen(work, progress) if work.exists() else run.begin_run(settings, work, progress)
    if validate(json.loads((work / run.SETTINGS).read_text())) != settings:
        raise BadInput(f"{work} was begun with other settings; choose another --work")
    job.finish()
    file = work / "predictors" / "shared.safetensors"
    (member,) = Predictor.from_parts(*tensorfile.from_bytes(file.read_bytes())).members
    return member, job.prepared.federation.sites


def attack(
    member: Member, site: Site, stage: int, how: DecoderTraining, most: int, seed: int, device: Device
) -> dict[str, Any]:
    """One site and stage."""
    began = time.perf_counter()
    with one_thread_per_worker():
        rebuilt = rebuild_from_stage(
            member, site.train, stage, how, Streams(seed), device.torch, site=site.name, most=most
        )
        found = rebuilt.attack(random_network(site.train.channels), seed)
    figures = {name: found.figure(name).value for name in FIGURES}
    return {"stage": stage, "site": site.name, "n": len(rebuilt.originals), "figures": figures} | {
        "seconds": round(time.perf_counter() - began, 1)
    }


def summary(rows: Sequence[Mapping[str, Any]], sites: Sequence[str]) -> dict[str, Any]:
    """Means over sites, each counting alike, of the stages whose sites are all there."""
    found = {}
    for stage in STAGES:
        of = [row["figures"] for row in rows if row["stage"] == stage]
        if len(of) == len(sites):
            found[str(stage)] = {name: sum(figures[name] for figures in of) / len(of) for name in FIGURES}
    return found


def markdown(record: Mapping[str, Any]) -> str:
    """Measured and published side by side."""
    head = ["Stage", "Fréchet", "max SSIM", "min L2", "identified", "paper: FID", "max SSIM", "min L2"]
    lines = headed(head)
    for stage, mean in record["means"].items():
        paper = record["published"][stage]
        ours = [f"{mean[name]:.{digits}f}" for name, digits in SHOWN.items()]
        theirs = [f"{paper['fid']:.0f}", f"{paper['max_ssim']:.4f}", f"{paper['min_l2']:.4f}"]
        lines.append(cells([stage, *ours, *theirs]))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left of the table, and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", help="an .npz file with places of acquisition, or phantoms:N")
    parser.add_argument("--out", type=Path, default=Path("papers/fedmp_table5.json"))
    parser.add_argument("--work", type=Path, help="the folder of the run (default: beside --out)")
    parser.add_argument("--smoke", action="store_true", help="a narrow network, two rounds: minutes on one core")
    parser.add_argument("--decoder-epochs", type=int, default=60)
    parser.add_argument("--most", type=int, default=2000, help="images of a site that are used, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    return told(lambda: _work(given))


def _work(given: argparse.Namespace) -> int:
    how = DecoderTraining(epochs=given.decoder_epochs)
    device = find_device(given.device)
    tree = study(given.file, given.smoke, given.seed, given.device)
    head = {
        "benchmark": NAME,
        "published": PUBLISHED,
        "settings": {**tree, "device": str(device.torch), "data": {**tree["data"], "source": Path(given.file).name}},
        "decoder": {"epochs": how.epochs, "batch": how.batch, "lr": how.lr, "width": how.width, "most": given.most},
    }
    rows = stored(given.out, head, "rows")
    member, sites = trained(given.work or given.out.with_suffix(".run"), tree, Silent())
    names = [site.name for site in sites]
    shapes = {str(s): list(stage_shape(member.spec, stage_name(member.spec, s))) for s in STAGES}
    eye = random_network(sites[0].train.channels).name
    done = {(row["stage"], row["site"]) for row in rows}
    for stage in STAGES:
        for site in sites:
            if (stage, site.name) not in done:
                rows.append(attack(member, site, stage, how, given.most, given.seed, device))
                record: dict[str, Any] = {
                    **head,
                    "machine": machine(),
                    "torch": torch.__version__,
                    "feature_network": eye,
                }
                record |= {"shapes": shapes, "sites": names, "means": summary(rows, names), "rows": rows}
                keep(given.out, record)
    print(markdown(json.loads(given.out.read_text())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
