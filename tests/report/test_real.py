"""Real images beside a gallery: which ones, how they are marked, and that no page has them by itself."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from report.example import imaging_result
from report.test_page import Page, rows_of
from report.test_workings import keep, pictures_of, pixels
from wardround.data.imageset import ImageSet
from wardround.report import render
from wardround.report.real import PER_COLUMN, RealImages

CLASSES = ("ash", "birch", "cedar")
WARNING = "This file holds patients’ images"


def site(first: int, labels: list[int], size: int = 4, channels: int = 1) -> ImageSet:
    """Images of one grey each, counted from `first`."""
    greys = torch.arange(first, first + len(labels), dtype=torch.uint8).reshape(-1, 1, 1, 1)
    return ImageSet(greys.expand(-1, channels, size, size).contiguous(), torch.tensor(labels), CLASSES)


REAL = RealImages({"north": site(100, [0, 0, 0, 0, 1]), "south": site(200, [2, 0, 0])})


def greys(row: list[Any]) -> list[int | None]:
    return [int(real.pixels[0, 0, 0]) if real else None for real in row]


# Which ones -----------------------------------------------------------------------------------------------------------


def test_sites_take_turns_and_a_class_that_comes_again_gets_other_images() -> None:
    rows = REAL.below([0, 1, 0, 2])
    assert [greys(row) for row in rows] == [[100, 104, 202, 200], [201, None, 102, None], [101, None, 103, None]]
    assert [real.site if real else None for real in rows[0]] == ["north", "north", "south", "south"]
    assert len(rows) == PER_COLUMN


def test_a_clusters_gallery_has_images_of_its_own_sites_only() -> None:
    result = {"clusters": [{"method": "fedbicross", "clusters": [["north"], ["south"]]}]}
    assert [*REAL.behind(result, "fedbicross", "cluster 2").sites] == ["south"]
    assert REAL.behind(result, "fedbicross", "cluster 2").whose == "the cluster’s sites (south)"
    for method, title in (("fedisca", "cluster 2"), ("fedbicross", "images"), ("fedbicross", "cluster 3")):
        assert REAL.behind(result, method, title) is REAL
    assert REAL.behind({"clusters": [3, {"method": "m", "clusters": "x"}]}, "m", "cluster 1") is REAL


# On the page ----------------------------------------------------------------------------------------------------------


def test_real_rows_are_below_the_steps_and_marked(tmp_path: Path) -> None:
    made = torch.arange(4, dtype=torch.uint8).reshape(2, 2, 1, 1, 1).expand(2, 2, 1, 4, 4).contiguous()
    html = render(keep(tmp_path, {"images": made}, [1, 9], [0, 2]), tmp_path, REAL)
    heads = [row[0] for row in rows_of(html, "Images made by fedisca, by step and class, and real ones")]
    assert heads == ["Step", "step 1", "step 9", "real 1", "real 2", "real 3"]
    images = pictures_of(html)
    assert [image["alt"] for image in images] == [
        *("ash, step 1", "cedar, step 1", "ash, step 9", "cedar, step 9"),
        *("ash, real image 1, of north", "cedar, real image 1, of south"),
        *("ash, real image 2, of south", "ash, real image 3, of north"),
    ]
    assert [pixels(image).getpixel((0, 0)) for image in images] == [0, 1, 2, 3, 100, 200, 201, 101]
    assert html.count('<tbody class="real">') == 1
    assert html.count("<td>none</td>") == 2
    assert WARNING in html
    assert "<title>Patients’ images · " in html
    assert "from all sites in turn" in html
    assert "no patient&#39;s image" not in html


def test_a_page_that_nobody_asked_for_has_none(tmp_path: Path) -> None:
    html = render(imaging_result(tmp_path), tmp_path)
    assert WARNING not in html
    assert "Patients’ images ·" not in html
    assert 'class="real"' not in html
    assert not [image for image in pictures_of(html) if "real" in image["alt"]]
    assert "no patient&#39;s image" in html


@pytest.mark.parametrize(("clusters", "size"), [(1, 28), (12, 28), (3, 224), (60, 64)])
def test_the_page_stays_small(clusters: int, size: int, tmp_path: Path) -> None:
    result = imaging_result(tmp_path, clusters=clusters, classes=3, size=size)
    draw = torch.Generator().manual_seed(0)
    sites = {}
    for name in ("site-1", "site-2"):
        colours = torch.randint(0, 256, (12, 3, size, size), generator=draw).to(torch.uint8)
        sites[name] = ImageSet(colours, torch.arange(12) % 3, CLASSES)
    html = render(result, tmp_path, RealImages(sites))
    assert len(html.encode()) - len(render(result).encode()) < 1_000_000
    tables = re.findall(r"<figure class=\"gallery\">.*?</table>", html, re.DOTALL)
    assert tables
    assert all(table.count('<tbody class="real">') == 1 for table in tables)


def test_the_page_is_whole(tmp_path: Path) -> None:
    page = Page(render(imaging_result(tmp_path, classes=3), tmp_path, REAL))
    assert all(image["src"].startswith("data:image/png;base64,") and image["alt"] for image in page.all("img"))
    assert not [attributes for _, attributes in page.found if "style" in attributes]
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
