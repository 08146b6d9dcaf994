"""What a site would carry out: a parcel in its outbox, verified as the coordinator would verify it."""

from __future__ import annotations

from pathlib import Path

from wardround.agreement import read_agreement
from wardround.audit.target import Target
from wardround.errors import BadInput
from wardround.exchange.bundle import SIZE, Bundle
from wardround.learn.predictor import Member
from wardround.methods.base import join_groups
from wardround.models import spec_layout
from wardround.progress import Silent
from wardround.remote.inspection import read_any
from wardround.remote.trust import Trust
from wardround.sitedata import read_site


def target_of_parcel(path: Path, study_file: Path, data: str | None, site: str | None, progress: Silent) -> Target:
    """The answer in this parcel of the study in `study_file`, against the images that `data` names."""
    if data is None:
        raise BadInput("the audit of a parcel needs the site's images; name them with --data")
    if not study_file.exists():
        raise BadInput(f"there is no {study_file}; name the study that the parcel belongs to with --study")
    trust = Trust.beside(study_file, read_agreement(study_file))
    agreement = trust.agreement
    manifest, bundle = read_any(path, trust)
    if manifest.kind != "answer":
        raise BadInput(f"{path} is a {manifest.kind} of the coordinator's, nothing that a site sends; give an answer")
    if site is not None and site != manifest.site:
        raise BadInput(f"{path} is of {manifest.site}, not of {site}; leave --site out or give the other parcel")
    study, method = agreement.study(), agreement.method()
    own = read_site(agreement, manifest.site, data, progress)
    _refuse_other_images(path, bundle, len(own.train))
    sent, spec = join_groups(bundle), study.spec(manifest.site)
    whole = set(sent) == set(spec_layout(spec).names)
    notes = ("parts of the network stay at the site, so the attacks on models cannot be run on the parcel",)
    return Target(
        bundle,
        own,
        study.recipe(0, study.total_epochs),
        Member(spec, sent) if whole else None,
        stage=getattr(method.settings, "stage", None),
        notes=notes if sent and not whole else (),
        privacy=manifest.privacy,
    )


def _refuse_other_images(path: Path, bundle: Bundle, images: int) -> None:
    """A parcel has no hash of the images, but it may say how many there were."""
    for told in bundle.group(SIZE).values():
        if int(told) not in (0, images):
            raise BadInput(
                f"{path} was trained on {int(told):,} images, and {images:,} of these would be; give the images that "
                "the site trained on"
            )
