"""Weights files: what is in them comes out, and what does not fit is refused in one line."""

import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wardround.errors import BadInput
from wardround.models import NetSpec, Weights, fresh, load_weights, spec_layout

SPEC = NetSpec("small", 3, 4, 28, width=2)


@pytest.fixture
def weights() -> Weights:
    return fresh(SPEC, torch.Generator().manual_seed(0))


def refused(path: Path, spec: NetSpec = SPEC) -> str:
    with pytest.raises(BadInput) as error:
        load_weights(path, spec)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    return str(error.value)


def test_a_round_trip_changes_nothing(weights: Weights, tmp_path: Path) -> None:
    weights["stages.conv1.2.num_batches_tracked"] = torch.tensor(17)
    save_file(weights, tmp_path / "a.safetensors")
    found = load_weights(tmp_path / "a.safetensors", SPEC)
    assert tuple(found) == spec_layout(SPEC).names
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_loaded_weights_outlive_the_file(weights: Weights, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(weights, path)
    found = load_weights(path, SPEC)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(found["head.weight"], weights["head.weight"])


def test_half_precision_is_widened(weights: Weights, tmp_path: Path) -> None:
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    save_file(half, tmp_path / "a")
    found = load_weights(tmp_path / "a", SPEC)
    assert found["head.weight"].dtype == torch.float32
    assert torch.equal(found["head.weight"], weights["head.weight"].half().float())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not weights at all",
        pickle.dumps({"head.weight": [1.0]}),
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 9) + b"{" + b" " * 8,
        (lambda h: struct.pack("<Q", len(h)) + h)(
            json.dumps({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}).encode()
        ),
    ],
    ids=["empty", "text", "pickle", "huge header", "broken header", "header without data"],
)
def test_a_file_that_is_not_safetensors(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    assert "cannot be read as a safetensors file" in refused(path)


def test_a_cut_file(weights: Weights, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(weights, path)
    path.write_bytes(path.read_bytes()[:-1])
    assert "cannot be read as a safetensors file" in refused(path)


def test_no_file_or_a_folder(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / "absent")
    assert "cannot be read" in refused(tmp_path)


def test_names_that_do_not_fit(weights: Weights, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("stages.conv4")}
    save_file({**kept, "fc.weight": torch.zeros(2)}, path)
    message = refused(path)
    assert "it lacks stages.conv4.0.weight, stages.conv4.2.weight, stages.conv4.2.bias and 3 more" in message
    assert "and it has fc.weight besides" in message
    assert "small, width 2, 3×28×28 images, 4 classes" in message


def test_a_file_of_another_network(weights: Weights, tmp_path: Path) -> None:
    save_file(weights, tmp_path / "a")
    assert "set the model to the one that the file was saved from" in refused(
        tmp_path / "a", NetSpec("resnet18", 3, 4, 28, width=2)
    )


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (NetSpec("small", 3, 2, 28, width=2), "the file is for 4 classes, the model for 2: set the classes"),
        (NetSpec("small", 1, 4, 28, width=2), "the file is for images of 3 channels, the model for 1"),
        (NetSpec("small", 3, 4, 28, width=3), "the file has width 2, the model 3: set the model's width"),
    ],
    ids=["classes", "channels", "width"],
)
def test_the_likely_reason_of_a_misfit(spec: NetSpec, reason: str, weights: Weights, tmp_path: Path) -> None:
    save_file(weights, tmp_path / "a")
    assert reason in refused(tmp_path / "a", spec)


def test_another_image_size(tmp_path: Path) -> None:
    save_file(fresh(NetSpec("cnn4", 1, 2, 28, width=1), torch.Generator().manual_seed(0)), tmp_path / "a")
    message = refused(tmp_path / "a", NetSpec("cnn4", 1, 2, 32, width=1))
    assert "stages.fc.1.weight is 16×98 float32, not 16×128 float32" in message
    assert "check the model's name, width, stem and image size" in message


def test_a_counter_that_is_not_whole(weights: Weights, tmp_path: Path) -> None:
    weights["stages.conv1.2.num_batches_tracked"] = torch.tensor(1.5)
    save_file(weights, tmp_path / "a")
    assert "num_batches_tracked is one float32, not one int64" in refused(tmp_path / "a")


def test_a_head_without_rows(weights: Weights, tmp_path: Path) -> None:
    weights["head.weight"] = torch.tensor(1.0)
    save_file(weights, tmp_path / "a")
    assert "head.weight is one float32, not 4×8 float32" in refused(tmp_path / "a")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(bad: float, weights: Weights, tmp_path: Path) -> None:
    weights["stages.conv2.2.running_var"][1] = bad
    save_file(weights, tmp_path / "a")
    assert "NaN or infinite values in stages.conv2.2.running_var" in refused(tmp_path / "a")


def test_a_double_too_large_for_a_float_is_not_finite(weights: Weights, tmp_path: Path) -> None:
    weights["head.bias"] = torch.full((4,), 1e300, dtype=torch.float64)
    save_file(weights, tmp_path / "a")
    assert "NaN or infinite values in head.bias" in refused(tmp_path / "a")
