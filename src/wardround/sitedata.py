"""A site's images as the agreement wants them: its classes in its order, its size, its channels.

The same function serves a site on its own and a rehearsal on one machine, so that both train on the same images.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from wardround.agreement import Agreement, Task
from wardround.data.federate import patient_notes
from wardround.data.federation import Federation, LocalTest, Site
from wardround.data.imageset import ImageSet, merge
from wardround.data.partition import Partition
from wardround.data.sources import default_data_folder, load
from wardround.data.splits import Splits
from wardround.errors import BadInput
from wardround.progress import NO_PROGRESS, Silent


def read_site(agreement: Agreement, name: str, source: str, progress: Silent = NO_PROGRESS) -> Site:
    """The images of site `name`: any source that a run reads (see docs/your-images.md).

    An official validation part is trained on, and a validation share of its own is held out, as in a run: by patient
    where it has patient ids. The site is tested on the official test part.
    """
    task = agreement.task
    data = load(source, default_data_folder(), size=task.size, progress=progress, slices=task.slices)
    train = merge([data.train, data.val]) if data.val is not None and len(data.val) else data.train
    for note in (*data.notes, *patient_notes(train, data.test)):
        progress.say(f"note: {note}")
    own, test = (as_agreed(part, task, data.name) for part in (train, data.test))
    by_patient = task.by_patient or own.patients is not None
    train, val, _ = Splits("natural", val_share=task.val_share, by_patient=by_patient).split(name, own)
    return Site(name, train, val, LocalTest(test, None))


def all_sites(agreement: Agreement, sites: Sequence[Site]) -> tuple[Federation, Partition]:
    """The sites of a rehearsal together; it needs every one of them."""
    here = [site.name for site in sites]
    if sorted(here) != list(agreement.sites):
        raise BadInput(
            f"a rehearsal needs the images of every site: {', '.join(agreement.sites)}, not {', '.join(here) or 'none'}"
        )
    ordered = sorted(sites, key=lambda site: site.name)
    merged = merge([site.test.images for site in ordered])
    federation = Federation(
        sites=tuple(ordered),
        test=merged,
        classes=agreement.task.classes,
        partition_rule=f"each site's own images, {len(sites)} sites",
        partition_hash=agreement.id,
        local_protocol="accuracy of each site on its own test part",
        global_protocol=f"accuracy on the test parts of all sites merged ({len(merged):,} images)",
        provenance=f"rehearsal of study {agreement.name} ({agreement.id}) on one machine",
    )
    edges = np.cumsum([0, *(len(site.train) + len(site.val) for site in ordered)])
    return federation, Partition(tuple(np.arange(a, b) for a, b in pairwise(edges)), federation.partition_rule, 0)


def as_agreed(images: ImageSet, task: Task, name: str) -> ImageSet:
    """The same images with the agreement's class numbers and channels; a class it does not know is an error."""
    if images.size != task.size:
        raise BadInput(f"{name} has images of {images.size} pixels, the study has {task.size}; convert them first")
    pixels = images.images
    if images.channels == 1 and task.channels == 3:
        pixels = pixels.expand(-1, 3, -1, -1).contiguous()
    elif images.channels != task.channels:
        raise BadInput(f"{name} has colour images, the study has grey ones; convert them first")
    place = torch.tensor(_places(images.classes, task, name))
    return replace(images, images=pixels, labels=place[images.labels], classes=task.classes)


def _places(found: tuple[str, ...], task: Task, name: str) -> list[int]:
    """Where each class of the source stands in the agreement; a file that numbers its classes counts as it does."""
    if all(re.fullmatch(r"class [0-9]+", c) for c in found) and not set(found) & set(task.classes):
        if len(found) > len(task.classes):
            raise BadInput(f"{name} has labels up to {len(found) - 1}, the study has {len(task.classes)} classes")
        return list(range(len(found)))
    unknown = [c for c in found if c not in task.classes]
    if unknown:
        raise BadInput(
            f"{name} has the class {unknown[0]!r}, which the study does not know; its classes are "
            f"{', '.join(task.classes)}: rename it in the folder or table, or leave it out"
        )
    return [task.classes.index(c) for c in found]
