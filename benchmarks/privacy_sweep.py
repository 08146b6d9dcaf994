"""What privacy costs: one study at several ε, and the same membership attack on each result.

Every ε is a run of its own in `--work`, which goes on where it was stopped; its figures go into `--out` when it ends,
and what `--out` holds is never done again. `inf` is the same network without noise. Beside the JSON an SVG is written:
accuracy, and the attack's AUC, against ε.

    python benchmarks/privacy_sweep.py phantoms:4000 --out privacy_sweep.json
    python benchmarks/privacy_sweep.py dermamnist.npz --method fedavg --rounds 10 --epsilons 1,2,4,8,16,inf
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import keep, machine, stored, told
from wardround import run
from wardround.audit.attacks import LIRA, LOSS, Effort
from wardround.audit.from_run import open_run, targets
from wardround.audit.report import AuditRecord
from wardround.audit.work import RECORD, work
from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.learn.device import find_device
from wardround.papers.summaries import cells, headed
from wardround.progress import Silent
from wardround.settings import overlay, validate

NAME = "privacy_sweep"
EPSILONS = "1,2,4,8,16,inf"
WIDTH, HEIGHT, LEFT, BOTTOM = 560, 320, 60, 270


def study(given: argparse.Namespace, epsilon: float) -> dict[str, Any]:
    """The settings of one point."""
    tree: dict[str, Any] = {
        "method": given.method,
        "seed": given.seed,
        "rounds": given.rounds,
        "device": given.device,
        "data": {"source": given.source, "sites": given.sites, "partition": "iid", "test": "weighted"},
        "model": {"name": given.model, "width": given.width},
        "train": {"epochs": given.epochs, "batch": given.batch, "lr": given.lr, "momentum": 0.0, "round_decay": 1.0},
    }
    return tree if math.isinf(epsilon) else overlay(tree, {"privacy": {"epsilon": epsilon, "delta": given.delta}})


def measured(folder: Path, tree: Mapping[str, Any], given: argparse.Namespace, progress: Silent) -> dict[str, Any]:
    """Train one point, attack it, and say how both went."""
    job = run.reopen(folder, progress) if folder.exists() else run.begin_run(validate(tree), folder, progress)
    result = job.finish()
    device = find_device(given.device)
    audit = folder / "audit"
    if not (audit / RECORD).exists():
        found = open_run(folder, None, None, progress)
        names = found.study.sites[: given.audited]
        effort = Effort(shadows=given.shadows, most=given.most)
        work(folder.name, targets(found, names, device, progress), (LOSS, LIRA), effort, 0, audit, device, progress)
    record = AuditRecord.from_json((audit / RECORD).read_bytes())
    attacks = {attack.name: attack for group in record.averaged for attack in group.attacks}
    keys = {headline["key"]: headline["value"] for headline in result["headlines"]}
    return {
        "headlines": keys,
        "spent": {row["site"]: row["epsilon"] for row in result["privacy"]},
        "attacks": {
            name: {figure.name: figure.value for figure in attack.figures if figure.name != "smallest_fpr"}
            for name, attack in attacks.items()
        },
    }


def chart(points: Sequence[Mapping[str, Any]], key: str) -> str:
    """Accuracy (solid) and the stronger attack's AUC (dashed) against ε, one place for each ε."""
    step = (WIDTH - LEFT - 110) / max(1, len(points) - 1)
    series = (
        ("accuracy", "#332288", "", [p["figures"]["headlines"][key] for p in points]),
        ("attack AUC", "#cc6677", ' stroke-dasharray="6 4"', [auc(p["figures"]) for p in points]),
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f"<title>{key} and membership AUC against epsilon</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in range(0, 11, 2):
        y = BOTTOM - tick / 10 * (BOTTOM - 20)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - 110}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e3de"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick / 10:g}</text>')
    for i, point in enumerate(points):
        out.append(f'<text x="{LEFT + i * step:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{point["epsilon"]}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - 110) / 2}" y="{BOTTOM + 38}" text-anchor="middle">ε of the study</text>')
    for name, colour, dash, values in series:
        spots = [(LEFT + i * step, BOTTOM - v * (BOTTOM - 20)) for i, v in enumerate(values)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        out.append(f'<text x="{spots[-1][0] + 8:.1f}" y="{spots[-1][1] + 4:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def auc(figures: Mapping[str, Any]) -> float:
    """The stronger attack's."""
    return max(float(attack["auc"]) for attack in figures["attacks"].values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left of the sweep, and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", help="phantoms:N, a set's name or an .npz file")
    parser.add_argument("--out", type=Path, default=Path("privacy_sweep.json"))
    parser.add_argument("--work", type=Path, help="folder of the runs (default: beside --out)")
    parser.add_argument("--epsilons", default=EPSILONS)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--model", default="small-gn")
    parser.add_argument("--width", type=int, default=16)
    for name, value in (("sites", 2), ("rounds", 5), ("epochs", 4), ("batch", 250), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("shadows", 4), ("most", 1000), ("audited", 1)):
        parser.add_argument(f"--{name}", type=int, default=value, help="of the audit")
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    return told(lambda: _work(given))


def _work(given: argparse.Namespace) -> int:
    try:
        epsilons = [float(text) for text in given.epsilons.split(",")]
    except ValueError:
        raise BadInput(f"--epsilons {given.epsilons!r} are no numbers; write for example {EPSILONS}") from None
    settings = {key: value for key, value in vars(given).items() if key not in ("out", "work", "epsilons", "device")}
    head = {"benchmark": NAME, "settings": {**settings, "source": Path(given.source).name}}
    points = stored(given.out, head, "points")
    folder = given.work or given.out.with_suffix(".runs")
    for epsilon in epsilons:
        label = f"{epsilon:g}"
        if label not in {point["epsilon"] for point in points}:
            figures = measured(folder / f"epsilon-{label}", study(given, epsilon), given, Silent())
            points = sorted([*points, {"epsilon": label, "figures": figures}], key=lambda p: float(p["epsilon"]))
            keep(given.out, {**head, "machine": machine(), "points": points})
    key = _headline(points)
    with disk_errors(given.out):
        write_atomically(given.out.with_suffix(".svg"), chart(points, key).encode())
    print(markdown(points, key))
    return 0


def markdown(points: Sequence[Mapping[str, Any]], key: str) -> str:
    """Accuracy and both attacks at every ε."""
    head = ["ε", key, "AUC, loss threshold", "AUC, LiRA", "TPR at 0.1 % FPR, LiRA"]
    lines = headed(head)
    for point in points:
        found = point["figures"]["attacks"]
        attacks = (found[LOSS]["auc"], found[LIRA]["auc"], found[LIRA]["tpr_at_fpr_0.001"])
        lines.append(cells([point["epsilon"], *(f"{x:.3f}" for x in (point["figures"]["headlines"][key], *attacks))]))
    return "\n".join(lines)


def _headline(points: Sequence[Mapping[str, Any]]) -> str:
    """The first headline that every point has: the shared model's accuracy where there is one."""
    wanted = ("shared_global_accuracy", "global_accuracy", "local_accuracy")
    have = [{k for k, v in p["figures"]["headlines"].items() if v is not None} for p in points]
    for key in wanted:
        if all(key in keys for keys in have):
            return key
    raise BadInput(f"no headline of {', '.join(wanted)} is in every run; choose another method")


if __name__ == "__main__":
    raise SystemExit(main())
