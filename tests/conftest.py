"""What every test shares: one thread, and the soak tests only when they are asked for."""

import os

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("WARDROUND_SOAK"):
        return
    skip = pytest.mark.skip(reason="a soak test: run `make soak`")
    for item in items:
        if "soak" in item.keywords:
            item.add_marker(skip)
