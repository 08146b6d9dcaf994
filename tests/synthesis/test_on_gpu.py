"""What only a GPU can show: captured steps against the same steps one by one, and every method with them."""

from pathlib import Path

import pytest
import torch

from tiny import QUICK
from wardround.api import simulate
from wardround.learn.predictor import Member
from wardround.learn.replay import Replay
from wardround.models import NetSpec, fresh
from wardround.synthesis.inversion import Inversion, Synthesis, balanced_labels
from wardround.synthesis.teachers import Teachers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SPEC = NetSpec("resnet18", 3, 4, 16, width=8)


def test_captured_steps_are_the_steps_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [Member(SPEC, fresh(SPEC, torch.Generator().manual_seed(i))) for i in (1, 2)]
    labels = balanced_labels(8, 4).cuda()
    found = []
    for warm_up in (3, 10**6):
        monkeypatch.setattr("wardround.learn.replay.WARM_UP_CALLS", warm_up)
        synthesis = Synthesis(Teachers(members, labels.device), labels, (3, 16, 16), Inversion(steps=12, batch=8))
        for _ in range(2):  # a captured step serves a second trajectory
            *_, last = synthesis.trajectory(torch.Generator().manual_seed(0))
        found.append(last)
    torch.testing.assert_close(found[0].images, found[1].images, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(found[0].loss, found[1].loss, rtol=1e-3, atol=1e-3)


def test_a_replay_sees_its_inputs_change_and_changes_state_once_a_call() -> None:
    total = torch.zeros((), device="cuda")

    def add(value: torch.Tensor) -> torch.Tensor:
        total.add_(value)
        return total * 2

    replay = Replay(add, total.device)
    given = [torch.full((), float(i), device="cuda") for i in range(8)]
    assert [float(replay(value)) for value in given] == [0.0, 2.0, 6.0, 12.0, 20.0, 30.0, 42.0, 56.0]
    assert float(total) == 28.0


@pytest.mark.parametrize("method", sorted(QUICK))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_method_that_makes_images_runs_with_captured_steps(method: str, precision: str, tmp_path: Path) -> None:
    """More steps of each kind than run as they are; a captured one that touches the CPU's memory is an error."""
    steps = {name: 6 for name in ("steps", "generator_steps", "kd_steps", "turns") if name in QUICK[method]}
    own = {f"{method}.{name}": value for name, value in {**QUICK[method], **steps}.items()}
    settings = {**own, "train.precision": precision, "model.width": 8}
    result = simulate(
        method, model="resnet18", epochs=1, device="cuda", settings=settings, out=tmp_path / "run", progress=False
    )
    assert result.headlines[method]["global_accuracy"] is not None


CUBLAS_WORKSPACE = 32 * 2**20  # bytes, of each stream that multiplies matrices; kept as long as the process


def test_what_a_run_captured_is_given_back(tmp_path: Path) -> None:
    def held_after(name: str) -> int:
        simulate("fedbicross", preset="demo", device="cuda", out=tmp_path / name, progress=False)
        return torch.cuda.memory_reserved()

    held_after("first")  # what the process keeps for good, such as the libraries' workspaces, is made here
    grown = -held_after("second") + held_after("third")
    assert grown <= 4 * CUBLAS_WORKSPACE  # a stream that no run used before brings one, and there are 32 streams
