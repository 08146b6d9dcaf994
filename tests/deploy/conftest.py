"""An export of the predictor that was worked out by hand, made once: tests copy it before they change it."""

import shutil
from pathlib import Path

import pytest

from deploy.samples import ABOUT, MADE, bright
from wardround.deploy.export import export


@pytest.fixture(scope="session")
def whole_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(bright(), tmp_path_factory.mktemp("export") / "model", ABOUT, made=MADE).folder


@pytest.fixture
def model(whole_export: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_export, tmp_path / "model"))
