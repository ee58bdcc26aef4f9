"""ExportedProgram → ForwardGraph: ONNX nodes, the user's names, weights as inputs, source lines, symbolic sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir
import sympy
import torch

from onnxtrain.capture import aten, exact_constants, hidden_sizes
from onnxtrain.capture.flat_module import PREFIX
from onnxtrain.capture.lowering.records import memory_of
from onnxtrain.capture.lowering.strides import lies_in_order
from onnxtrain.capture.onnx_graph import TRACED
from onnxtrain.capture.python_op import recorded
from onnxtrain.capture.translator import Translator
from onnxtrain.errors import ShapeError
from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import close_bodies
from onnxtrain.ir.graphs import DRAWN, ForwardGraph, Signature, origin_of
from onnxtrain.ir.python_calls import CALL, HANDLE, is_call

_OF_CONTENT = re.compile(r"\bu\d+\b")  # how torch names a size that content decides on

Refusals: TypeAlias = Callable[[ForwardGraph], Iterable[ir.Node]]


def to_graph(
    program: torch.export.ExportedProgram,
    input_names: Sequence[str],
    buffers: Mapping[str, bool],
    opset: int,
    refusals: Refusals | None = None,
    borrowed: Mapping[str, bool] | None = None,
) -> ForwardGraph:
    """Translate a captured program.

    Args:
        program: what ``capture.export`` made of a ``FlatModule``.
        input_names: one name for each user input.
        buffers: names of the module's buffers, and of parameters that it changes, whose content the program returns
            after the user's outputs; with whether they are trained.
        opset: ONNX opset of the result.
        refusals: the nodes of a graph that a later stage cannot take; the operators they come from stay whole.
        borrowed: the constants that are others' tensors, with whether they are trained: inputs as weights are.

    Raises:
        CaptureError: the program cannot be translated.
    """
    translator = Translator(program, opset)
    while True:
        graph = _graph(translator.translate(), program, translator.lowered, input_names, buffers, borrowed or {})
        contradictions = _infer(graph.model.graph)
        refused = list(contradictions) or (list(refusals(graph)) if refusals is not None else [])
        if not sum(translator.keep(node) for node in refused):
            break
    if contradictions:
        raise next(iter(contradictions.values()))
    exact_constants.restore(graph.model.graph)
    for node in graph.model.graph:
        node.meta.pop(TRACED, None)  # the traced node, which the translator needs
    return graph


def _graph(
    model: ir.Model,
    ep: torch.export.ExportedProgram,
    lowered: torch.fx.GraphModule,
    input_names: Sequence[str],
    buffers: Mapping[str, bool],
    borrowed: Mapping[str, bool],
) -> ForwardGraph:
    """A translated program with the user's names, weights as inputs, and the buffers that it changes as outputs."""
    aten.release(model.graph)
    calls = {node: recorded(node.attributes.pop(HANDLE).as_string()).call for node in model.graph if is_call(node)}
    _name_inputs(model.graph, input_names)
    _weights_to_inputs(model.graph, ep, buffers, borrowed)
    updated = _buffer_outputs(model.graph, ep, lowered, tuple(buffers))
    _distinct_outputs(model.graph)
    _rename_symbols(model.graph)
    for node in model.graph.all_nodes():
        _keep_source(node)
    close_bodies(model.graph)
    for node, call in calls.items():
        node.meta[CALL] = call
    names = [str(v.name) for v in model.graph.outputs]
    count = len(names) - len(updated)
    updates = dict(zip(updated, names[count:], strict=True))
    owned = [str(v.name) for v in model.graph.inputs[len(input_names) :]]  # the trained ones first
    untrained = {n.removeprefix(PREFIX) for n, is_trained in {**buffers, **borrowed}.items() if not is_trained}
    parameters, kept = (tuple(n for n in owned if (n in untrained) == is_kept) for is_kept in (False, True))
    views = _views(ep, input_names, names[:count], borrowed)
    outputs, in_order, is_turned = tuple(names[:count]), _in_order(ep, names[:count]), _is_out_of_order(ep)
    roles = tuple(input_names), parameters, kept, outputs
    signature = Signature(*roles, updates, views=views, in_order=in_order, is_out_of_order=is_turned)
    assert signature.inputs == tuple(str(v.name) for v in model.graph.inputs), "inputs come in the graph's order"
    return ForwardGraph(ir.Model(model.graph, ir_version=10), signature)


def _views(
    program: torch.export.ExportedProgram, input_names: Sequence[str], outputs: Sequence[str], borrowed: Collection[str]
) -> dict[str, str]:
    """Of each output that lies in the memory of an input, or of an output before it, the name of that.

    Of one that is expanded, and lies in no other's memory, its own name. A constant is made anew in each call, but for
    those that are others' tensors.
    """
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names |= {n: c for n, c in signature.inputs_to_lifted_tensor_constants.items() if c in borrowed}
    names |= dict(zip(signature.user_inputs, input_names, strict=True))
    *inputs, returned = (n for n in program.graph.nodes if n.op in ("placeholder", "output"))
    lies = {memory_of(n.meta["val"]): names[n.name] for n in inputs if n.name in names}
    found = dict[str, str]()
    for name, node in zip(outputs, returned.args[0], strict=False):
        memory = memory_of(node.meta["val"])
        if memory is not None and ((first := lies.setdefault(memory, name)) != name or _is_expanded(node.meta["val"])):
            found[name] = first
    return found


def _in_order(program: torch.export.ExportedProgram, outputs: Sequence[str]) -> tuple[str, ...]:
    """The outputs whose axes lie in memory in their order."""
    returned = next(n for n in program.graph.nodes if n.op == "output").args[0]
    return tuple(name for name, node in zip(outputs, returned, strict=False) if _lies_in_order(node))


def _is_out_of_order(program: torch.export.ExportedProgram) -> bool:
    """Whether the axes of a user's input lie in memory in another order than theirs."""
    given = {str(name) for name in program.graph_signature.user_inputs}
    return not all(_lies_in_order(n) for n in program.graph.nodes if n.op == "placeholder" and n.name in given)


def _lies_in_order(node: torch.fx.Node) -> bool:
    value = node.meta["val"]
    return value.layout is torch.strided and lies_in_order(value)


def _is_expanded(value: torch.Tensor) -> bool:
    return any(isinstance(step, int) and step == 0 for step in value.stride())


def _infer(graph: ir.Graph) -> dict[ir.Node, ShapeError]:
    """Infer all types and shapes; the nodes that contradict their inputs or the trace: a translation is wrong."""
    contradictions = {}
    for node in graph:
        try:
            shapes.infer(node, is_stated=True)
        except ShapeError as error:
            contradictions[node] = error
    return contradictions


def _name_inputs(graph: ir.Graph, names: Sequence[str]) -> None:
    taken = _named(graph)
    for value, name in zip(graph.inputs, names, strict=True):
        _give(value, name, taken)


def _named(graph: ir.Graph) -> dict[str, ir.Value]:
    """The values of a graph but for its inputs, by name."""
    made = {str(v.name): v for node in graph for v in node.outputs}
    return {str(v.name): v for v in graph.initializers.values()} | made


def _give(value: ir.Value, name: str, taken: Mapping[str, ir.Value]) -> None:
    """Let an input have its name; a value within the graph that has it gives way."""
    clash = taken.get(name)
    if clash is not None and clash is not value:
        clash.name = f"{name}_value"
    value.name = name


def _weights_to_inputs(
    graph: ir.Graph, program: torch.export.ExportedProgram, buffers: Mapping[str, bool], borrowed: Mapping[str, bool]
) -> None:
    """Parameters, then buffers, become graph inputs under the user's names; a buffer with several names is one."""
    taken, owned = _named(graph), _owned_names(program)
    given: dict[str, ir.Value] = {}
    parameters = [n for n in program.graph_signature.inputs_to_parameters.values() if buffers.get(owned[n], True)]
    trained = [*parameters, *(n for n in borrowed if borrowed[n])]
    for name in (*trained, *owned, *(n for n in borrowed if not borrowed[n])):
        if name in graph.initializers:
            value, own = graph.initializers.pop(name), owned.get(name, name.removeprefix(PREFIX))
            if own in given:
                value.replace_all_uses_with(given[own], replace_graph_outputs=True)
                continue
            value.const_value, given[own] = None, value
            _give(value, own, taken)
            graph.inputs.append(value)


def _owned_names(program: torch.export.ExportedProgram) -> dict[str, str]:
    """The user's name of each buffer and parameter; of a buffer with several the first, not the last."""
    held, first = {**program.state_dict, **program.constants}, {}
    names = program.graph_signature.inputs_to_buffers.values()
    buffers = {n: first.setdefault(id(held[n]), n.removeprefix(PREFIX)) for n in names}
    return buffers | {n: n.removeprefix(PREFIX) for n in program.graph_signature.inputs_to_parameters.values()}


def _buffer_outputs(
    graph: ir.Graph, program: torch.export.ExportedProgram, lowered: torch.fx.GraphModule, buffers: Sequence[str]
) -> list[str]:
    """Keep, of the buffers' contents among the outputs, those that the call changed; says which."""
    changed = _changed(program, lowered, buffers)
    first = len(graph.outputs) - len(buffers)
    for index in reversed(range(len(buffers))):
        if buffers[index] not in changed:
            _remove_unread(graph, graph.outputs.pop(first + index))
    return [name for name in buffers if name in changed]


def _changed(program: torch.export.ExportedProgram, lowered: torch.fx.GraphModule, buffers: Sequence[str]) -> set[str]:
    """The buffers whose contents, which the program returns last, are not copies of what they were."""
    names, signature = _owned_names(program), program.graph_signature
    inputs = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    owned = {n: names[name] for n, name in inputs.items()}
    (returned,) = (n.args[0] for n in lowered.graph.nodes if n.op == "output")
    copies = zip(buffers, returned[len(returned) - len(buffers) :], strict=True)  # type: ignore[arg-type, index]
    return {name for name, copy in copies if owned.get(copy.args[0].name) != name}  # type: ignore[union-attr]


def _remove_unread(graph: ir.Graph, value: ir.Value) -> None:
    """Take away the node that copied a buffer for nobody, and the buffer where nothing else reads it."""
    node = value.producer()
    if node is not None and not value.uses() and not value.is_graph_output() and len(node.inputs) == 1:
        source = node.inputs[0]
        graph.remove(node, safe=True)
        if source is not None and source in graph.inputs and not source.uses() and not source.is_graph_output():
            graph.inputs.remove(source)


def _distinct_outputs(graph: ir.Graph) -> None:
    """Outputs that are inputs, constants or given twice get a node of their own."""
    seen: set[ir.Value] = set()
    for index, value in enumerate(list(graph.outputs)):
        if value in seen or value.producer() is None:
            node = ir.Node("", "Identity", [value], num_outputs=1)
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[index] = node.outputs[0]
        seen.add(graph.outputs[index])


def _rename_symbols(graph: ir.Graph) -> None:
    """Torch's ``s27`` becomes ``input_ids_dim1``: the first input dimension that is just that symbol."""
    renamed: dict[str, str] = {}
    for value in graph.inputs:
        for axis, dim in enumerate(shapes.dims_of(value) or ()):
            if not isinstance(dim, int) and dim.value and dim.value.isidentifier():
                renamed.setdefault(dim.value, re.sub(r"\W", "_", f"{value.name}_dim{axis}"))
    anew: dict[str | None, shapes.Dim] = {}
    for value in _all_values(graph):
        if value.shape is not None:
            value.shape = ir.Shape([d if isinstance(d, int) else _renamed(d, renamed, anew) for d in value.shape])
    hidden_sizes.show(_all_values(graph))


def _all_values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph.all_nodes():
        yield from node.outputs


def _renamed(dim: ir.SymbolicDim, renamed: dict[str, str], anew: dict[str | None, shapes.Dim]) -> shapes.Dim:
    """A dimension with other names of its symbols; those that were made are kept."""
    if dim.value not in anew:
        anew[dim.value] = _with_names(dim, renamed)
    return anew[dim.value]


def _with_names(dim: ir.SymbolicDim, renamed: dict[str, str]) -> shapes.Dim:
    if dim.value is None:
        return dim
    if dim.value.isidentifier():
        return ir.SymbolicDim(renamed.get(dim.value, dim.value))
    expression = _parse(dim.value)
    if expression is None or _is_of_some_alone(dim.value, expression):
        return ir.SymbolicDim(None)
    names: Any = {
        s: sympy.Symbol(renamed.get(str(s), str(s)), integer=True, positive=True) for s in expression.free_symbols
    }
    return shapes.simplify(ir.SymbolicDim(expression.subs(names)))


def _is_of_some_alone(text: str, some: sympy.Expr) -> bool:
    """Whether a size is told by numbers that content decides on, and would be another one where these are 0.

    Of ``x[mask][1:]`` torch says ``u0 - 1``, and of ``x[mask][:1]`` ``Min(1, u0)``: 1 where something is found.

    Args:
        text: torch's way of writing it.
        some: what it says where all numbers are more than 0.
    """
    found = set(_OF_CONTENT.findall(text))
    if not found:
        return False
    less = _parse(_OF_CONTENT.sub(r"(\g<0> - 1)", text))  # a number that is parsed is more than 0, one less may be 0
    if less is None:
        return True
    counts = {n: sympy.Symbol(n, integer=True, nonnegative=True) for n in found}
    told: Any = less.subs({s: counts[s.name] + 1 for s in less.free_symbols if s.name in counts})
    return not told.is_nonnegative or str(told) != str(some)


def _parse(text: str) -> sympy.Expr | None:
    """Torch's way of writing an expression, or None where it uses something that sympy's integers do not have."""
    try:
        return ir.SymbolicDim(re.sub(r"\b(FloorDiv|CleanDiv)\(([^(),]+), ([^(),]+)\)", r"(\2)//(\3)", text))._expr
    except (ValueError, TypeError):
        return None


def _keep_source(node: ir.Node) -> None:
    """Reduce what is said of a node to where it comes from, and to whether its numbers are read."""
    kept = origin_of(node)
    if DRAWN in node.metadata_props:
        kept[DRAWN] = node.metadata_props[DRAWN]
    node.metadata_props.clear()
    node.metadata_props.update(kept)
