"""Charts as files of their own."""

import re
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from report.example import compare_result, imaging_result, run_result
from wardround.cli import main
from wardround.errors import BadInput
from wardround.record.rundir import write_json
from wardround.report.charts import Bar, bars
from wardround.report.page import render, views
from wardround.report.plots import charts_of, standing_alone, write_plots
from wardround.report.raster import SCALE, _dashed, _outlines, rasterise
from wardround.report.svg import Label
from wardround.report.values import percent


def test_every_chart_of_the_page_is_written_twice(tmp_path: Path) -> None:
    result = imaging_result(tmp_path, classes=3)
    html = render(result, tmp_path)
    keys = re.findall(r'<svg class="chart"[^>]*aria-labelledby="([\w-]+)-t ', html)
    written = write_plots(result, tmp_path, tmp_path / "plots")
    assert len(keys) > 20
    assert sorted(path.name for path in written) == sorted(f"{key}.{kind}" for key in keys for kind in ("svg", "png"))
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(path.name for path in written)


def test_a_chart_stands_alone_with_its_colours_written_out() -> None:
    for chart in charts_of(views(compare_result(rounds=3))):
        alone = standing_alone(chart)
        root = ElementTree.fromstring(alone)  # noqa: S314 - our own
        assert "var(" not in alone
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert float(root.attrib["width"]) == float(root.attrib["viewBox"].split()[2])


def test_a_picture_is_what_the_chart_says() -> None:
    chart = bars(Label("k", "t", "d"), [Bar("a", 0.5), Bar("b", 1.0, "lowest")], percent, percent)
    picture = Image.open(BytesIO(rasterise(standing_alone(chart)))).convert("RGB")
    root = ElementTree.fromstring(chart)  # noqa: S314 - our own
    width, height = (float(part) for part in root.attrib["viewBox"].split()[2:])
    assert picture.size == (round((width + 24) * SCALE), round((height + 24) * SCALE))

    def colour(x: float, y: float) -> tuple[int, ...]:
        found = picture.getpixel((round((x + 12) * SCALE), round((y + 12) * SCALE)))
        assert isinstance(found, tuple)
        return found

    plain, marked = root.iter("rect")
    for box, expected in ((plain, (0x84, 0x95, 0xBD)), (marked, (0xB5, 0x39, 0x4F))):
        x, y, length, thick = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert colour(x + 3, y + thick / 2) == expected
        assert colour(x + length - 2, y + 3) == expected
    x, y, length, thick = (float(plain.attrib[name]) for name in ("x", "y", "width", "height"))
    assert colour(x + length + 4, y + thick / 2) == (255, 255, 255)
    dark = sum(value < 100 for value in picture.crop((36, 125, 90, 160)).convert("L").tobytes())
    assert dark > 20  # the name


def test_paths_and_dashes() -> None:
    assert _outlines("M1 2L3 4M0 0h2v-1.5h-2z") == [
        ([(1.0, 2.0), (3.0, 4.0)], False),
        ([(0.0, 0.0), (2.0, 0.0), (2.0, -1.5), (0.0, -1.5)], True),
    ]
    assert _dashed([(0, 0), (10, 0)], [3, 2]) == [[(0, 0), (3, 0)], [(5, 0), (8, 0)]]
    assert _dashed([(0, 0), (2, 0), (2, 4)], [3, 2]) == [[(0, 0), (2, 0)], [(2, 0), (2, 1)], [(2, 3), (2, 4)]]


def test_the_command_writes_them_and_refuses_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(tmp_path / "result.json", run_result())
    assert main(["report", str(tmp_path), "--plots", str(tmp_path / "plots")]) == 0
    count = len(list((tmp_path / "plots").iterdir()))
    assert capsys.readouterr().out.splitlines()[1] == f"{count} plots in {tmp_path / 'plots'}"
    (tmp_path / "taken").write_text("")
    with pytest.raises(BadInput, match="is a file; give a folder for the plots"):
        write_plots(run_result(), None, tmp_path / "taken")
