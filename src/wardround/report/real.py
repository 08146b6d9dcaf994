"""Real images beside made ones: a few of each class, for the eye, and only where the user asked for them.

No report has them by itself: `wardround report RUN --real-images` writes a page of another name that stays at the site.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from wardround.data.imageset import ImageSet
from wardround.report.parts import View
from wardround.report.values import as_list, as_records, as_text, as_texts

PER_COLUMN = 3  # real images below each column of a gallery


@dataclass(frozen=True)
class Real:
    """One training image, and the site whose it is."""

    pixels: Tensor  # uint8 (channels, height, width)
    site: str


@dataclass(frozen=True)
class RealImages:
    """What some sites of a run trained on, and who they are in words."""

    sites: Mapping[str, ImageSet]
    whose: str = "all sites"

    def behind(self, result: View, method: str, title: str) -> RealImages:
        """Only those of the sites whose models a gallery was made from: of a cluster's gallery, the cluster's."""
        found = re.fullmatch(r"cluster (\d+)", title)
        for entry in as_records(result.get("clusters")) if found else []:
            clusters = as_list(entry.get("clusters"))
            if found and as_text(entry.get("method")) == method and 0 < int(found[1]) <= len(clusters):
                names = as_texts(clusters[int(found[1]) - 1])
                inside = {name: images for name, images in self.sites.items() if name in names}
                return RealImages(inside, f"the cluster’s sites ({', '.join(inside)})")
        return self

    def below(self, labels: Sequence[int]) -> list[list[Real | None]]:
        """`PER_COLUMN` rows with an image below each column of these classes; None where there is no other."""
        columns = []
        for i, label in enumerate(labels):
            before = PER_COLUMN * list(labels[:i]).count(label)
            found = self._in_turn(label, before + PER_COLUMN)[before:]
            columns.append([*found, *[None] * (PER_COLUMN - len(found))])
        return [[column[row] for column in columns] for row in range(PER_COLUMN)]

    def _in_turn(self, label: int, most: int) -> list[Real]:
        """Images of a class, from the sites in turn, so that a large site hides no small one."""
        found = [
            (turn, name, place)
            for name, images in self.sites.items()
            for turn, place in enumerate((images.labels == label).nonzero().flatten().tolist()[:most])
        ]
        found.sort(key=lambda entry: entry[0])  # stable: within a turn, sites stay in their order
        return [Real(self.sites[name].images[place], name) for _, name, place in found[:most]]
