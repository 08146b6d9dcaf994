"""The report with a keyboard, a screen reader's eyes and a slider, in a real browser."""

from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from report.example import imaging_result
from report.test_browser import DESK, PHONE, context_of
from wardround.report import write_report

pytestmark = pytest.mark.browser
GRAVE = {"serious", "critical"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every section that there is."""
    folder = tmp_path_factory.mktemp("whole")
    write_report(imaging_result(folder, classes=3), folder / "report.html")
    return folder / "report.html"


def faults(page: Page) -> list[tuple[str, str]]:
    found: list[dict[str, Any]] = Axe().run(page).response["violations"]
    return [(fault["id"], fault["nodes"][0]["html"]) for fault in found if fault["impact"] in GRAVE]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_axe_finds_no_grave_fault(browser: Browser, whole: Path, size: tuple[int, int], scheme: str) -> None:
    with context_of(browser, size, scheme) as context:
        page = context.new_page()
        page.goto(whole.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert faults(page) == []


def test_axe_would_find_one(browser: Browser, whole: Path) -> None:
    with context_of(browser, DESK) as context:
        page = context.new_page()
        page.goto(whole.as_uri())
        page.evaluate("document.querySelector('svg').removeAttribute('aria-labelledby')")
        page.evaluate("document.querySelectorAll('svg title').forEach(t => t.remove())")
        assert [name for name, _ in faults(page)] == ["svg-img-alt"]


def shown_steps(page: Page) -> list[str]:
    rows = page.locator("figure.gallery").first.locator("tbody th")
    return [row.inner_text() for row in rows.all() if row.is_visible()]


def test_the_slider_goes_along_the_trajectory_by_keyboard_and_by_click(browser: Browser, whole: Path) -> None:
    with context_of(browser, PHONE) as context:
        page = context.new_page()
        page.goto(whole.as_uri())
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
    with context_of(browser, DESK) as context:
        page = context.new_page()
        page.goto(whole.as_uri())
        page.emulate_media(media="print")
        assert len(shown_steps(page)) == 6
        assert not page.get_by_role("radio").first.is_visible()


def test_every_link_of_the_page_leads_somewhere_and_every_fold_opens_by_click(browser: Browser, whole: Path) -> None:
    requests: list[str] = []
    with context_of(browser, DESK) as context:
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.goto(whole.as_uri())
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
    assert [url for url in requests if not url.startswith(("data:", whole.as_uri()))] == []
