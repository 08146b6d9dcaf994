"""The whole study on one machine, with the images of all sites: a dress rehearsal, and the measure for the parcels.

What sites and hub do over parcels gives the very tensors that this gives in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wardround import run
from wardround.agreement import Agreement, write_agreement
from wardround.data.federation import Site
from wardround.learn.device import Device
from wardround.progress import NO_PROGRESS, Silent
from wardround.record.rundir import RunDir
from wardround.settings import DataSettings, Settings
from wardround.sitedata import all_sites
from wardround.study import Study


def simulate(
    agreement: Agreement,
    sites: Sequence[Site],
    out: Path,
    device: Device,
    progress: Silent = NO_PROGRESS,
    *,
    files: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run the agreement in `out` over the sites' own images; the result that `wardround run` would give.

    `files` says where each site's images were read. The record needs it to find them again: to go on, to be repeated,
    to be audited.
    """
    study, method = agreement.study(), agreement.method()
    federation, partition = all_sites(agreement, sites)
    study = replace(study, settings=_settings(agreement, study, device, files or {}))
    prepared = run.Prepared(study, federation, partition, device, (method,), (method.name,))

    job = run.Job(out, prepared, False, progress)

    def fill(part: Path) -> None:
        job.write_opening(part, study)
        write_agreement(part / run.AGREEMENT, agreement)

    RunDir.create(out, fill).close()
    return job.finish()


def _settings(agreement: Agreement, study: Study, device: Device, files: Mapping[str, str]) -> Settings:
    """The agreed ones, and of this machine where the images are and what computes."""
    task = agreement.task
    data = DataSettings(
        files=dict(sorted(files.items())),
        sites=len(agreement.sites),
        size=task.size,
        slices=task.slices,
        val_share=task.val_share,
        by_patient=task.by_patient or None,
    )
    return study.settings.model_copy(update={"data": data, "device": str(device.torch)})
