"""What a backend is, and what it makes of a plan."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import BackendError
from onnxtrain.ir.graphs import DOMAIN, Plan, describe, source_of
from onnxtrain.options import Options


@dataclasses.dataclass(frozen=True)
class Use:
    """Memory in use while a line of a program runs.

    Args:
        part: ``"forward"`` or ``"backward"``.
        line: the line.
        value: name of the first value that it makes, empty where there is none.
        most: bytes in use at once at most while it ran.
        rest: bytes in use after it.
    """

    part: str
    line: str
    value: str
    most: int
    rest: int


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The memory that a step has in use beside its inputs: what it computes, saves and hands over, and workspace.

    Args:
        uses: of the lines of the programs, in order.
        holders: for each tensor in use at the peak the line that made it and its bytes, the largest first.
    """

    uses: tuple[Use, ...]
    holders: tuple[tuple[str, int], ...]

    @property
    def peak(self) -> int:
        """Most bytes in use at once."""
        return max((use.most for use in self.uses), default=0)

    def beside(self, size: int) -> Footprint:
        """The same with so many bytes more all the time, which the caller holds."""
        more = [dataclasses.replace(use, most=use.most + size, rest=use.rest + size) for use in self.uses]
        held = (("kept to run a step again", size),) if size else ()
        return Footprint(tuple(more), (*self.holders, *held))

    @property
    def saved(self) -> int:
        """Bytes in use between forward and backward: outputs and saved values."""
        return next((use.rest for use in reversed(self.uses) if use.part == "forward"), 0)


@dataclasses.dataclass(frozen=True)
class Timing:
    """What a line of a program cost when it ran.

    Args:
        part: ``"forward"`` or ``"backward"``.
        line: the line.
        operator: the one that it calls.
        value: name of the first value that it makes, empty where there is none.
        seconds: on the clock, without what lines inside of it took (the body of a loop).
        calls: how often it ran.
        read: bytes of its operands, in all its calls.
        written: bytes of what it made; a view of a tensor reads and writes nothing.
    """

    part: str
    line: str
    operator: str
    value: str
    seconds: float
    calls: int
    read: int
    written: int


class Executable(abc.ABC):
    """A plan compiled by one backend.

    Tensors are whatever the backend takes without copying: ``torch.Tensor`` for the torch backend, any
    object with ``__dlpack__`` for onnxruntime, numpy arrays for the reference.
    """

    has_segments: bool = False  # whether ``walk`` gives gradients segment by segment

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # inputs whose gradients ``walk`` adds to what ``made`` has at their places, and these places
        self.added: Mapping[str, int] = {}

    @abc.abstractmethod
    def forward(self, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        """Run the forward pass.

        Args:
            inputs: tensors in the order of ``plan.signature.inputs``.

        Returns:
            The user's outputs and then the buffer updates, in the order of the signature; and the saved values
            that ``backward`` takes (opaque, may be used once).
        """

    @abc.abstractmethod
    def walk(self, saved: Any, output_gradients: list[Any], made: list[Any]) -> Iterator[None]:
        """Run the backward pass: one segment of the plan at each step of the iterator, or all at the first one.

        Args:
            saved: what ``forward`` returned; its memory is freed as the pass goes on.
            output_gradients: gradients in the order of ``plan.output_gradients``; they are taken out of the list.
            made: receives the gradients of a segment at its end, in the order of ``plan.gradients``. To a tensor at the
                place of an input of ``added`` the gradient may be added; then it stays there.
        """

    def backward(self, saved: Any, output_gradients: Sequence[Any]) -> list[Any]:
        """Run the whole backward pass: gradients in the order of ``plan.gradients``.

        Args:
            saved: what ``forward`` returned.
            output_gradients: gradients in the order of ``plan.output_gradients``.
        """
        made: list[Any] = [None] * len(self.plan.gradients)
        for _ in self.walk(saved, list(output_gradients), made):
            pass
        return made

    def footprint(self, inputs: Sequence[Any]) -> Footprint:
        """The memory of a step on inputs like these, which is not run.

        Args:
            inputs: tensors in the order of ``plan.signature.inputs``; of meta tensors the sizes count.

        Raises:
            BackendError: the backend cannot tell it.
        """
        raise BackendError(
            f"{type(self).__name__.removesuffix('Executable')} cannot tell what memory a step needs",
            cure="use backend='torch'",
        )

    def timings(self, inputs: Sequence[Any]) -> list[Timing]:
        """Run a step with a clock at every operator: what its lines cost, forward before backward.

        Args:
            inputs: tensors in the order of ``plan.signature.inputs``. The gradient of each output is one.

        Raises:
            BackendError: the backend cannot tell.
        """
        raise BackendError(
            f"{type(self).__name__.removesuffix('Executable')} cannot tell what its operators cost",
            cure="use backend='torch'",
        )

    def told(self) -> list[str]:
        """What else there is to say of how it runs, a line each."""
        return []

    def source(self, part: str) -> str:
        """The program of ``"forward"`` or ``"backward"`` as text; backends without source print the graph."""
        from onnxtrain.ir.printer import to_text

        model = self.plan.forward if part == "forward" else self.plan.backward
        return to_text(model) if model is not None else ""


class Backend(abc.ABC):
    """Compiles plans."""

    name: str
    runs_aten: bool = False  # whether it runs operators of torch by name
    gathers: bool = False  # whether its programs gather parameters that are in shards

    def runs(self, node: ir.Node) -> bool:
        """Whether the backend has the operator of a node."""
        return True

    def draws_again(self, device: str) -> bool:
        """Whether it runs ``RandomState`` and ``DropoutMask`` there, which draw a mask a second time."""
        return False

    def unsupported(self, nodes: Sequence[ir.Node]) -> list[BackendError]:
        """One error for each node whose operator the backend does not have."""
        return [_refusal(self.name, node) for node in nodes if not self.runs(node)]

    def compiled(self, plan: Plan, device: str, options: Options) -> Executable:
        """``compile`` of a plan that may have shards.

        Raises:
            BackendError: it has, and the backend gathers none.
        """
        if plan.gathering is not None and not self.gathers:
            raise BackendError(f"the {self.name} backend gathers no parameters", cure="use the torch backend")
        return self.compile(plan, device, options)

    @abc.abstractmethod
    def compile(self, plan: Plan, device: str = "cpu", options: Options | None = None) -> Executable:
        """An executable for the plan on a device named as in torch: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.

        Of the options ``deterministic`` and ``conv_algo_search`` concern backends.

        Raises:
            BackendError: the plan has an operator that the backend cannot run; the node is named.
        """


def _refusal(backend: str, node: ir.Node) -> BackendError:
    name = f"the operator {node.op_type}"
    for attribute, kind in (("operator", "ATen operator"), ("func_name", "torch.autograd.Function")):
        if node.domain == DOMAIN and attribute in node.attributes:
            name = f"the {kind} {node.attributes[attribute].value}"
    others = "use backend='torch'" if backend != "torch" else f"give it a lowering: @lowering({node.op_type!r})"
    return BackendError(
        f"the {backend} backend cannot run {name}", node=describe(node), source=source_of(node), cure=others
    )
