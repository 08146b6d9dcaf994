"""Example results, shaped like `result.json`: numbers by formula, realistic to look at and the same every time."""

import math
from pathlib import Path
from typing import Any

import torch

from wardround import tensorfile

CLASSES = (
    "basophil",
    "eosinophil",
    "erythroblast",
    "immature granulocyte",
    "lymphocyte",
    "monocyte",
    "neutrophil",
    "platelet",
    "blast",
    "smudge cell",
    "plasma cell",
)
CEILING = {"fedavg": 0.905, "fedprox": 0.918, "local": 0.70}  # shared global accuracy a method tends to
MODEL_BYTES = {"parameters": 1_117_736, "statistics": 3_840, "counters": 120}
OVERHEAD = 2_344
MEAN = "Mean over the sites of the personal predictor's"
WHOLE = "on the whole official test set"
HEADLINES = {
    "local_accuracy": (
        "Local accuracy",
        f"{MEAN} accuracy on the official test set weighted to the site's label mix, after the last round.",
    ),
    "global_accuracy": ("Global accuracy", f"{MEAN} accuracy {WHOLE}, after the last round."),
    "balance": ("Balance", "Mean of local and global accuracy, as FedKPer defines it."),
    "local_balanced_accuracy": (
        "Local balanced accuracy",
        f"{MEAN} mean recall over the classes the site holds, after the last round.",
    ),
    "worst_site_accuracy": ("Worst site", "The lowest local accuracy of any site, after the last round."),
    "shared_global_accuracy": ("Shared model", f"Accuracy of the shared model {WHOLE}, after the last round."),
    "best_round_shared_global_accuracy": (
        "Shared model, best round",
        f"The highest accuracy of the shared model {WHOLE} in any round. Chosen on the test set, so optimistic.",
    ),
    "macro_auc": (
        "Macro-AUC",
        f"Mean over classes of the shared model's one-against-rest area under the curve {WHOLE}, after the last round.",
    ),
}
Row = dict[str, Any]


def compare_result(
    methods: tuple[str, ...] = ("fedavg", "fedprox", "local"), sites: int = 5, rounds: int = 10, classes: int = 8
) -> dict[str, Any]:
    """Several methods on the same sites; `local` exchanges nothing, so it has no shared model and no bytes."""
    names = [f"site-{i + 1}" for i in range(sites)]
    rows = [row for m in methods for row in _rows(m, names, rounds)]
    ledger = [row for m in methods if m != "local" for row in _ledger(m, names, rounds)]
    return {
        "schema_version": 1,
        "kind": "compare" if len(methods) > 1 else "run",
        "name": "-".join(methods[:3]) + "-phantoms",
        "created": "2026-11-15T10:00:00Z",
        "version": "0.1.0",
        "command": f"wardround compare --methods {','.join(methods)} --data phantoms --sites {sites} --alpha 0.3 "
        f"--model cnn4 --rounds {rounds} --epochs 2 --seed 0 --partition-seed 0",
        "methods": list(methods),
        "settings": {
            "data": {"source": "phantoms", "images": 4000, "size": 28},
            "partition": {"kind": "dirichlet", "alpha": 0.3, "seed": 0},
            "training": {"model": "cnn4", "rounds": rounds, "epochs": 2, "batch": 32, "optimiser": "sgd"},
            "seed": 0,
        },
        "data": {
            "provenance": "Phantoms: 4,000 training and 1,000 test images of stained cells, drawn with seed 0.",
            "classes": list(CLASSES[:classes]),
            "partition_rule": f"Dirichlet(0.3), capped, {sites} sites, partition seed 0",
            "partition_hash": "ab12c9d07744e1a5b0c3aa90f1de55aa72c8e0c19d6a4b3f7e21d0c4b5a69788",
            "local_protocol": "Each site is tested on the official test set, weighted to the site's own label mix.",
            "global_protocol": "Every model is tested on the whole official test set, 1,000 images.",
            "sites": [_site(i, classes) for i in range(sites)],
        },
        "environment": {
            "python": "3.11.7",
            "torch": "2.13.0",
            "platform": "Linux x86_64",
            "device": "cpu",
            "threads": 2,
        },
        "rows": rows,
        "headlines": [h for m in methods for h in _headlines(m, rows, rounds)],
        "rounds": [point for m in methods if m != "local" for point in _points(m, names, rounds)],
        "answers": [a for i, m in enumerate(methods) for a in _answers(m, i, names, rounds, classes)],
        "ledger": {"totals": _totals(ledger), "rows": ledger},
        "seconds": {m: 41.2 + 3.4 * i for i, m in enumerate(methods)},
        "notes": [
            {
                "method": "local",
                "text": "site-3: constant predictor: every test image is called lymphocyte.",
            }
        ]
        if "local" in methods
        else [],
    }


def run_result() -> dict[str, Any]:
    """One method."""
    return compare_result(methods=("fedavg",))


def _site(i: int, classes: int) -> Row:
    """A skewed label mix: two classes dominate and some are missing."""
    counts = [int(310 * math.exp(-((c - 1.7 * i) % classes) * 0.9)) for c in range(classes)]
    return {
        "name": f"site-{i + 1}",
        "train": sum(counts),
        "val": sum(counts) // 9,
        "test": 1000,
        "label_counts": counts,
    }


def _accuracy(method: str, i: int, round: int) -> float:
    """Accuracy that rises over rounds, with a wiggle that differs by site."""
    rise = 1 - 0.62 * math.exp(-(round + 1) / 2.6)
    return CEILING.get(method, 0.88) * rise + 0.03 * math.sin(2.1 * i + 0.9 * round) - 0.025 * (i % 4)


def _rows(method: str, names: list[str], rounds: int) -> list[Row]:
    rows: list[Row] = []

    def add(site: str, round: int, split: str, model: str, metric: str, value: float, n: int = 1000) -> None:
        where = {"method": method, "seed": 0, "site": site, "round": round - 1, "split": split, "model": model}
        rows.append({**where, "metric": metric, "value": _tidy(value), "n": n})

    for round in range(1, rounds + 1):
        for i, name in enumerate(names):
            accuracy = _accuracy(method, i, round)
            add(name, round, "local", "personal", "accuracy", accuracy + 0.04)
            add(name, round, "local", "personal", "balanced_accuracy", accuracy - 0.05)
            add(name, round, "global", "personal", "accuracy", accuracy - 0.03)
            add(name, round, "train", "personal", "loss", 1.9 - 1.7 * accuracy, 700)
        if method != "local":
            add("", round, "global", "shared", "accuracy", _accuracy(method, 0, round))
            add("", round, "global", "shared", "macro_auc", 0.5 + 0.5 * _accuracy(method, 0, round))
    return rows


def _tidy(value: float) -> float:
    return round(min(max(value, 0.0), 2.0), 6)


def _headlines(method: str, rows: list[Row], rounds: int) -> list[Row]:
    def values(split: str, model: str, metric: str, at: int | None = rounds) -> list[float]:
        want = (method, split, model, metric)
        found = [r for r in rows if (r["method"], r["split"], r["model"], r["metric"]) == want]
        return [r["value"] for r in found if at in (None, r["round"] + 1)]

    local = values("local", "personal", "accuracy")
    shared = values("global", "shared", "accuracy")
    at_home, everywhere = _mean(local), _mean(values("global", "personal", "accuracy"))
    figures = {
        "local_accuracy": at_home,
        "global_accuracy": everywhere,
        "balance": (at_home + everywhere) / 2,
        "local_balanced_accuracy": _mean(values("local", "personal", "balanced_accuracy")),
        "worst_site_accuracy": min(local),
        "shared_global_accuracy": _mean(shared) if shared else None,
        "best_round_shared_global_accuracy": max(values("global", "shared", "accuracy", at=None), default=None),
        "macro_auc": _mean(values("global", "shared", "macro_auc")) if shared else None,
    }
    return [
        {"method": method, "key": key, "label": label, "value": figures[key], "definition": definition}
        for key, (label, definition) in HEADLINES.items()
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _ledger(method: str, names: list[str], rounds: int) -> list[Row]:
    return [
        {"method": method, "round": r - 1, "site": s, "direction": d, "groups": dict(MODEL_BYTES), "overhead": OVERHEAD}
        for r in range(1, rounds + 1)
        for s in names
        for d in ("down", "up")
    ]


def _points(method: str, names: list[str], rounds: int) -> list[Row]:
    each = 2 * len(names) * (sum(MODEL_BYTES.values()) + OVERHEAD)
    return [
        {
            "method": method,
            "round": r - 1,
            "sites": names,
            "bytes": each * r,
            "seconds": 4.1 * r,
            "shared_global_accuracy": _tidy(_accuracy(method, 0, r)),
            "backward_transfer": 0.01,
            "trained_local_accuracy": None,
            "worst_trained_local_accuracy": None,
        }
        for r in range(1, rounds + 1)
    ]


def _answers(method: str, shift: int, names: list[str], rounds: int, classes: int) -> list[Row]:
    """125 test images of each class: most are found, the others are taken for the next class."""
    found = []
    for i, name in enumerate(names):
        right = [125 - (7 * c + 11 * i + 5 * shift) % 60 for c in range(classes)]
        confusion = [[0] * classes for _ in range(classes)]
        for c, n in enumerate(right):
            confusion[c][c] = n
            confusion[c][(c + 1) % classes] += 125 - n
        share = sum(right) / (125 * classes)
        bins = [[8 * b, round(8 * b * min(share, b / 15)), round((b + 0.5) / 15, 6)] for b in range(15)]
        where = {"method": method, "seed": 0, "site": name, "round": rounds - 1, "split": "global", "model": "personal"}
        found.append({**where, "confusion": confusion, "bins": bins, "calibration_error": 0.02 * (i + 1)})
    return found


def _totals(ledger: list[Row]) -> list[Row]:
    sums: dict[tuple[str, str, str], int] = {}
    for row in ledger:
        for group, size in {**row["groups"], "overhead": row["overhead"]}.items():
            key = (row["method"], row["direction"], group)
            sums[key] = sums.get(key, 0) + size
    return [{"method": m, "direction": d, "group": g, "bytes": size} for (m, d, g), size in sums.items()]


# What methods that make images leave ----------------------------------------------------------------------------------

WORK = {"synthesis": (500, 4.1), "adaptation": (500, 0.6), "distillation": (500, 2.9)}


def imaging_result(folder: Path, clusters: int = 2, classes: int = 8, size: int = 28, channels: int = 3) -> Row:
    """`fedisca` and `fedbicross` with work, clusters and galleries; the gallery files are written into `folder`."""
    result = compare_result(("fedisca", "fedbicross"), classes=classes)
    titles = {"fedisca": ["images"], "fedbicross": [f"cluster {k + 1}" for k in range(clusters)]}
    for method, found in titles.items():
        (folder / method).mkdir()
        pictures = {title: _pictures(classes, size, channels, k) for k, title in enumerate(found)}
        facts = {"labels": list(range(classes)), "steps": [1, 101, 201, 300, 400, 500], "left_out": []}
        tensorfile.write(folder / method / "gallery.safetensors", {"gallery": pictures}, {"gallery": facts})
    result["galleries"] = [{"method": m, "file": f"{m}/gallery.safetensors"} for m in titles]
    result["work"] = [
        {"method": m, "part": part, "steps": steps, "seconds": seconds, "ms_per_step": 1000 * seconds / steps}
        for m in titles
        for part, (steps, seconds) in WORK.items()
    ]
    sites = [site["name"] for site in result["data"]["sites"]]
    result["clusters"] = [
        {
            "method": "fedbicross",
            "clusters": [sites[k::clusters] for k in range(clusters)],
            "silhouettes": {"2": 0.41, "3": 0.38, "4": 0.12},
            "weights": _cross(clusters, 0.7),
            "similarity": {
                "sites": sites,
                "of": "predictions",
                "values": [[round(1 - 0.17 * abs(i - j), 2) for j in range(len(sites))] for i in range(len(sites))],
            },
            "course": [_cross(clusters, 1 / clusters + (0.7 - 1 / clusters) * t / 20) for t in range(21)],
        }
    ]
    result["projections"] = [_projection(way, sites, classes) for way in ("pca", "tsne")]
    return result


def _cross(clusters: int, own: float) -> list[list[float]]:
    other = (1 - own) / max(clusters - 1, 1)
    return [[own if i == j else other for j in range(clusters)] for i in range(clusters)]


def _projection(way: str, sites: list[str], classes: int) -> Row:
    points = [
        [round(0.6 * math.cos(0.7 * c + s / 9) + 0.02 * i, 3), round(0.6 * math.sin(2 * c) - s / 20, 3), s, c]
        for s in range(len(sites))
        for c in range(classes)
        for i in range(4)
    ]
    return {
        "method": "fedisca",
        "way": way,
        "shares": [0.41, 0.2] if way == "pca" else [],
        "sites": sites,
        "points": points,
    }


def _pictures(classes: int, size: int, channels: int, seed: int) -> torch.Tensor:
    """A disc per class that comes out of noise over six frames."""
    noise = torch.rand((6, classes, channels, size, size), generator=torch.Generator().manual_seed(seed))
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    radius = torch.linspace(0.2, 0.9, classes).reshape(1, classes, 1, 1, 1)
    disc = (x**2 + y**2 < radius**2).float() * 0.8
    share = torch.linspace(0, 0.95, 6).reshape(6, 1, 1, 1, 1)
    return ((noise * (1 - share) + disc * share) * 255).to(torch.uint8)
