"""The page with patients' images in a real browser: it asks for nothing, fits a phone, and says what it is."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from browsing import DESK, PAPER, PHONE, faults, opened, overflow, unfold
from report.example import imaging_result
from report.test_access import shown_steps
from report.test_real import REAL, WARNING
from wardround.report import render

pytestmark = pytest.mark.browser
STEPS = [f"step {step}" for step in (1, 101, 201, 300, 400, 500)]
ROWS = ["real 1", "real 2", "real 3"]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patients")
    page = folder / "page.html"
    page.write_text(render(imaging_result(folder, classes=3), folder, REAL), encoding="utf-8")
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_it_fits_asks_for_nothing_and_has_no_grave_fault(
    browser: Browser, page_file: Path, size: tuple[int, int], scheme: str
) -> None:
    with opened(browser, page_file.as_uri(), size, scheme) as page:
        unfold(page)
        assert overflow(page) <= 0
        banner = page.get_by_role("region", name=WARNING).bounding_box()
        assert banner is not None
        assert banner["y"] + banner["height"] < size[1]  # on the first screen
        assert faults(page) == []


def test_real_rows_stay_beside_every_step(browser: Browser, page_file: Path) -> None:
    with opened(browser, page_file.as_uri(), PHONE) as page:
        slider = page.get_by_role("group", name="Steps of synthesis, fedisca")
        assert shown_steps(page) == ["step 500", *ROWS]
        slider.get_by_text("201").click()
        assert shown_steps(page) == ["step 201", *ROWS]
        slider.get_by_text("all").click()
        assert shown_steps(page) == [*STEPS, *ROWS]


def test_the_warning_and_the_real_rows_are_printed(browser: Browser, page_file: Path) -> None:
    with opened(browser, page_file.as_uri(), PAPER) as page:
        page.emulate_media(media="print")
        assert page.get_by_role("heading", name=WARNING).is_visible()
        assert shown_steps(page) == [*STEPS, *ROWS]
        assert max(page.evaluate("[...document.images].map(i => i.getBoundingClientRect().right)")) <= 718
