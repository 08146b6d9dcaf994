"""Five ResNet-18 sites training at once on one GPU, against the same sites trained one after the other in eager fp32.

The baseline is what reference code does: one network, a plain loop, `torch.optim.SGD`, fp32, images already on the
device. Both do the same optimiser steps on the same images. With `--accuracy FILE.npz` a real set is also trained to
the end in both precisions and the test accuracies are compared.

    python benchmarks/side_by_side.py [--accuracy bloodmnist.npz] [--out side_by_side.json]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from common import median, report
from wardround.data.imageset import ImageSet, merge
from wardround.learn.device import find_device
from wardround.learn.evaluate import network_outputs
from wardround.learn.fit import Fit, Fitted, Recipe
from wardround.learn.pixels import normalise
from wardround.learn.side_by_side import train_many
from wardround.models import NetSpec, build, fresh
from wardround.streams import Streams

SITES, BATCH = 5, 128
SPEC = NetSpec("resnet18", 3, 8, 28)


def drawn_images(n: int) -> ImageSet:
    """Random pixels: speed does not depend on what they show."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, 3, 28, 28), dtype=torch.uint8, generator=generator)
    return ImageSet(images, torch.randint(0, 8, (n,), generator=generator), tuple("abcdefgh"))


def fits(sets: list[ImageSet], recipe: Recipe, spec: NetSpec = SPEC) -> list[Fit]:
    """One fit per site, all from the same start."""
    start = {name: t.cuda() for name, t in fresh(spec, torch.Generator().manual_seed(0)).items()}
    return [Fit(f"site-{i}", spec, start, data, recipe, seed=i) for i, data in enumerate(sets)]


def ours(sets: list[ImageSet], recipe: Recipe) -> float:
    """Images per second with everything included: loading weights, warm-up, capture, reading the result."""
    work = fits(sets, recipe)
    torch.cuda.synchronize()
    began = time.perf_counter()
    train_many(work, find_device("cuda"))
    torch.cuda.synchronize()
    return sum(len(data) for data in sets) * recipe.epochs / (time.perf_counter() - began)


def eager(sets: list[ImageSet], epochs: int) -> float:
    """Images per second of a plain fp32 loop, one site after the other."""
    net = build(SPEC).cuda().train()
    net.load_state_dict(fresh(SPEC, torch.Generator().manual_seed(0)))
    torch.cuda.synchronize()
    began = time.perf_counter()
    for data in sets:
        optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        for _ in range(epochs):
            for index in torch.split(torch.randperm(len(data), device="cuda"), BATCH):
                loss = F.cross_entropy(net(normalise(data.images[index]).contiguous()), data.labels[index])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
    torch.cuda.synchronize()
    return sum(len(data) for data in sets) * epochs / (time.perf_counter() - began)


def accuracies(path: Path, seeds: int) -> dict[str, list[float]]:
    """Mean test accuracy (%) of five IID sites trained alone in fp32 and in bf16, per seed."""
    from wardround.data.medmnist import read_medmnist

    source = read_medmnist(path)
    pool = merge([part for part in (source.train, source.val) if part is not None]).to("cuda")
    test = source.test.to("cuda")
    spec = NetSpec("resnet18", pool.channels, len(pool.classes), pool.size)
    found: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for seed in range(seeds):
        order = torch.randperm(len(pool), generator=Streams(seed).torch("partition"))
        sets = [pool.take(part.cuda()) for part in order.chunk(SITES)]
        for precision in ("fp32", "bf16"):
            recipe = Recipe(epochs=20, batch=BATCH, lr=0.01, weight_decay=5e-4, schedule="step", precision=precision)
            right = []
            for fitted in train_many(fits(sets, recipe, spec), find_device("cuda")):
                if not isinstance(fitted, Fitted):
                    raise fitted
                logits = network_outputs(spec, fitted.weights, test.images, torch.device("cuda")).logits
                right.append(float((logits.argmax(1) == test.labels).double().mean()))
            found[precision].append(100 * sum(right) / len(right))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=3)
    parser.add_argument("--accuracy", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    sets = [drawn_images(2734).to("cuda") for _ in range(SITES)]
    recipe = Recipe(epochs=20, batch=BATCH, lr=0.01, weight_decay=5e-4, precision="bf16")
    eager(sets, 1), ours(sets, Recipe(epochs=2, batch=BATCH, precision="bf16"))
    base = median(lambda: eager(sets, 2), options.n)
    fp32 = median(lambda: ours(sets, Recipe(epochs=20, batch=BATCH, lr=0.01, weight_decay=5e-4)), options.n)
    bf16 = median(lambda: ours(sets, recipe), options.n)
    rows = [
        ("baseline: eager fp32, one after the other", f"{base:,.0f} images/s"),
        ("five side by side, fp32", f"{fp32:,.0f} images/s, {fp32 / base:.1f} times"),
        ("five side by side, bf16", f"{bf16:,.0f} images/s, {bf16 / base:.1f} times"),
        ("n", f"median of {options.n}; five sites of 2,734 images, 20 epochs, everything included"),
    ]
    figures: dict[str, object] = {"eager_fp32": base, "side_by_side_fp32": fp32, "side_by_side_bf16": bf16}
    if options.accuracy:
        figures["accuracy"] = found = accuracies(options.accuracy, 3)
        means = {precision: sum(values) / len(values) for precision, values in found.items()}
        rows.append(("test accuracy fp32", f"{means['fp32']:.2f} %"))
        rows.append(("test accuracy bf16", f"{means['bf16']:.2f} % ({means['bf16'] - means['fp32']:+.2f})"))
    report("side_by_side", rows, options.out, n=options.n, **figures)


if __name__ == "__main__":
    main()
