"""What every test shares: one thread, the same examples every time, and the soak tests only when they are asked for."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from playwright.sync_api import Browser

torch.set_num_threads(1)
if not torch.cuda.is_available():  # before anything imports Triton: kernels are then interpreted, on the CPU
    os.environ["TRITON_INTERPRET"] = "1"
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background, where Ctrl-C would be a dead key
    signal.signal(signal.SIGINT, signal.default_int_handler)
SOAK = bool(os.environ.get("WARDROUND_SOAK"))
CHROMIUM = Path(shutil.which("chromium") or "/usr/bin/chromium")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
OFFLINE = ("--disable-background-networking", "--disable-component-update")

try:
    from hypothesis import settings
except ImportError:  # a GPU machine may lack it; the tests that need it say so themselves
    pass
else:
    settings.register_profile("wardround", deadline=None, derandomize=not SOAK)
    settings.load_profile("wardround")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SOAK:
        return
    skip = pytest.mark.skip(reason="a soak test: run `make soak`")
    for item in items:
        if "soak" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """A real browser; closed after each module, as it keeps an event loop that others may not share."""
    if not CHROMIUM.exists():
        if os.environ.get("CI") == "true":
            pytest.fail("no chromium, and CI must have one: tests/browser.sh installs it")
        pytest.skip("no chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=[*QUIET, *OFFLINE])
        yield opened
        opened.close()
