"""Hostile .onnx files: small ones that would make us read elsewhere, allocate gigabytes or compute for minutes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from misuse.room import Room, Row
from onnxtrain.adapters import lora
from onnxtrain.artifacts import OptimType, generate_artifacts

Node = helper.make_node
OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]
W = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")


def value(name: str, *dims: Any, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def model(
    nodes: Sequence[onnx.NodeProto] = (),
    initializers: Sequence[onnx.TensorProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    **constants: Any,
) -> onnx.ModelProto:
    """``mean(x @ w + k)``, where nodes make k, or where there is none."""
    made = [Node("Constant", [], [n], value=numpy_helper.from_array(np.asarray(c), n)) for n, c in constants.items()]
    last = [Node("Add", ["y", "k"], ["z"])] if any("k" in n.output for n in nodes) else [Node("Relu", ["y"], ["z"])]
    nodes = [Node("MatMul", ["x", "w"], ["y"]), *made, *nodes, *last, Node("ReduceMean", ["z"], ["loss"], keepdims=0)]
    graph = helper.make_graph(nodes, "g", [value("x", "n", 4)], [value("loss")], [W, *initializers])
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=10, functions=functions)


def tensor(dims: Sequence[int], kind: int = TensorProto.FLOAT, **content: Any) -> onnx.TensorProto:
    """A tensor v whose shape says something else than its content."""
    made = TensorProto(name="v", data_type=kind, **content)
    made.dims[:] = dims
    return made


def holds(initializer: onnx.TensorProto) -> onnx.ModelProto:
    return model([Node("ReduceMean", ["v"], ["k"], keepdims=0)], [initializer])


def function(name: str, *calls: str) -> onnx.FunctionProto:
    """A function that calls others in a row, or is a Relu."""
    names = ["a", *(f"c{i}" for i in range(len(calls) - 1)), "b"]
    nodes = [Node(call, [names[i]], [names[i + 1]], domain="f") for i, call in enumerate(calls)]
    return helper.make_function("f", name, ["a"], ["b"], nodes or [Node("Relu", ["a"], ["b"])], OPSETS)


def calls(*functions: onnx.FunctionProto) -> onnx.ModelProto:
    return model([Node("F0", ["y"], ["k"], domain="f")], functions=functions)


def chain(count: int, width: int) -> onnx.ModelProto:
    """Functions, each of which calls the next some times."""
    return calls(*(function(f"F{i}", *[f"F{i + 1}"] * width) for i in range(count)), function(f"F{count}"))


def branches(depth: int) -> onnx.ModelProto:
    """Branches in branches."""
    body = helper.make_graph([Node("Identity", ["y"], ["o0"])], "b", [], [helper.make_tensor_value_info("o0", 1, None)])
    for level in range(1, depth + 1):
        other = helper.make_graph(
            [Node("Relu", ["y"], [f"e{level}"])], "e", [], [helper.make_tensor_value_info(f"e{level}", 1, None)]
        )
        node = Node("If", ["c"], [f"o{level}"], then_branch=body, else_branch=other)
        body = helper.make_graph([node], "b", [], [helper.make_tensor_value_info(f"o{level}", 1, None)])
    node = body.node[0]
    node.output[0] = "k"
    return model([node], c=np.array(True))


def nested_functions() -> onnx.ModelProto:
    """Functions whose branches call the next: short, and deep once they are written out."""
    made = [function("F30")]
    for i in range(29, -1, -1):
        body = helper.make_graph(
            [Node(f"F{i + 1}", ["a"], ["t"], domain="f")], "t", [], [helper.make_tensor_value_info("t", 1, None)]
        )
        other = helper.make_graph([Node("Relu", ["a"], ["e"])], "e", [], [helper.make_tensor_value_info("e", 1, None)])
        nodes = [Node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(True)))]
        nodes.append(Node("If", ["c"], ["b"], then_branch=body, else_branch=other))
        made.append(helper.make_function("f", f"F{i}", ["a"], ["b"], nodes, OPSETS))
    return calls(*made)


def beside(
    location: str, offset: int | None = None, length: int | None = None, dims: Sequence[int] = (4,)
) -> onnx.ModelProto:
    """A model whose tensor says that its data lies in another file."""
    made = tensor(dims, data_location=TensorProto.EXTERNAL)
    entries = {"location": location, "offset": offset, "length": length}
    for key, entry in entries.items():
        if entry is not None:
            made.external_data.add(key=key, value=str(entry))
    return holds(made)


def generate(room: Room, source: Any) -> None:
    generate_artifacts(source, optimizer=OptimType.SGD, artifact_directory=room.folder / "out")


def given(make: Callable[[], onnx.ModelProto]) -> Callable[[Room], None]:
    """Artifacts of a model in memory."""
    return lambda room: generate(room, make())


def stored(
    make: Callable[[], onnx.ModelProto], prepare: Callable[[Path], None] | None = None
) -> Callable[[Room], None]:
    """Artifacts of a file in a folder of its own, beside which something is."""

    def use(room: Room) -> None:
        folder = room.folder / "model"
        folder.mkdir()
        (room.folder / "secret").write_bytes(b"\0" * 64)
        if prepare is not None:
            prepare(folder)
        generate(room, room.write("model/model.onnx", make().SerializeToString()))

    return use


def link(target: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "data").symlink_to(target)


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "data")


def file(size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / "data").write_bytes(b"\0" * size) and None


def adapter_of_data(room: Room) -> None:
    lora(beside("/etc/passwd"), "w", 2)


def constant_of_function() -> onnx.ModelProto:
    """Data elsewhere that a constant of a function names."""
    elsewhere = tensor([4], data_location=TensorProto.EXTERNAL)
    elsewhere.external_data.add(key="location", value="../secret")
    nodes = [Node("Constant", [], ["c"], value=elsewhere), Node("Add", ["a", "c"], ["b"])]
    return calls(helper.make_function("f", "F0", ["a"], ["b"], nodes, OPSETS))


def strange(op_type: str, domain: str = "", inputs: Sequence[str] = ("y",), **given: Any) -> onnx.ModelProto:
    """A node that is no valid call, and a layer behind it."""
    nodes = [Node(op_type, inputs, ["s"], "strange", domain=domain, **given), Node("MatMul", ["s", "w"], ["k"])]
    return model(nodes)


def named_twice() -> onnx.ModelProto:
    return model([Node("Relu", ["y"], ["y"])])


def in_a_circle() -> onnx.ModelProto:
    return model([Node("Add", ["y", "b"], ["a"]), Node("Add", ["y", "a"], ["b"]), Node("Relu", ["b"], ["k"])])


def newer(opset: int) -> onnx.ModelProto:
    made = model()
    made.opset_import[0].version = opset
    return made


def sparse() -> onnx.ModelProto:
    made = model([Node("ReduceMean", ["v"], ["k"], keepdims=0)])
    one, at = numpy_helper.from_array(np.ones(1, np.float32), "v"), numpy_helper.from_array(np.zeros(1, np.int64), "at")
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(one, at, [2**40]))
    return made


def maps() -> onnx.ModelProto:
    made = model()
    kind = helper.make_sequence_type_proto(helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, [])))
    made.graph.output.append(helper.make_value_info("maps", kind))
    return made


def no_room(room: Room) -> None:
    """A shape of 2⁴⁴ bytes, and not one of them."""
    generate(room, holds(tensor([2**42])))


TABLE = [
    Row("2³⁰ calls of 30 functions", given(lambda: chain(30, 2)), "1,073,741,82. nodes .*100,000 are the bound"),
    Row("10³⁰ calls of 30 functions", given(lambda: chain(30, 10)), "100,000 are the bound"),
    Row("function that calls itself", given(lambda: calls(function("F0", "F0"))), "the function F0 calls itself"),
    Row(
        "functions that call each other",
        given(lambda: calls(function("F0", "F1"), function("F1", "F0"))),
        "calls itself",
    ),
    Row("1000 functions in a row", given(lambda: chain(1000, 1)), "more than 200 functions call each other"),
    Row("the same from a file", stored(lambda: chain(30, 2)), "model.onnx: .*100,000 are the bound"),
    Row("20 branches in branches", given(lambda: branches(20)), r"2\d bodies nested .*16 are the bound"),
    Row("functions in branches of functions", given(nested_functions), "30 bodies nested"),
    Row(
        "data of a model in memory",
        given(lambda: beside("data")),
        "beside a file that is not known(.|\n)*pass the path",
    ),
    Row("absolute data of a model in memory", given(lambda: beside("/etc/passwd")), "beside a file that is not known"),
    Row("data of a model in memory, for adapters", adapter_of_data, "beside a file that is not known"),
    Row("data at an absolute place", stored(lambda: beside("/etc/passwd")), "outside of the folder"),
    Row("data above the folder", stored(lambda: beside("../secret")), "outside of the folder"),
    Row("data above and below", stored(lambda: beside("../model/../secret")), "outside of the folder"),
    Row(
        "data behind a link that leads out", stored(lambda: beside("data"), link("../secret")), "outside of the folder"
    ),
    Row("data behind a link to a device", stored(lambda: beside("data"), link("/dev/zero")), "outside of the folder"),
    Row("data that is a pipe", stored(lambda: beside("data"), pipe), "is a pipe, no file"),
    Row("data that is the folder", stored(lambda: beside(".")), "outside of the folder|is a folder"),
    Row("data of no name", stored(lambda: beside("")), "outside of the folder|cannot be read"),
    Row("data that is not there", stored(lambda: beside("none")), "none cannot be read: No such file"),
    Row("data that is short", stored(lambda: beside("data"), file(8)), "0 to 16 of data, which has 8 bytes"),
    Row("data behind the end", stored(lambda: beside("data", 2**40, 16), file(64)), "of data, which has 64 bytes"),
    Row("data before the start", stored(lambda: beside("data", -16, 16), file(64)), "data of v has the offset '-16'"),
    Row("data of a length below 0", stored(lambda: beside("data", 0, -1), file(64)), "data of v has the length '-1'"),
    Row(
        "data of terabytes in a short file",
        stored(lambda: beside("data", 0, None, [2**40]), file(64)),
        "which has 64 bytes",
    ),
    Row("data of another length", stored(lambda: beside("data", 0, 64, [4]), file(64)), "tensor v|data of v"),
    Row("data of a function's constant", stored(constant_of_function), "outside of the folder"),
    Row("shape below 0", given(lambda: holds(tensor([-1]))), r"tensor v has the shape \[-1\]"),
    Row("shape of 2⁸⁰", given(lambda: holds(tensor([2**40, 2**40], raw_data=b"1234"))), "tensor v of the shape"),
    Row("shape of 2⁴² without data", no_room, "has no data, or more than"),
    Row("less data than the shape", given(lambda: holds(tensor([4], float_data=[1, 2]))), "tensor v cannot be read"),
    Row("more data than the shape", given(lambda: holds(tensor([1], raw_data=b"12345678"))), "tensor v cannot be read"),
    Row(
        "texts fewer than the shape",
        given(lambda: holds(tensor([3], 8, string_data=[b"\xff"]))),
        "tensor v cannot be read",
    ),
    Row("texts where numbers are", given(lambda: holds(tensor([1], 8, string_data=[b"\xff"]))), "v|string"),
    Row("type that is none", given(lambda: holds(tensor([1], 99, raw_data=b"1234"))), "99"),
    Row("sparse initializer", given(sparse), "v is sparse"),
    Row("maps", given(maps), "maps is a map(.|\n)*zipmap"),
    Row("operator that is none", given(lambda: strange("Foo")), "no operator Foo in opset 20 of ONNX(.|\n)*strange"),
    Row(
        "operator of an unknown domain",
        given(lambda: strange("Foo", "acme")),
        "Foo of the domain 'acme' is no operator(.|\n)*acme::Foo.strange(.|\n)*value_info",
    ),
    Row(
        "unknown operator further back",
        given(
            lambda: model(
                [
                    Node("Foo", ["y"], ["s"], "strange", domain="f"),
                    Node("Relu", ["s"], ["t"]),
                    Node("MatMul", ["t", "w"], ["k"]),
                ]
            )
        ),
        "Foo of the domain 'f' is no operator",
    ),
    Row("operator of ours that is none", given(lambda: strange("Foo", "onnxtrain")), "Foo"),
    Row("operator without its inputs", given(lambda: strange("Gemm", inputs=["y"])), "1 inputs; 2 to 3 are allowed"),
    Row("attribute that is none", given(lambda: strange("Relu", slope=1.0)), "no attribute slope"),
    Row("attribute of another type", given(lambda: strange("Softmax", axis="last")), "axis is no INT"),
    Row("attribute that is missing", given(lambda: strange("Cast")), "attribute to is missing"),
    Row("input that is none", given(lambda: strange("Relu", inputs=["nowhere"])), "nowhere"),
    Row("two values of one name", given(named_twice), "y"),
    Row("nodes in a circle", given(in_a_circle), "not defined before its use"),
    Row(
        "sizes that contradict each other",
        given(lambda: model([Node("MatMul", ["y", "v"], ["k"])], v=np.ones((5, 4), np.float32))),
        "MatMul",
    ),
    Row(
        "index beyond a shape",
        given(
            lambda: model(
                [Node("Shape", ["y"], ["s"]), Node("Gather", ["s", "i"], ["g"]), Node("Cast", ["g"], ["k"], to=1)],
                i=np.int64(7),
            )
        ),
        "Gather",
    ),
    Row("opset of the future", given(lambda: newer(99)), "99"),
    Row("opset of 0", given(lambda: newer(0)), "opset|domain"),
    Row("opset below 0", given(lambda: newer(-5)), "opset"),
    Row("file that is empty", stored(lambda: onnx.ModelProto()), "model.onnx"),
    Row("file that is text", lambda r: generate(r, r.write("m.onnx", b"import os")), "m.onnx: there is no model in it"),
    Row("file that is cut", lambda r: generate(r, r.write("m.onnx", model().SerializeToString()[:150])), "m.onnx"),
    Row("file of zeros", lambda r: generate(r, r.write("m.onnx", b"\0" * 4096)), "m.onnx"),
    Row("file of lists in lists", lambda r: generate(r, r.write("m.json", b"[" * 100_000)), "m.json"),
    Row(
        "link to itself",
        lambda r: ((r.folder / "m.onnx").symlink_to("m.onnx"), r.note(), generate(r, r.folder / "m.onnx")),
        "m.onnx",
    ),
]
