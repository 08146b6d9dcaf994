"""Pages in a real browser: what the tests of the report, the board and the data check watch for alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page

PHONE, DESK, PAPER = (380, 800), (1280, 900), (718, 1000)  # the last is A4 within its margins
GRAVE = {"serious", "critical"}


def context_of(browser: Browser, size: tuple[int, int], scheme: Any = "light", **more: Any) -> BrowserContext:
    """A window of its own, light or dark."""
    viewport: Any = {"width": size[0], "height": size[1]}
    return browser.new_context(viewport=viewport, color_scheme=scheme, **more)


@dataclass
class Watched:
    """A page, what it asked for (pictures within it left out), and whatever it complained of."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self._asks(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._dialog)

    def _asks(self, url: str) -> None:
        if not url.startswith("data:"):
            self.requests.append(url)

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(dialog.message)
        dialog.dismiss()


@contextmanager
def opened(browser: Browser, url: str, size: tuple[int, int] = DESK, scheme: str = "light") -> Iterator[Page]:
    """A page that must ask for nothing but itself and complain of nothing."""
    with context_of(browser, size, scheme) as context:
        watched = Watched(context.new_page())
        watched.page.goto(url)
        yield watched.page
    assert {asked.partition("#")[0] for asked in watched.requests} == {url}
    assert watched.complaints == []


def unfold(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")


def overflow(page: Page) -> int:
    """How many pixels the document is wider than the window."""
    return int(page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


def faults(page: Page) -> list[tuple[str, str]]:
    """What axe-core finds that is serious or worse: its name, and the first place."""
    found: list[dict[str, Any]] = Axe().run(page).response["violations"]
    return [(fault["id"], fault["nodes"][0]["html"]) for fault in found if fault["impact"] in GRAVE]
