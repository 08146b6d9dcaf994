"""Points as charts: what stands where, read back from what was drawn."""

import re
from itertools import pairwise

import pytest

from wardround.report.points import Axis, scatter
from wardround.report.svg import Label
from wardround.report.values import duration, percent, percent_mark, unit_of_time

SPOTS = {"fedbicross": (0.891, 0.595), "local": (0.879, 0.499), "fedavg": (0.162, 0.196)}


def drawn(spots: dict[str, tuple[float, float]]) -> str:
    axes = (Axis(f"{name} accuracy", percent_mark, percent, span=0.05) for name in ("local", "global"))
    return scatter(Label("balance", "t", "d"), spots, *axes, diagonals=True)


def numbers(markup: str, *names: str) -> list[float]:
    return [float(found[1]) for name in names if (found := re.search(rf' {name}="([-\d.]+)"', markup))]


class Scale:
    """From places of a chart to per cent, by its grid lines and the marks beside them."""

    def __init__(self, svg: str) -> None:
        lines = [numbers(line, "x1", "x2", "y1", "y2") for line in re.findall(r'<line class="grid"[^>]*/>', svg)]
        self.x = sorted({x1 for x1, x2, _, _ in lines if x1 == x2})
        self.y = sorted({y1 for _, _, y1, y2 in lines if y1 == y2}, reverse=True)
        self.across, self.up = (
            [float(mark) for mark in re.findall(rf'<text class="tick" [^>]*"{anchor}">([-\d.]+)%<', svg)]
            for anchor in ("middle", "end")
        )

    def share(self, x: float, y: float) -> tuple[float, float]:
        return (
            self.across[0] + (self.across[-1] - self.across[0]) * (x - self.x[0]) / (self.x[-1] - self.x[0]),
            self.up[0] + (self.up[-1] - self.up[0]) * (y - self.y[0]) / (self.y[-1] - self.y[0]),
        )


def test_every_method_stands_at_its_accuracies() -> None:
    svg = drawn(SPOTS)
    found = {title: numbers(dot, "cx", "cy") for dot, title in re.findall(r"(<circle[^>]*>)<title>([^:]+):", svg)}
    for name, (local, overall) in SPOTS.items():
        assert Scale(svg).share(*found[name]) == pytest.approx((100 * local, 100 * overall), abs=0.2)


@pytest.mark.parametrize("spots", [SPOTS, {"a": (0.91, 0.2), "b": (0.93, 0.9)}, {"a": (0.5, 0.5), "b": (0.5, 0.5)}])
def test_along_a_balance_line_the_mean_of_both_accuracies_is_its_mark(spots: dict[str, tuple[float, float]]) -> None:
    svg = drawn(spots)
    found = re.findall(r'(<line class="reference faint"[^>]*/>)<text class="tick faint"[^>]*>([\d.]+)%', svg)
    assert len(found) >= 2
    for line, mark in found:
        for ends in (("x1", "y1"), ("x2", "y2")):
            assert sum(Scale(svg).share(*numbers(line, *ends))) / 2 == pytest.approx(float(mark), abs=0.2)


def test_marks_of_balance_lines_stand_above_the_frame_where_no_name_is_in_the_way() -> None:
    marks = re.findall(
        r'<line class="reference faint"[^>]* y1="26"[^>]*/>(<text class="tick faint"[^>]*>)', drawn(SPOTS)
    )
    assert marks
    assert all(numbers(mark, "y") == [22.0] for mark in marks)


def test_names_stay_beside_their_points_and_never_meet() -> None:
    crowd = {f"same {n}": (0.2, 0.3) for n in range(6)} | {"near": (0.21, 0.31), "far": (0.9, 0.3), "high": (0.2, 0.9)}
    svg = drawn(crowd)
    dots = {title: numbers(dot, "cx", "cy") for dot, title in re.findall(r"(<circle[^>]*>)<title>([^:]+):", svg)}
    names = {name: numbers(text, "x", "y") for text, name in re.findall(r'(<text class="name"[^>]*>)([^<]+)<', svg)}
    assert names.keys() == crowd.keys()
    for name in ("same 0", "far", "high"):  # nothing is in their way
        assert names[name][1] - 4 == pytest.approx(dots[name][1])
    assert max(abs(names[name][1] - 4 - dots[name][1]) for name in crowd) <= 13 * 4
    close = [place for name, place in names.items() if name.startswith(("same", "near"))]
    heights = sorted(y for _, y in close)
    assert all(b - a >= 12.9 for a, b in pairwise(heights))


def test_marks_of_time_are_whole_minutes_or_hours() -> None:
    time = Axis("time", duration, duration, low=0.0, unit=unit_of_time)
    assert time.ticks([1.0, 41.0], 3) == [0.0, 20.0, 40.0, 60.0]
    assert time.ticks([1.0, 400.0], 3) == [0.0, 300.0, 600.0]
    assert time.ticks([600.0, 30000.0], 3) == [0.0, 18000.0, 36000.0]
