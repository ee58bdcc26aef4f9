"""ExportedProgram → torch.onnx's model: the one place that knows torch.onnx's inside.

What torch.onnx has no translation for stays whole: the call that the user's code made, not the primitives that torch
would take it apart into, becomes an ``ATen`` node. So do calls on complex numbers, which torch.onnx would turn into
pairs of real ones, and calls whose translation a later stage refuses.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import operator
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias

import onnx_ir as ir
import torch
from torch.export.graph_signature import TensorArgument

from onnxtrain.capture import aten, exact_constants
from onnxtrain.capture.library import Library, signatures_made_once
from onnxtrain.capture.lowering import ORIGINS, Lowering
from onnxtrain.capture.quiet import loggers_at
from onnxtrain.capture.translations import TRANSLATIONS, WHOLE, stays_whole
from onnxtrain.errors import CaptureError

Overload: TypeAlias = torch._ops.OpOverload


_VIEWS = (torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default)  # which are as simple as they can be


class Translator:
    """Translates one program, as often as it takes to find which operators stay whole.

    Args:
        program: what ``capture.export`` made of a ``FlatModule``.
        opset: ONNX opset of the result.

    Attributes:
        whole: the operators that are not taken apart.
    """

    def __init__(self, program: torch.export.ExportedProgram, opset: int) -> None:
        self.program, self.opset = program, opset
        self._library = Library(opset)
        self.whole: set[Overload] = {target for target in WHOLE if not self._library.is_registered(target)}
        self._made: dict[str, torch.fx.Node] = {}  # the calls that were translated

    def translate(self) -> Any:
        """The model and the lowered program as torch.onnx returns them (``ONNXProgram``).

        Raises:
            CaptureError: an operator can neither be translated nor stay whole.
        """
        from torch.onnx._internal.exporter import _core

        while True:
            program = self._lowered()
            try:
                with _silence(), exact_constants.remembered(), signatures_made_once():
                    made = _core._exported_program_to_onnx_program(program, registry=self._library)
            except Exception as error:
                self._keep_failed(error, program)
            else:
                self._made = _by_result(program)
                made.model = _core.onnxscript_apis.convert_version(made.model, self.opset)
                for node in made.model.graph.all_nodes():
                    node.version = None  # within branches it is the opset that introduced the operator, not the graph's
                _restore_complex(made)
                return made

    def _lowered(self) -> torch.export.ExportedProgram:
        """The program with calls that have translations; those that stay whole are calls of their recorders."""
        with _silence(), _without_wrong_references():
            lowering = Lowering(self.program.graph_module, self._verdict, self.whole)
            module = lowering.lowered()
        program = copy.copy(self.program)
        program._graph_module = module
        program._graph_signature = _named_outputs(program)
        for node in lowering.kept:
            node.target = record = aten.recorder_of(node)
            self._library.add(record, record)
        return program

    def _verdict(self, call: torch.fx.Node) -> bool | None:
        """Whether a call has a translation; False where that is wrong, None where there is none."""
        from torch.onnx._internal.exporter import _dispatching

        if (stays_whole(call) or _is_complex(call)) and aten.can_be_node(call):
            return False
        if _is_made_of_views(call.target):
            return None
        return True if _dispatching.dispatch(call, self._library)[0] is not None else None

    def keep(self, node: ir.Node) -> bool:
        """Let the operator that a node of the translation comes from stay whole; says whether that is anything new."""
        call = self._call_of(node)
        return call is not None and node.op_type != aten.ATEN and self._keep_origin(call)

    def _keep_origin(self, call: torch.fx.Node) -> bool:
        """Let the first of the operators that a call comes from stay whole, the user's if it can."""
        origins = map(_known, call.meta.get(ORIGINS, ()))
        origin = next((o for o in origins if o is not None and o not in self.whole and _gives_tensors(o)), None)
        if origin is None:
            return False
        self.whole.add(origin)
        return True

    def _call_of(self, node: ir.Node) -> torch.fx.Node | None:
        """The call a node was made for; nodes of inlined functions lead to the value that has the call's name."""
        todo, seen = [node], {node}
        while todo:
            current = todo.pop()
            found = current.meta.get("node") or next(
                (c for v in current.outputs if (c := self._made.get(str(v.name)))), None
            )
            if found is not None:
                return found
            readers = {reader for value in current.outputs for reader, _ in value.uses()} - seen
            seen |= readers
            todo.extend(readers)
        return None

    def _keep_failed(self, error: Exception, program: torch.export.ExportedProgram) -> None:
        """Keep the operator whose translation raised.

        Raises:
            CaptureError: that is not what is wrong.
        """
        name = re.search(r"Error when translating node %(\w+)", "".join(map(str, _causes(error))))
        node = next((n for n in _calls(program) if name and n.name == name.group(1)), None)
        if node is None or not self._keep_origin(node):
            raise CaptureError(
                f"torch.onnx cannot translate the captured program: {_last_line(error)}",
                node=str(node.target if node is not None else ""),
                cure="keep that part outside the wrapped module",
            ) from error


def _is_made_of_views(target: Any) -> bool:
    """Whether an operator is a name for simpler views, of which later stages know more (mT, unflatten, movedim)."""
    if target in TRANSLATIONS or target in _VIEWS or not isinstance(target, Overload):
        return False
    returns = target._schema.returns
    return target._can_decompose() and any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _known(target: Any) -> Overload | None:
    """An operator as ``torch.ops`` has it (graphs hold copies of operators), None for a primitive."""
    if not isinstance(target, Overload) or target.namespace in ("prim", "prims"):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), target._schema.name.split("::")[-1])
    return getattr(packet, target._overloadname)


def _gives_tensors(target: Any) -> bool:
    """Whether all that an operator returns are tensors, as an ATen node's results are."""
    return isinstance(target, Overload) and all("Tensor" in str(made.type) for made in target._schema.returns)


def _calls(program: torch.export.ExportedProgram) -> Iterator[torch.fx.Node]:
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (n for n in module.graph.nodes if n.op == "call_function" and isinstance(n.target, Overload))


def _by_result(program: torch.export.ExportedProgram) -> dict[str, torch.fx.Node]:
    """The calls by the names of what they return, the parts of several results among them."""
    calls = list(_calls(program))
    parts = {n.name: call for call in calls for n in call.users if n.target is operator.getitem}
    return {call.name: call for call in calls} | parts


def _named_outputs(program: torch.export.ExportedProgram) -> Any:
    """The signature with the names of what the graph returns now."""
    signature = copy.copy(program.graph_signature)
    (returned,) = (n.args[0] for n in program.graph.nodes if n.op == "output")
    names = [node.name if isinstance(node, torch.fx.Node) else None for node in returned]  # type: ignore[union-attr]
    signature.output_specs = [
        dataclasses.replace(spec, arg=TensorArgument(name=name)) if name and _is_tensor(spec) else spec
        for spec, name in zip(signature.output_specs, names, strict=True)
    ]
    return signature


def _is_tensor(spec: Any) -> bool:
    return isinstance(spec.arg, TensorArgument)


def _is_complex(node: torch.fx.Node) -> bool:
    made = node.meta.get("val")
    values = [n.meta.get("val") for n in node.all_input_nodes] + (
        list(made) if isinstance(made, list | tuple) else [made]
    )
    return any(isinstance(v, torch.Tensor) and v.dtype.is_complex for v in values)


def _restore_complex(made: Any) -> None:
    """Inputs and constants that torch.onnx took for pairs of real numbers are complex again."""
    graph, program = made.model.graph, made.exported_program
    for value in graph.inputs:
        traced = value.meta["node"].meta.get("val")
        if isinstance(traced, torch.Tensor) and traced.dtype.is_complex:
            aten.set_type(value, traced)
    known = {**dict(program.named_parameters()), **dict(program.named_buffers()), **program.constants}
    for name, value in graph.initializers.items():
        tensor = known.get(name)
        if isinstance(tensor, torch.Tensor) and tensor.dtype.is_complex:
            aten.set_type(value, tensor)
            value.const_value = ir.tensor(tensor.detach().resolve_conj().cpu().numpy(), name=name)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _last_line(error: BaseException) -> str:
    cause = list(_causes(error))[-1]
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else type(cause).__name__


@contextlib.contextmanager
def _without_wrong_references() -> Iterator[None]:
    """Hide torch's reference of nll_loss from inference of shapes: its reduction is a name, so that a number, which is
    what the operator has, gives a mean (``torch._refs.nn.functional.nll_loss``).
    """
    from torch._decomp import decomposition_table

    target = torch.ops.aten.nll_loss.default
    hidden = decomposition_table.pop(target, None)
    try:
        yield
    finally:
        if hidden is not None:
            decomposition_table[target] = hidden


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep the exporter's own chatter out of the user's terminal; its errors are raised all the same."""
    loggers = loggers_at(logging.ERROR, "torch.onnx", "onnx_ir")
    with loggers, warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield
