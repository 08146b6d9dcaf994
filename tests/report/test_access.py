"""The report with a keyboard, a screen reader's eyes and a slider, in a real browser."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from browsing import DESK, PHONE, faults, opened, unfold
from report.example import imaging_result
from wardround.report import write_report

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every section that there is."""
    folder = tmp_path_factory.mktemp("whole")
    write_report(imaging_result(folder, classes=3), folder / "report.html")
    return folder / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_axe_finds_no_grave_fault(browser: Browser, whole: Path, size: tuple[int, int], scheme: str) -> None:
    with opened(browser, whole.as_uri(), size, scheme) as page:
        unfold(page)
        assert faults(page) == []


def test_axe_would_find_one(browser: Browser, whole: Path) -> None:
    with opened(browser, whole.as_uri(), DESK) as page:
        page.evaluate("document.querySelector('svg').removeAttribute('aria-labelledby')")
        page.evaluate("document.querySelectorAll('svg title').forEach(t => t.remove())")
        assert [name for name, _ in faults(page)] == ["svg-img-alt"]


def shown_steps(page: Page) -> list[str]:
    rows = page.locator("figure.gallery").first.locator("tbody th")
    return [row.inner_text() for row in rows.all() if row.is_visible()]


def test_the_slider_goes_along_the_trajectory_by_keyboard_and_by_click(browser: Browser, whole: Path) -> None:
    with opened(browser, whole.as_uri(), PHONE) as page:
        assert shown_steps(page) == ["step 500"]
        slider = page.get_by_role("group", name="Steps of synthesis, fedisca")
        slider.get_by_role("radio", name="500").focus()
        page.keyboard.press("ArrowLeft")
        assert shown_steps(page) == ["step 400"]
        for _ in range(4):
            page.keyboard.press("ArrowLeft")
        assert shown_steps(page) == ["step 1"]
        slider.get_by_text("201").click()
        assert shown_steps(page) == ["step 201"]
        slider.get_by_text("all").click()
        assert shown_steps(page) == [f"step {step}" for step in (1, 101, 201, 300, 400, 500)]
        others = page.locator("figure.gallery").nth(1).locator("tbody th")
        assert [row.inner_text() for row in others.all() if row.is_visible()] == ["step 500"]


def test_every_step_is_printed(browser: Browser, whole: Path) -> None:
    with opened(browser, whole.as_uri(), DESK) as page:
        page.emulate_media(media="print")
        assert len(shown_steps(page)) == 6
        assert not page.get_by_role("radio").first.is_visible()


def test_every_link_of_the_page_leads_somewhere_and_every_fold_opens_by_click(browser: Browser, whole: Path) -> None:
    with opened(browser, whole.as_uri(), DESK) as page:
        links = page.get_by_role("navigation").get_by_role("link")
        assert links.count() == 8
        for link in links.all():
            link.click()
            name = link.inner_text()
            heading = page.locator(page.url[page.url.index("#") :])
            assert heading.evaluate("h => Math.abs(h.getBoundingClientRect().top) < innerHeight"), name
        for fold in page.locator("summary").all():
            fold.click()
        assert page.locator("details:not([open])").count() == 0
