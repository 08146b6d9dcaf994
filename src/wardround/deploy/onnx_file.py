"""`model.onnx`: the same predictor for programs that know nothing of wardround, normalisation inside.

It takes `pixels`, float32 `(n, channels, size, size)` with the raw values 0 to 255, any n, and gives `probabilities`
`(n, classes)`; where the model can tell, also `unfamiliar` `(n,)`: 1 for an image unlike what it was trained on, or 0.
The record of the model stands in the file's metadata under "wardround". Needs the extra `[onnx]`.
"""

from __future__ import annotations

import importlib
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wardround import __version__
from wardround.deploy.about import ModelRecord, parsed
from wardround.errors import BadInput
from wardround.learn import nets
from wardround.learn.pixels import normalise
from wardround.learn.predictor import Predictor
from wardround.models import build
from wardround.tensorfile import RECORD, canonical, tensor_bytes

INSTALL = "pip install 'wardround[onnx]'"
OPSET = 18  # what runtimes of the last years all read
INPUT, OUTPUT, UNFAMILIAR, COUNT = "pixels", "probabilities", "unfamiliar", "n"
LARGEST = 2**31 - 2**24  # bytes of tensors: a file of this kind ends at 2 GiB, and the graph wants some, too
FLOAT = "tensor(float)"


class _WithPixels(nn.Module):
    """A predictor from raw pixels to probabilities, as one graph; how members combine is the predictor's own code."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.predictor = predictor
        self.members = nn.ModuleList()
        for member in predictor.members:
            net = build(member.spec)
            nets.load(net, member.weights)
            self.members.append(net)
        self.eval().requires_grad_(False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Probabilities `(n, classes)` and, where it can tell, whether images are unfamiliar."""
        seen = normalise(pixels.clone())
        logits = [net(seen) for net in self.members]
        scores, unfamiliar = self.predictor.combined(logits, pixels.shape[0]), self.predictor.unfamiliar(logits)
        return (scores.softmax(dim=1), *([] if unfamiliar is None else [unfamiliar.float()]))


def make_onnx(predictor: Predictor, record: ModelRecord) -> bytes:
    """The file's bytes."""
    for name in ("onnx", "onnxscript"):
        _package(name)
    if sum(tensor_bytes(predictor.parts()[0]).values()) > LARGEST:
        raise BadInput("the model has more than 2 GiB, which is the end of an ONNX file; use model.safetensors")
    task = record.task
    example = torch.zeros(2, task.channels, task.size, task.size)
    with _quiet(), _exporter_errors():
        program = torch.onnx.export(
            _WithPixels(predictor),
            (example,),
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            input_names=[INPUT],
            output_names=[OUTPUT, *([] if predictor.least_familiar is None else [UNFAMILIAR])],
            dynamic_shapes=({0: torch.export.Dim(COUNT)},),
        )
    if program is None:
        raise TypeError("torch.onnx.export returned no program")
    model = program.model_proto
    _strip(model)
    entry = model.metadata_props.add()
    entry.key, entry.value = RECORD, canonical(record.model_dump(mode="json"))
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _strip(model: Any) -> None:
    """Take out what the exporter notes of this machine: lines of code with their paths."""
    graph = model.graph
    graph.name, graph.doc_string = "wardround", ""
    model.producer_name, model.producer_version = "wardround", __version__
    del model.metadata_props[:], graph.metadata_props[:], graph.value_info[:]
    for part in (*graph.node, *graph.initializer, *graph.input, *graph.output):
        part.doc_string = ""
        del part.metadata_props[:]
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = COUNT


class OnnxModel:
    """An ONNX file of ours, in onnxruntime on the CPU."""

    def __init__(self, data: bytes, name: str) -> None:
        """Refuse whatever is not a plain graph with our record; `name` is the file's, for messages."""
        runtime = _package("onnxruntime")
        runtime.disable_telemetry_events()  # which its builds for Windows have
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = torch.get_num_threads()
        self._name = name
        with _refusals(name):
            proto = _read(data, name)
            self.record = _record(proto, name)
            _check_plain(proto, name)
            # Its second try after a failure would print what the first one found in the file.
            self._session = runtime.InferenceSession(
                data, options, providers=["CPUExecutionProvider"], enable_fallback=0
            )
            self._check_ends()

    def answer(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of uint8 images `(n, channels, size, size)`: float32 `(n, classes)`, and which are unfamiliar."""
        with _refusals(self._name):
            found, *more = self._session.run(None, {INPUT: images.to(torch.float32).contiguous().cpu().numpy()})
        if found.shape != (len(images), len(self.record.task.classes)):
            raise BadInput(f"{self._name} gives {found.shape} numbers, which are not a probability of each class")
        if more and more[0].shape != (len(images),):
            raise BadInput(f"{self._name} gives {more[0].shape} numbers, which do not say if each image is unfamiliar")
        return torch.from_numpy(found), torch.from_numpy(more[0]) > 0 if more else None

    def _check_ends(self) -> None:
        task = self.record.task
        outputs = self._session.get_outputs()
        ends = [
            (self._session.get_inputs(), INPUT, [task.channels, task.size, task.size]),
            (outputs[:1], OUTPUT, [len(task.classes)]),
            *((([value]), UNFAMILIAR, []) for value in outputs[1:]),
        ]
        for values, wanted, shape in ends:
            found = [(value.name, value.type, list(value.shape[1:])) for value in values]
            if found != [(wanted, FLOAT, shape)] or isinstance(values[0].shape[0], int):
                raise BadInput(
                    f"{self._name} has {found}, but its record means {wanted} {('n', *shape)} in float32: they are not "
                    "of one model; export it again"
                )


def largest_difference(model: OnnxModel, expected: Tensor, images: Tensor) -> float:
    """The largest absolute difference of a probability: all images at once, and the first one alone."""
    at_once = (model.answer(images)[0] - expected).abs().max()
    alone = (model.answer(images[:1])[0] - expected[:1]).abs().max()
    return float(torch.maximum(at_once, alone))


def versions() -> dict[str, str]:
    """Of the packages that made and checked the file."""
    return {name: str(_package(name).__version__) for name in ("onnx", "onnxruntime", "onnxscript")}


def _read(data: bytes, name: str) -> Any:
    onnx = _package("onnx")
    damage = importlib.import_module("google.protobuf.message").DecodeError
    try:
        return onnx.load_model_from_string(data)
    except (damage, ValueError, RuntimeError) as error:
        raise BadInput(f"{name} is not an ONNX file, or is cut short; export the model again") from error


def _record(proto: Any, name: str) -> ModelRecord:
    found = {entry.key: entry.value for entry in proto.metadata_props}
    if RECORD not in found:
        raise BadInput(f"{name} is no exported model, it does not name its classes; give a file that export wrote")
    try:
        tree = json.loads(found[RECORD])
    except (ValueError, RecursionError):
        tree = None
    return parsed(ModelRecord, tree, f"the record in {name}")


def _check_plain(proto: Any, name: str) -> None:
    """A graph as export writes it is a straight line of standard operations with all tensors in the file.

    Loops could run for ever, other domains load code, and tensors outside the file could be any file of the machine.
    """
    tensors = list(proto.graph.initializer)
    plain = not proto.functions and not proto.graph.sparse_initializer
    for node in proto.graph.node:
        plain &= node.domain in ("", "ai.onnx")
        for attribute in node.attribute:
            plain &= not (attribute.HasField("g") or attribute.graphs or attribute.HasField("sparse_tensor"))
            tensors += [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
    if not plain or any(tensor.external_data or tensor.data_location for tensor in tensors):
        raise BadInput(
            f"{name} holds loops, functions, foreign operations or tensors outside the file, which wardround never "
            "writes; give a file that export wrote"
        )


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadInput(f"ONNX needs the package {name}, which is not installed here: {INSTALL}") from error


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Onnxruntime's own errors, which have no common base, as one line."""
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    own = (kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception))
    kinds: tuple[type[Exception], ...] = (RuntimeError, ValueError, *own)
    try:
        yield
    except kinds as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{name} cannot be used ({reason}); export the model again") from error


@contextmanager
def _exporter_errors() -> Iterator[None]:
    try:
        yield
    except torch.onnx.OnnxExporterError as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise BadInput(f"torch cannot make an ONNX file of this model ({reason}); use model.safetensors") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter talks of torch's own workings, on which nobody here can act."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
