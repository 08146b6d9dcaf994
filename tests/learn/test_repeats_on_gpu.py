"""What only a GPU can show: training repeats to the bit, in another process, too."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SCRIPT = """
import hashlib
from bare_loop import BN, a_fit
from wardround.learn.device import find_device
from wardround.learn.side_by_side import train_many

fits = [a_fit(BN, n=200, seed=seed, epochs=10, batch=32, precision=precision)
        for seed in (1, 2, 3) for precision in ("fp32", "bf16")]
for fitted in train_many(fits, find_device("cuda")):
    whole = b"".join(t.cpu().float().numpy().tobytes() for t in fitted.weights.values())
    print(hashlib.sha256(whole).hexdigest())
"""


def test_two_processes_train_the_same_networks() -> None:
    tests = Path(__file__).parents[1]
    first, second = (
        subprocess.run([sys.executable, "-c", SCRIPT], cwd=tests, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert first == second
    assert len(set(first.split())) == 6
