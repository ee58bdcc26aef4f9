"""Whether a call is on a path: what its inputs alone tell before the path's graph runs, all else right after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxtrain.capture import Look, Path, content_of, same
from onnxtrain.compiler import Compiled
from onnxtrain.engine.tensors import as_torch
from onnxtrain.errors import BackendError
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.optimize.rows import early_values, with_outputs

ANY = object()  # the answer of a look that is not known yet


class MissedError(Exception):
    """A graph's forward pass saw something else than its path says; nothing of it was given to anybody.

    Attributes:
        found: what it saw, up to the first difference; nothing where it stopped for another reason.
    """

    def __init__(self, found: tuple[Look, ...] = ()) -> None:
        super().__init__("the forward pass saw something else in a tensor than its path says")
        self.found = found


class PathCheck:
    """Compares what a call sees in tensors with what a path says.

    Args:
        graph: the path's graph.
        path: what a call on it sees.
        compile: compiles a graph without gradients.
    """

    def __init__(self, graph: ForwardGraph, path: Path, compile: Callable[[ForwardGraph], Compiled]) -> None:
        self._path, self._names = path, graph.signature.outputs
        early = {str(v.name) for v in early_values(graph, frozenset())} if self._path else set()
        early &= {self._names[p] for p in self._path.outputs}
        self._early = [name for name in self._names if name in early]
        self._compiled: Compiled | None = None
        if early:
            unchanged = dataclasses.replace(graph.signature, buffer_updates={})
            try:
                self._compiled = compile(with_outputs(ForwardGraph(graph.model, unchanged), early))
            except BackendError:  # it runs within the whole, or says there why not
                self._early = []

    def before(self, inputs: Sequence[Any], shapes: Sequence[Sequence[int]]) -> None:
        """Compare what is known before the graph runs.

        Args:
            inputs: all inputs of the graph.
            shapes: sizes of the call's tensors.

        Raises:
            MissedError: the call is on another path.
        """
        if self._compiled is not None:
            made, _ = self._compiled.executable.forward(list(inputs))
            late = [dataclasses.replace(look, answer=ANY) for look in self._path.looks]
            self._compare(dict(zip(self._early, made, strict=False)), shapes, late)

    def after(self, outputs: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> None:
        """Compare all of a forward pass that ``before`` did not.

        Args:
            outputs: the graph's outputs by name.
            shapes: sizes of the call's tensors.

        Raises:
            MissedError: the call is on another path.
        """
        asked = {self._names[p] for p in self._path.asked}
        known = set(self._early) - (asked if asked - set(self._early) else set())
        rest = {name: value for name, value in outputs.items() if name not in known}
        self._compare(rest, shapes, self._path.looks)

    def _compare(self, outputs: Mapping[str, Any], shapes: Sequence[Sequence[int]], others: Sequence[Look]) -> None:
        """Compare looks at these outputs; of the others there is a look each, as far as it is known."""
        found = []
        for look, position, other in zip(self._path.looks, self._path.seen, others, strict=True):
            if position is None or (name := self._names[position]) not in outputs:
                found.append(look if position is None else other)
                continue
            answer = content_of(as_torch(outputs[name]))
            found.append(dataclasses.replace(look, answer=answer))
            if not same(answer, look.answer):
                raise MissedError(tuple(found))
        asked = [self._names[p] for p in self._path.asked]
        known = asked and all(name in outputs for name in asked)
        if known and not self._path.conditions.hold([content_of(as_torch(outputs[n])) for n in asked], shapes):
            raise MissedError(tuple(found))
