"""Which published figures `one_shot_grid.py` puts beside its own; the figures themselves are in `wardround.papers`.

FedBiCross says of its tables only "test accuracy on each client", averaged over clients. A cluster that has never seen
most classes could not reach them on the global test, so they are put beside local accuracy. Of its rows K = 2, 3, 4
(the automatic choice is in bold there) the highest is taken. The E-FedISCA paper, Table 3, measures the global model on
the official test set.
"""

from __future__ import annotations

from wardround.papers.datasets import STAND_INS, stands_for
from wardround.papers.library import table
from wardround.papers.schema import value

LABEL = "published, on the authors' protocol, single run"
SITES = 5  # both tables' number of clients here
_FEDISCA_ALPHA = 0.3  # the one level of its Table 3 that FedBiCross has, too

__all__ = ["LABEL", "SITES", "STAND_INS", "local", "shared_global"]


def local(images: str, alpha: float | None, entry: str) -> float | None:
    """What FedBiCross's tables have for an entry, to put beside its local accuracy."""
    found = (_beside(id, images, alpha, entry) for id in ("fedbicross-1", "fedbicross-2"))
    return next((figure for figure in found if figure is not None), None)


def shared_global(images: str, alpha: float | None, entry: str) -> float | None:
    """What the E-FedISCA paper has for an entry, to put beside the shared model's accuracy on the global test."""
    return _beside("fedisca-3", images, alpha, entry) if alpha == _FEDISCA_ALPHA else None


def _beside(id: str, images: str, alpha: float | None, entry: str) -> float | None:
    found = None if alpha is None else table(id).printed(entry, stands_for(images), SITES, alpha)
    return None if found is None else value(found[0])
