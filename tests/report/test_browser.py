"""The report in a real browser: what no look at the markup can tell."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from browsing import DESK, PAPER, PHONE, opened, overflow, unfold
from report.example import compare_result, imaging_result, run_result
from wardround.report import write_report

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(compare_result(), path)
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_it_opens_alone_and_fits(
    browser: Browser, report: Path, tmp_path: Path, size: tuple[int, int], scheme: str
) -> None:
    with opened(browser, report.as_uri(), size, scheme) as page:
        assert overflow(page) <= 0
        unfold(page)
        assert overflow(page) <= 0
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(251, 251, 249)", "dark": "rgb(18, 21, 27)"}[scheme]
        picture = tmp_path / f"{size[0]}-{scheme}.png"
        page.screenshot(path=picture, full_page=True)
        assert picture.stat().st_size > 20_000


def test_details_open_and_close_by_keyboard(browser: Browser, report: Path) -> None:
    with opened(browser, report.as_uri(), PHONE) as page:
        summary = page.locator("summary", has_text="The numbers as a table").first
        table = page.get_by_role("table", name="Local accuracy by method")
        assert not table.is_visible()
        summary.focus()
        page.keyboard.press("Enter")
        assert table.is_visible()
        page.keyboard.press("Enter")
        assert not table.is_visible()


def test_the_keyboard_reaches_every_fold_and_scrolls_wide_tables(browser: Browser, report: Path) -> None:
    with opened(browser, report.as_uri(), PHONE) as page:
        reached = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("[...document.querySelectorAll('summary')].indexOf(document.activeElement)"))
        assert reached - {-1} == set(range(page.locator("summary").count()))
        box = page.get_by_role("region", name="Bytes by group, over all sites and rounds")
        box.focus()
        assert box.evaluate("box => box.scrollLeft") == 0
        for _ in range(100):  # scrolling is smooth: it takes some frames, and pages of ours allow no script to wait in
            page.keyboard.press("ArrowRight")
            page.wait_for_timeout(20)
            if box.evaluate("box => box.scrollLeft") > 0:
                break
        assert box.evaluate("box => box.scrollLeft") > 0


def test_every_chart_has_a_name_and_every_table_a_caption_for_a_screen_reader(browser: Browser, report: Path) -> None:
    with opened(browser, report.as_uri(), DESK) as page:
        names = [
            "Local accuracy of fedavg at each site",
            "Label mix of each site's training images",
            "Shared model, global test",
            "What crossed the sites' boundaries",
        ]
        for name in names:
            assert page.get_by_role("img", name=name).count() == 1
        assert page.get_by_role("heading", level=1).count() == 1
        assert page.get_by_role("rowheader", name="Macro-AUC").count() == 1


def test_chart_text_is_readable_on_a_phone(browser: Browser, report: Path) -> None:
    with opened(browser, report.as_uri(), PHONE) as page:
        scales = page.evaluate(
            "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().width / s.viewBox.baseVal.width)"
        )
        assert min(scales) > 0.9  # text of 11 units is at least ten pixels high


def test_it_prints_light_with_its_settings(browser: Browser, report: Path, tmp_path: Path) -> None:
    with opened(browser, report.as_uri(), DESK, "dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.get_by_text("partition.alpha").bounding_box()
        page.pdf(path=tmp_path / "report.pdf", format="A4")
        assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("sites", [2, 50, 200])
def test_few_and_many_sites_fit_a_phone(browser: Browser, tmp_path: Path, sites: int) -> None:
    result = compare_result(sites=sites, rounds=3, classes=11)
    result["name"] = "a-name-without-any-place-to-break-it-" * 4
    result["data"]["sites"][0]["name"] = "University-Hospital-of-a-very-long-name" * 3
    write_report(result, tmp_path / "report.html")
    with opened(browser, (tmp_path / "report.html").as_uri(), PHONE) as page:
        unfold(page)
        assert overflow(page) <= 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_galleries_are_admitted_drawn_and_fit(
    browser: Browser, tmp_path: Path, size: tuple[int, int], scheme: str
) -> None:
    result = imaging_result(tmp_path, clusters=4, classes=11)
    result["clusters"][0]["clusters"][0] = [f"University-Hospital-{i}" for i in range(50)]
    write_report(result, tmp_path / "report.html")
    with opened(browser, (tmp_path / "report.html").as_uri(), size, scheme) as page:
        unfold(page)
        for everything in page.get_by_role("radio", name="all").all():
            everything.check()
        assert overflow(page) <= 0
        widths = page.evaluate("[...document.images].map(i => [i.naturalWidth, i.getBoundingClientRect().width])")
        assert len(widths) > 100
        assert {natural for natural, _ in widths} == {28}
        assert min(shown for _, shown in widths) > 56  # pixels of the images are at least two of the screen
        style = page.evaluate("getComputedStyle(document.images[0]).imageRendering")
        assert style == "pixelated"


def test_a_gallery_is_named_and_scrolls_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    write_report(imaging_result(tmp_path, clusters=1), tmp_path / "report.html")
    with opened(browser, (tmp_path / "report.html").as_uri(), PHONE) as page:
        assert page.get_by_role("img", name="basophil, step 500").count() == 2
        assert page.get_by_role("img", name="basophil, step 1", exact=True).count() == 0
        assert page.get_by_role("img", name="Where the coordinator's time went").count() == 1
        assert page.get_by_role("columnheader", name="immature granulocyte").count() >= 2
        box = page.get_by_role("region", name="Images made by fedisca, by step and class")
        box.focus()
        for _ in range(100):
            page.keyboard.press("ArrowRight")
            page.wait_for_timeout(20)
            if box.evaluate("box => box.scrollLeft") > 0:
                break
        assert box.evaluate("box => box.scrollLeft") > 0


def test_every_table_of_a_dozen_methods_prints_within_the_page(browser: Browser, tmp_path: Path) -> None:
    methods = ("majority", "confidence-ensemble", "local", "single", "fedavg", "fedprox", "fedbicross", "fedisca")
    result = compare_result((*methods, "consult-distilled", "deepinversion", "coboosting", "dense"))
    for headline in result["headlines"]:  # labels and figures as long as they come
        headline["label"] += ", mean over rounds"
    write_report(result, tmp_path / "report.html")
    with opened(browser, (tmp_path / "report.html").as_uri(), PAPER) as page:
        page.emulate_media(media="print")
        beyond = "[...document.querySelectorAll('table, svg, pre')].map(e => e.getBoundingClientRect().right)"
        assert max(page.evaluate(beyond)) <= 718


def test_galleries_print_within_the_page(browser: Browser, tmp_path: Path) -> None:
    write_report(imaging_result(tmp_path, clusters=1, classes=11), tmp_path / "report.html")
    with opened(browser, (tmp_path / "report.html").as_uri(), PAPER) as page:  # the width of A4 within its margins
        page.emulate_media(media="print")
        ends = page.evaluate("[...document.images].map(i => i.getBoundingClientRect().right)")
        assert max(ends) <= 718


def test_a_run_of_one_method_fits_a_phone(browser: Browser, tmp_path: Path) -> None:
    write_report(run_result(), tmp_path / "report.html")
    with opened(browser, (tmp_path / "report.html").as_uri(), PHONE) as page:
        assert overflow(page) <= 0


@pytest.mark.parametrize(
    "body",
    ["<img src='https://example.invalid/x.png'>", "<script>console.log(1)</script>", "<script>alert(1)</script>"],
)
def test_a_page_that_asks_or_complains_would_be_caught(browser: Browser, tmp_path: Path, body: str) -> None:
    (tmp_path / "page.html").write_text(f"<!doctype html><title>t</title>{body}")
    with pytest.raises(AssertionError), opened(browser, (tmp_path / "page.html").as_uri()):
        pass
