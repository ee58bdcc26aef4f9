"""What a file has besides its nodes: names, dimensions, types, forms of weights, comments."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fuzz.wraps import rename_graph

NAMES = (
    "loss", "step", "learning_rate", "lazy_reset_grad", "val_0", "val_1", "val_3", "const_0", "const_1", "x_grad", "w.out",
    "a b", " leading", "trailing ", "a/b", "/layer/MatMul_output_0", "onnx::MatMul_12", "input.1", "x:0", "1", "0", "-1",
    "*", "w*", "[a]", "[!a]", "w?", '"quoted"', "it's", "back\\slash", "tab\there", "new\nline", "ünï", "权重", "🙂", "None",
    "lambda", "E", "S", "I", "N", "x.grad", "grad", "output", "input", "dy", "seed", "gradient", "model", "optimizer", "%0",
    "{}", "{name}", "%s", "$x", "#", ";", "a,b", "a=b", "(x)", "<x>", "|", "..", ".", "__class__", "const_value", "x" * 300,
    "loss_grad", "ones", "zeros", "update", "Loss", "STEP", "scores", "val_3_1", "val_3_2", "v", "w", "b", "x", "y",
)  # fmt: skip
DERIVED = (
    "{}_grad", "{}.out", "{}_grad.accumulation.buffer", "{}_grad.accumulation.out", "{}.exp_avg", "{}_1", "{}_dim0",
    "{}_axes", "{}.exp_avg_sq", "grad_{}", "{}.step", "{}__1", "{}_copy",
)  # fmt: skip
STYLES = {
    "plain": "{}", "dynamo": "val_{n}", "torchscript": "/layers.{n}/Op_output_0", "numbers": "{n}",
    "tf": "StatefulPartitionedCall/model/dense_{n}/MatMul:0", "keras": "layer_{n}/kernel:0",
}  # fmt: skip
DIMENSIONS = (
    "N", "batch", "batch size", "output-0_dim0", "N/2", "2*N", "None", "?", "lambda", "E", "S", "I", "seq len", "s0", "s1 + 1",
    "Max(1, N)", "unk__12", "-1", "0", "α", "x.shape[0]", "input_ids_dim1", "dim_param", "N+1", "floor(N/2)", "(", "1batch",
    "if", "N N", "sqrt", "pi", "Symbol", "zoo", "oo", "nan", "True",
)  # fmt: skip


def dress(file: Any, features: Collection[str]) -> None:
    """Dress a file, in place; each kind of dress has random numbers of its own."""
    if "forms" in features:
        _forms(file, np.random.default_rng([file.seed, 6]))
    if "names" in features:
        _names(file, np.random.default_rng([file.seed, 7]))
    if "dimensions" in features:
        _dimensions(file, np.random.default_rng([file.seed, 8]))
        _infos(file, np.random.default_rng([file.seed, 9]))
    file.external = "external" in features and np.random.default_rng([file.seed, 10]).random() < 0.25


def _forms(file: Any, rng: np.random.Generator) -> None:
    """Raw and typed data, initializers that are inputs as well, old versions of the format, comments."""
    graph, model = file.model.graph, file.model
    for held in graph.initializer:
        if rng.random() < 0.3 and held.data_type in (TensorProto.FLOAT, TensorProto.INT64):
            array = numpy_helper.to_array(held)
            held.CopyFrom(helper.make_tensor(held.name, held.data_type, array.shape, array.reshape(-1).tolist()))
        if rng.random() < 0.1:
            held.doc_string = "a tensor"
    also = rng.random()
    if also < 0.25:
        chosen = [i for i in graph.initializer if also < 0.1 or rng.random() < 0.5]
        infos = [helper.make_tensor_value_info(i.name, i.data_type, i.dims) for i in chosen]
        places = [int(rng.integers(0, len(graph.input) + 1)) for _ in infos]
        for place, info in zip(places, infos, strict=True):
            graph.input.insert(place, info)
        model.ir_version = 3 if also < 0.1 and not model.functions else int(rng.choice([7, 8, 9, 10]))
    else:
        model.ir_version = int(rng.choice([7, 8, 9, 10, 10, 10]))
    if model.functions:
        model.ir_version = max(model.ir_version, 10 if any(f.attribute_proto for f in model.functions) else 8)
    if rng.random() < 0.5:
        model.producer_name, model.doc_string = "a fuzzer", "doc\nstring"
        model.metadata_props.add(key="onnxtrain.facts" if rng.random() < 0.1 else "key", value="{}")
        graph.doc_string = "Ünï"
    graph.name = str(rng.choice(["main", "main_graph", "g/1", " ", "training"]))
    for node in graph.node:
        if rng.random() < 0.2:
            node.doc_string = "File x.py, line 3"
            node.metadata_props.add(key="namespace", value=": m.Model/layer: torch.nn.Linear")
    if rng.random() < 0.3:
        model.opset_import.add(domain=str(rng.choice(["com.microsoft", "ai.onnx.ml", "pkg.onnxscript"])), version=1)


def _names(file: Any, rng: np.random.Generator) -> None:
    graph = file.model.graph
    style, share = STYLES[str(rng.choice(list(STYLES)))], float(rng.choice([0.0, 0.2, 0.5]))
    names = _mapping(_all_names(graph), rng, style, share)
    rename_graph(graph, names)
    file.feeds = {names[n]: v for n, v in file.feeds.items()}
    file.weights, file.outputs = [names[n] for n in file.weights], [names[n] for n in file.outputs]
    for function in file.model.functions:
        own = dict.fromkeys([*function.input, *function.output, *(o for n in function.node for o in _inner_names(n))])
        inner = _mapping(list(own), rng, style, share)
        function.input[:] = [inner[n] for n in function.input]
        function.output[:] = [inner[n] for n in function.output]
        rename_graph_nodes(function.node, inner)
    kind = ("keep", "", "/layer/Op{}", "val_{}", "{}")[int(rng.integers(5))]
    for place, node in enumerate(graph.node):
        node.name = node.name if kind == "keep" else kind.replace("{}", str(place))


def rename_graph_nodes(nodes: Any, names: dict[str, str]) -> None:
    """Give values other names in nodes, in place."""
    holder = onnx.GraphProto()
    holder.node.extend(nodes)
    rename_graph(holder, names)
    del nodes[:]
    nodes.extend(holder.node)


def _all_names(graph: onnx.GraphProto) -> list[str]:
    held = [v.name for v in (*graph.input, *graph.initializer)]
    return list(dict.fromkeys([*held, *(o for n in graph.node for o in _inner_names(n))]))


def _inner_names(node: onnx.NodeProto) -> list[str]:
    bodies = [a.g for a in node.attribute if a.HasField("g")]
    return [o for o in node.output if o] + [n for b in bodies for n in _all_names(b)]


def _mapping(old: list[str], rng: np.random.Generator, style: str, share: float) -> dict[str, str]:
    """Another name for each: of a style, and some odd ones."""
    made: dict[str, str] = {}
    taken: set[str] = set()
    for place, name in enumerate(old):
        new = style.format(name, n=place)
        if rng.random() < share:
            new = str(NAMES[int(rng.integers(len(NAMES)))])
            if taken and rng.random() < 0.3:
                new = DERIVED[int(rng.integers(len(DERIVED)))].replace(
                    "{}", sorted(taken)[int(rng.integers(len(taken)))]
                )
        if new in taken or len(new) > 400:
            new = f"{style.format(name, n=place)}_{place}"
        taken.add(new)
        made[name] = new
    return made


def _dimensions(file: Any, rng: np.random.Generator) -> None:
    """Sizes of inputs and outputs: numbers, names or nothing; a name always means the same size."""
    graph = file.model.graph
    held = {i.name for i in graph.initializer}
    sizes: dict[str, int] = {}
    share = rng.dirichlet([0.5, 1, 0.5])
    for value in graph.input:
        if value.name in held:
            continue
        for axis in value.type.tensor_type.shape.dim:
            _dimension(axis, rng, share, sizes)
    values = file.model.graph.output
    for value in values:
        if (
            rng.random() < 0.5
            and value.name in file.outputs
            and file.target is not None
            and file.loss != "cross_entropy"
        ):
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, kind, file.target.shape))
            for axis in value.type.tensor_type.shape.dim:
                _dimension(axis, rng, share, sizes)


def _dimension(axis: Any, rng: np.random.Generator, share: np.ndarray, sizes: dict[str, int]) -> None:
    size, kind = axis.dim_value, rng.choice(3, p=share)
    if kind == 1:
        name = str(DIMENSIONS[int(rng.integers(len(DIMENSIONS)))])
        if sizes.setdefault(name, size) == size:
            axis.dim_param = name
    elif kind == 2:
        axis.Clear()


def _infos(file: Any, rng: np.random.Generator) -> None:
    """Types of values in between: none, some or all."""
    share = float(rng.choice([0.0, 0.4, 1.0]))
    if not share:
        return
    try:
        inferred = onnx.shape_inference.infer_shapes(file.model)
    except Exception:  # of many kinds; then there are none
        return
    kept = [v for v in inferred.graph.value_info if rng.random() < share]
    file.model.graph.value_info.extend(kept)
