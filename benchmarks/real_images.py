"""Every method of the core on real images, one comparison per set: what the bars are, on data that was not drawn.

Not a timing: the table is of accuracies. Sets are MedMNIST `.npz` files given by path; those with site ids are also
run on their natural sites.

    python benchmarks/real_images.py bloodmnist.npz wbc_sites.npz --device cuda [--out real_images.json]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import report
from wardround.data.medmnist import read_medmnist
from wardround.progress import Silent
from wardround.run import begin_comparison
from wardround.settings import validate

METHODS = ("majority", "local", "ensemble", "single", "fedavg", "fedprox", "centralised")
SHOWN = ("local_accuracy", "global_accuracy", "balance", "worst_site_accuracy", "shared_global_accuracy")


def settings(path: Path, natural: bool, device: str, model: str) -> dict[str, Any]:
    """Twenty local epochs in ten rounds; Dirichlet(0.3) over five sites, or natural ones."""
    data: dict[str, Any] = {"source": str(path), "alpha": 0.3, "sites": 5}
    if natural:
        data = {"source": str(path), "partition": "natural", "sites": 0}
    return {
        "rounds": 10,
        "device": device,
        "data": data,
        "model": {"name": model},
        "train": {
            "epochs": 2,
            "batch": 128,
            "lr": 0.01,
            "weight_decay": 5e-4,
            "round_decay": 0.95,
            "precision": "bf16" if device.startswith("cuda") else "fp32",
        },
    }


def compare(path: Path, natural: bool, device: str, model: str) -> dict[str, Any]:
    """One comparison; its headlines, seconds and the settings behind them."""
    chosen = settings(path, natural, device, model)
    with tempfile.TemporaryDirectory() as folder:
        methods: list[tuple[str, dict[str, Any]]] = [(method, {}) for method in METHODS]
        result = begin_comparison(validate(chosen), methods, Path(folder) / "run", Silent()).finish()
    figures: dict[str, dict[str, float]] = {method: {} for method in METHODS}
    for headline in result["headlines"]:
        if headline["key"] in SHOWN and headline["value"] is not None:
            figures[headline["method"]][headline["key"]] = round(headline["value"], 4)
    words = {key: result["data"][key] for key in ("provenance", "partition_rule", "local_protocol", "global_protocol")}
    chosen["data"]["source"] = path.name
    return {"settings": chosen, **words, "figures": figures, "seconds": result["seconds"], "notes": result["notes"]}


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for path in options.files:
        has_sites = read_medmnist(path).test.sites is not None
        for natural in (False, True) if has_sites else (False,):
            name = f"{path.stem}, {'natural sites' if natural else 'Dirichlet(0.3), 5 sites'}"
            found[name] = compare(path, natural, options.device, options.model)
            rows = []
            for method, figures in found[name]["figures"].items():
                shown = " ".join(f"{100 * figures[key]:6.1f}" if key in figures else "     –" for key in SHOWN)
                rows.append((method, f"{shown}   {found[name]['seconds'][method]:.0f} s"))
            report(f"{name}: local, global, balance, worst site, shared global (%)", rows, None)
    report("real_images", [("n", "one seed, one partition each")], options.out, n=1, comparisons=found)


if __name__ == "__main__":
    main()
