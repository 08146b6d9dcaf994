"""What only a GPU can show: generator steps, the weight search and distillation captured, against one by one."""

import pytest
import torch
from torch import Tensor

from wardround.learn import replay
from wardround.learn.distillation import distillation
from wardround.learn.predictor import Member
from wardround.models import NetSpec, fresh
from wardround.synthesis.generator import BatchMaker, ImageGenerator, settled_logits, view
from wardround.synthesis.pool import Pool, cropped, draw_crops
from wardround.synthesis.student import Student
from wardround.synthesis.teachers import Precision, Teachers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SPEC = NetSpec("resnet18", 3, 4, 16, width=8)
NEVER = 10**9


def stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def two_epochs(precision: Precision) -> tuple[Tensor, Tensor]:
    """Two batches of images and a student that learned from them: DENSE in small."""
    cuda = torch.device("cuda")
    teachers = Teachers([Member(SPEC, fresh(SPEC, stream(i))) for i in range(2)], cuda, precision)
    student = Student(SPEC, fresh(SPEC, stream(9)), cuda, 0.9, 0.0, precision)
    student.set_rate(0.01)
    pool = Pool(32, (3, 16, 16), cuda)

    def loss(images: Tensor, labels: Tensor, crops: Tensor) -> Tensor:
        pixels = cropped(images, crops)
        seen = view(teachers, pixels, statistics=True)
        away = distillation(seen.mean, settled_logits(student, pixels), 1.0)
        return torch.nn.functional.cross_entropy(seen.mean, labels) + torch.stack(seen.gaps).mean() - away

    def learn(index: Tensor, crops: Tensor) -> None:
        pixels = pool.pixels(index, crops)
        student.step(distillation(teachers.logits(pixels), student.logits(pixels), 20.0))

    maker = BatchMaker(ImageGenerator((3, 16, 16), 8, cuda, lr=1e-3, learned=16, clip=10.0, precision=precision), loss)
    lesson = replay.Replay(learn, cuda)
    for epoch in range(2):
        draw = stream(epoch)
        labels = torch.randint(4, (16,), generator=draw).cuda()
        crops = draw_crops(6 * 16, "crop", draw).cuda().view(6, 16, 3)
        maker.begin(draw)
        for crop in crops:
            maker.step(labels, crop)
        pool.add(maker.made(), labels)
        for _ in range(4):
            for index, crop in pool.one_pass(16, 0, "crop", draw):
                lesson(index, crop)
    return pool.images.cpu(), student.weights()["head.weight"].cpu()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_captured_generator_is_the_same_one_by_one(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = two_epochs(precision)
    monkeypatch.setattr(replay, "WARM_UP_CALLS", NEVER)
    plain = two_epochs(precision)
    away = (captured[0].float() - plain[0].float()).abs().mean()
    assert away < (0.5 if precision == "fp32" else 5), "levels of 255"
    torch.testing.assert_close(*(found[1] for found in (captured, plain)), rtol=0.05, atol=0.01)


@pytest.mark.parametrize("name", ["coboosting", "dafl", "dense"])
def test_a_method_with_captured_steps_is_the_same_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pydantic")
    from dataclasses import replace

    import tiny
    from wardround.learn.device import Device
    from wardround.methods.registry import find, make
    from wardround.methods.state import State

    own: dict[str, float] = {"turns": 6} if name == "dafl" else {"generator_steps": 6}
    own |= {"epochs": 5, "batch": 16, "codes": 8, "lr": 0.01}
    data = tiny.federation((9, 6))
    ctx = tiny.context(tiny.study(data, method=name, rounds=1))
    requests = find(name)().ask(ctx, State())
    assert requests is not None
    sent = {
        site.name: tiny.drive(ctx, find(name)().answer(ctx, site, requests[site.name], State())).bundle
        for site in data.sites
    }
    ctx = replace(ctx, device=Device(torch.device("cuda"), 1))
    found = []
    for eager_calls in (replay.WARM_UP_CALLS, NEVER):
        monkeypatch.setattr(replay, "WARM_UP_CALLS", eager_calls)
        (*_, last) = make(name, own).absorb(ctx, State(), sent)
        found.append(last.groups["student"]["head.weight"].cpu())
    torch.testing.assert_close(*found, rtol=0.05, atol=0.02)
