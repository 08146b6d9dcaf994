"""Tiny federations, studies and runs that the tests of the core share: eight-pixel images, four classes, width 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wardround import coordinator, run
from wardround.coordinator import Coordinator
from wardround.data.federation import Federation, LocalTest, Site
from wardround.data.imageset import ImageSet
from wardround.data.partition import Partition
from wardround.exchange.bundle import Bundle
from wardround.learn.device import Device
from wardround.learn.fit import Fit
from wardround.learn.predictor import Predictor
from wardround.learn.side_by_side import Outcome
from wardround.learn.store import FitStore
from wardround.learn.trainer import train_one
from wardround.methods.base import Context, Method
from wardround.methods.registry import make
from wardround.progress import Silent
from wardround.record import deployed as record_deployed
from wardround.record import result as results
from wardround.record.rundir import Log, RunDir
from wardround.settings import Settings, overlay, validate
from wardround.study import Study, agree

CLASSES = ("ash", "birch", "cedar", "durmast")
CPU = torch.device("cpu")
SIZES = (11, 8, 6)  # images that the sites train on
BASE: dict[str, Any] = {
    "rounds": 2,
    "device": "cpu",
    "workers": 1,
    "model": {"name": "small", "width": 2},
    "train": {"epochs": 1, "batch": 4, "lr": 0.05},
}


# Settings under which a method that makes images is done in no time, for tests that run every method.
QUICK: dict[str, dict[str, Any]] = {
    "coboosting": {"epochs": 2, "batch": 8, "codes": 4, "generator_steps": 2, "shots": 1},
    "consult-distilled": {
        "epochs": 1,
        "batch": 8,
        "codes": 4,
        "generator_steps": 3,
        "kd_steps": 2,
        "replayed": 4,
        "tune_epochs": 1,
        "shots": 1,
    },
    "dafl": {"epochs": 1, "turns": 2, "batch": 8, "codes": 4, "kd_steps": 2, "shots": 1},
    "deepinversion": {"epochs": 1, "steps": 3, "batch": 8, "kd_steps": 2, "shots": 1},
    "dense": {"epochs": 2, "batch": 8, "codes": 4, "generator_steps": 2, "shots": 1},
    "efedisca": {"epochs": 1, "steps": 3, "batch": 8, "kd_steps": 2, "memory": 2, "noise_images": 4, "shots": 1},
    "fedbicross": {"trajectories": 1, "steps": 6, "samples": 2, "batch": 8, "probes": 8, "personal_epochs": 1},
    "fedisca": {"epochs": 1, "steps": 3, "batch": 8, "shots": 1},
}


def quick(name: str) -> Method:
    """A built-in method that is done in no time."""
    return make(name, QUICK.get(name, {}))


def images(n: int, seed: int = 0, labels: Sequence[int] | None = None, size: int = 8, classes: int = 4) -> ImageSet:
    """Noise whose brightness follows the class, so that there is something to learn."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes if labels is None else torch.tensor(labels)
    pixels = torch.randint(0, 120, (n, 3, size, size), generator=draw) + 40 * y.reshape(n, 1, 1, 1)
    return ImageSet(pixels.clamp(max=255).to(torch.uint8), y.to(torch.int64), CLASSES[:classes])


def federation(sizes: Sequence[int] = SIZES, *, size: int = 8, classes: int = 4) -> Federation:
    """Sites `site-1`, `site-2`, ... of these training sizes, two validation images each, and one test set for all."""
    test = images(16, seed=99, size=size, classes=classes)
    sites = []
    for number, n in enumerate(sizes, 1):
        train = images(n, seed=number, size=size, classes=classes)
        counts = train.counts().double()
        mix = counts / counts.sum() if n else torch.full((classes,), 1 / classes, dtype=torch.float64)
        val = images(2, seed=50 + number, size=size, classes=classes)
        sites.append(Site(f"site-{number}", train, val, LocalTest(test, mix)))
    return Federation(
        sites=tuple(sites),
        test=test,
        classes=CLASSES[:classes],
        partition_rule="by hand",
        partition_hash=partition(sizes).sha256,
        local_protocol="accuracy weighted to the site's label mix",
        global_protocol="accuracy on the 16 test images",
        provenance="drawn in a test",
    )


def partition(sizes: Sequence[int] = SIZES) -> Partition:
    """The partition that belongs to `federation`."""
    edges = np.cumsum([0, *sizes])
    ranges = [np.arange(start, stop) for start, stop in pairwise(edges)]
    return Partition(tuple(ranges), "by hand", 0)


def settings(**changes: Any) -> Settings:
    """The tiny settings with some changed, nested as in a study file."""
    return validate(overlay(BASE, changes))


def study(data: Federation | None = None, /, **changes: Any) -> Study:
    """A study over `federation()`, or over other data."""
    return agree(settings(**changes), data or federation())


def context(of: Study, round: int = 0) -> Context:
    """What a question comes with, outside a run; training is done at once."""
    return Context(of, round, Device(CPU, 1), lambda fits: [train_one(fit, CPU) for fit in fits])


def drive(ctx: Context, work: Any) -> Any:
    """Do one site's work alone and return what it returns."""
    try:
        fit: Fit = next(work)
        while True:
            fit = work.send(train_one(fit, ctx.device.torch))
    except StopIteration as end:
        return end.value


def coordinate(
    path: Path, method: Method, data: Federation | None = None, /, *, fits: Path | None = None, **changes: Any
) -> dict[str, Any]:
    """Run one method to its end in `path`, and the part of a result that it gives."""
    data = data or federation()
    agreed = study(data, **{"method": method.name, **changes})
    device = Device(CPU, agreed.settings.workers or 1)
    opened = RunDir(path) if path.exists() else RunDir.create(path, lambda part: None)
    try:
        Coordinator(agreed, data, method, device, opened, FitStore(fits or path / "fits"), Silent()).work()
    finally:
        opened.close()
    return results.one_method(path, method.name, results.describe_data(data))


def figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """What must not depend on how a run was executed: all of a result but the seconds."""
    return {key: result[key] for key in ("rows", "headlines", "ledger", "notes")}


def deployed(path: Path, site: str) -> Predictor:
    """What a run left at a site: a predictor of its own, or the shared one."""
    found = record_deployed.read(path, site)
    assert found is not None
    return found


def predictor_bytes(path: Path) -> dict[str, bytes]:
    """Every predictor that a run left, to the byte."""
    found = {file.name: file.read_bytes() for file in (path / "predictors").iterdir()}
    assert found
    networks = path / record_deployed.NETWORKS
    return {**found, networks.name: networks.read_bytes()} if networks.exists() else found


def events(path: Path) -> list[dict[str, Any]]:
    """The event log but for what a resumed run may say otherwise: seconds, and which fits were at hand."""
    passing = ("seconds", "reused")
    return [{k: v for k, v in row.items() if k not in passing} for row in Log(path / "events.jsonl").rows()]


def everything(path: Path) -> dict[str, Any]:
    """All that a finished run left that must not depend on how often it was stopped."""
    return {**figures(run.read_result(path)), "events": events(path), "predictors": predictor_bytes(path)}


def give_tiny_data(patch: pytest.MonkeyPatch, *methods: type[Method], sizes: Sequence[int] = SIZES) -> None:
    """Let `wardround.run` find the tiny federation, whatever source is named, and these methods by their names."""
    made = run.make  # type: ignore[attr-defined]
    toys = {method.name: method for method in methods}
    patch.setattr(run, "_federation", lambda *_: (federation(sizes), partition(sizes)))
    patch.setattr(run, "make", lambda name, own: toys[name]() if name in toys else made(name, own))


def watch_bundles(patch: pytest.MonkeyPatch) -> list[Bundle]:
    """Every bundle that crosses a boundary from now on."""
    seen: list[Bundle] = []
    count = Coordinator._count

    def watched(self: Coordinator, bundle: Bundle) -> None:
        seen.append(bundle)
        count(self, bundle)

    patch.setattr(Coordinator, "_count", watched)
    return seen


def watch_fits(patch: pytest.MonkeyPatch) -> list[Fit]:
    """Every fit that is really trained from now on (those out of the store are not)."""
    seen: list[Fit] = []
    train_many: Callable[..., list[Outcome]] = coordinator.train_many  # type: ignore[attr-defined]

    def watched(fits: list[Fit], *rest: Any) -> list[Outcome]:
        seen.extend(fits)
        return train_many(fits, *rest)

    patch.setattr(coordinator, "train_many", watched)
    return seen
