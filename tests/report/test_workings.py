"""The coordinator's part of the page: clusters, galleries and time."""

import base64
import copy
import json
import os
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from report.example import compare_result, imaging_result
from report.test_page import HOSTILE, Page, rows_of, small
from wardround import tensorfile
from wardround.report import render, write_report


def pictures_of(html: str) -> list[dict[str, str]]:
    return Page(html).all("img")


def pixels(image: dict[str, str]) -> Image.Image:
    head, data = image["src"].split(",")
    assert head == "data:image/png;base64"
    return Image.open(BytesIO(base64.b64decode(data)))


def keep(folder: Path, pictures: dict[str, torch.Tensor], steps: list[int], labels: list[int], **more: Any) -> Any:
    """A result of one method that names a gallery of these pictures."""
    facts = {"labels": labels, "steps": steps, **more}
    tensorfile.write(folder / "gallery.safetensors", {"gallery": pictures}, {"gallery": facts})
    named = [{"method": "fedisca", "file": "gallery.safetensors"}]
    return small(galleries=named, data={"classes": ["ash", "birch", "cedar"]})


# Galleries ------------------------------------------------------------------------------------------------------------


def test_rows_are_steps_and_columns_are_classes(tmp_path: Path) -> None:
    grey = torch.arange(6, dtype=torch.uint8).reshape(3, 2, 1, 1, 1).expand(3, 2, 1, 4, 5).contiguous()
    html = render(keep(tmp_path, {"images": grey}, [1, 250, 1500], [0, 2]), tmp_path)
    table = rows_of(html, "Images made by fedisca, by step and class")
    assert table == [["Step", "ash", "cedar"], ["step 1", "", ""], ["step 250", "", ""], ["step 1,500", "", ""]]
    images = pictures_of(html)
    assert [image["alt"] for image in images] == [
        *("ash, step 1", "cedar, step 1", "ash, step 250", "cedar, step 250", "ash, step 1,500", "cedar, step 1,500")
    ]
    assert {(image["width"], image["height"]) for image in images} == {("5", "4")}
    assert [pixels(image).getpixel((4, 3)) for image in images] == [0, 1, 2, 3, 4, 5]
    assert "Made by the coordinator from the models alone; no patient&#39;s image." in html
    assert "To keep this page small" not in html


def test_colours_come_through_unchanged(tmp_path: Path) -> None:
    colour = torch.tensor([10, 200, 30], dtype=torch.uint8).reshape(1, 1, 3, 1, 1).expand(1, 1, 3, 28, 28).contiguous()
    (image,) = pictures_of(render(keep(tmp_path, {"images": colour}, [9], [1]), tmp_path))
    assert pixels(image).getpixel((27, 0)) == (10, 200, 30)


def test_a_class_that_comes_again_is_numbered_and_an_unknown_one_is_named_by_number(tmp_path: Path) -> None:
    blank = torch.zeros((1, 3, 1, 2, 2), dtype=torch.uint8)
    html = render(keep(tmp_path, {"images": blank}, [1], [1, 1, 7], left_out=[0, 2]), tmp_path)
    assert [image["alt"] for image in pictures_of(html)] == ["birch, step 1", "birch (2), step 1", "class 7, step 1"]
    assert "Not shown: ash, cedar." in html


def test_a_comparison_has_a_gallery_for_each_method_and_cluster(tmp_path: Path) -> None:
    html = render(imaging_result(tmp_path, clusters=2), tmp_path)
    captions = re.findall(r'gallery">\s*<figcaption>(fed[^<]*)<span>', html)
    assert captions == ["fedisca", "fedbicross, cluster 1", "fedbicross, cluster 2"]
    assert len(pictures_of(html)) == 3 * 6 * 8


def test_cluster_ten_comes_after_cluster_nine(tmp_path: Path) -> None:
    html = render(imaging_result(tmp_path, clusters=11, classes=2, size=4), tmp_path)
    captions = re.findall(r'gallery">\s*<figcaption>fedbicross, (cluster \d+)<span>', html)
    assert captions == [f"cluster {k}" for k in range(1, 12)]


@pytest.mark.parametrize(
    ("clusters", "size", "channels"), [(2, 28, 3), (12, 28, 3), (49, 28, 3), (3, 224, 3), (60, 64, 3)]
)
def test_galleries_stay_under_a_megabyte_and_say_what_is_left_out(
    clusters: int, size: int, channels: int, tmp_path: Path
) -> None:
    result = imaging_result(tmp_path, clusters=clusters, size=size, channels=channels)
    html, without = render(result, tmp_path), render(result)
    images = pictures_of(html)
    assert images
    assert len(html.encode()) - len(without.encode()) < 1_000_000
    whole = (clusters + 1) * 6 * 8
    assert ("To keep this page small" in html) == (len(images) < whole)
    assert ("Shown at 1/4 of 224 × 224 pixels." in html) == (size == 224)
    for head in re.findall(r'gallery">\s*<figcaption>fed[^<]*<span>.*?</table>', html, re.DOTALL):
        steps = re.findall(r'<th scope="row">step (\d+)</th>', head)
        assert (steps[0], steps[-1]) == ("1", "500")


def test_galleries_that_have_no_room_at_all_are_counted(tmp_path: Path) -> None:
    html = render(imaging_result(tmp_path, clusters=60, classes=2, size=64), tmp_path)
    shown = len(re.findall(r'gallery">\s*<figcaption>fed[^<]*<span>', html))
    assert shown < 61
    assert f"{61 - shown} more galleries are not shown" in html


def test_a_damaged_gallery_is_noted_and_the_others_are_shown(tmp_path: Path) -> None:
    result = imaging_result(tmp_path)
    (tmp_path / "fedisca" / "gallery.safetensors").write_bytes(b"\x08\x00")
    html = render(result, tmp_path)
    assert "The images of fedisca cannot be shown: these bytes are not a wardround tensor file" in html
    assert len(pictures_of(html)) == 2 * 6 * 8


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such pipes")
def test_a_pipe_in_the_place_of_a_gallery_is_not_waited_for(tmp_path: Path) -> None:
    result = imaging_result(tmp_path)
    (tmp_path / "fedisca" / "gallery.safetensors").unlink()
    os.mkfifo(tmp_path / "fedisca" / "gallery.safetensors")
    html = render(result, tmp_path)
    assert "The images of fedisca cannot be shown: gallery.safetensors is not a plain file." in html


@pytest.mark.parametrize(
    "file", ["", "../gallery.safetensors", "/gallery.safetensors", "elsewhere/gallery.safetensors", None, 3]
)
def test_a_file_outside_the_directory_is_not_read(file: Any, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    result = keep(tmp_path, {"images": torch.zeros((1, 1, 1, 2, 2), dtype=torch.uint8)}, [1], [0])
    result["galleries"][0]["file"] = file
    html = render(result, inner)
    assert "The images of fedisca cannot be shown" in html
    assert pictures_of(html) == []


def test_the_page_with_galleries_is_whole_and_admits_nothing_else(tmp_path: Path) -> None:
    html = render(imaging_result(tmp_path), tmp_path)
    page = Page(html)
    assert all(image["src"].startswith("data:image/png;base64,") and image["alt"] for image in page.all("img"))
    assert not [attributes for _, attributes in page.found if "style" in attributes]
    assert len(page.all("caption")) == len(page.all("table"))
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert '<a href="#coordinator">' in html


# Work -----------------------------------------------------------------------------------------------------------------


def test_the_coordinators_time_by_part(tmp_path: Path) -> None:
    html = render(imaging_result(tmp_path))
    assert rows_of(html, "The coordinator&#39;s work")[:4] == [
        ["Part", "Steps", "Time", "One step"],
        ["fedisca, synthesis", "500", "4.1 s", "8.2 ms"],
        ["fedisca, adaptation", "500", "0.6 s", "1.2 ms"],
        ["fedisca, distillation", "500", "2.9 s", "5.8 ms"],
    ]
    assert "One bar per method, split by part: fedisca 7.6 s, fedbicross 7.6 s." in html
    assert "One step: copies of the models follow the images of one step." in html


def test_the_work_of_one_method_with_parts_unknown_and_without_steps() -> None:
    work = [{"method": "fedavg", "part": "boosting", "steps": 0, "seconds": 1.5, "ms_per_step": None}]
    html = render(small(work=work))
    assert rows_of(html, "The coordinator&#39;s work")[1] == ["Boosting", "0", "1.5 s", "–"]


# Clusters -------------------------------------------------------------------------------------------------------------


def test_clusters_silhouettes_and_weights(tmp_path: Path) -> None:
    html = render(imaging_result(tmp_path))
    assert "Which sites belong together: fedbicross, 2 clusters" in html
    assert rows_of(html, "Clusters of fedbicross")[1:] == [
        ["Cluster 1", "3", "site-1, site-3, site-5"],
        ["Cluster 2", "2", "site-2, site-4"],
    ]
    assert rows_of(html, "Silhouette by number of clusters, fedbicross")[1:] == [
        ["2", "0.410"],
        ["3", "0.380"],
        ["4", "0.120"],
    ]
    assert "Highest, 0.410, with 2 clusters." in html
    assert rows_of(html, "Cross-cluster weights of fedbicross") == [
        ["Learns from", "Cluster 1", "Cluster 2"],
        ["Cluster 1", "0.700", "0.300"],
        ["Cluster 2", "0.300", "0.700"],
    ]
    drawing = html.split('aria-labelledby="weights-0-')[1].split("</svg>")[0]
    assert re.findall(r'class="heat (h\d+)"', drawing) == ["h7", "h3", "h3", "h7"]


def test_one_cluster_without_anything_to_choose_from() -> None:
    html = render(
        small(clusters=[{"method": "fedavg", "clusters": [["a", "b"]], "silhouettes": {}, "weights": [[1.0]]}])
    )
    assert "fedavg, 1 cluster<" in html
    assert "Silhouette" not in html
    assert rows_of(html, "Cross-cluster weights of fedavg") == [["Learns from", "Cluster 1"], ["Cluster 1", "1.000"]]


# Any result -----------------------------------------------------------------------------------------------------------


def test_a_result_without_workings_has_no_such_section() -> None:
    html = render(compare_result())
    assert "At the coordinator" not in html
    assert "#coordinator" not in html


def test_any_field_of_any_workings_may_be_missing_or_nonsense(tmp_path: Path) -> None:
    whole = imaging_result(tmp_path, classes=2, size=4)
    for key in ("work", "clusters", "galleries"):
        for nonsense in (None, [], {}, [3], "x"):
            Page(render({**whole, key: nonsense}, tmp_path))
        for field in whole[key][0]:
            for nonsense in (None, [], "x", {"x": "y"}, [["x"]], -1):
                result = copy.deepcopy(whole)
                result[key][0][field] = nonsense
                Page(render(json.loads(json.dumps(result)), tmp_path))
            del result[key][0][field]
            Page(render(result, tmp_path))


def test_hostile_names_are_only_ever_text(tmp_path: Path) -> None:
    result = imaging_result(tmp_path)
    result["data"]["classes"] = [HOSTILE] * 8
    result["clusters"][0]["clusters"][0][0] = HOSTILE
    result["work"][0]["part"] = HOSTILE
    result["galleries"].append({"method": HOSTILE, "file": HOSTILE})
    html = render(result, tmp_path)
    page = Page(html)
    assert page.all("script") == []
    assert not set(html) & {"\x00", "\x1b", "\u202e", "\ud800"}


def test_a_page_is_written_with_its_galleries(tmp_path: Path) -> None:
    result = imaging_result(tmp_path)
    write_report(result, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == render(result, tmp_path)
