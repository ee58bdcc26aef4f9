"""Inputs that a forward pass changes in place: what they hold then is an output of the graph, and written to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from onnxtrain.capture.hidden_changes import PASSED_ON
from onnxtrain.capture.lowering.records import memory_of
from onnxtrain.capture.shared_memory import line_of_write
from onnxtrain.capture.source_lines import user_line
from onnxtrain.capture.tensor_questions import place_in_memory
from onnxtrain.errors import CaptureError

_OF_A_LEAF = "leaf Variable that requires grad is being used in an in-place operation"  # torch's words


@dataclasses.dataclass(frozen=True)
class Copied:
    """An input of which a trace has a copy, because it is changed in place.

    Args:
        line: the user's line that does so.
        is_leaf: whether it is a leaf that requires a gradient, of which autograd must not know that it is changed.
    """

    line: str
    is_leaf: bool


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """An input that gets another content.

    Args:
        position: among the call's tensors.
        output: the position of the content among the graph's outputs.
        copied: its copy in the trace.
    """

    position: int
    output: int
    copied: Copied


class Contents:
    """Sees which of the tensors of a call are changed in place from now on.

    Args:
        tensors: they.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._before = [(t._version, place_in_memory(t)) for t in tensors]

    def changed(self) -> frozenset[int]:
        """The positions of those that were."""
        return frozenset(i for i, t in enumerate(self.tensors) if t._version != self._before[i][0])

    def rewritten(self, position: int, output: int, copied: Copied) -> Rewritten:
        """That one of them was, as a copy of the caller's, where its content is an output.

        Raises:
            CaptureError: it is of another form now, which the caller's would have to become.
        """
        if place_in_memory(self.tensors[position]) != self._before[position][1]:
            raise _reshaped(f"its input {position}", copied.line)
        return Rewritten(position, output, copied)


def refuse_reshaped(tensors: Mapping[str, torch.Tensor], adopted: Collection[str], graph: torch.fx.Graph) -> None:
    """Raise where a call changes the shape of a tensor that is there in the next call too.

    Args:
        tensors: those that have another shape than before the call, by name.
        adopted: the names that only the trace has given to tensors of others.
        graph: the trace.

    Raises:
        CaptureError: there is one.
    """
    for name, tensor in tensors.items():
        raise _reshaped("a tensor from elsewhere" if name in adopted else name, line_of_write(graph, tensor))


def _reshaped(what: str, line: str) -> CaptureError:
    cure = "let it change a view, which has a shape of its own: x = x.view_as(x)"
    return CaptureError(f"the forward pass changes the shape of {what} in place", source=line, cure=cure)


def is_trained_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor gets a gradient of its own."""
    return tensor.is_leaf and tensor.requires_grad


def may_be_changed(tensors: Sequence[torch.Tensor], error: CaptureError) -> set[int]:
    """The inputs that eager PyTorch may have been changing where a trace, to which they are leaves, may not."""
    trained = {i for i, t in enumerate(tensors) if t.requires_grad}
    if PASSED_ON in error.what:
        return trained
    return {i for i in trained if not tensors[i].is_leaf} if _OF_A_LEAF in error.what else set()


def lines_of_changes(program: torch.export.ExportedProgram, changed: Collection[int]) -> dict[int, str]:
    """The user's lines that write to inputs of a program."""
    given = set(program.graph_signature.user_inputs)
    inputs = [n for n in program.graph.nodes if n.name in given]
    return {i: _line_of_change(program, memory_of(inputs[i].meta["val"])) for i in changed}


def _line_of_change(program: torch.export.ExportedProgram, memory: int | None) -> str:
    """The user's line whose call writes to a memory."""
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
            if writes and any(memory_of(n.meta.get("val")) == memory for n in node.all_input_nodes[:1]):
                return user_line(node.meta.get("stack_trace") or "")
    return ""


def write_back(rewritten: Iterable[Rewritten], tensors: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Write what a graph gives into the caller's tensors; where a call returns one of them, it is the caller's own.

    Args:
        rewritten: what is written.
        tensors: the caller's.
        outputs: the graph's, in place.
    """
    for made in rewritten:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not made.copied.is_leaf):
            outputs[made.output] = tensors[made.position].copy_(outputs[made.output])


def copies(
    rewritten: Iterable[Rewritten], tensors: Sequence[torch.Tensor], names: Sequence[str], module: torch.nn.Module
) -> list[torch.Tensor]:
    """The tensors of a call, copies of those that are written afterwards: the backward pass may read them.

    Args:
        rewritten: what is written.
        tensors: the call's.
        names: their names.
        module: the module.

    Raises:
        CaptureError: one of these is a part of another tensor, or of the module's, or has elements that are one in
            memory: others would change too.
    """
    made = list(tensors)
    for one in rewritten:
        name, tensor = names[one.position], tensors[one.position]
        is_expanded = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
        if is_expanded or _shares_memory(one.position, tensors, module):
            other = "is expanded from a smaller one" if is_expanded else "shares memory with another tensor"
            raise CaptureError(
                f"the forward pass modifies its input {name} in place, which {other}",
                source=one.copied.line,
                cure=f"let it modify a copy: {name} = {name}.clone()",
            )
        copy = tensor.clone()
        made = [copy if t is tensor else t for t in made]
    return made


def _shares_memory(position: int, tensors: Sequence[torch.Tensor], module: torch.nn.Module) -> bool:
    """Whether a tensor of a call is, in part, another one of it, or of the module's.

    A floating tensor that comes again, as itself, is known to be one.
    """
    tensor = tensors[position]
    beside = [t for i, t in enumerate(tensors) if i != position and not (t is tensor and t.is_floating_point())]
    memory = tensor.untyped_storage().data_ptr()
    all_of_them = (*beside, *module.parameters(), *module.buffers())
    return tensor.numel() > 0 and any(t.untyped_storage().data_ptr() == memory for t in all_of_them)
