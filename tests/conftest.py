"""What every test shares: one thread, the same examples every time, and the soak tests only when they are asked for."""

import os

import pytest
import torch

torch.set_num_threads(1)
SOAK = bool(os.environ.get("WARDROUND_SOAK"))

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
