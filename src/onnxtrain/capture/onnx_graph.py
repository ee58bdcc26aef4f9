"""Lowered program → ONNX model: each call by its translation, ours first, torch.onnx's second."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor, from_torch_dtype
from torch.export.graph_signature import ConstantArgument, InputKind

from onnxtrain.capture.flat_module import PREFIX
from onnxtrain.capture.library import Library
from onnxtrain.capture.nodes import Nodes, Value, added_to
from onnxtrain.capture.source_lines import user_place
from onnxtrain.capture.translations import TRANSLATIONS
from onnxtrain.ir.bodies import remove_unread
from onnxtrain.ir.graphs import DRAWN, SIZE, SOURCE
from onnxtrain.ir.modules import NAMESPACE, Module, namespace

TRACED = "node"  # in the ``meta`` of a node: the call that it was made for
_SUBGRAPHS = "pkg.torch.__subgraph__"


class UntranslatableError(Exception):
    """The translation of a call raised.

    Attributes:
        call: the call.
    """

    def __init__(self, call: torch.fx.Node) -> None:
        super().__init__(str(call))
        self.call = call


def onnx_model(
    program: torch.export.ExportedProgram,
    module: torch.fx.GraphModule,
    records: Mapping[torch.fx.Node, Callable[..., Any]],
    opset: int,
) -> ir.Model:
    """Translate a lowered program.

    Args:
        program: whose inputs, outputs and weights they are.
        module: the program's calls, of which each has a translation.
        records: how single calls are translated, in place of their operators.
        opset: ONNX opset of the model.

    Returns:
        A model whose inputs are the user's and whose initializers are parameters, buffers and constants, under the
        program's names; only the last have their content.

    Raises:
        UntranslatableError: a translation raised.
    """
    library = Library(opset)
    functions: dict[str, dict[str, ir.Function]] = {}
    for name, part in reversed(list(module.named_modules(remove_duplicate=False))):
        if name and isinstance(part, torch.fx.GraphModule):
            owner, _, own = name.rpartition(".")
            made = ir.Function(_SUBGRAPHS, name.replace(".", "__"), graph=ir.Graph((), (), nodes=()), attributes=())
            _Part(made, functions.get(name, {}), records, library).translate(part.graph)
            functions.setdefault(owner, {})[own] = library.functions[made.identifier()] = made
    graph = ir.Graph([], [], nodes=[], name="main_graph")
    values = _Part(graph, functions.get("", {}), records, library).translate(module.graph)
    _take_weights(graph, program, values)
    remove_unread(graph)
    model = ir.Model(graph, ir_version=10)
    library.finish(model)
    return model


class _Part:
    """The translation of one graph of calls.

    Args:
        graph: receives inputs, nodes and outputs.
        owned: the functions that its calls are given, by name.
        records: how single calls are translated.
        library: the translations that are not ours.
    """

    def __init__(
        self,
        graph: ir.Graph | ir.Function,
        owned: Mapping[str, ir.Function],
        records: Mapping[torch.fx.Node, Callable[..., Any]],
        library: Library,
    ) -> None:
        self._graph, self._owned, self._records, self._library = graph, owned, records, library
        self._nodes = Nodes()
        self._values: dict[torch.fx.Node, Any] = {}
        self._sizes: dict[Any, ir.SymbolicDim] = {}
        self._places: dict[str, str | None] = {}

    def translate(self, calls: torch.fx.Graph) -> dict[str, Any]:
        """The values by the names of the calls that they are results of."""
        for call in calls.nodes:
            if call.op == "placeholder":
                self._values[call] = value = Value(name=call.name)
                value.meta[TRACED] = call
                self._describe(value, call.meta["val"])
                self._graph.inputs.append(value)
            elif call.op == "get_attr":
                self._values[call] = self._owned[str(call.target)]
            elif call.op == "call_function":
                self._values[call] = self._translated(call)
            elif call.op == "output":
                self._return(call.args[0])
        return {call.name: value for call, value in self._values.items()}

    def _return(self, returned: Any) -> None:
        for call in returned if isinstance(returned, list | tuple) else [returned]:
            if isinstance(call, torch.fx.Node):
                value = self._values[call]
                self._graph.outputs.extend(value if isinstance(value, list | tuple) else [value])

    def _translated(self, call: torch.fx.Node) -> Any:
        """What a call returns, as a value or several."""
        if call.target is operator.getitem:
            several: Any = self._values[call.args[0]]  # type: ignore[index]
            place: Any = call.args[1]
            if isinstance(several, list | tuple):
                several[place].name = call.name
                return several[place]
        try:
            with added_to(self._nodes):
                made = self._recorded(call)
        except Exception as error:
            raise UntranslatableError(call) from error
        added = self._nodes.taken()
        place, within = self._place(call), namespace(_modules(call), call.name, str(call.target))
        for node in added:
            node.meta[TRACED] = call
            node.metadata_props[NAMESPACE] = within
            if place is not None:
                node.metadata_props[SOURCE] = place
            if DRAWN in call.meta:
                node.metadata_props[DRAWN] = "yes"
        self._graph.extend(added)
        try:
            self._name_all(made, call)
        except TypeError as error:  # of a type that ONNX does not have
            raise UntranslatableError(call) from error
        return made

    def _name_all(self, made: Any, call: torch.fx.Node) -> None:
        """Name and describe what a call returns."""
        results: Any = call.meta.get("val")
        if isinstance(made, list | tuple):
            for index, (value, result) in enumerate(zip(made, results, strict=False)):
                self._name(value, f"{call.name}__{index}", result, call)
        else:
            self._name(made, call.name, results, call)

    def _recorded(self, call: torch.fx.Node) -> Any:
        args = [self._argument(a) for a in call.args]
        kwargs = {name: self._argument(a) for name, a in call.kwargs.items()}
        ours = self._records.get(call) or TRANSLATIONS.get(call.target)
        made = NotImplemented if ours is None else ours(*args, **kwargs)
        if made is NotImplemented:
            kwargs = {name: -1 if name == "dtype" and value is None else value for name, value in kwargs.items()}
            made = self._library.call(call.target, args, kwargs)
        return made

    def _argument(self, argument: Any) -> Any:
        """An argument as translations take it."""
        if isinstance(argument, torch.fx.Node):
            return self._values[argument]
        if isinstance(argument, list | tuple):
            return [self._argument(a) for a in argument]
        if isinstance(argument, torch.dtype):
            return from_torch_dtype(argument)
        if isinstance(argument, torch.device | torch.memory_format | torch.layout):
            return str(argument)
        return argument

    def _name(self, value: ir.Value, name: str, result: Any, call: torch.fx.Node) -> None:
        """Name the result of a call, and say what the trace knows of it."""
        producer = value.producer()
        if producer is None or producer.meta.get(TRACED) is not call:
            return
        value.name, producer.name = name, f"node_{name}"
        if isinstance(result, torch.SymInt) and result.node.expr.is_Symbol:
            value.metadata_props[SIZE] = str(result.node.expr)
        self._describe(value, result)

    def _describe(self, value: ir.Value, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            value.dtype = value.dtype or from_torch_dtype(result.dtype)
            value.shape = ir.Shape([d if isinstance(d, int) else self._size(d.node) for d in result.shape])
        elif (kind := _type_of_number(result)) is not None:
            value.dtype, value.shape = kind, ir.Shape([])

    def _size(self, size: Any) -> ir.SymbolicDim:
        """A size that is computed; writing it as text takes long."""
        if size.expr not in self._sizes:
            self._sizes[size.expr] = ir.SymbolicDim(str(size))
        return self._sizes[size.expr]

    def _place(self, call: torch.fx.Node) -> str | None:
        """The user's line of a call."""
        stack = call.meta.get("stack_trace") or ""
        if stack not in self._places:
            place = user_place(stack)
            self._places[stack] = None if place is None else f"{place[0].rsplit('/', 1)[-1]}:{place[1]}"
        return self._places[stack]


def _modules(call: torch.fx.Node) -> Iterator[Module]:
    """The modules that were being called, the outermost first, but for the one that is captured."""
    for name, kind in (call.meta.get("nn_module_stack") or {}).values():
        if name.startswith(PREFIX):
            told = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            yield name.removeprefix(PREFIX), told


def _type_of_number(result: Any) -> ir.DataType | None:
    for kinds, dtype in (
        ((bool, torch.SymBool), ir.DataType.BOOL),
        ((int, torch.SymInt), ir.DataType.INT64),
        ((float, torch.SymFloat), ir.DataType.FLOAT),
    ):
        if isinstance(result, kinds):
            return dtype
    return None


def _take_weights(graph: ir.Graph, program: torch.export.ExportedProgram, values: Mapping[str, Any]) -> None:
    """Let the inputs be the user's, and the others initializers under the program's names."""
    graph.inputs.clear()
    held = {**program.state_dict, **program.constants}
    for spec in program.graph_signature.input_specs:
        if isinstance(spec.arg, ConstantArgument):
            continue
        value = values[spec.arg.name]
        if spec.kind == InputKind.USER_INPUT:
            graph.inputs.append(value)
            continue
        value.name = str(spec.target)
        graph.initializers[value.name] = value
        if spec.kind == InputKind.CONSTANT_TENSOR:
            value.const_value = _content(held[value.name], value.name)


def _content(tensor: torch.Tensor, name: str) -> ir.TensorProtocol:
    if tensor.dtype.is_complex:
        return ir.tensor(tensor.detach().resolve_conj().cpu().numpy(), name=name)
    return TorchTensor(tensor, name=name)


__all__ = ["TRACED", "UntranslatableError", "onnx_model"]
