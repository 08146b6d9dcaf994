"""The report with real images beside the galleries, which is another file than the report that people pass on.

It shows patients' images: it has another name, says on top that it stays at the site, and only its owner may read it.
The images are read again from where the run's settings find them, and must be the very ones that the run was made with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wardround import run
from wardround.errors import BadInput
from wardround.files import disk_errors, write_for_owner
from wardround.progress import Silent
from wardround.report.gallery import galleries_view
from wardround.report.page import render
from wardround.report.real import RealImages
from wardround.settings import Settings, validate

PAGE = "report-with-patients-images.html"


def write_with_real_images(path: Path, data: str | None, progress: Silent) -> Path:
    """Write the page of a finished run with some of its training images; the page.

    `data` says where the images are now, where the run's settings no longer find them.
    """
    result = run.read_result(path)
    folder = path if path.is_dir() else path.parent
    _check_galleries(result, folder)
    page = render(result, folder, _images(folder, data, progress)).encode()
    with disk_errors(folder / PAGE):
        write_for_owner(folder / PAGE, page)
    return folder / PAGE


def _check_galleries(result: dict[str, Any], folder: Path) -> None:
    """Before any image is read: there must be something to put real images beside."""
    galleries = galleries_view(result, folder)
    if galleries["figures"]:
        return
    if galleries["problems"]:
        raise BadInput(f"there is no gallery to put real images beside: {galleries['problems'][0].rstrip('.')}")
    raise BadInput(
        f"{folder} has no gallery to put real images beside: none of its methods makes images; "
        "write its report without --real-images"
    )


def _images(folder: Path, data: str | None, progress: Silent) -> RealImages:
    settings = _settings(validate(run.read_json(folder / run.SETTINGS, dict)), data)
    federation = run.prepare_again(folder, settings, [], progress).federation
    return RealImages({site.name: site.train for site in federation.sites})


def _settings(settings: Settings, data: str | None) -> Settings:
    """The run's, with no more asked of this machine than to read images: neither its device nor its weights."""
    images = settings.data
    if data is not None:
        if images.files:
            raise BadInput(
                "this run has a file for each site, so --data cannot name its images; put them where its "
                f"{run.SETTINGS} says"
            )
        images = images.model_copy(update={"source": data})
    model = settings.model.model_copy(update={"weights": None})
    return settings.model_copy(update={"data": images, "model": model, "device": "cpu"})
