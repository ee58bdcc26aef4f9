"""A file made smaller while what is wrong with it stays the same."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator

import numpy as np
import onnx

from fuzz.onnx_files import FEATURES, File, generate
from fuzz.oracle import check
from fuzz.outcomes import Outcome
from fuzz.units import Evaluator, Rejected, reads, tensor, type_of

_PLAIN = ("extras", "external", "names", "dimensions", "forms", "wraps", "dead", "loss", "large")


def shrunk(file: File, found: Outcome, seconds: float = 60.0) -> File:
    """The smallest file that is found in this time and ends alike."""
    end = time.monotonic() + seconds
    file = _without_features(file, found)
    going = True
    while going:
        going, tried = False, 0
        while time.monotonic() < end:
            smaller = next(itertools.islice(_smaller(file), tried, None), None)
            if smaller is None:
                break
            if _ends_alike(smaller, found):  # what was tried before it is not tried again in this round
                file, going = smaller, True
            else:
                tried += 1
    return file


def _without_features(file: File, found: Outcome) -> File:
    """The file with as little dress as shows the same."""
    kept = [f for f in FEATURES if f in file.features]
    for feature in _PLAIN:
        if feature not in kept:
            continue
        try:
            other = generate(file.seed, [f for f in kept if f != feature])
        except Rejected:
            continue
        if _ends_alike(other, found):
            file = other
            kept.remove(feature)
    return file


def _ends_alike(file: File, found: Outcome) -> bool:
    other = check(file)
    return (other.kind, other.reason) == (found.kind, found.reason)


def _smaller(file: File) -> Iterator[File]:
    """Files with a value in the place of what computed it, from the last value that may be cut to the first."""
    try:
        values = Evaluator(file.model, file.feeds).values
    except Rejected:
        return
    graph = file.model.graph
    for node in graph.node if len(file.outputs) > 1 or len(graph.node) > 2 else ():  # the loss of an earlier value
        for name in node.output:
            yield from _with_loss(file, name, values)
    read = {n for node in graph.node for n in reads(node)}
    for node in reversed(graph.node):
        if node.op_type == "Constant":
            continue
        for name in node.output:
            if name in read and name in values and isinstance(values[name], np.ndarray) and name not in file.outputs:
                yield _cut(file, name, values[name])
    for name in [o.name for o in graph.output if o.name not in file.outputs]:
        yield _pruned(file, [o.name for o in graph.output if o.name != name])


def _copy(file: File) -> File:
    model = onnx.ModelProto.FromString(file.model.SerializeToString())
    return dataclasses.replace(file, model=model, feeds=dict(file.feeds), weights=list(file.weights))


def _with_loss(file: File, name: str, values: dict[str, np.ndarray]) -> Iterator[File]:
    """The mean square of another value as the loss."""
    value = values.get(name)
    if file.loss == "own" or not isinstance(value, np.ndarray) or value.dtype != np.float32 or name == file.outputs[0]:
        return
    made = _copy(file)
    made.loss, made.outputs, made.target = "mse", [name], np.full(value.shape, 0.5, np.float32)
    del made.model.graph.output[:]
    made.model.graph.output.add(name=name).type.CopyFrom(type_of(value, [None] * value.ndim))
    yield _pruned(made, [name])


def _cut(file: File, name: str, value: np.ndarray) -> File:
    """The file with an initializer in the place of what computed a value."""
    made = _copy(file)
    graph = made.model.graph
    for node in graph.node:
        node.output[:] = [n if n != name else f"{n}_before" for n in node.output]
    graph.initializer.append(tensor(value, name))
    if value.dtype == np.float32:
        made.weights.append(name)
    return _pruned(made, [o.name for o in graph.output])


def _pruned(file: File, outputs: list[str]) -> File:
    """The file with what its outputs need."""
    made = _copy(file)
    graph = made.model.graph
    needed, kept = set(outputs), []
    for node in reversed(graph.node):
        if needed & set(node.output):
            kept.append(node)
            needed |= {*reads(node)}
    infos = [o for o in graph.output if o.name in outputs]
    inputs = [i for i in graph.input if i.name in needed]
    held = [i for i in graph.initializer if i.name in needed]
    for field, content in (
        (graph.node, reversed(kept)), (graph.output, infos), (graph.input, inputs), (graph.initializer, held),
    ):  # fmt: skip
        content = list(content)
        del field[:]
        field.extend(content)
    del graph.value_info[:]
    called = {(n.domain, n.op_type) for f in made.model.functions for n in f.node} | {
        (n.domain, n.op_type) for n in kept
    }
    for function in [f for f in made.model.functions if (f.domain, f.name) not in called and not _in_body(kept, f)]:
        made.model.functions.remove(function)
    made.feeds = {n: v for n, v in made.feeds.items() if n in needed}
    made.weights = [n for n in made.weights if n in needed]
    return made


def _in_body(nodes: list[onnx.NodeProto], function: onnx.FunctionProto) -> bool:
    return any(function.name in str(n) for n in nodes)


def told(file: File, found: Outcome) -> str:
    """A file and what became of it, as text."""
    text = onnx.printer.to_text(file.model)
    parts = [f"seed {file.seed}, features {' '.join(file.features)}: {found.kind}: {found.reason}", found.detail]
    parts += [text, f"loss {file.loss} of {file.outputs}, weights {file.weights}"]
    parts.append(f"python -m fuzz.run --seed {file.seed}")
    return "\n".join(parts)
