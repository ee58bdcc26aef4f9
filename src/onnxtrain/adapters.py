"""Low-rank adapters: a small trainable part beside frozen weights (LoRA, Hu et al. 2021, arXiv:2106.09685).

A weight W that is stored as (out, in) becomes ``W + scaling · B·A`` with A of shape (rank, in) and B of shape
(out, rank), of which only A and B are trained. The product is never computed: x goes through A and B beside W.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from safetensors import numpy as safetensors

from onnxtrain.errors import ArtifactError, close_to
from onnxtrain.files import write_atomically
from onnxtrain.ir.bodies import remove_unread
from onnxtrain.ir.graphs import describe
from onnxtrain.ir.reading import Source, load
from onnxtrain.number_ranges import check_names, check_number, check_whole

_A, _B, _SCALING = ".lora_A", ".lora_B", ".lora_scaling"
_WEIGHT_OF = {"MatMul": 1, "Gemm": 1, "Gather": 0, "Conv": 1}  # which operand is the weight
_PASSING = frozenset(("Transpose", "Identity", "Cast", "DequantizeLinear"))  # between a weight and its use


@dataclasses.dataclass(frozen=True)
class _Site:
    """A node that multiplies by a weight, or looks rows up in it.

    Args:
        node: the node.
        is_rows: whether the weight is stored as (out, in); else as (in, out).
    """

    node: ir.Node
    is_rows: bool


def lora(
    model: Source, targets: str | Sequence[str], rank: int, alpha: float | None = None, seed: int = 0
) -> onnx.ModelProto:
    """The model with a low-rank adapter beside each chosen weight, ready for
    ``generate_artifacts(model, requires_grad=["*.lora_?"])``.

    Weights are those of MatMul and Gemm (the second operand), of Conv without groups, and tables that Gather reads
    rows of; behind Transpose, Cast or DequantizeLinear as well, so that quantized weights can stay as they are. A
    weight with several uses gets one adapter. A is uniform within 1/√fan-in and B is zero, as in the PEFT library, so
    that the model computes at first what it did before.

    Args:
        model: path of the ``.onnx`` file, or the model; it is not changed.
        targets: names of weights, or patterns: ``"*query.weight"``.
        rank: columns of B.
        alpha: the adapter is scaled by ``alpha / rank``; None is ``rank``.
        seed: of A.

    Returns:
        The model with the initializers ``{weight}.lora_A`` and ``{weight}.lora_B``, and the scalar
        ``{weight}.lora_scaling``.

    Raises:
        ArtifactError: no weight has such a name (close ones are listed), one is used by an operator that no adapter
            fits, or has an adapter already; the rank is not positive.
        GraphError: the model cannot be read.
    """
    patterns = [targets] if isinstance(targets, str) else check_names("targets", targets)
    if not patterns:
        raise ArtifactError("targets is empty: nothing would be adapted", cure="name weights, or give a pattern")
    check_whole("rank", rank, least=1)
    check_whole("seed", seed, least=0)
    if alpha is not None:
        check_number("alpha", alpha, above=0)
    made = _in_memory(model)
    graph, known = made.graph, _adaptable(made.graph)
    random = np.random.default_rng(seed)
    for name in _matching(known, patterns, graph):
        if f"{name}{_A}" in graph.initializers:
            raise ArtifactError(f"{name} has an adapter already", cure="merge it first, or leave it out of targets")
        sites = _sites(graph, name)
        parts = _parts(graph, name, sites[0], rank, rank if alpha is None else alpha, random)
        for site in sites:
            _adapt(site.node, *parts)
    made.ir_version = max(made.ir_version, 4)  # before, every initializer was an input
    return ir.to_proto(made)


def merge_lora(model: Source) -> onnx.ModelProto:
    """The model with its adapters folded into the weights: the same outputs, the nodes and speed of the plain model.

    Args:
        model: what ``lora`` made, or what training made of it (``export_model_for_inferencing``); it is not changed.

    Raises:
        ArtifactError: the model has no adapter, or one beside a quantized weight.
        GraphError: the model cannot be read.
    """
    made = _in_memory(model)
    graph = made.graph
    for name, a, b, scaling in _adapters(graph):
        weight, sites = graph.initializers[name], _sites(graph, name)
        content = _content(weight)
        if weight.dtype is None or not weight.dtype.is_floating_point():
            raise ArtifactError(
                f"{name} is stored as {weight.dtype}, which cannot hold its adapter", cure="keep the adapter beside it"
            )
        change = scaling * (b.reshape(b.shape[0], -1).astype(np.float64) @ a.reshape(a.shape[0], -1))
        change = (change if sites[0].is_rows else change.T).reshape(content.shape)
        merged = (content.astype(np.float64) + change).astype(content.dtype)
        for use in list(graph.initializers[f"{name}{_SCALING}"].uses()):
            (addition,) = use.node.outputs[0].consumers()
            _take_out(graph, addition)
        weight.const_value = ir.tensor(merged, weight.dtype, name=name)
    _forget_inputs(graph)
    remove_unread(graph)
    return ir.to_proto(made)


def adapter_inputs(model: Source) -> onnx.ModelProto:
    """The model with its adapters as inputs whose defaults are the initializers.

    A program then runs one model with any adapter: onnxruntime's ``RunOptions.add_active_adapter`` sets those inputs
    from a file that ``save_adapter`` wrote.

    Raises:
        ArtifactError: the model has no adapter.
    """
    made = _in_memory(model)
    for name, *_ in _adapters(made.graph):
        for part in (_A, _B):
            value = made.graph.initializers[name + part]
            if value not in made.graph.inputs:
                made.graph.inputs.append(value)
    return ir.to_proto(made)


def save_adapter(model: Source, path: Path | str) -> None:
    """Write the adapters alone.

    Args:
        model: what ``lora`` made, or what training made of it.
        path: a file ``*.onnx_adapter`` that onnxruntime loads by ``LoraAdapter``, or a folder that the PEFT library
            loads by ``PeftModel.from_pretrained``: ``adapter_model.safetensors`` and ``adapter_config.json``. Modules
            are called there as the weights here, without ``.weight``.

    Raises:
        ArtifactError: the model has no adapter.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArtifactError(f"path={path!r} is no path", cure="give a file *.onnx_adapter, or a folder")
    graph, path = _in_memory(model).graph, Path(path)
    found = list(_adapters(graph))
    if path.suffix == ".onnx_adapter":
        from onnxtrain.execute.onnxruntime import write_adapter

        write_adapter(path, {f"{n}{suffix}": v for n, a, b, _ in found for suffix, v in ((_A, a), (_B, b))})
        return
    tensors = {}
    for name, a, b, _ in found:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if any(site.node.op_type == "Gather" for site in _sites(graph, name)):
            tensors |= {f"{module}.lora_embedding_A": b.T, f"{module}.lora_embedding_B": a.T}
        else:
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    content = safetensors.save({n: np.ascontiguousarray(t) for n, t in tensors.items()}, {"format": "pt"})
    write_atomically(path / "adapter_model.safetensors", content)
    write_atomically(path / "adapter_config.json", json.dumps(_configuration(found), indent=2).encode())


def _configuration(found: Sequence[tuple[str, np.ndarray, np.ndarray, float]]) -> dict[str, object]:
    """What PEFT's ``LoraConfig`` says: rank and alpha, of each module where they differ."""
    ranks = {name.removesuffix(".weight"): a.shape[0] for name, a, _, _ in found}
    alphas = {name.removesuffix(".weight"): scaling * a.shape[0] for name, a, _, scaling in found}
    first = next(iter(ranks))
    return {
        "peft_type": "LORA",
        "r": ranks[first],
        "lora_alpha": alphas[first],
        "target_modules": list(ranks),
        "rank_pattern": {n: r for n, r in ranks.items() if r != ranks[first]},
        "alpha_pattern": {n: a for n, a in alphas.items() if a != alphas[first]},
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": None,
    }


def _in_memory(source: Source) -> ir.Model:
    """The model with all its data: what becomes of it may be stored elsewhere."""
    return load(source)


def _content(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


def _adaptable(graph: ir.Graph) -> list[str]:
    """Names of the initializers that are weights of a node which an adapter fits."""
    found: dict[str, None] = {}
    for node in graph:
        index = _WEIGHT_OF.get(node.op_type) if node.domain == "" else None
        value = node.inputs[index] if index is not None and index < len(node.inputs) else None
        while value is not None and (before := value.producer()) is not None and _passes(before):
            value = before.inputs[0]
        shape = None if value is None or value.const_value is None else value.const_value.shape
        if value is not None and shape is not None and len(shape) == (4 if node.op_type == "Conv" else 2):
            found[str(value.name)] = None
    return [n for n in found if n in graph.initializers]


def _passes(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in _PASSING


def _matching(known: Sequence[str], targets: Sequence[str], graph: ir.Graph) -> list[str]:
    """The weights of these names, in the order of the model."""
    for pattern in targets:
        if not fnmatch.filter(known, pattern) and pattern not in known:
            why = "no adapter fits" if pattern in graph.initializers else "no weight is called"
            raise ArtifactError(
                f"{why} {pattern}{close_to(pattern, known)}", cure="name weights of MatMul, Gemm, Gather or Conv"
            )
    return [n for n in known if any(n == p or fnmatch.fnmatchcase(n, p) for p in targets)]


def _sites(graph: ir.Graph, name: str) -> list[_Site]:
    """All uses of a weight.

    Raises:
        ArtifactError: an adapter does not fit one of them, or two of them read the weight in different ways.
    """
    found = list(_uses(graph, graph.initializers[name], False))
    if len({site.is_rows for site in found}) > 1:
        raise ArtifactError(
            f"{name} is used both as it is and transposed, by {' and '.join(describe(s.node) for s in found)}",
            cure="leave it out of targets",
        )
    return found


def _uses(graph: ir.Graph, value: ir.Value, transposed: bool) -> Iterator[_Site]:
    for use in value.uses():
        node = use.node
        if _passes(node) and use.idx == 0:
            yield from _uses(graph, node.outputs[0], transposed != (node.op_type == "Transpose"))
            continue
        fits = node.domain == "" and _WEIGHT_OF.get(node.op_type) == use.idx
        if node.op_type in ("Conv", "Gather"):
            other = node.attributes.get("group" if node.op_type == "Conv" else "axis")
            fits = fits and not transposed and (other is None or other.as_int() == (node.op_type == "Conv"))
        if not fits or node.graph is not graph:
            raise ArtifactError(
                f"no adapter fits {value.name} in {describe(node)}", node=describe(node), cure="leave it out of targets"
            )
        flipped = node.op_type == "Gemm" and _integer(node, "transB")
        yield _Site(node, node.op_type in ("Conv", "Gather") or transposed != bool(flipped))


def _integer(node: ir.Node, name: str) -> int:
    found = node.attributes.get(name)
    return 0 if found is None else found.as_int()


def _parts(
    graph: ir.Graph, name: str, site: _Site, rank: int, alpha: float, random: np.random.Generator
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The initializers of one adapter."""
    weight = graph.initializers[name]
    shape = _content(weight).shape
    rows, columns = (shape[0], shape[1:]) if site.is_rows else (shape[1], shape[:1])
    bound = float(np.prod(columns)) ** -0.5  # Kaiming's with a = √5
    dtype = _floating_type(weight).numpy()
    content = {
        _A: random.uniform(-bound, bound, (rank, *columns)).astype(dtype),
        _B: np.zeros((rows, rank, *(1 for _ in columns[1:])), dtype),
        _SCALING: np.array(alpha / rank, dtype),
    }
    made = []
    for suffix, array in content.items():
        made.append(ir.val(f"{name}{suffix}", const_value=ir.tensor(array, name=f"{name}{suffix}")))
        graph.register_initializer(made[-1])
    return made[0], made[1], made[2]


def _floating_type(value: ir.Value) -> ir.DataType:
    """The element type in which a weight is multiplied: after casts, or of the scale of a quantized one."""
    dtype = value.dtype
    while node := next((u.node for u in value.uses() if u.idx == 0 and _passes(u.node)), None):
        if node.op_type == "Cast":
            dtype = ir.DataType(node.attributes["to"].as_int())
        elif node.op_type == "DequantizeLinear" and node.inputs[1] is not None:
            dtype = node.inputs[1].dtype
        value = node.outputs[0]
    assert dtype is not None
    return dtype


def _adapt(node: ir.Node, a: ir.Value, b: ir.Value, scaling: ir.Value) -> None:
    """Add the adapter's output to that of a node, whose name the sum then has."""
    assert isinstance(node.graph, ir.Graph) and node.inputs[0] is not None
    y, new = node.outputs[0], _Nodes()
    x = node.inputs[0]
    if node.op_type == "Conv":
        low = new.add("Conv", [x, a], {n: v for n, v in node.attributes.items() if n != "group"})
        change = new.add("Conv", [low, b])
    elif node.op_type == "Gather":
        change = new.add("MatMul", [new.add("Gather", [b, node.inputs[1]]), a])
    else:
        x = new.add("Transpose", [x], {"perm": [1, 0]}) if _integer(node, "transA") else x
        low = new.add("MatMul", [x, new.add("Transpose", [a], {"perm": [1, 0]})])
        change = new.add("MatMul", [low, new.add("Transpose", [b], {"perm": [1, 0]})])
    factor = node.attributes.get("alpha") if node.op_type == "Gemm" else None
    if factor is not None and factor.as_float() != 1.0:
        one = ir.tensor(np.array(factor.as_float(), _content(scaling).dtype))
        change = new.add("Mul", [change, new.add("Constant", [], {"value": one})])
    total = new.add("Add", [y, new.add("Mul", [change, scaling])])
    name, y_type, y_shape = y.name, y.type, y.shape
    y.replace_all_uses_with(total, replace_graph_outputs=True)
    new.nodes[-1].replace_input_with(0, y)
    node.graph.insert_after(node, new.nodes)
    y.name = f"{name}.base"
    total.name, total.type, total.shape = name, y_type, y_shape


class _Nodes:
    """New nodes, in order; types are inferred by whoever reads the model."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []

    def add(
        self, op_type: str, inputs: Sequence[ir.Value | None], attributes: dict[str, object] | None = None
    ) -> ir.Value:
        """The output of a new node."""
        given = ir.convenience.convert_attributes(attributes or {})  # type: ignore[arg-type]
        self.nodes.append(ir.Node("", op_type, inputs, attributes=given, num_outputs=1))
        return self.nodes[-1].outputs[0]


def _adapters(graph: ir.Graph) -> list[tuple[str, np.ndarray, np.ndarray, float]]:
    """The weights that have an adapter: name, A, B, scaling.

    Raises:
        ArtifactError: there is none.
    """
    names = [n.removesuffix(_SCALING) for n in graph.initializers if n.endswith(_SCALING)]
    parts = [(n, *(graph.initializers.get(n + suffix) for suffix in ("", _A, _B, _SCALING))) for n in names]
    found = [(n, _content(a), _content(b), float(_content(s))) for n, w, a, b, s in parts if w and a and b and s]
    if not found:
        raise ArtifactError("the model has no adapter", cure="give a model that lora() made")
    return found


def _take_out(graph: ir.Graph, addition: ir.Node) -> None:
    """Undo ``_adapt``: what reads the sum reads the node's own output, which has its name again."""
    base, total = addition.inputs[0], addition.outputs[0]
    assert base is not None
    name = total.name
    total.replace_all_uses_with(base, replace_graph_outputs=True)
    graph.remove(addition, safe=True)
    total.name = None
    base.name = name


def _forget_inputs(graph: ir.Graph) -> None:
    """Inputs that are parts of adapters, as ``adapter_inputs`` makes them, are inputs no more."""
    for value in [v for v in graph.inputs if str(v.name).endswith((_A, _B)) and v.name in graph.initializers]:
        graph.inputs.remove(value)
