"""Running statistics taken anew."""

import pytest
import torch

from wardround.learn import nets
from wardround.learn.statistics import even_parts, retaken
from wardround.models import NetSpec, build, fresh, spec_layout

SPEC = NetSpec("small", 3, 4, 8, width=2)
CPU = torch.device("cpu")


def batches() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn((6, 3, 8, 8), generator=draw), torch.randn((4, 3, 8, 8), generator=draw) + 3]


def test_they_are_the_mean_over_the_batches_and_nothing_else_changes() -> None:
    weights = fresh(SPEC, torch.Generator().manual_seed(1))
    found = retaken(SPEC, weights, batches(), CPU)
    net = build(SPEC)
    nets.load(net, weights)
    seen: list[torch.Tensor] = []
    layer = next(module for module in net.modules() if isinstance(module, torch.nn.BatchNorm2d))
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].mean(dim=(0, 2, 3))))
    net.train()
    for batch in batches():
        net(batch)
    name = next(name for name, module in net.named_modules() if module is layer)
    torch.testing.assert_close(found[f"{name}.running_mean"], (seen[0] + seen[1]) / 2)
    for parameter in spec_layout(SPEC).in_group("parameters"):
        assert torch.equal(found[parameter], weights[parameter])


def test_the_next_borrower_gets_the_usual_momentum() -> None:
    weights = fresh(SPEC, torch.Generator().manual_seed(1))
    retaken(SPEC, weights, batches(), CPU)
    with nets.borrow(SPEC, CPU, weights) as net:
        assert {m.momentum for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d)} == {0.1}


@pytest.mark.parametrize(
    ("n", "sizes"),
    [(1, [1]), (2, [2]), (256, [256]), (257, [129, 128]), (258, [129, 129]), (513, [171, 171, 171]), (600, [200] * 3)],
)
def test_parts_are_of_a_size(n: int, sizes: list[int]) -> None:
    """Two images left over by 256 would be half of all statistics."""
    parts = even_parts(torch.arange(n))
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat(parts), torch.arange(n))
