"""Whether images and a network belong together, asked before an attack spends an hour on them."""

from __future__ import annotations

from wardround.data.imageset import ImageSet
from wardround.errors import BadInput
from wardround.models import NetSpec


def require_fit(spec: NetSpec, images: ImageSet) -> None:
    """Refuse images that this network was not made for: those of another study, most likely."""
    found = (images.channels, images.size, len(images.classes))
    if found != (spec.channels, spec.size, spec.classes):
        raise BadInput(
            f"the network takes {spec.channels}×{spec.size}×{spec.size} images of {spec.classes} classes, and these "
            f"are {found[0]}×{found[1]}×{found[1]} of {found[2]}; give the images of the network's own study"
        )
