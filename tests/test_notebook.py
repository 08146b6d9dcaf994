"""The example notebook: runs as it is, and is kept without output and without a trace of a machine."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples/wardround.ipynb"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook after a run in an empty folder."""
    place = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    before = {key: os.environ.get(key) for key in ("PYTHONPATH", "OMP_NUM_THREADS", "IPYTHONDIR")}
    os.environ |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(place / "ipython")}
    try:
        NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": place}}).execute()
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
    assert (place / "runs/notebook/report.html").is_file()
    return notebook


def outputs(notebook: Any) -> list[list[dict[str, Any]]]:
    return [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_it_is_kept_without_output_or_a_machine_s_paths() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = json.loads(text)
    nbformat.validate(nbformat.from_dict(notebook))
    for cell in notebook["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
        assert cell["metadata"] == {}
    assert not re.search(r"/home/|/root/|/tmp/|/work/|/Users/|[A-Z]:\\\\|pyenv|\.venv", text)
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def test_it_runs_and_shows_the_table(done: Any) -> None:
    first = outputs(done)[0]
    (table,) = (output for output in first if output["output_type"] == "execute_result")
    html = table["data"]["text/html"]
    assert re.findall(r"<tr><td>(\w+)</td>", html) == ["local", "ensemble", "fedavg"]
    assert 'href="runs/notebook/report.html"' in html


def test_progress_leaves_one_output_that_is_empty_in_the_end(done: Any) -> None:
    first = outputs(done)[0]
    assert [output["output_type"] for output in first] == ["display_data", "execute_result"]
    assert first[0]["data"] == {"text/plain": "", "text/html": ""}


def test_no_cell_complains(done: Any) -> None:
    for shown in outputs(done):
        assert not [output for output in shown if output["output_type"] == "error" or output.get("name") == "stderr"]


def test_the_shared_model_gets_better_and_a_picture_is_shown(done: Any) -> None:
    text = "".join(output.get("text", "") for shown in outputs(done) for output in shown)
    rounds = [float(value) for value in re.findall(r"round \d+: +([\d.]+) %", text)]
    assert len(rounds) == 10
    assert rounds[-1] > rounds[0]
    assert text.count(" taken for ") == 8
    assert any("image/png" in output.get("data", {}) for shown in outputs(done) for output in shown)
    assert sys.executable not in text
