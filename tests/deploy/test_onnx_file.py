"""The ONNX file: equal to the model it was made of, and read only where it is a plain graph of ours."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.samples import ABOUT, PREDICTORS, TASK, bright, malignant, noise, panel, panel_about, weights
from wardround.deploy import onnx_file
from wardround.deploy.about import Task
from wardround.deploy.onnx_file import OnnxModel, largest_difference, make_onnx
from wardround.errors import BadInput
from wardround.learn.device import Device
from wardround.learn.predictor import Member, Predictor, member_logits, single
from wardround.models import NetSpec, names
from wardround.tensorfile import canonical

onnx = pytest.importorskip("onnx", reason="needs the extra [onnx]")
pytest.importorskip("onnxruntime", reason="needs the extra [onnx]")
pytest.importorskip("onnxscript", reason="needs the extra [onnx]")
helper = onnx.helper

DEEPER = {"resnet34", "resnet50", "vgg11", "vgg16"}  # more of the same layers as a shallower network in the list


def expected(predictor: Predictor, images: torch.Tensor) -> torch.Tensor:
    return predictor.scores(images, Device(torch.device("cpu"), 1)).softmax(dim=1)


def compared(predictor: Predictor, about: Any) -> float:
    images = noise(9, about.task)
    for member in predictor.members:  # each tells images apart, or its part of the graph would not be tested
        alone = expected(single(member.spec, member.weights), images)
        assert float((alone.amax(dim=0) - alone.amin(dim=0)).max()) > 0.01
    model = OnnxModel(make_onnx(predictor, about.record), "it")
    return largest_difference(model, expected(predictor, images), images)


# Written --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PREDICTORS.keys() - {"logits", "nothing"}))  # these are made elsewhere here
def test_every_kind_of_predictor_gives_the_same_probabilities(name: str) -> None:
    assert compared(PREDICTORS[name], panel_about()) < 2e-6


def test_what_is_unfamiliar_is_a_second_output() -> None:
    predictor, images = PREDICTORS["pairs"], noise(9, panel_about().task)
    familiarity = predictor.familiarity(member_logits(predictor.members, images, Device(torch.device("cpu"), 1)))
    least = familiarity.median().double() + 1e-6  # so that some are and some are not
    model = OnnxModel(make_onnx(replace(predictor, least_familiar=least), panel_about().record), "it")
    _, unfamiliar = model.answer(images)
    assert unfamiliar is not None
    assert unfamiliar.tolist() == (familiarity < least).tolist()
    assert 0 < int(unfamiliar.sum()) < 9
    assert model.answer(images[:1])[1] is not None
    silent = OnnxModel(make_onnx(replace(predictor, least_familiar=None), panel_about().record), "it")
    assert silent.answer(images)[1] is None


def network(name: str) -> Member:
    stem = "imagenet" if name.startswith("resnet") else None  # which has a layer that the other stem lacks
    spec = NetSpec(name, 3, 3, 16, width=2, stem=stem)
    return Member(spec, weights(spec, 1))


def test_networks_of_all_kinds_of_layers_give_the_same_probabilities() -> None:
    """But for rounding: on a CPU without AVX-512 they differ by 2.6e-6."""
    members = tuple(network(name) for name in names() if name not in DEEPER)
    task = Task(classes=("ash", "birch", "cedar"), channels=3, size=16)
    assert compared(Predictor(3, members), panel_about(task=task)) < 1e-5


@pytest.mark.soak
@pytest.mark.parametrize("name", names())
def test_every_network_gives_the_same_probabilities(name: str) -> None:
    """A group norm of a few values that are nearly alike divides by nearly nothing: rounding shows there."""
    task = Task(classes=("ash", "birch", "cedar"), channels=3, size=16)
    limit = 2e-5 if name.endswith("-gn") else 1e-5
    assert compared(Predictor(3, (network(name),)), panel_about(task=task)) < limit


@pytest.fixture(scope="module")
def by_hand(whole_export: Path) -> bytes:
    return (whole_export / "model.onnx").read_bytes()


def test_normalisation_is_inside_and_any_number_of_images_will_do(by_hand: bytes) -> None:
    model = OnnxModel(by_hand, "it")
    assert model.record == ABOUT.record
    greys = [0, 64, 128, 200, 255]
    for n in (1, 2, 5):
        images = torch.tensor(greys[:n], dtype=torch.uint8).reshape(n, 1, 1, 1).expand(n, 1, 4, 4)
        assert model.answer(images)[0][:, 1].tolist() == pytest.approx([malignant(g) for g in greys[:n]], abs=1e-6)


def test_the_file_says_nothing_of_the_machine(by_hand: bytes) -> None:
    proto = onnx.load_model_from_string(by_hand)
    assert b".py" not in by_hand
    assert [entry.key for entry in proto.metadata_props] == ["wardround"]
    assert (proto.producer_name, proto.graph.name) == ("wardround", "wardround")
    assert [entry.version for entry in proto.opset_import] == [18]
    onnx.checker.check_model(proto)


def test_making_one_is_quiet_changes_nothing_and_gives_the_same_every_time(
    by_hand: bytes, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    predictor, state, level = bright(), torch.get_rng_state(), logging.getLogger("torch.onnx").level
    before = {name: tensor.clone() for name, tensor in predictor.members[0].weights.items()}
    assert make_onnx(predictor, ABOUT.record) == by_hand
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
    assert torch.equal(torch.get_rng_state(), state)
    assert logging.getLogger("torch.onnx").level == level
    assert all(torch.equal(tensor, before[name]) for name, tensor in predictor.members[0].weights.items())


def test_a_model_beyond_what_such_a_file_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "LARGEST", 100)
    with pytest.raises(BadInput, match=r"more than 2 GiB.*use model\.safetensors"):
        make_onnx(bright(), ABOUT.record)


def test_what_torch_cannot_export_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.onnx.OnnxExporterError("no such operator\nlong tale")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(BadInput, match=r"^torch cannot make .* \(no such operator\); use model\.safetensors$"):
        make_onnx(bright(), ABOUT.record)


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_without_the_extra_it_says_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadInput, match=rf"package {package}, .*: pip install 'wardround\[onnx\]'$"):
        make_onnx(bright(), ABOUT.record)


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_without_the_extra_none_is_read(package: str, monkeypatch: pytest.MonkeyPatch, by_hand: bytes) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadInput, match=rf"package {package}, .*: pip install 'wardround\[onnx\]'$"):
        OnnxModel(by_hand, "it")


def test_the_difference_is_the_largest_of_all_images_and_of_the_first_alone() -> None:
    class Odd(OnnxModel):
        def __init__(self) -> None:
            pass

        def answer(self, images: torch.Tensor) -> tuple[torch.Tensor, None]:
            found = torch.tensor([[0.5, 0.5], [0.25, 0.75]]) if len(images) == 2 else torch.tensor([[0.0, 1.0]])
            return found, None

    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    assert largest_difference(Odd(), torch.tensor([[0.5, 0.5], [0.5, 0.5]]), images) == 0.5
    assert largest_difference(Odd(), torch.tensor([[0.0, 1.0], [0.25, 0.75]]), images) == 0.5
    assert largest_difference(Odd(), torch.tensor([[0.25, 0.75], [0.25, 0.75]]), images) == 0.25


# Read -----------------------------------------------------------------------------------------------------------------


def graph(classes: int = 2, size: int = 4, kind: int = 1, channels: int = 1, n: int | str = "n") -> Any:
    """A small graph of the right form, made without torch: the mean brightness decides."""
    pixels = helper.make_tensor_value_info("pixels", kind, [n, channels, size, size])
    answer = helper.make_tensor_value_info("probabilities", 1, [n, classes])
    matrix = helper.make_tensor("w", 1, [channels * size**2, classes], [0.001] * (channels * size**2 * classes))
    nodes = [
        helper.make_node("Cast", ["pixels"], ["floats"], to=1),
        helper.make_node("Flatten", ["floats"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"]),
    ]
    made = helper.make_graph(nodes, "g", [pixels], [answer], [matrix])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def with_record(proto: Any, record: str | None = None) -> bytes:
    text = canonical(ABOUT.record.model_dump(mode="json")) if record is None else record
    helper.set_model_props(proto, {"wardround": text})
    return bytes(proto.SerializeToString())


def refusal(data: bytes) -> str:
    with pytest.raises(BadInput) as caught:
        OnnxModel(data, "model.onnx")
    message = str(caught.value)
    assert "model.onnx" in message
    assert "\n" not in message
    return message


def test_a_graph_of_the_right_form_is_read() -> None:
    model = OnnxModel(with_record(graph()), "it")
    assert model.answer(noise(3, TASK))[0].tolist() == [[0.5, 0.5]] * 3


def test_a_model_of_another_program_is_refused() -> None:
    assert "does not name its classes" in refusal(graph().SerializeToString())


@pytest.mark.parametrize("record", ["", "{", "[1]", "[" * 100_000, "null", '{"format": "wardround-model-1"}'])
def test_a_record_that_is_none_is_refused(record: str) -> None:
    assert "the record in model.onnx is not as wardround writes it" in refusal(with_record(graph(), record))


@pytest.mark.parametrize(
    "other",
    [
        {"classes": 3},
        {"size": 5},
        {"channels": 3},
        {"kind": onnx.TensorProto.UINT8},
        {"n": 4},
    ],
)
def test_a_graph_of_another_model_is_refused(other: dict[str, Any]) -> None:
    assert "but its record means" in refusal(with_record(graph(**other)))


def test_a_graph_that_promises_one_thing_and_does_another_is_refused_when_it_answers() -> None:
    """A row for each pixel that is not black."""
    proto = graph()
    del proto.graph.node[2:], proto.graph.initializer[:]
    proto.graph.node.append(helper.make_node("NonZero", ["flat"], ["places"]))
    proto.graph.node.append(helper.make_node("Cast", ["places"], ["numbers"], to=1))
    proto.graph.node.append(helper.make_node("Transpose", ["numbers"], ["probabilities"]))
    model = OnnxModel(with_record(proto), "model.onnx")
    with pytest.raises(BadInput, match=r"^model\.onnx gives \(32, 2\) numbers, which are not a probability of each"):
        model.answer(torch.ones(2, 1, 4, 4, dtype=torch.uint8))


def test_an_output_that_is_declared_otherwise_than_it_is_computed_is_refused() -> None:
    proto = graph(classes=3)
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 2
    assert "but its record means" in refusal(with_record(proto))


def external(proto: Any) -> None:
    tensor = proto.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "../../etc/passwd"


def external_in_a_constant(proto: Any) -> None:
    tensor = helper.make_tensor("c", 1, [1], [0.0])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    proto.graph.node.append(helper.make_node("Constant", [], ["c"], value=tensor))


def loop(proto: Any) -> None:
    body = helper.make_graph([], "body", [], [])
    proto.graph.node.append(helper.make_node("Loop", ["", ""], ["x"], body=body))


def foreign(proto: Any) -> None:
    proto.graph.node.append(helper.make_node("Run", ["pixels"], ["x"], domain="com.example"))


def function(proto: Any) -> None:
    node = helper.make_node("Identity", ["a"], ["b"])
    proto.functions.append(helper.make_function("f", "F", ["a"], ["b"], [node], [helper.make_opsetid("", 18)]))


@pytest.mark.parametrize("change", [external, external_in_a_constant, loop, foreign, function])
def test_what_export_never_writes_is_refused_before_it_runs(change: Callable[[Any], None]) -> None:
    proto = graph()
    change(proto)
    assert "which wardround never writes" in refusal(with_record(proto))


def test_an_unknown_operation_is_refused() -> None:
    proto = graph()
    proto.graph.node[3].op_type = "Divination"
    assert "cannot be used" in refusal(with_record(proto))


@pytest.mark.parametrize("word", [b"pixels", b"Flatten", b"MatMul"])
def test_names_that_are_no_text_are_refused_and_not_printed(word: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    refusal(with_record(graph()).replace(word, b"\xff" * len(word)))
    assert capfd.readouterr() == ("", "")


def test_a_file_cut_short_is_refused(by_hand: bytes) -> None:
    for length in (1, 10, len(by_hand) // 2, len(by_hand) - 1):
        refusal(by_hand[:length])
    assert "does not name its classes" in refusal(b"")
    assert "is not an ONNX file" in refusal(b"hello, this is a letter")


@settings(deadline=None, max_examples=50)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_harmless(place: float, bit: int) -> None:
    data = bytearray(with_record(graph()))
    data[int(place * len(data))] ^= 1 << bit
    message, shape = "", (2, 2)
    try:
        shape = tuple(OnnxModel(bytes(data), "it").answer(noise(2, TASK))[0].shape)
    except BadInput as error:
        message = str(error)
    assert "\n" not in message
    assert shape == (2, 2)


def test_the_panel_is_no_mere_member() -> None:
    """The rules are told apart by these samples: no two give the same answers."""
    images = noise(5, panel_about().task)
    answers = [expected(predictor, images) for predictor in PREDICTORS.values()]
    apart = [float((a - b).abs().max()) for i, a in enumerate(answers) for b in answers[:i]]
    assert min(apart) > 1e-3
    assert panel().combine == "logits"
