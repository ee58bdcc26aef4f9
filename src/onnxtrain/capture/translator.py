"""ExportedProgram → ONNX model: what is translated, what is taken apart, and what stays whole.

What has no translation stays whole: the call that the user's code made, not the primitives that torch would take it
apart into, becomes an ``ATen`` node. So do calls on complex numbers, which torch.onnx would turn into pairs of real
ones, and calls whose translation a later stage refuses.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias

import onnx_ir as ir
import torch

from onnxtrain.capture import aten
from onnxtrain.capture.graph_code import CODE_WHEN_RUN
from onnxtrain.capture.library import has_translation
from onnxtrain.capture.lowering import ORIGINS, Lowering
from onnxtrain.capture.onnx_graph import TRACED, UntranslatableError, onnx_model
from onnxtrain.capture.quiet import loggers_at
from onnxtrain.capture.replaced import ABSENT, replaced
from onnxtrain.capture.translations import APART, TRANSLATIONS, WHOLE, stays_whole
from onnxtrain.errors import CaptureError

Overload: TypeAlias = torch._ops.OpOverload


_VIEWS = (torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default)  # which are as simple as they can be
# whose nodes are the same for all types; others of complex numbers torch.onnx would write for pairs of real ones
_OF_ANY_TYPE = (torch.ops.aten.detach.default,)


class Translator:
    """Translates one program, as often as it takes to find which operators stay whole.

    Args:
        program: what ``capture.export`` made of a ``FlatModule``.
        opset: ONNX opset of the result.

    Attributes:
        lowered: the calls that were translated last.
    """

    def __init__(self, program: torch.export.ExportedProgram, opset: int) -> None:
        self.program, self.opset = program, opset
        self.lowered = program.graph_module
        self._whole = _Whole(opset)
        self._made: dict[str, torch.fx.Node] = {}  # the calls that were translated

    def translate(self) -> ir.Model:
        """The program as a model (``onnx_graph.onnx_model``).

        Raises:
            CaptureError: an operator can neither be translated nor stay whole.
        """
        while True:
            with _silence(), _without_wrong_references(), replaced(CODE_WHEN_RUN):
                lowering = Lowering(self.program.graph_module, self._verdict, self._whole)
                self.lowered = lowering.lowered()
            records = {call: aten.recorder_of(call) for call in lowering.kept}
            try:
                with _silence():
                    made = onnx_model(self.program, self.lowered, records, self.opset)
            except UntranslatableError as error:
                self._keep_failed(error)
            else:
                self._made = _by_result(self.lowered)
                return made

    def _verdict(self, call: torch.fx.Node) -> bool | None:
        """Whether a call has a translation; False where that is wrong, None where there is none."""
        is_complex = _is_complex(call) and call.target not in _OF_ANY_TYPE
        if (is_complex or stays_whole(call)) and aten.can_be_node(call):
            return False
        if _is_made_of_views(call.target):
            return None
        if call.target in TRANSLATIONS:
            return True
        return True if not is_complex and has_translation(call.target, self.opset) else None

    def keep(self, node: ir.Node) -> bool:
        """Let the operator that a node of the translation comes from stay whole; says whether that is anything new."""
        call = self._call_of(node)
        return call is not None and node.op_type != aten.ATEN and self._keep_origin(call)

    def _keep_origin(self, call: torch.fx.Node) -> bool:
        """Let the first of the operators that a call comes from stay whole, the user's if it can."""
        origins = map(_known, call.meta.get(ORIGINS, ()))
        origin = next((o for o in origins if o is not None and o not in self._whole and _gives_tensors(o)), None)
        if origin is None:
            return False
        self._whole.add(origin)
        return True

    def _call_of(self, node: ir.Node) -> torch.fx.Node | None:
        """The call a node was made for; nodes of inlined functions lead to the value that has the call's name."""
        todo, seen = [node], {node}
        while todo:
            current = todo.pop()
            found = current.meta.get(TRACED) or next(
                (c for v in current.outputs if (c := self._made.get(str(v.name)))), None
            )
            if found is not None:
                return found
            readers = {reader for value in current.outputs for reader, _ in value.uses()} - seen
            seen |= readers
            todo.extend(readers)
        return None

    def _keep_failed(self, error: UntranslatableError) -> None:
        """Keep the operator whose translation raised.

        Raises:
            CaptureError: it cannot stay whole.
        """
        if not self._keep_origin(error.call):
            raise CaptureError(
                f"the captured program cannot be translated: {_last_line(error)}",
                node=str(error.call.target),
                cure="keep that part outside the wrapped module",
            ) from error


class _Whole:
    """The operators that are not taken apart: those that turned out so, and those of ``WHOLE`` without translation."""

    def __init__(self, opset: int) -> None:
        self._opset, self._found = opset, set[Any]()

    def add(self, target: Any) -> None:
        """Let an operator stay whole."""
        self._found.add(target)

    def __contains__(self, target: Any) -> bool:
        if target in self._found:
            return True
        if target not in WHOLE or target in APART:
            return False
        return target not in TRANSLATIONS and not has_translation(target, self._opset)


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


def _by_result(lowered: torch.fx.GraphModule) -> dict[str, torch.fx.Node]:
    """The calls by the names of what they return, the parts of several results among them."""
    modules = [m for m in lowered.modules() if isinstance(m, torch.fx.GraphModule)]
    calls = [n for m in modules for n in m.graph.nodes if n.op == "call_function" and isinstance(n.target, Overload)]
    parts = {n.name: call for call in calls for n in call.users if n.target is operator.getitem}
    return {call.name: call for call in calls} | parts


def _is_complex(node: torch.fx.Node) -> bool:
    made = node.meta.get("val")
    values = [n.meta.get("val") for n in node.all_input_nodes] + (
        list(made) if isinstance(made, list | tuple) else [made]
    )
    return any(isinstance(v, torch.Tensor) and v.dtype.is_complex for v in values)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _last_line(error: BaseException) -> str:
    cause = list(_causes(error))[-1]
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else type(cause).__name__


def _without_wrong_references() -> contextlib.AbstractContextManager[None]:
    """Hide torch's reference of nll_loss from inference of shapes: its reduction is a name, so that a number, which is
    what the operator has, gives a mean (``torch._refs.nn.functional.nll_loss``).
    """
    from torch._decomp import decomposition_table

    return replaced((decomposition_table, torch.ops.aten.nll_loss.default, ABSENT))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep the exporter's own chatter out of the user's terminal; its errors are raised all the same."""
    loggers = loggers_at(logging.ERROR, "torch.onnx", "onnx_ir")
    with loggers, warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield
