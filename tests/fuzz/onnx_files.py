"""Random ``.onnx`` files that onnx.checker accepts and onnxruntime runs, with all that exporters and people put in."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from fuzz import dress
from fuzz.phrases import fit, write
from fuzz.program import Program
from fuzz.units import Rejected, tensor, type_of
from fuzz.wraps import Wrapper
from onnxtrain.ir.opsets import NEWEST

OPSETS = range(13, min(NEWEST, onnx.defs.onnx_opset_version()) + 1)
FEATURES = ("wraps", "names", "dimensions", "forms", "external", "dead", "large", "loss", "extras")
LOSSES = ("mse", "cross_entropy", "bce", "smooth", "own")


@dataclasses.dataclass
class File:
    """A model and how it is to be trained.

    Args:
        seed: makes it again.
        features: with these.
        model: the model; large data may lie in ``data`` files when it is saved.
        feeds: its inputs, by name.
        weights: names of initializers that may be trained.
        loss: one of ``LOSSES``.
        outputs: names of the outputs that the loss reads.
        target: the loss' own input, where it has one.
        external: whether data is saved beside it.
    """

    seed: int
    features: tuple[str, ...]
    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    weights: list[str]
    loss: str
    outputs: list[str]
    target: np.ndarray | None
    external: bool = False

    def save(self, folder: Path) -> Path:
        """Write it into a folder."""
        path = folder / "model.onnx"
        model = onnx.ModelProto.FromString(self.model.SerializeToString())
        for place, held in enumerate(model.graph.initializer if self.external else ()):
            if held.data_type == onnx.TensorProto.FLOAT and held.dims and held.HasField("raw_data"):
                location = "my data.bin" if self.seed % 2 else f"{place}.bin"
                onnx.external_data_helper.set_external_data(held, location)
        onnx.save(model, path)
        return path


def generate(seed: int, features: Collection[str] = FEATURES) -> File:
    """The file of a seed; leaving features out keeps the rest of it.

    Raises:
        Rejected: onnxruntime does not run what was made.
    """
    p = Program(np.random.default_rng([seed, 1]), OPSETS[seed % len(OPSETS)])
    _write(p, 3 + int(np.random.default_rng([seed, 2]).integers(3, 34 if "large" in features else 8)))
    main, kind = _loss(p, np.random.default_rng([seed, 3]), "loss" in features)
    p.rng = np.random.default_rng([seed, 4])
    wrapper = Wrapper(p)
    for _ in range(p.number(0, 4) if "wraps" in features else 0):
        wrapper.wrap()
    main = _joined(p, main, wrapper.extra if "wraps" in features else [], kind)
    p.rng = np.random.default_rng([seed, 5])
    names = [main, *_others(p, main)] if "extras" in features else [main]
    if "dead" not in features:
        _drop_dead(p, names)
    model = _assembled(p, names, wrapper.functions)
    read = [main]
    if kind == "smooth":
        read = [n for n in names if p.values[n].dtype == np.float32][:3]
    target = _target(p, main, kind)
    feeds = {n: p.values[n] for n in p.inputs}
    held = {i.name for i in model.graph.initializer}
    weights = [n for n in p.weights if n in held]
    file = File(seed, tuple(features), model, feeds, weights, kind, read, target)
    dress.dress(file, features)
    return file


def _write(p: Program, size: int) -> None:
    """Inputs, and phrases up to a number of nodes."""
    for _ in range(p.number(1, 3)):
        p.input(p.random(*(p.number(1, 5) for _ in range(p.choose([1, 2, 2, 2, 3, 3, 4])))))
    p.attempt(lambda: p.emit("Add", [p.inputs[0], p.weight(p.random(p.shape(p.inputs[0])[-1]))]))
    for _ in range(4 * size):
        if len(p.nodes) >= size:
            return
        write(p)


def _loss(p: Program, rng: np.random.Generator, any_kind: bool) -> tuple[str, str]:
    """The value that the loss reads, and which loss it is."""
    p.rng = rng
    kind = p.choose(LOSSES) if any_kind else "mse"
    ends = _ends(p)
    main = ends[-1]
    for other in ends[-4:-1]:  # so that most nodes are reached
        main = _scaled(p, main, other)
    if kind == "cross_entropy":
        shape = p.choose([(2, 3), (3, 2), (1, 4), (2, 3, 2)])
        if not p.attempt(lambda: fit(p, main, shape)):
            raise Rejected("nothing fits the loss")
        main = p.made()[-1]
    elif kind == "own":
        if not p.attempt(lambda: p.emit("ReduceMean", [p.emit("Mul", [main, main])[0]], keepdims=0)):
            raise Rejected("nothing fits the loss")
        main = p.made()[-1]
    return main, kind


def _scaled(p: Program, main: str, other: str) -> str:
    """The main value times the mean of another."""
    p.attempt(lambda: p.emit("Mul", [main, p.emit("ReduceMean", [other], keepdims=0)[0]]))
    return p.made()[-1]


def _ends(p: Program) -> list[str]:
    """Values of nodes that no node reads."""
    used = {n for node in p.nodes for n in node.input}
    inputs = {*p.inputs}
    found = [n for n in p.made() if n not in used and n not in inputs]
    if not found:
        raise Rejected("no value is an end")
    return found


def _joined(p: Program, main: str, extra: list[str], kind: str) -> str:
    """The main value, with what wrapping made besides added to it."""
    if not extra or kind not in ("mse", "bce", "smooth"):
        return main
    for name in extra[:3]:
        mean, made = p.name("v"), p.name("v")
        p.nodes.append(helper.make_node("ReduceMean", [name], [mean], keepdims=0))
        p.nodes.append(helper.make_node("Add", [main, mean], [made]))
        p.values[made], main = p.values[main], made
    return main


def _others(p: Program, main: str) -> list[str]:
    """Further outputs; any values of the graph."""
    known = [n for n in p.numbers() if n != main]
    return list(dict.fromkeys(p.choose(known) for _ in range(p.choose([0, 0, 1, 1, 2, 3])))) if known else []


def _drop_dead(p: Program, outputs: list[str]) -> None:
    from fuzz.units import reads

    needed, kept = set(outputs), []
    for node in reversed(p.nodes):
        if needed & set(node.output):
            kept.append(node)
            needed |= {*reads(node)}
    p.nodes[:] = reversed(kept)


def _target(p: Program, main: str, kind: str) -> np.ndarray | None:
    shape = p.shape(main)
    if kind == "cross_entropy":
        return p.rng.integers(0, shape[1], (shape[0], *shape[2:]))
    if kind in ("mse", "bce"):
        return p.rng.uniform(0, 1, shape).astype(np.float32)
    return None


def _assembled(p: Program, outputs: list[str], functions: list[onnx.FunctionProto]) -> onnx.ModelProto:
    """The model, plain; what nothing reads is there as well."""
    inputs = [onnx.ValueInfoProto(name=n, type=type_of(p.values[n], p.shape(n))) for n in p.inputs]
    made = [onnx.ValueInfoProto(name=n, type=type_of(p.values[n], [None] * p.array(n).ndim)) for n in outputs]
    held = [tensor(p.values[n], n) for n in dict.fromkeys(p.initializers)]
    graph = helper.make_graph(p.nodes, "main", inputs, made, held)
    return helper.make_model(graph, opset_imports=p.imports, functions=functions, ir_version=10)
