"""What a file may make us read, expand and nest: checked before anything of it is computed.

Each bound has a name, and the error says which one was met. Data beside a model is read from regular files in the
model's folder alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.files import check_file
from onnxtrain.ir.bodies import bodies_of
from onnxtrain.ir.graphs import describe

LARGEST_GRAPH = 100_000  # nodes, once functions are written out
DEEPEST = 16  # bodies in bodies, calls of functions counted as what they stand for
MOST_CALLS = 200  # functions that call each other in a row

_Key = tuple[str, str, str]


def check_size(model: ir.Model) -> None:
    """Check how many nodes a model has once its functions are written out, and how deep its bodies are nested.

    Raises:
        GraphError: too many or too deep, or a function calls itself.
    """
    sizes: dict[_Key, tuple[int, int]] = {}
    count, depth = _measure(model.graph, model, sizes, ())
    if model.functions and count > LARGEST_GRAPH:
        what = f"the model has {count:,} nodes once its functions are written out; {LARGEST_GRAPH:,} are the bound"
        raise GraphError(what, cure="export it without functions, or in parts")
    if depth > DEEPEST:
        what = f"the model has {depth} bodies nested in each other; {DEEPEST} are the bound"
        raise GraphError(what, cure="export it with fewer branches within branches")


def _measure(
    nodes: Iterable[ir.Node], model: ir.Model, known: dict[_Key, tuple[int, int]], calls: tuple[_Key, ...]
) -> tuple[int, int]:
    """Number of nodes, and depth of bodies."""
    count, deepest = 0, 0
    for node in nodes:
        total, depth = 1, 0
        key = (node.domain, node.op_type, node.overload)
        if key in model.functions:
            total, depth = _measured(key, node, model, known, calls)
        for body in bodies_of(node):
            inner, below = _measure(body, model, known, calls)
            total, depth = total + inner, max(depth, below + 1)
        count, deepest = count + total, max(deepest, depth)
        if depth > 4 * DEEPEST:
            break  # deep enough for the error, and not for Python's own bound
    return count, deepest


def _measured(
    key: _Key, node: ir.Node, model: ir.Model, known: dict[_Key, tuple[int, int]], calls: tuple[_Key, ...]
) -> tuple[int, int]:
    """The same of a function, which is measured once."""
    if key in calls:
        raise GraphError(f"the function {key[1]} calls itself", node=describe(node), cure="write it as a Loop")
    if len(calls) >= MOST_CALLS:
        what = f"more than {MOST_CALLS} functions call each other in a row"
        raise GraphError(what, node=describe(node), cure="export it without functions")
    if key not in known:
        known[key] = _measure(model.functions[key], model, known, (*calls, key))
    return known[key]


def check_data(model: ir.Model, file: Path | None) -> None:
    """Check all data that lies beside a model, before any of it is read.

    Args:
        model: the model.
        file: where it is from; None where it was given in memory.

    Raises:
        GraphError: there is no file that says where the data is, or they are not in its folder, no regular files or
            shorter than the model says.
    """
    folders = _folders(file) if file is not None else ()
    sizes: dict[str, int] = {}
    for tensor in _external(model):
        name, location = tensor.name, os.fspath(tensor.location)
        if file is None and not os.fspath(tensor.base_dir):
            cure = "pass the path of the model, or load the data first: onnx.load(path) does"
            raise GraphError(f"the data of {name} is in {location}, beside a file that is not known", cure=cure)
        found = folders or _folders(Path(tensor.base_dir) / "model")
        if location not in sizes:
            sizes[location] = _size(name, location, found)
        start, length = tensor.offset or 0, tensor.length
        end = start + (tensor.nbytes if length is None else length)
        if length not in (None, tensor.nbytes):
            what = f"the data of {name} has {length} bytes, not {tensor.nbytes} as its shape says"
            raise GraphError(what, cure="give the model as it was written")
        if start < 0 or end > sizes[location]:
            what = f"the data of {name} is at {start} to {end} of {location}, which has {sizes[location]} bytes"
            raise GraphError(what, cure="give the whole file that belongs to the model")


def check_places(proto: onnx.ModelProto) -> None:
    """Check that what a model says of data beside it are numbers where numbers belong: onnx_ir takes them as such.

    Raises:
        GraphError: an offset or a length is none.
    """
    for tensor in stored_tensors(proto):
        for entry in tensor.external_data:
            if entry.key in ("offset", "length") and not entry.value.isdecimal():
                what = f"the data of {tensor.name} has the {entry.key} {entry.value!r}"
                raise GraphError(what, cure="give the model as it was written")


def stored_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """All tensors of a model: of initializers and attributes, in bodies and functions too."""
    for part in (proto.graph, *proto.functions):
        yield from _stored(part)


def _stored(part: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.TensorProto]:
    """All tensors of a graph or function, and of the bodies in it."""
    yield from part.initializer if isinstance(part, onnx.GraphProto) else ()
    for attribute in (a for node in part.node for a in node.attribute):
        yield from (attribute.t, *attribute.tensors)
        for body in (attribute.g, *attribute.graphs):
            yield from _stored(body)


def _folders(file: Path) -> tuple[Path, ...]:
    """The folder of a model: where its file is, and where it really is if that is a link, as in caches of downloads."""
    return file.absolute().parent, file.resolve().parent


def _size(name: str | None, location: str, folders: tuple[Path, ...]) -> int:
    """The size of a file of data."""
    cure = "keep the data in the folder of the model, in ordinary files"
    parts = Path(location).parts
    outside = not parts or Path(location).is_absolute() or ".." in parts or "\0" in location
    path = folders[0] / location if not outside else folders[0]
    roots = [os.path.realpath(folder) for folder in folders]
    if outside or not any(os.path.realpath(path).startswith(os.path.join(root, "")) for root in roots):
        raise GraphError(f"the data of {name} is in {location!r}, outside of the folder of the model", cure=cure)
    return check_file(path, GraphError, cure)


def _external(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """All tensors of a model whose data lies beside it."""
    functions = (function.graph for function in model.functions.values())
    for graph in (model.graph, *functions):
        yield from (t for t in tensors_of(graph) if isinstance(t, ir.ExternalTensor))


def tensors_of(graph: ir.Graph) -> Iterator[ir.TensorProtocol]:
    """All tensors of a graph and of the bodies in it: of initializers, and of attributes."""
    yield from (v.const_value for v in graph.initializers.values() if v.const_value is not None)
    for node in graph:
        for attribute in node.attributes.values():
            if attribute.is_ref() or attribute.value is None:
                continue
            if attribute.type == ir.AttributeType.TENSOR:
                yield attribute.as_tensor()
            elif attribute.type == ir.AttributeType.TENSORS:
                yield from attribute.as_tensors()
        for body in bodies_of(node):
            yield from tensors_of(body)
