"""A trail on a GPU: looking on must never make the host wait."""

import pytest
import torch

from wardround.synthesis.gallery import Trail

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_looking_on_never_waits() -> None:
    device = torch.device("cuda")
    labels = torch.arange(16, device=device) % 4
    images = torch.zeros((16, 3, 8, 8), device=device).contiguous(memory_format=torch.channels_last)
    trail = Trail(labels, classes="abcd", steps=10, frames=3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(10):
            trail.see(step, images)
            images.add_(0.0625)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pictures = trail.groups()["gallery"]["images"]
    assert (pictures.device.type, pictures.shape) == ("cpu", (3, 4, 3, 8, 8))
    assert pictures[:, 0, 0, 0, 0].tolist() == [128, 159, 199]  # 127.5 times 1, 1.25 and 1.5625
