"""What only a GPU can show: a stopped fit goes on with captured steps, and a fit too large says so."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bare_loop import BN, a_fit
from learn.stopping import STEPS, Stopped, Watch
from wardround.errors import SiteFailed
from wardround.learn import captured, resumable
from wardround.learn.resumable import train_resumable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
EPOCHS = 20


@pytest.mark.parametrize("recipe", [{}, {"optimiser": "adam", "lr": 0.002}, {"augment": True}], ids=str)
def test_a_stopped_fit_goes_on_and_its_steps_are_captured(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[int] = []
    replay = captured._Graph.replay
    monkeypatch.setattr(captured._Graph, "replay", lambda self, i, d: (graphs.append(len(i)), replay(self, i, d))[1])
    device, stop, watch = torch.device("cuda", 0), Watch(2 * STEPS + 1), Watch()
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        straight = train_resumable(a_fit(BN, epochs=EPOCHS, **recipe), device, tmp_path / "straight")
        with pytest.raises(Stopped):
            train_resumable(a_fit(BN, epochs=EPOCHS, **recipe), device, tmp_path / "file", stop, every_seconds=0.0)
        graphs.clear()
        found = train_resumable(a_fit(BN, epochs=EPOCHS, **recipe), device, tmp_path / "file", watch)
    assert watch.steps == STEPS * (EPOCHS - 2)
    assert len(graphs) > watch.steps // 2
    assert found.losses == pytest.approx(straight.losses, rel=1e-3)
    for name, tensor in straight.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=1e-2, atol=1e-3)


def test_a_fit_that_the_memory_does_not_hold_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(resumable, "Trainer", full)
    with pytest.raises(SiteFailed, match="GPU's memory is too small for site-11, round 1"):
        train_resumable(a_fit(BN), torch.device("cuda", 0), tmp_path / "file")
