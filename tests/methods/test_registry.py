"""Methods by name, and methods out of a file of one's own."""

from pathlib import Path
from typing import Any

import pytest

from tiny import figures, give_tiny_data, predictor_bytes, settings
from wardround import run
from wardround.errors import BadInput
from wardround.methods.registry import find, known, make, own_settings
from wardround.progress import Silent

OWN = '''
from typing import Annotated

from pydantic import Field

from wardround.methods.fedavg import FedAvg
from wardround.settings import Frozen


class Half(FedAvg):
    """FedAvg that trains half of the epochs."""

    name = "half"
    summary = "half the epochs"

    class Settings(Frozen):
        """How much less."""

        divisor: Annotated[int, Field(ge=1)] = 2

    def epochs(self, ctx):
        return ctx.study.epochs(ctx.round) // self.settings.divisor
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "my method.py"
    file.write_text(OWN, encoding="utf-8")
    return str(file)


def test_the_built_in_methods() -> None:
    bars = {"majority", "local", "centralised", "single", "ensemble", "fedavg", "fedprox"}
    assert bars <= set(known())
    assert list(known()) == sorted(known())


@pytest.mark.parametrize("name", list(known()))
def test_every_method_introduces_itself(name: str) -> None:
    method = find(name)
    assert method.name == name
    assert method.family in ("bar", "one-shot", "multi-round")
    for line in (method.paper, method.summary):
        assert line
        assert "\n" not in line
    assert method().settings == method.Settings()


def test_a_misspelt_name_gets_a_hint() -> None:
    with pytest.raises(BadInput, match=r"there is no method 'fedavgg'; did you mean fedavg\?"):
        find("fedavgg")


def test_an_unknown_name_gets_the_list() -> None:
    with pytest.raises(BadInput, match=r"there is no method 'xyzzy'; known are .*fedavg.*majority"):
        find("xyzzy")


def test_settings_of_a_method_without_any_are_refused() -> None:
    with pytest.raises(BadInput, match=r"there is no setting 'fedavg.mu'"):
        make("fedavg", {"mu": 1})


def test_what_is_set_for_methods() -> None:
    tree = {"fedprox": {"mu": 0.5}, "moon": {"tau": 0.4}, "bare": 1}
    assert own_settings(tree, "fedprox") == {"bare": 1, "mu": 0.5}
    assert own_settings(tree, "fedavg") == {"bare": 1}
    assert own_settings({"mine": {"x": 1}, "table": {"y": 2}}, "mine") == {"x": 1, "table": {"y": 2}}
    assert own_settings({"mine": {"x": 1}}, "fedavg", ["fedavg", "mine"]) == {}


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"fedprox": {"muu": 3}}, r"^there is no setting 'fedprox.muu'; did you mean fedprox.mu\?$"),
        ({"fedprox": {"mu": -3}}, r"^fedprox.mu = -3 cannot be used"),
        ({"fedprox": 3}, r"^set.fedprox = 3 cannot be used: it should be a table of fedprox's settings$"),
        ({"fedpox": {"mu": 3}}, r"^there is no method 'fedpox'; did you mean fedprox\?"),
    ],
)
@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_a_slip_in_what_is_set_is_found_whichever_method_runs(method: str, tree: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        own_settings(tree, method)


def test_a_method_of_ones_own(own: str) -> None:
    method = make(own, {"divisor": 3})
    assert method.name == "half"
    assert method.settings.divisor == 3
    with pytest.raises(BadInput, match=r"^half\.divisor = 0"):
        make(own, {"divisor": 0})


def test_a_method_of_ones_own_runs_and_resumes(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is no name that a bundle could carry: inside the run the method goes by its own."""
    give_tiny_data(monkeypatch)
    job = run.begin_run(settings(method=own, train={"epochs": 2}), tmp_path / "own", Silent())
    result = run.reopen(job.path, Silent()).finish()
    assert result["methods"] == ["half"]
    assert result["settings"]["set"] == {"divisor": 2}
    run.begin_run(settings(train={"epochs": 1}), tmp_path / "fedavg", Silent()).finish()
    assert predictor_bytes(tmp_path / "own") == predictor_bytes(tmp_path / "fedavg")


def test_a_method_of_ones_own_in_a_comparison(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_tiny_data(monkeypatch)
    compared = [("fedavg", {}), (own, {"divisor": 1})]
    result = run.begin_comparison(settings(), compared, tmp_path / "both", Silent()).finish()
    assert result["methods"] == ["fedavg", "half"]
    assert predictor_bytes(tmp_path / "both" / "half") == predictor_bytes(tmp_path / "both" / "fedavg")
    (tmp_path / "both" / "result.json").unlink()
    assert figures(run.reopen(tmp_path / "both", Silent()).finish()) == figures(result)


@pytest.mark.parametrize(
    ("text", "count"), [("x = 1\n", 0), (OWN + OWN.replace("Half", "Other").replace('"half"', '"other"'), 2)]
)
def test_a_file_has_one_method(text: str, count: int, tmp_path: Path) -> None:
    file = tmp_path / "methods.py"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=f"must define exactly one Method with a name, it defines {count}"):
        find(str(file))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"there is no file .*gone.py"):
        find(str(tmp_path / "gone.py"))
