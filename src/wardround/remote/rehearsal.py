"""The whole study on one machine, with the images of all sites: a dress rehearsal, and the measure for the parcels.

What sites and hub do over parcels gives the very tensors that this gives in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from wardround import run
from wardround.agreement import Agreement
from wardround.data.federation import Federation, Site
from wardround.data.imageset import merge
from wardround.data.partition import Partition
from wardround.errors import BadInput
from wardround.learn.device import Device
from wardround.progress import NO_PROGRESS, Silent
from wardround.record import result as results
from wardround.record.rundir import RunDir, write_json


def simulate(
    agreement: Agreement, sites: Sequence[Site], out: Path, device: Device, progress: Silent = NO_PROGRESS
) -> dict[str, Any]:
    """Run the agreement in `out` over the sites' own images; the result that `wardround run` would give."""
    study, method = agreement.study(), agreement.method()
    here = [site.name for site in sites]
    if sorted(here) != list(study.sites):
        raise BadInput(
            f"a rehearsal needs the images of every site: {', '.join(study.sites)}, not {', '.join(here) or 'none'}"
        )
    federation = _federation(agreement, sorted(sites, key=lambda site: site.name))
    edges = np.cumsum([0, *(len(site.train) + len(site.val) for site in federation.sites)])
    partition = Partition(tuple(np.arange(a, b) for a, b in pairwise(edges)), federation.partition_rule, 0)
    prepared = run.Prepared(study, federation, partition, device, (method,), (method.name,))

    def fill(part: Path) -> None:
        write_json(part / run.SETTINGS, study.settings.model_dump(mode="json"))
        partition.save(part / run.PARTITION)
        write_json(part / run.DATA, results.describe_data(federation))
        write_json(part / run.ENVIRONMENT, results.environment(device))

    RunDir.create(out, fill).close()
    return run.Job(out, prepared, False, progress).finish()


def _federation(agreement: Agreement, sites: Sequence[Site]) -> Federation:
    merged = merge([site.test.images for site in sites])
    return Federation(
        sites=tuple(sites),
        test=merged,
        classes=agreement.task.classes,
        partition_rule=f"each site's own images, {len(sites)} sites",
        partition_hash=agreement.id,
        local_protocol="accuracy of each site on its own test part",
        global_protocol=f"accuracy on the test parts of all sites merged ({len(merged):,} images)",
        provenance=f"rehearsal of study {agreement.name} ({agreement.id}) on one machine",
    )
