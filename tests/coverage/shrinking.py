"""The smallest part of a model that fails as the whole does, and a program of a few lines that shows it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable

import onnx

from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import OnnxTrainError
from onnxtrain.onnxblock import loss, optim

_PROGRAM = """
# {why}
import onnx
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.onnxblock import loss, optim

model = onnx.parser.parse_model('''
{text}
''')
generate_artifacts(model, loss=loss.MSELoss(), optimizer=optim.AdamW(), artifact_directory="out")
"""
_LARGEST = 16  # elements of a constant that is printed


def failure(proto: onnx.ModelProto) -> str | None:
    """How artifacts of a model fail, without the names in it; None where they do not."""
    output = proto.graph.output[0].name
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = {"loss": loss.MSELoss(), "optimizer": optim.AdamW(), "loss_input_names": [output]}
            generate_artifacts(proto, artifact_directory=folder, **made)
    except OnnxTrainError as error:
        return _kind(error, error.what)
    except Exception as error:
        return _kind(error, str(error))
    return None


def _kind(error: Exception, what: str) -> str:
    first = next((line for line in what.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', '…', first)}"


def smallest(proto: onnx.ModelProto, fails: Callable[[onnx.ModelProto], bool]) -> onnx.ModelProto:
    """The shortest run of nodes that still fails: first what comes after is cut off, then what comes before.

    What a part reads of the rest becomes its inputs.
    """
    known = {v.name: v for v in _inferred(proto).graph.value_info} | {v.name: v for v in proto.graph.input}
    count = len(proto.graph.node)
    ends = (k for k in range(1, count) if fails(_part(proto, 0, k, known)))
    end = next(ends, count)
    starts = (k for k in range(end - 1, 0, -1) if fails(_part(proto, k, end, known)))
    start = next(starts, 0)
    return proto if (start, end) == (0, count) else _part(proto, start, end, known)


def _inferred(proto: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(proto)
    except Exception:  # a model that is not valid; what it says itself has to do
        return proto


def _part(proto: onnx.ModelProto, start: int, end: int, known: dict[str, onnx.ValueInfoProto]) -> onnx.ModelProto:
    """The nodes from one to another, whose last output is the part's."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    graph, nodes = made.graph, list(proto.graph.node)[start:end]
    for field in (graph.node, graph.output, graph.input, graph.value_info):
        del field[:]
    graph.node.extend(nodes)
    last = nodes[-1].output[0]
    graph.output.append(known.get(last) or next((o for o in proto.graph.output if o.name == last), _float(last)))
    held = [t for t in proto.graph.initializer if any(t.name in n.input for n in nodes)]
    del graph.initializer[:]
    graph.initializer.extend(held)
    there = {t.name for t in held} | {o for n in nodes for o in n.output}
    read = dict.fromkeys(name for n in nodes for name in n.input if name and name not in there)
    graph.input.extend(known.get(name) or _float(name) for name in read)
    return made


def _float(name: str) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)


def program(proto: onnx.ModelProto, why: str) -> str:
    """Lines that make artifacts of a model; one with large constants is read from ``out/exported/smallest.onnx``."""
    text = onnx.printer.to_text(proto)
    if any(len(t.raw_data) > 4 * _LARGEST for t in proto.graph.initializer):
        read = 'model = onnx.load("out/exported/smallest.onnx")'
        start, end = _PROGRAM.index("model = onnx.parser"), _PROGRAM.index("generate_artifacts(model")
        return (_PROGRAM[:start] + read + "\n" + _PROGRAM[end:]).format(why=why)
    return _PROGRAM.format(why=why, text=text)
