"""Where networks can be cut: counted stages, their widths, their features, and running on from there."""

import pytest
import torch

from tiny import CPU, images
from wardround.errors import BadInput
from wardround.learn import nets
from wardround.learn.evaluate import network_outputs
from wardround.learn.stages import run_on, stage_features, stage_name, stage_shape, stage_width
from wardround.models import NetSpec, Weights, fresh

SMALL, CNN = NetSpec("small", 3, 4, 8, width=2), NetSpec("cnn4", 3, 4, 8, width=2)


def weights(spec: NetSpec) -> Weights:
    """With running statistics that are nobody's, so that a change of them shows."""
    drawn = fresh(spec, torch.Generator().manual_seed(3))
    return {name: t + 0.1 if name.endswith(("running_mean", "running_var")) else t for name, t in drawn.items()}


def test_resnet50_has_the_dimensions_of_fedmps_table_2() -> None:
    spec = NetSpec("resnet50", 3, 2, 256, stem="imagenet")
    assert [stage_width(spec, stage_name(spec, n)) for n in (1, 2, 3, 4)] == [1_048_576, 524_288, 262_144, 2_048]


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (SMALL, ["conv1", "conv2", "conv3", "pool"]),
        (CNN, ["conv1", "conv2", "fc"]),
        (NetSpec("resnet18", 1, 2, 8, width=2), ["stage1", "stage2", "stage3", "pool"]),
        (NetSpec("wrn16-2", 1, 2, 8, width=2), ["stage1", "stage2", "pool"]),
        (NetSpec("vgg8", 1, 2, 16, width=2), ["block1", "block2", "block3", "block4", "pool"]),
    ],
)
def test_stages_are_counted_from_one_and_the_last_is_pooled(spec: NetSpec, names: list[str]) -> None:
    assert [stage_name(spec, n + 1) for n in range(len(names))] == names
    assert stage_name(spec, None) == names[-1]
    with pytest.raises(BadInput, match=f"{spec.name} has {len(names)} stages, not 9; choose a stage from 1"):
        stage_name(spec, 9)


def test_the_last_stage_gives_what_the_head_reads() -> None:
    data = images(5).images
    found = stage_features(SMALL, weights(SMALL), data, stage_name(SMALL, None), CPU)
    assert torch.equal(found, network_outputs(SMALL, weights(SMALL), data, CPU).features)
    assert found.shape == (5, stage_width(SMALL, "pool"))


@pytest.mark.parametrize("spec", [SMALL, CNN], ids=["small", "cnn4"])
@pytest.mark.parametrize("number", [1, 2, 3, None])
def test_features_that_run_on_give_the_networks_logits(spec: NetSpec, number: int | None) -> None:
    stage, data = stage_name(spec, number), images(5).images
    features = stage_features(spec, weights(spec), data, stage, CPU)
    assert features.shape == (5, stage_width(spec, stage))
    with nets.borrow(spec, CPU, weights(spec)) as net:
        net.train()
        logits = run_on(net, stage, features, stage_shape(spec, stage))
        after = nets.read(net)
        assert all(layer.training for layer in net.modules())
    torch.testing.assert_close(logits, network_outputs(spec, weights(spec), data, CPU).logits)
    assert all(torch.equal(after[name], tensor) for name, tensor in weights(spec).items())


def test_a_layer_that_was_still_stays_still() -> None:
    """A batch norm whose statistics are frozen is in evaluation mode before, and after."""
    with nets.borrow(SMALL, CPU, weights(SMALL)) as net:
        net.train()
        still = next(layer for layer in net.modules() if isinstance(layer, torch.nn.BatchNorm2d))
        still.eval()
        run_on(net, "conv1", torch.zeros(2, stage_width(SMALL, "conv1")), stage_shape(SMALL, "conv1"))
        assert [layer is still for layer in net.modules() if not layer.training] == [True]


def test_no_images_have_no_features() -> None:
    found = stage_features(SMALL, weights(SMALL), images(3).images[:0], "pool", CPU)
    assert found.shape == (0, stage_width(SMALL, "pool"))
