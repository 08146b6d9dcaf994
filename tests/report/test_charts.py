import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wardround.report.charts import Bar, Line, Stack, bars, lines, stacked_bars
from wardround.report.svg import Label, plain

LABEL = Label("key", "Title", "What it shows")
NUMBERS = st.none() | st.floats()
NAMES = st.text(max_size=30)


def percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)  # noqa: S314 - our own markup, parsed to see that it is well formed


def numbers(root: ElementTree.Element, tag: str, kind: str, attribute: str) -> list[float]:
    return [float(e.get(attribute, "nan")) for e in root.iter(tag) if (e.get("class") or "").split()[0] == kind]


def words(root: ElementTree.Element, kind: str) -> list[str]:
    return [e.text or "" for e in root.iter("text") if kind in (e.get("class") or "").split()]


def test_a_chart_is_named_for_a_screen_reader() -> None:
    root = parse(bars(LABEL, [Bar("a", 0.5)], percent, percent))
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == "key-t key-d"
    assert [(e.tag, e.get("id"), e.text) for e in list(root)[:2]] == [
        ("title", "key-t", "Title"),
        ("desc", "key-d", "What it shows"),
    ]


def test_bars_are_as_long_as_their_values() -> None:
    items = [Bar("a", 1.0), Bar("b", 0.25), Bar("c", 0.0), Bar("d", None), Bar("e", math.nan), Bar("f", 1.7)]
    root = parse(bars(LABEL, items, percent, percent, width=320))
    span = 320 - 50 - (14 + 6.6)  # width less the column of values and of names one character long
    assert numbers(root, "rect", "bar", "width") == pytest.approx([span, span / 4, 0, 0, 0, span], abs=0.03)
    assert words(root, "value") == ["100%", "25%", "0%", "–", "–", "170%"]


def test_the_marked_bar_carries_its_word_and_the_mean_its_line() -> None:
    root = parse(bars(LABEL, [Bar("a", 0.9), Bar("b", 0.7, "lowest")], percent, percent, reference=0.8))
    assert words(root, "mark") == ["lowest"]
    assert [e.get("class") for e in root.iter("rect")] == ["bar", "bar marked"]
    assert [e.get("class") for e in root.iter("line")].count("reference") == 1
    without = parse(bars(LABEL, [Bar("a", 0.9)], percent, percent, reference=math.nan))
    assert {e.get("class") for e in without.iter("line")} == {"grid"}


def test_the_word_stays_beside_a_bar_too_short_to_hold_it() -> None:
    root = parse(bars(LABEL, [Bar("a", 0.01, "lowest")], percent, percent))
    assert words(root, "mark") == ["lowest"]
    assert not words(root, "inside")


def test_many_bars_are_sorted_and_only_the_marked_one_is_named() -> None:
    items = [Bar(f"site-{i}", i / 100, "lowest" if i == 0 else "") for i in range(61)]
    root = parse(bars(LABEL, items, percent, percent))
    widths = numbers(root, "rect", "bar", "width")
    assert widths == sorted(widths, reverse=True)
    assert words(root, "name") == ["site-0"]


def test_shares_fill_the_width_in_proportion() -> None:
    rows = [Stack("x", [1, 3], "4"), Stack("y", [0, 0], "0"), Stack("z", [5, 0], "5")]
    root = parse(stacked_bars(LABEL, rows, ["one", "two"], percent, share=True, width=360))
    span = 360 - (14 + 6.6) - (8 + 6.6)
    key, first, second = (15.0, 15.0), numbers(root, "rect", "s1", "width"), numbers(root, "rect", "s2", "width")
    assert first == pytest.approx([key[0], span / 4, span], abs=0.03)
    assert second == pytest.approx([key[1], span * 3 / 4], abs=0.03)
    assert words(root, "value") == ["4", "0", "5"]


def test_amounts_share_one_scale() -> None:
    rows = [Stack("x", [10, 10], ""), Stack("y", [5, math.nan], "")]
    root = parse(stacked_bars(LABEL, rows, ["one", "two"], percent, share=False, width=360))
    _, longest, quarter = numbers(root, "rect", "s1", "width")
    assert longest == pytest.approx(2 * quarter, abs=0.06)
    assert len(numbers(root, "rect", "s2", "width")) == 2


def test_segments_carry_the_letters_of_the_key() -> None:
    root = parse(stacked_bars(LABEL, [Stack("x", [1, 1], "")], ["cat", "dog"], percent, share=True))
    assert words(root, "letter") == ["A", "B", "A", "B"]
    assert words(root, "name") == ["cat", "dog", "x"]


def test_more_than_sixty_rows_become_one_path_per_series_no_taller_than_a_screen() -> None:
    rows = [Stack(f"site-{i}", [1, i], str(i)) for i in range(500)]
    root = parse(stacked_bars(LABEL, rows, ["one", "two"], percent, share=True))
    assert [e.get("class") for e in root.iter("path")] == ["s1", "s2"]
    assert words(root, "name") == ["one", "two"]
    assert float(root.get("viewBox", "").split()[3]) < 560


def test_the_thirteenth_series_has_a_colour_and_the_thirtieth_no_letter() -> None:
    root = parse(stacked_bars(LABEL, [Stack("x", [1] * 30, "")], [f"c{i}" for i in range(30)], percent, share=True))
    assert {e.get("class") for e in root.iter("rect")} == {f"s{i}" for i in range(1, 12)}
    assert words(root, "letter")[:26] == [chr(65 + i) for i in range(26)]


def test_a_missing_value_breaks_a_line_and_a_lone_point_is_a_dot() -> None:
    series = [Line("a", [(0, 0.5), (1, 0.6), (2, None), (3, 0.7), (4, math.nan), (5, 0.8), (6, 0.9)])]
    root = parse(lines(LABEL, series, percent, percent, "round"))
    assert len(list(root.iter("path"))) == 3
    titles = [e.findtext("title") for e in root.iter("circle") if e.get("class") == "s1" and len(e)]
    assert titles == ["a, round 3: 70%"]
    assert len([e for e in root.iter("circle") if e.get("class") == "hit"]) == 4


@pytest.mark.parametrize(
    ("low", "high", "unit", "ticks"),
    [
        (1.4, 17.3, 1.0, [5, 10, 15]),
        (10, 210, 60.0, [60, 120, 180]),
        (0, 3, 1.0, [0, 1, 2, 3]),
        (50, 100, 60.0, [60, 90]),
    ],
)
def test_an_axis_of_costs_has_two_marks_at_least(low: float, high: float, unit: float, ticks: list[float]) -> None:
    line = Line("a", [(low, 0.5), (high, 0.9)])
    root = parse(lines(LABEL, [line], percent, percent, "cost", x_show="x{:g}".format, x_unit=unit))
    assert [word for word in words(root, "tick") if word.startswith("x")] == [f"x{tick:g}" for tick in ticks]


def test_points_are_drawn_in_the_order_of_rounds_on_round_ticks() -> None:
    root = parse(lines(LABEL, [Line("a", [(10, 0.93), (1, 0.61)])], percent, percent, "round"))
    assert words(root, "tick") == ["60%", "70%", "80%", "90%", "100%", "2", "4", "6", "8", "10", "round"]
    (path,) = (e.get("d", "") for e in root.iter("path"))
    x0, y0, x1, y1 = map(float, re.findall(r"[\d.]+", path))
    # 0.6 to 1.0 spans y 198 to 12; round 1 is the left edge of the plot, round 10 the right
    assert (x0, y0) == pytest.approx((48, 198 - 186 * 0.01 / 0.4), abs=0.03)
    assert (x1, y1) == pytest.approx((360 - 10 - 14 - 6.6, 198 - 186 * 0.33 / 0.4), abs=0.03)


def test_names_beside_lines_do_not_overlap_nor_leave_the_plot() -> None:
    series = [Line(f"m{i}", [(0, 0.1), (1, 0.9 - i * 1e-4)]) for i in range(10)]
    root = parse(lines(LABEL, series, percent, percent, "round"))
    heights = [float(e.get("y", "nan")) for e in root.iter("text") if e.get("class") == "name"]
    assert sorted(words(root, "name")) == sorted(f"m{i}" for i in range(10))
    assert all(b - a >= 13.9 for a, b in pairwise(heights))
    assert max(heights) <= 198 + 4


@pytest.mark.parametrize("series", [[], [Line("a")], [Line("a", [(0, None)])], [Line("a", [(3, 0.5)])]])
def test_lines_with_next_to_nothing_to_draw(series: list[Line]) -> None:
    parse(lines(LABEL, series, percent, percent, "round"))


def test_nothing_to_draw() -> None:
    parse(bars(LABEL, [], percent, percent))
    parse(stacked_bars(LABEL, [], [], percent, share=True))
    parse(stacked_bars(LABEL, [Stack("x", [0], "")], ["one"], percent, share=False))


def test_plain_keeps_words_and_shows_what_is_forbidden() -> None:
    assert plain("Universitätsklinikum 東京 نمونه‌ها") == "Universitätsklinikum 東京 نمونه‌ها"
    assert plain("a\x00b\x1bc\u202ed\ud800e\uffff") == "a�b�c�d�e�"
    assert plain("two\nlines") == "two\nlines"


@settings(deadline=None, max_examples=25)
@given(name=NAMES, value=NUMBERS, other=NUMBERS)
def test_any_name_and_number_gives_well_formed_svg(name: str, value: float | None, other: float | None) -> None:
    label = Label("key", name, name)
    amounts = [v if v is not None else 0.0 for v in (value, other)]
    bounded = [None if v is None or not abs(v) < 1e6 else v for v in (value, other)]
    for svg in (
        bars(label, [Bar(name, value, name), Bar("b", other)], str, str, reference=value),
        stacked_bars(label, [Stack(name, amounts, name)], [name, "b"], str, share=True),
        stacked_bars(label, [Stack(name, amounts, name)], [name, "b"], str, share=False),
        lines(label, [Line(name, [(0, bounded[0]), (1, bounded[1])])], str, str, name),
    ):
        for element in parse(svg).iter():
            places = [v for k, v in element.attrib.items() if k not in {"class", "id", "role", "aria-labelledby"}]
            assert not [v for v in places if "nan" in v or "inf" in v]
