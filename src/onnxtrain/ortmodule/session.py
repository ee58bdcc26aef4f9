"""One captured call of a module, bound to the module's own tensors."""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture import (
    Answers,
    Captured,
    Carried,
    Kind,
    Numbers,
    Part,
    Path,
    at,
    change,
    copies,
    device_of,
    leave,
    write_back,
)
from onnxtrain.compiler import Report, capture_module
from onnxtrain.engine.bound import BoundGraph
from onnxtrain.engine.step import run
from onnxtrain.engine.tensors import Owned
from onnxtrain.ir.graphs import Signature
from onnxtrain.options import Options
from onnxtrain.ortmodule.checks import is_gathered
from onnxtrain.ortmodule.contents import Contents
from onnxtrain.ortmodule.gathering_order import compare
from onnxtrain.ortmodule.guards import Call
from onnxtrain.ortmodule.shards import shards_of, whole
from onnxtrain.ortmodule.size_checks import size_check
from onnxtrain.ortmodule.verification import Verification


class Session:
    """A captured call of a module and the graph that runs it.

    Args:
        module: the user's module; its parameters and buffers are used in place.
        args: positional arguments of the first call.
        kwargs: keyword arguments of the first call.
        options: backend and checks.
        numbers: for a structure of arguments, the positions of numbers that are captured as tensors.
        answers: what the call saw in tensors, where it was rehearsed.

    Raises:
        CaptureError: the module cannot be captured; names the source line.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        options: Options,
        numbers: Numbers | None = None,
        answers: Answers | None = None,
    ) -> None:
        chosen = dataclasses.replace(
            options,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            cache_casts=options.cache_casts and not is_gathered(module),
        )
        report = Report()
        self.module = module
        self.announced = False  # whether the user was told what this graph does
        self.was_training = module.training
        self._given: list[weakref.ref[torch.Tensor]] | None = None  # the tensors of the latest call
        with whole(module):
            self.captured: Captured = capture_module(module, args, kwargs, chosen, report, numbers, answers)
            self.fits = size_check(self.captured, module)
        graph = self.captured.graph
        given = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        device = device_of(module, given)
        owned = ModuleTensors(module, graph.signature, self.captured.borrowed, device)
        path, state = self.captured.path, [*self._state()]
        self.bound = BoundGraph(graph, owned, chosen, report, path, self.place_of, self._compare, state)

    def _state(self) -> Iterator[str]:
        """The outputs that are left in buffers, and in attributes that code reads before it sets them."""
        captured = self.captured
        if not captured.leaves:
            return
        _, left, _ = captured.outputs.restore([*map(_Position, range(captured.outputs.tensors))])
        for place, value in zip(captured.left, left, strict=True):
            attribute = type(place.owner(self.module)), place.name
            if place.kind is not Kind.EXTEND and attribute not in captured.unread:
                positions = (x for x in pytree.tree_leaves(value) if isinstance(x, _Position))
                yield from (captured.graph.signature.outputs[captured.sources[p]] for p in positions)

    def agree(self, call: int) -> None:
        """Compare with what other ranks captured for a call of this number, where parameters are gathered together.

        Raises:
            OnnxTrainError: they gather them in another order.
        """
        gathering = self.bound.owned.gathering(self.captured.graph.model.graph)
        if gathering is not None:
            compare(self.module, gathering, call)

    def run(self, tensors: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call returns; what it leaves on the module, and in what it was given, is put there.

        Args:
            tensors: those of the arguments, in order.
            args: positional arguments.
            kwargs: keyword arguments.

        Raises:
            MissedError: the call is on another path.
            CaptureError: it changes an input in place that shares memory with another tensor.
        """
        captured, arguments, given = self.captured, (tuple(args), kwargs), tensors
        self._given = [*map(weakref.ref, tensors)]
        if captured.rewritten:
            given = copies(captured.rewritten, tensors, captured.graph.signature.user_inputs, self.module)
        outputs = run(self.bound, given)
        write_back(captured.rewritten, tensors, outputs)
        made = captured.outputs.restore([outputs[i] for i in captured.sources], functools.partial(at, arguments))
        if not captured.leaves:
            return made
        result, left, written = made
        leave(self.module, captured.left, left)
        change(arguments, captured.given, written)
        return result

    @property
    def latest(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of the latest call; None where there was none, or where its tensors are gone."""
        tensors = [None] if self._given is None else [reference() for reference in self._given]
        held = [tensor for tensor in tensors if tensor is not None]
        return self.captured.inputs.restore(held) if len(held) == len(tensors) else None

    def place_of(self, output: str) -> str:
        """Where an output of the graph is in what the module returns: ``logits``, ``hidden_states[1]``."""
        schema, left, given = self.captured.outputs, self.captured.left, self.captured.given
        index = self.captured.graph.signature.outputs.index(output)
        positions = schema.restore([_Position(i) for i in range(schema.tensors)])
        for path, position in pytree.tree_flatten_with_path(positions)[0]:
            if isinstance(position, _Position) and self.captured.sources[position] == index:
                if self.captured.leaves and path[0].idx:
                    return (left, given)[path[0].idx - 1][path[1].idx].label
                path = path[1:] if self.captured.leaves else path
                return pytree.keystr(path).replace("['", "", 1).replace("']", "", 1).lstrip(".") or output
        return output

    def _compare(self, tensors: Sequence[torch.Tensor]) -> Verification:
        return Verification(self.module, self.captured, tensors)


class _Position(int):
    """Which of the tensors stands somewhere, and no number that the module returns."""


class ModuleTensors(Owned):
    """The parameters and buffers that a module has now, and what its graph borrows.

    Args:
        module: the module.
        signature: of a graph, which names them as the module does.
        borrowed: the tensors of others, by the names that it has for them.
        device: where the module is called, where it has no tensors itself.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        signature: Signature,
        borrowed: Mapping[str, torch.Tensor | Carried | Part],
        device: torch.device,
    ) -> None:
        self._module, self._called_on = module, device
        lent = _Lent(module, borrowed)
        self._lender = types.SimpleNamespace(_parameters=lent, _buffers=lent)
        self.shards = shards_of(module)
        self._parameters = [self._place(name) for name in signature.parameters]
        self._buffers = [self._place(name) for name in signature.buffers]
        self._updated = [self._place(name) for name in signature.buffer_updates]

    @property
    def device(self) -> str:
        """That of the first parameter or buffer."""
        return str(device_of(self._module, otherwise=self._called_on))

    def now(self) -> list[torch.Tensor]:
        """Those that the module has now."""
        parameters = [m._parameters.get(leaf) for m, leaf in self._parameters]  # DeepSpeed gathers what is in brackets
        if self.shards is not None:
            parameters = self.shards.gathered(parameters)
        return [*parameters, *(_table(m, leaf)[leaf] for m, leaf in self._buffers)]

    def update(self, contents: Sequence[torch.Tensor]) -> None:
        """Write running statistics and the like into the module's own buffers, and parameters that are not trained."""
        with torch.no_grad():
            for (owner, leaf), content in zip(self._updated, contents, strict=True):
                _table(owner, leaf)[leaf].copy_(content)

    def _place(self, name: str) -> tuple[Any, str]:
        if name in self._lender._parameters:
            return self._lender, name
        path, _, leaf = name.rpartition(".")
        return self._module.get_submodule(path), leaf


class _Lent(Mapping[str, torch.Tensor]):
    """The tensors that a graph borrows, as they are now."""

    def __init__(self, module: torch.nn.Module, borrowed: Mapping[str, torch.Tensor | Carried | Part]) -> None:
        self._module, self._borrowed = module, borrowed

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._borrowed[name]
        return found if isinstance(found, torch.Tensor) else found.of(self._module)

    def __iter__(self) -> Iterator[str]:
        return iter(self._borrowed)

    def __len__(self) -> int:
        return len(self._borrowed)


def _table(owner: Any, leaf: str) -> Mapping[str, Any]:
    """Where a module has something that its forward pass changes."""
    return owner._buffers if leaf in owner._buffers else owner._parameters


@dataclasses.dataclass
class Entry:
    """One graph: the call it was captured for, the number of that call, why, what it read, how many calls it served."""

    call: Call
    session: Session
    first: int
    reasons: list[str]
    contents: Contents
    served: int = 0

    @property
    def path(self) -> Path:
        """What the graph stands on that is seen in tensors."""
        return self.session.captured.path

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it can serve a call of these inputs now."""
        return self.session.fits(tensors) and self.contents.are_the_same()
