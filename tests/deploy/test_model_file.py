from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.samples import ABOUT, PREDICTORS, TASK, bright, noise, panel, panel_about
from wardround import tensorfile
from wardround.deploy.model_file import NEEDS, check_fit, read_model, write_model
from wardround.errors import BadInput
from wardround.learn.device import Device
from wardround.learn.predictor import Predictor

CPU = Device(torch.device("cpu"), 1)
Change = Callable[[dict[str, dict[str, torch.Tensor]], dict[str, Any]], None]


def written(path: Path, predictor: Predictor, about: Any = None) -> bytes:
    write_model(path / "model.safetensors", predictor, (about or panel_about()).record)
    return (path / "model.safetensors").read_bytes()


def refusal(data: bytes) -> str:
    with pytest.raises(BadInput) as caught:
        read_model(data, "model.safetensors")
    message = str(caught.value)
    assert message.startswith("model.safetensors: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", PREDICTORS)
def test_every_kind_of_predictor_survives_the_file(name: str, tmp_path: Path) -> None:
    predictor, about = PREDICTORS[name], panel_about()
    record, found = read_model(written(tmp_path, predictor), "it")
    images = noise(7, about.task)
    assert record == about.record
    assert torch.equal(found.scores(images, CPU), predictor.scores(images, CPU))
    assert tensorfile.to_bytes(*found.parts()) == tensorfile.to_bytes(*predictor.parts())


def test_equal_models_are_equal_files(tmp_path: Path) -> None:
    assert written(tmp_path, panel()) == written(tmp_path, panel())


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path, bright(), ABOUT)
    for length in (0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1):
        assert "not a wardround tensor file" in refusal(data[:length])
    assert "not a wardround tensor file" in refusal(data + b"x")


@settings(deadline=None, max_examples=100)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_harmless(place: float, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    kept = tmp_path_factory.getbasetemp() / "model.safetensors"
    data = bytearray(kept.read_bytes() if kept.exists() else written(kept.parent, bright(), ABOUT))
    data[int(place * len(data))] ^= 1 << bit
    message, shape = "", (1, 2)
    try:
        _, predictor = read_model(bytes(data), "it")
        shape = tuple(predictor.scores(noise(1, TASK), CPU).shape)
    except BadInput as error:
        message = str(error)
    assert "\n" not in message
    assert shape == (1, 2)


def test_a_predictor_out_of_a_run_does_not_say_enough() -> None:
    assert "does not name its classes" in refusal(tensorfile.to_bytes(*bright().parts()))


def lie(change: Change, predictor: Predictor | None = None) -> str:
    """What is said of a file whose content was changed and written again, as one who can write such files would."""
    groups, own = (predictor or bright()).parts()
    tree = {**(panel_about() if predictor else ABOUT).record.model_dump(mode="json"), "predictor": own}
    copied = {group: {name: tensor.clone() for name, tensor in tensors.items()} for group, tensors in groups.items()}
    change(copied, tree)
    return refusal(tensorfile.to_bytes(copied, tree))


def setting(path: str, value: Any) -> Change:
    """Put a value into the record at a dotted place."""

    def change(_: Any, tree: dict[str, Any]) -> None:
        *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        inner: Any = tree
        for part in way:
            inner = inner[part]
        inner[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("format", "wardround-model-2", "format"),
        ("task.classes", ["a", "b", "c"], "the model has 2 classes, but 3 are named"),
        ("task.size", 8, "is said to take 1×8×8 images"),
        ("task.channels", 3, "is said to take 3×4×4 images"),
        ("task.normalisation", "pixels", "task.normalisation"),
        ("origin.site", "", "origin.site"),
        ("origin.run", "rm -rf", "origin.run"),
        ("predictor.classes", 3, "the model has 3 classes, but 2 are named"),
        ("predictor.combine", "vote", "predictor.combine"),
        ("predictor.members", [], "differ in 'member-000'"),
        ("predictor.members.0.name", "resnet18", "resnet18 needs images of at least 8 pixels"),
        ("predictor.members.0.name", "small", "not those of small, width 1"),
        ("predictor.members.0.name", "../cnn4", "there is no network"),
        ("predictor.members.0.classes", 3, "but the model is said to take"),
        ("predictor.members.0.width", 2, "stages.conv1.0.weight of the model is (1, 1, 5, 5)"),
        ("predictor.members.0.width", 10**9, "predictor.members.0.width"),
        ("predictor.members.0.size", 10**9, "predictor.members.0.size"),
        ("predictor.members.0.stem", "small", "cnn4 has no stem"),
        ("predictor.code", "print()", "predictor.code"),
    ],
)
def test_a_record_that_lies_is_refused(path: str, value: Any, says: str) -> None:
    assert says in lie(setting(path, value))


def test_tensors_that_do_not_belong_are_refused() -> None:
    def without_a_tensor(groups: Any, _: Any) -> None:
        del groups["member-000"]["head.bias"]

    def with_another(groups: Any, _: Any) -> None:
        groups["member-000"]["tail.bias"] = torch.zeros(1)

    def with_a_group(groups: Any, _: Any) -> None:
        groups["member-001"] = {"x": torch.zeros(1)}

    def with_a_part(groups: Any, _: Any) -> None:
        groups["combine"] = {"luck": torch.zeros(1)}

    def in_half_precision(groups: Any, _: Any) -> None:
        groups["member-000"]["head.bias"] = groups["member-000"]["head.bias"].half()

    assert "differ in 'head.bias'" in lie(without_a_tensor)
    assert "differ in 'tail.bias'" in lie(with_another)
    assert "differ in 'member-001'" in lie(with_a_group)
    assert "differ in 'luck'" in lie(with_a_part)
    assert "(2,) torch.float16" in lie(in_half_precision)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_when_read_and_when_written(value: float, tmp_path: Path) -> None:
    def change(groups: Any, _: Any) -> None:
        groups["member-000"]["head.bias"][1] = value

    assert "head.bias of the model holds NaN or infinite values" in lie(change)
    predictor = bright()
    predictor.members[0].weights["head.bias"][1] = value
    with pytest.raises(BadInput, match="NaN or infinite"):
        written(tmp_path, predictor, ABOUT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("trust", torch.ones(3), "trust of the model has shape (3,), which does not fit 2 networks and 3 classes"),
        ("trust", torch.ones(2, 1), "trust of the model has shape (2, 1)"),
        ("trust", torch.tensor([1.0, -1.0]), "trusted less than not at all"),
        ("trust", torch.tensor([1.0, float("nan")]), "trust of the model holds NaN"),
        ("log_prior", torch.zeros(1), "log_prior of the model has shape (1,)"),
        ("log_prior", torch.tensor([0.0, 0.0, float("-inf")]), "log_prior of the model holds NaN or infinite"),
        ("member_log_prior", torch.zeros(3), "member_log_prior of the model has shape (3,)"),
        ("votes", torch.ones(3), "votes of the model has shape (3,)"),
        ("votes", torch.tensor([3.0, 0.0]), "votes of the model holds a number that is not above 0"),
        ("voices", torch.ones(3), "voices of the model has shape (3,)"),
        ("voices", torch.tensor([1.0, 0.0]), "voices of the model holds a number that is not above 0"),
        ("sharpness", torch.ones(1), "sharpness of the model has shape (1,)"),
        ("sharpness", torch.tensor(-1.0), "sharpness of the model holds a number that is not above 0"),
        ("least_familiar", torch.ones(1), "least_familiar of the model has shape (1,)"),
        ("least_familiar", torch.tensor(float("nan")), "least_familiar of the model holds NaN"),
    ],
)
def test_what_members_are_combined_with_must_fit(name: str, tensor: torch.Tensor, says: str, tmp_path: Path) -> None:
    def change(groups: Any, _: Any) -> None:
        groups["combine"] = {name: tensor}

    assert says in lie(change, panel())
    with pytest.raises(BadInput) as caught:
        written(tmp_path, panel(**{name: tensor}))
    assert says in str(caught.value)


@pytest.mark.parametrize(("way", "name"), [(way, name) for way, names in NEEDS.items() for name in names])
def test_pairs_and_chains_need_all_that_they_are_weighed_by(way: str, name: str, tmp_path: Path) -> None:
    whole, says = PREDICTORS[way], f"combined by {way} needs {name}, and it is not there"

    def change(groups: Any, _: Any) -> None:
        del groups["combine"][name]

    assert says in lie(change, whole)
    with pytest.raises(BadInput, match=says):
        written(tmp_path, replace(whole, **{name: None}))


@pytest.mark.parametrize("way", NEEDS)
def test_pairs_and_chains_are_weighed_class_by_class(way: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"trust of the model has shape \(2,\)"):
        written(tmp_path, replace(PREDICTORS[way], trust=torch.ones(2)))


def test_a_chain_is_of_two_networks(tmp_path: Path) -> None:
    whole = PREDICTORS["chain"]
    with pytest.raises(BadInput, match="has two networks, and this one has 1"):
        written(tmp_path, replace(whole, members=whole.members[:1]))


def test_a_model_for_another_task_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="3 classes, but 2 are named"):
        write_model(tmp_path / "m", panel(), ABOUT.record)
    check_fit(bright(), TASK)
