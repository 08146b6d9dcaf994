"""The board in a real browser: list, filter, sort, compare, and a study that goes on while its page is open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from board.samples import Study, finished
from board.test_server import HOSTILE, serving
from browsing import DESK, PHONE, Watched, context_of, faults, overflow
from report.example import run_result
from wardround.board.server import Server
from wardround.record.rundir import lock_directory, write_json

pytestmark = pytest.mark.browser

LONG = "a-name-without-any-place-to-break-it-" * 4


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("board")
    finished(folder, "alpha", created="2026-11-01T10:00:00Z", report="real")
    finished(folder, "beta", "fedavg", "local", "moon", created="2026-11-03T10:00:00Z", report="real")
    finished(folder, f"2026/{LONG}", created="2026-11-02T10:00:00Z")
    finished(folder, HOSTILE.replace("/", "-"), methods=[HOSTILE], created="2026-10-01T10:00:00Z", report=HOSTILE)
    (folder / "broken").mkdir()
    (folder / "broken/result.json").write_text("{")
    stopped = Study(folder / "stopped")
    stopped.round(0, 0.5)
    stopped.round(1, 0.625)
    stopped.append({"kind": "note", "text": HOSTILE})
    stopped.commit()
    with serving(folder) as server:
        yield server


@contextmanager
def page_of(
    browser: Browser, server: Server, size: tuple[int, int] = DESK, scheme: str = "light", blocked: bool = False
) -> Iterator[Page]:
    """A page that asks nobody but the board and complains of nothing, unless something is meant to be blocked."""
    with context_of(browser, size, scheme, base_url=server.address) as context:
        watched = Watched(context.new_page())
        yield watched.page
    assert watched.requests
    assert [url for url in watched.requests if not url.startswith(server.address)] == []
    assert bool(watched.complaints) == blocked
    assert all(text.startswith(("Blocked script execution", "Loading the image")) for text in watched.complaints)


def shown(page: Page) -> list[str]:
    """The runs of the list that can be seen, in order."""
    return [text for row in page.locator("tbody tr:visible").all() for text in [row.locator("th").inner_text()]]


def test_the_list_is_filtered_as_one_types_and_sorted(browser: Browser, board: Server) -> None:
    with page_of(browser, board) as page:
        page.goto("/")
        assert len(shown(page)) == 6
        page.get_by_label("Filter").press_sequentially("fedavg beta")
        assert shown(page) == ["beta"]
        expect(page.locator("#count")).to_have_text("1 of 6 runs")
        page.get_by_label("Filter").fill("stopped")
        assert shown(page) == ["stopped"]
        page.get_by_label("Filter").fill("no such run")
        assert shown(page) == []
        page.get_by_label("Filter").fill("finished 2026")
        page.get_by_role("button", name="When").click()
        assert shown(page)[-3:] == ["alpha", f"2026/{LONG}", "beta"]
        page.get_by_role("button", name="When").click()
        assert shown(page)[:3] == ["beta", f"2026/{LONG}", "alpha"]
        page.get_by_label("Filter").fill("")
        page.get_by_role("button", name="Local").focus()
        page.keyboard.press("Enter")
        column = page.get_by_role("columnheader", name="Local")
        assert column.get_attribute("aria-sort") == "descending"
        values = [
            float(text.rstrip("%")) for text in page.locator("tbody td:nth-child(7)").all_inner_texts() if text != "–"
        ]
        assert len(values) >= 3
        assert values == sorted(values, reverse=True)


def test_ticked_runs_are_compared_and_their_reports_open(browser: Browser, board: Server) -> None:
    with page_of(browser, board) as page:
        page.goto("/")
        page.get_by_role("checkbox", name="Compare alpha").check()
        page.get_by_role("checkbox", name="Compare beta").check()
        assert page.get_by_role("checkbox", name="Compare stopped").is_disabled()
        page.get_by_role("button", name="Compare").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Comparison")
        heads = page.get_by_role("rowheader").all_inner_texts()
        assert heads[:3] == ["A · beta: fedavg", "B · beta: local", "C · beta: moon"]
        assert heads[3].startswith("D · alpha: ")
        assert page.get_by_role("img", name="Local against global accuracy").count() == 1
        page.get_by_role("link", name="alpha", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("alpha")
        page.get_by_role("link", name="Open its report").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("alpha")
        assert page.locator("svg").count() > 0
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(251, 251, 249)"


def test_a_hostile_run_is_text_and_its_report_can_do_nothing(browser: Browser, board: Server) -> None:
    with page_of(browser, board, blocked=True) as page:
        page.goto("/")
        page.get_by_role("link", name="onerror").click()
        assert page.locator("main img").count() == 0
        page.get_by_role("link", name="Open its report").click()
        page.wait_for_url("**/report/**")
        assert page.evaluate("window.origin") == "null"  # not the board's: it could read no answer of it


def test_a_study_that_goes_on_is_followed(browser: Browser, tmp_path: Path) -> None:
    study = Study(tmp_path / "live", rounds=3)
    with serving(tmp_path) as server, page_of(browser, server) as page, page_of(browser, server) as other:
        with lock_directory(study.path):
            page.goto("/run/live")
            other.goto("/")
            expect(page.locator(".state")).to_have_text("running")
            expect(page.locator("#progress")).to_contain_text("0 of 3 rounds done")
            study.round(0, 0.5)
            expect(page.locator("#progress")).to_contain_text("1 of 3 rounds done")
            assert page.get_by_role("img").count() == 0  # one point is no curve
            study.append({"kind": "note", "text": "site-2 did not answer in round 2"})
            study.round(1, 0.625)
            expect(page.locator("#progress")).to_contain_text("2 of 3 rounds done")
            expect(page.get_by_role("img", name="Accuracy by round: shared model, global test")).to_have_count(1)
            expect(page.locator(".notes")).to_have_text("fedavg: site-2 did not answer in round 2")
            assert page.get_by_role("progressbar").get_attribute("value") == str(2 / 3)
            assert other.locator("#stale").inner_text() == ""
            study.round(2, 0.75)
            study.append({"kind": "end", "seconds": 4.5})
            write_json(study.path / "result.json", {**run_result(), "methods": ["fedavg"]})
            (study.path / "report.html").write_text("<h1>done</h1>")
        expect(page.locator(".state")).to_have_text("finished")
        expect(page.get_by_role("link", name="Open its report")).to_have_count(1)
        other.get_by_role("link", name="The list has changed").click()
        expect(other.locator("tbody .state")).to_have_text("finished")


PLACES = [
    "/",
    "/run/stopped",
    "/run/beta",
    "/compare?run=alpha&run=beta",
    "/compare",
    "/run/broken",
    f"/run/2026/{LONG}",
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_a_phone_and_no_serious_fault_is_found(browser: Browser, board: Server, scheme: str) -> None:
    with page_of(browser, board, PHONE, scheme) as page:
        for place in PLACES:
            page.goto(place)
            assert overflow(page) <= 0, place
            assert faults(page) == [], place


def test_an_empty_folder_says_so(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path) as server, page_of(browser, server) as page:
        page.goto("/")
        expect(page.locator("main")).to_contain_text("There are no runs in this folder yet.")
