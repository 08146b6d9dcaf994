"""Published ResNet weights in the layouts that they come in, and one clear line where they do not fit."""

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from wardround.errors import BadInput
from wardround.models import NetSpec, Weights, build, fresh, load_weights, spec_layout
from wardround.models.pretrained import is_published, renamed

SPEC = NetSpec("resnet18", 3, 5, 32, width=4, stem="imagenet")


def own(spec: NetSpec = SPEC, seed: int = 1) -> Weights:
    """Weights of a network, with statistics that tell layers apart."""
    weights = fresh(spec, torch.Generator().manual_seed(seed))
    draw = torch.Generator().manual_seed(seed)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and ".bn" in name:
            weights[name] = torch.rand(tensor.shape, generator=draw) + 0.5
    return weights


def published(weights: Weights, prefix: str = "", numbered: bool = False, head: bool = True) -> Weights:
    """The same under the names of torchvision, or of a Sequential of its layers."""
    found = {}
    for name, tensor in weights.items():
        place = re.sub(r"^stages\.(stem\.)?", "", name)
        place = re.sub(r"^stage(\d)", lambda m: str(int(m[1]) + 3) if numbered else f"layer{m[1]}", place)
        if numbered:
            place = re.sub(r"^(conv1|bn1)", lambda m: {"conv1": "0", "bn1": "1"}[m[1]], place)
        place = re.sub(r"^head\.", "fc.", place)
        if head or not place.startswith("fc."):
            found[prefix + place] = tensor
    return found


def saved(path: Path, weights: Weights) -> Path:
    safetensors.torch.save_file({name: t.clone().contiguous() for name, t in weights.items()}, path)
    return path


def same(a: Weights, b: Weights, leave: frozenset[str] = frozenset()) -> bool:
    return list(a) == list(b) and all(torch.equal(a[n], b[n]) for n in a if n not in leave)


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
@pytest.mark.parametrize(
    ("prefix", "numbered"),
    [("", False), ("module.encoder_q.", False), ("backbone.", True), ("teacher.backbone.", False)],
)
def test_layouts(tmp_path: Path, name: str, prefix: str, numbered: bool) -> None:
    spec = NetSpec(name, 3, 5, 32, width=4, stem="imagenet")
    weights = own(spec)
    file = saved(tmp_path / "w.safetensors", published(weights, prefix, numbered))
    assert same(load_weights(file, spec), weights, leave=spec_layout(spec).head if numbered else frozenset())


def test_a_network_gives_the_same_logits(tmp_path: Path) -> None:
    weights = own()
    net = build(SPEC)
    net.load_state_dict(load_weights(saved(tmp_path / "w.safetensors", published(weights, "model.")), SPEC))
    other = build(SPEC)
    other.load_state_dict(weights)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(net.eval()(images), other.eval()(images))


def test_what_lies_beside_the_network_is_left_out(tmp_path: Path) -> None:
    query, key = own(seed=1), own(seed=2)
    moco = {
        **published(key, "module.encoder_k.", head=False),
        **published(query, "module.encoder_q.", head=False),
        "module.encoder_q.fc.0.weight": torch.zeros(8, 32),
        "module.queue": torch.zeros(8, 16),
    }
    dino = {
        **published(key, "student.backbone."),
        **published(query, "teacher.backbone."),
        "teacher.head.x": torch.ones(1),
    }
    head = spec_layout(SPEC).head
    drawn = own(seed=3)
    for number, found in enumerate((moco, dino)):
        loaded = load_weights(saved(tmp_path / f"{number}.safetensors", found), SPEC, drawn)
        assert same(loaded, query, leave=head)
    assert torch.equal(load_weights(tmp_path / "0.safetensors", SPEC, drawn)["head.weight"], drawn["head.weight"])


def test_the_head_is_drawn_where_classes_differ_and_grey_stems_are_sums(tmp_path: Path) -> None:
    thousand = NetSpec("resnet18", 3, 1000, 32, width=4, stem="imagenet")
    weights = own(thousand)
    file = saved(tmp_path / "w.safetensors", {n: t for n, t in published(weights).items() if "num_batches" not in n})
    drawn = own(seed=3)
    loaded = load_weights(file, SPEC, drawn)
    assert torch.equal(loaded["head.weight"], drawn["head.weight"])
    assert torch.equal(loaded["stages.stage4.1.conv2.weight"], weights["stages.stage4.1.conv2.weight"])
    again = [load_weights(file, SPEC)["head.weight"] for _ in range(2)]
    assert torch.equal(*again)
    assert again[0].any()
    grey = load_weights(file, NetSpec("resnet18", 1, 1000, 32, width=4, stem="imagenet"))
    assert torch.equal(grey["stages.stem.conv1.weight"], weights["stages.stem.conv1.weight"].sum(1, keepdim=True))
    assert torch.equal(grey["head.weight"], weights["head.weight"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            NetSpec("resnet18", 3, 5, 32, 4),
            r"stages.stem.conv1.weight is 4×3×7×7 float32, not 4×3×3×3; .*model.stem=imagenet",
        ),
        (
            NetSpec("resnet34", 3, 5, 32, 4, "imagenet"),
            r"stages.stage1.2.conv1.weight is missing, .*looks like a resnet18",
        ),
        (NetSpec("resnet50", 3, 5, 32, 4, "imagenet"), r"more; the file looks like a resnet18: set model.name"),
        (NetSpec("resnet18", 3, 5, 32, 8, "imagenet"), r"is 4×3×7×7 float32, not 8×3×7×7, .*name, width and stem"),
        (NetSpec("small", 3, 5, 32), "is not of this network"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, spec: NetSpec, message: str) -> None:
    file = saved(tmp_path / "w.safetensors", published(own(), "module."))
    with pytest.raises(BadInput, match=message):
        load_weights(file, spec)


def test_deeper_files_are_named_too(tmp_path: Path) -> None:
    file = saved(tmp_path / "w.safetensors", published(own(NetSpec("resnet34", 3, 5, 32, 4, "imagenet"))))
    with pytest.raises(BadInput, match=r"stages.stage1.2.\S+ is not in the model, .* looks like a resnet34"):
        load_weights(file, SPEC)


def test_other_names_are_no_published_layout() -> None:
    assert not is_published(own())
    assert not is_published({"conv1.weight", "fc.weight"})
    tensors: dict[str, Tensor] = {"a": torch.zeros(1)}
    assert renamed(tensors) == tensors
