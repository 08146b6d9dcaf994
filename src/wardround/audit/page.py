"""The audit as one HTML page that needs nothing else: figures, curves, and originals beside what an attacker gets.

It shows patients' images, so it is written readable by its owner alone, and says on top that it stays at the site.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from PIL import Image
from torch import Tensor

from wardround.audit.report import Attack, AuditRecord, Figure, Points
from wardround.embedded import data_uri, environment
from wardround.files import disk_errors, write_for_owner
from wardround.tensorfile import Groups

View = dict[str, Any]
MOST_SIDE = 128  # pixels of a picture on the page; larger ones are shown smaller
SIDE = 220.0  # of a curve's square
COLUMNS = {
    "original": "original",
    "reconstruction": "what the attacker gets",
    "computed": "what the attacker gets",
    "nearest": "nearest image of this site",
}
WARNING = (
    "This page shows patients' images. Keep it at the site: do not send it with a parcel, nor put it where others can "
    "read it. audit.json holds the same figures without any picture."
)


def write_page(path: Path, record: AuditRecord, pictures: Mapping[tuple[str, str, str], Groups]) -> None:
    """Write the page in one rename, for its owner's eyes alone."""
    text = render(record, pictures)
    with disk_errors(path):
        write_for_owner(path, text.encode())


def render(record: AuditRecord, pictures: Mapping[tuple[str, str, str], Groups]) -> str:
    """The page as text."""
    sites = [
        {
            "name": audit.site,
            "method": audit.method,
            "images": f"{audit.images:,}",
            "notes": list(record.notes.get(audit.site, ())),
            "privacy": {name: f"{value:g}" for name, value in record.privacy.get(audit.site, {}).items()},
            "groups": [
                {
                    "name": group.group,
                    "attacks": [_attack(a, pictures.get((audit.site, group.group, a.name), {})) for a in group.attacks],
                }
                for group in audit.groups
            ],
        }
        for audit in record.sites
    ]
    mean = [{"name": group.group, "attacks": [_attack(a, {}) for a in group.attacks]} for group in record.averaged]
    return _template().render(
        source=record.source,
        version=record.version,
        warning=WARNING,
        sites=sites,
        mean=mean if len(sites) > 1 else [],
        effort=record.effort,
    )


@cache
def _template() -> Template:
    return environment(Path(__file__).parent).get_template("page.html.j2")


def _attack(attack: Attack, pictures: Groups) -> View:
    return {
        "name": attack.name,
        "what": attack.what[:1].upper() + attack.what[1:],
        "short": attack.in_short(),
        "findings": list(attack.findings),
        "figures": [_figure(figure) for figure in attack.figures],
        "roc": _curve(attack.roc),
        "pairs": _pairs(pictures.get("pairs", {})),
    }


def _figure(figure: Figure) -> View:
    value = "–" if figure.value is None else f"{figure.value:.4g}"
    return {"name": figure.name, "value": value, "definition": figure.definition, "n": f"{figure.n:,}"}


def _curve(points: Points) -> str:
    """A ROC curve as an SVG path's points; empty where there is none."""
    return " ".join(f"{x * SIDE:.1f},{(1 - y) * SIDE:.1f}" for x, y in points)


def _pairs(tensors: Mapping[str, Tensor]) -> View | None:
    """A row of pictures for each kind, a column for each case."""
    kinds = [name for name in COLUMNS if name in tensors]
    if not kinds:
        return None
    rows = [{"name": COLUMNS[kind], "pictures": [_picture(image) for image in tensors[kind].cpu()]} for kind in kinds]
    return {"rows": rows, "l2": [f"{value:.3f}" for value in tensors["l2"].tolist()]}


def _picture(pixels: Tensor) -> str:
    """One 8-bit image `(channels, height, width)` as a data URI."""
    array = pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).contiguous().numpy()
    image = Image.fromarray(array)
    image = image.reduce(max(1, -(-max(image.size) // MOST_SIDE)))
    return data_uri(image)
