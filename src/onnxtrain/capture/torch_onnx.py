"""ExportedProgram → torch.onnx's model: the one place that knows torch.onnx's inside.

What torch.onnx has no translation for stays whole: the call that the user's code made, not the primitives that torch
would take it apart into, becomes an ``ATen`` node. So do calls on complex numbers, which torch.onnx would turn into
pairs of real ones, and calls whose translation a later stage refuses.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias

import onnx_ir as ir
import torch
from torch.export.graph_signature import TensorArgument

from onnxtrain.capture import aten, exact_constants
from onnxtrain.capture.quiet import loggers_at
from onnxtrain.capture.translations import TRANSLATIONS, WHOLE, stays_whole
from onnxtrain.errors import CaptureError

Overload: TypeAlias = torch._ops.OpOverload


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
        known = _registry(opset, frozenset())
        self.whole: set[Overload] = {target for target in WHOLE if not known.is_registered(target)}
        self._made: dict[str | None, torch.fx.Node] = {}  # the calls of the decomposed program
        self._calls = {n.name: n for n in program.graph.nodes if n.op == "call_function"}

    def translate(self) -> Any:
        """The model and the decomposed program as torch.onnx returns them (``ONNXProgram``).

        Raises:
            CaptureError: an operator can neither be translated nor stay whole.
        """
        from torch.onnx._internal.exporter import _core

        while True:
            with _silence(), _without_wrong_references():
                registry = _registry(self.opset, frozenset(self.whole))
                decomposed = _core._prepare_exported_program_for_export(self.program, registry=registry)
                _identify_sizes(decomposed)
                _name_outputs(decomposed)
            if self._keep_unknown(decomposed, registry):
                continue
            try:
                with _silence(), exact_constants.remembered():
                    made = _core._exported_program_to_onnx_program(decomposed, registry=registry)
            except Exception as error:
                self._keep_failed(error, decomposed)
            else:
                self._made = {n.name: n for n in _calls(decomposed)}
                made.model = _core.onnxscript_apis.convert_version(made.model, self.opset)
                for node in made.model.graph.all_nodes():
                    node.version = None  # within branches it is the opset that introduced the operator, not the graph's
                _restore_complex(made)
                return made

    def keep(self, node: ir.Node) -> bool:
        """Let the operator that a node of the translation comes from stay whole; says whether that is anything new."""
        call = self._call_of(node)
        origin = None if call is None or node.op_type == aten.ATEN else self._origin(call)
        if origin is None or origin in self.whole:
            return False
        self.whole.add(origin)
        return True

    def _call_of(self, node: ir.Node) -> torch.fx.Node | None:
        """The call a node was made for; nodes of inlined functions lead to the value that has the call's name."""
        todo, seen = [node], {node}
        while todo:
            current = todo.pop()
            found = current.meta.get("node") or next(
                (c for v in current.outputs if (c := self._made.get(v.name))), None
            )
            if found is not None:
                return found
            readers = {reader for value in current.outputs for reader, _ in value.uses()} - seen
            seen |= readers
            todo.extend(readers)
        return None

    def _keep_unknown(self, decomposed: torch.export.ExportedProgram, registry: Any) -> bool:
        """Make recorders of the calls that stay whole; True where the program has to be decomposed again first."""
        from torch.onnx._internal.exporter import _dispatching

        before = len(self.whole)
        recorders: dict[torch.fx.Node, Any] = {}
        for node in _calls(decomposed):
            kept = _known(node.target) in self.whole or stays_whole(node) or _is_complex(node)
            if not kept and _dispatching.dispatch(node, registry)[0] is not None:
                continue
            origin = self._origin(node)
            if origin is not None and origin is not _known(node.target):
                self.whole.add(origin)
            elif aten.can_be_node(node):
                recorders[node] = aten.recorder_of(node)
        if len(self.whole) > before:
            return True
        for node, record in recorders.items():
            node.target = record
            _register(registry, record, record)
        return False

    def _origin(self, node: torch.fx.Node) -> Overload | None:
        """The operator of the user's that a call was decomposed from and that can be kept whole, itself included."""
        sources = node.meta.get("from_node") or []
        call = self._calls.get(sources[-1].name) if sources else None
        found: list[Any] = [call.target] if call is not None and aten.can_be_node(call) else []
        found += [target for target in (node.meta.get("original_aten"), node.target) if _gives_tensors(target)]
        own = _known(node.target)
        for target in map(_known, found):
            if target is not None and not target._schema.is_mutable and (target is own or target not in self.whole):
                return target
        return None

    def _keep_failed(self, error: Exception, decomposed: torch.export.ExportedProgram) -> None:
        """Keep the operator whose translation raised.

        Raises:
            CaptureError: that is not what is wrong.
        """
        name = re.search(r"Error when translating node %(\w+)", "".join(map(str, _causes(error))))
        node = next((n for n in _calls(decomposed) if name and n.name == name.group(1)), None)
        origin = self._origin(node) if node is not None else None
        if origin is None or origin in self.whole:
            raise CaptureError(
                f"torch.onnx cannot translate the captured program: {_last_line(error)}",
                node=str(node.target if node is not None else ""),
                cure="keep that part outside the wrapped module",
            ) from error
        self.whole.add(origin)


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


def _name_outputs(program: torch.export.ExportedProgram) -> None:
    """Let the signature name what the graph returns: torch.onnx casts sums of halves back, and returns the others."""
    (returned,) = (n.args[0] for n in program.graph.nodes if n.op == "output")
    for spec, node in zip(program.graph_signature.output_specs, returned, strict=True):  # type: ignore[arg-type]
        if isinstance(node, torch.fx.Node) and isinstance(spec.arg, TensorArgument):
            spec.arg = TensorArgument(name=node.name)


def _identify_sizes(program: torch.export.ExportedProgram) -> None:
    """Let sizes that depend on content be the symbols that they were.

    The pass for type promotion runs the calls again, which makes each such size anew, in the same order. One size would
    have two names, and torch refuses to decompose a program once more while it knows of symbols that no call made.
    """
    calls = list(_calls(program))
    environment = next((e for n in calls for e in _environments(n.meta.get("val"))), None)
    if environment is None:
        return
    bound = [symbol for n in calls for symbol in n.meta.get("unbacked_bindings") or ()]
    again = list(environment.pending_fresh_unbacked_symbols)
    environment.pending_fresh_unbacked_symbols.clear()
    for new, old in zip(again, bound, strict=True) if len(again) == len(bound) else ():
        environment._rename_unbacked_to(new, old)


def _environments(made: Any) -> Iterator[Any]:
    """Where the symbols in the sizes of a call's results belong."""
    for value in made if isinstance(made, list | tuple) else [made]:
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
                yield size.node.shape_env


def _is_complex(node: torch.fx.Node) -> bool:
    made = node.meta.get("val")
    values = [n.meta.get("val") for n in node.all_input_nodes] + (
        list(made) if isinstance(made, list | tuple) else [made]
    )
    return any(isinstance(v, torch.Tensor) and v.dtype.is_complex for v in values)


@functools.cache
def _torchlib(opset: int) -> dict[Any, list[Any]]:
    """The translations of torch.onnx and ours, which come first; made once, since that takes a second."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with _silence():
        registry = ONNXRegistry.from_torchlib(opset)
        for target, function in TRANSLATIONS.items():
            registry.register_op(target, function)
    return registry.functions


def _registry(opset: int, whole: frozenset[Overload]) -> Any:
    """A registry in which the operators that stay whole have a place, so that they are not decomposed."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    registry = ONNXRegistry()
    registry._opset_version = opset
    registry.functions = {target: list(metas) for target, metas in _torchlib(opset).items()}
    for target in whole:
        _register(registry, target, _never)
    return registry


def _register(registry: Any, target: Any, function: Any) -> None:
    from torch.onnx._internal.exporter._registration import OnnxDecompMeta

    for is_complex in (False, True):
        given = {"onnx_function": function, "fx_target": target, "signature": None, "is_custom": True}
        meta = OnnxDecompMeta(**given, is_complex=is_complex, skip_signature_inference=True)
        registry._register(target, meta)


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("calls that stay whole have a recorder of their own")


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
