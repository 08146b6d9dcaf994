"""What a check found, as one HTML file that needs nothing else: findings, counts, and a contact sheet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from wardround import __version__
from wardround.data.check.findings import SEVERITIES, Finding
from wardround.data.check.inspected import Inspected
from wardround.data.listing import PARTS
from wardround.embedded import data_uri, environment
from wardround.files import disk_errors, write_for_owner

TILE = 72  # pixels of a picture on the page
OF_A_CLASS, OF_A_FINDING = 12, 12
MOST_CLASSES = 40
SHOWN_NAMES, SHOWN_VALUES = 200, 6


def write_page(seen: Inspected, findings: Sequence[Finding], path: Path) -> None:
    """Write the page, whole or not at all, and for its owner alone: it shows patients' images."""
    text = environment(Path(__file__).parent).get_template("page.html.j2").render(view(seen, findings))
    with disk_errors(path):
        write_for_owner(path, text.encode("utf-8", "backslashreplace"))


def view(seen: Inspected, findings: Sequence[Finding]) -> dict[str, Any]:
    """What the template shows."""
    return {
        "name": seen.name,
        "how": seen.how,
        "version": __version__,
        "parts": PARTS,
        "classes": list(counts(seen)),
        "facts": list(facts(seen)),
        "findings": [_finding(seen, finding) for finding in findings],
        "sheet": [
            {"name": seen.classes[c], "tiles": list(_tiles(seen, _spread(seen, c)))}
            for c in range(min(len(seen.classes), MOST_CLASSES))
        ],
    }


def counts(seen: Inspected) -> Iterator[tuple[str, list[int]]]:
    """For each class how many images each part has."""
    for c, name in enumerate(seen.classes):
        yield name, np.bincount(seen.parts[seen.labels == c], minlength=len(PARTS)).tolist()


def facts(seen: Inspected) -> Iterator[tuple[str, str]]:
    """Sizes, depths and the like, the most frequent first."""
    looks = [item.look for item in seen.items]
    yield "images", f"{len(looks):,}"
    yield "sizes", _most_frequent(f"{look.width}×{look.height}" for look in looks)
    yield "bits a value", _most_frequent(str(look.bits) for look in looks)
    yield "kind", _most_frequent("grey" if look.channels == 1 else "colour" for look in looks)
    patients = {item.patient for item in seen.items} - {-1}
    yield "patients", f"{len(patients):,}" if patients else "not known"
    yield "parts", seen.how
    if seen.cached:
        yield "cache", seen.cached


def _most_frequent(values: Iterable[str]) -> str:
    found = Counter(values)
    more = f", and {len(found) - SHOWN_VALUES} more" if len(found) > SHOWN_VALUES else ""
    return ", ".join(f"{value} ({n:,})" for value, n in found.most_common(SHOWN_VALUES)) + more


def _finding(seen: Inspected, finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity,
        "words": SEVERITIES[finding.severity],
        "kind": finding.kind,
        "text": finding.text,
        "count": f"{finding.count:,}",
        "names": finding.names[:SHOWN_NAMES],
        "more": max(0, finding.count - SHOWN_NAMES),
        "tiles": list(_tiles(seen, finding.places[:OF_A_FINDING])),
    }


def _spread(seen: Inspected, label: int) -> list[int]:
    """Images of a class, evenly from its first to its last."""
    members = np.flatnonzero(seen.labels == label)
    places = np.linspace(0, len(members) - 1, min(OF_A_CLASS, len(members))).astype(int)
    return members[places].tolist() if len(members) else []


def _tiles(seen: Inspected, places: Iterable[int]) -> Iterator[dict[str, str]]:
    for place in places:
        image = Image.fromarray(seen.picture(place))
        image.thumbnail((TILE, TILE))
        yield {"name": seen.items[place].name, "src": data_uri(image)}
