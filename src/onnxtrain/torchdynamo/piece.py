"""A piece: what Dynamo hands over between two graph breaks, run by the engine that runs modules."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.capture.shared_memory import overlap
from onnxtrain.capture.source_lines import is_users, places_in
from onnxtrain.engine.summary import graph_text, summary
from onnxtrain.errors import CaptureError, ModuleError, OnnxTrainError
from onnxtrain.options import Options
from onnxtrain.ortmodule.describe import explain
from onnxtrain.ortmodule.fallback import FallbackState
from onnxtrain.ortmodule.session import Session
from onnxtrain.ortmodule.sessions import Sessions
from onnxtrain.torchdynamo.inputs import Input, inputs_of
from onnxtrain.torchdynamo.modes import Modes
from onnxtrain.torchdynamo.outside import outputs_of
from onnxtrain.torchdynamo.program import PRIVATE, Program
from onnxtrain.torchdynamo.writes import example, memory, written

_LOG = logging.getLogger(__name__)
_ALIVE: weakref.WeakSet[Piece] = weakref.WeakSet()
_NUMBERS = itertools.count(1)


class Piece:
    """A graph of Dynamo's, captured at its first call and run at each.

    Args:
        graph: the graph.
        examples: what it will be called with.
        options: backend and checks.
    """

    def __init__(self, graph: torch.fx.GraphModule, examples: Sequence[Any], options: Options) -> None:
        whole, self._held = lifted(graph)
        memories = written(whole)
        self.inputs: tuple[Input, ...] = inputs_of(whole, [*examples, *self._held], memories)
        self.place = place_of(whole)
        self.number, self.calls = next(_NUMBERS), 0
        self._outputs = outputs_of(whole)
        self._graph = torch.fx.GraphModule(graph, returning(whole, self._outputs.kept))
        static = options.static_shapes or not any(x.is_free for x in self.inputs)
        ignored = (*options.ignored_attributes, *PRIVATE)
        self.options = dataclasses.replace(options, static_shapes=static, ignored_attributes=ignored)
        self._written = [i for i, x in enumerate(self.inputs) if x.is_written]
        self._computes = bool(self._outputs.kept) or any(
            memory(example(x.node)) in memories for x in self.inputs if x.node
        )
        self._fallback = FallbackState(self.options)
        self._program: Program | None = None
        self._sessions: Sessions | None = None
        self._last: Session | None = None
        _ALIVE.add(self)

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Run a call.

        Raises:
            OnnxTrainError: the graph cannot be captured, or a call cannot run on it.
        """
        self.calls += 1
        values = (*values, *self._held)
        computed = self._compute(values) if self._computes else ()
        nodes = {x.node: value for x, value in zip(self.inputs, values, strict=True) if x.node is not None}
        return self._outputs.values(nodes, computed)

    def _compute(self, values: Sequence[Any]) -> Sequence[Any]:
        """What the graph computes; inputs that the program writes are written."""
        if self._program is None:
            self._program = Program(self._graph, self.inputs, values)
        given = self._program.take(values)
        if self._written:
            self._check_memory(values)
        outputs, contents = self._run(given)
        for position, content in zip(self._written, contents, strict=True):
            _write(values[position], content)
        return outputs

    def _run(self, given: dict[str, Any]) -> Any:
        assert self._program is not None, "it is made first"
        if self._fallback.is_eager:
            return self._program(**given)
        try:
            if self._sessions is None:
                self._sessions = Sessions(self._program, self.options)
            session, result = self._sessions.run((), given)
        except OnnxTrainError as error:
            if not self._fallback.catches(error):
                raise
            return self._program(**given)
        if session is not None and session is not self._last:
            self._use(session)
        return result

    def _use(self, session: Session) -> None:
        self._last = session
        if not session.announced:
            session.announced = True
            _LOG.info("%s runs as a graph\n%s", self.place, summary(session.bound))

    def _check_memory(self, values: Sequence[Any]) -> None:
        """What the program writes into an input, it writes into that one alone.

        Raises:
            CaptureError: another input shares its memory.
        """
        tensors = {i: v for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.layout is torch.strided}
        for position in filter(tensors.__contains__, self._written):
            own = tensors[position]
            others = (i for i, v in tensors.items() if i != position and _is_shared(own, v))
            if (other := next(others, None)) is not None:
                name, beside = self.inputs[position].name, self.inputs[other].name
                raise CaptureError(
                    f"{name} is modified in place and shares memory with {beside}, which is an input too",
                    source=self.place,
                    cure="modify a copy, or call it where neither is an input of a compiled piece",
                )

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether weights of a module are among this piece's."""
        if self._program is None:
            return False
        owned = {id(t) for t in (*module.parameters(), *module.buffers())}
        return any(id(t) in owned for t in (*self._program.parameters(), *self._program.buffers()))

    def explain(self) -> str:
        """Why each graph was captured, how many calls it served, which sizes are free."""
        lines = [self.place]
        if self._fallback.reason is not None:
            lines.append(f"runs in eager PyTorch, because\n{self._fallback.reason}")
        if not self._computes:
            lines.append("nothing to compute: its outputs are inputs and views of inputs")
        lines.append(explain(self._sessions) if self._sessions is not None else "no graph yet")
        return "\n".join(lines)

    @property
    def captures(self) -> int:
        """How many graphs were captured."""
        return 0 if self._sessions is None else len(self._sessions.entries)

    def graph(self, stage: str = "training", form: str = "text") -> str:
        """The graph of the last call: ``"training"``, or ``"captured"``, the optimized forward alone.

        Args:
            stage: which of them.
            form: ``"text"``; ``"dot"``, as Graphviz draws it; ``"mermaid"``, as Markdown pages show it.
        """
        compiled = self._session().bound.latest
        is_trained = stage == "training" and compiled.training is not None
        return graph_text(compiled, "training" if is_trained else "captured", form)

    def source(self, part: str = "forward") -> str:
        """The program that runs for ``"forward"`` or ``"backward"`` of the last call."""
        return self._session().bound.latest.executable.source(part)

    def _session(self) -> Session:
        if self._last is None:
            raise ModuleError("the piece has no graph yet", cure="run one batch first")
        return self._last


def pieces(module: torch.nn.Module | None = None) -> list[Piece]:
    """The pieces there are, in the order in which Dynamo made them.

    Args:
        module: only those with weights of this module.
    """
    found = sorted(_ALIVE, key=lambda piece: piece.number)
    return found if module is None else [piece for piece in found if piece.holds(module)]


def explain_pieces(module: torch.nn.Module | None = None) -> str:
    """What became of compiled code: its pieces, and why each has the graphs that it has.

    Args:
        module: only the pieces with weights of this module.
    """
    found = pieces(module)
    told = [f"piece {number}: {piece.explain()}" for number, piece in enumerate(found, 1)]
    return "\n".join(told) or "no piece yet: nothing that is compiled with the backend onnxtrain was called"


def place_of(graph: torch.fx.Graph) -> str:
    """Where a graph begins, in the function that Dynamo compiles: ``model.py:12``."""
    calls = (node for node in graph.nodes if node.op not in ("placeholder", "output"))
    found = (p for node in calls for p in places_in(node.meta.get("stack_trace") or "") if is_users(p[0]))
    place = next(found, None)
    return "a graph" if place is None else "{}:{}".format(*place)


def forget() -> None:
    """Compiled code is thrown away: ``torch._dynamo.reset`` calls this."""
    _ALIVE.clear()


def lifted(graph: torch.fx.GraphModule) -> tuple[torch.fx.Graph, list[torch.Tensor]]:
    """A copy of a graph whose own tensors (those of an optimizer) are inputs behind the others, and these tensors."""
    made = torch.fx.Graph(graph)  # whose bodies of operators are its attributes
    made.output(made.graph_copy(graph.graph, {}))
    own = [node for node in made.nodes if node.op == "get_attr"]
    named = {node.target: functools.reduce(getattr, node.target.split("."), graph) for node in own}
    held = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    inputs: dict[Any, torch.fx.Node] = {}
    with made.inserting_before(next(node for node in made.nodes if node.op != "placeholder")):
        for name in held:
            inputs[name] = made.placeholder(name.replace(".", "_"))
    for node in own:
        if node.target in inputs:
            inputs[node.target].meta = node.meta
            node.replace_all_uses_with(inputs[node.target])
            made.erase_node(node)
    return made, list(held.values())


def returning(graph: torch.fx.Graph, kept: Sequence[torch.fx.Node]) -> torch.fx.Graph:
    """A copy of a graph that returns these values, and knows of its calls no more than their lines."""
    made = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    made.graph_copy(graph, copies)
    made.output(tuple(copies[node] for node in kept))
    for node in made.nodes:
        node.meta = {name: node.meta[name] for name in ("stack_trace",) if name in node.meta}
    return made


def _is_shared(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have elements in one memory."""
    is_one = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return is_one and first.numel() > 0 < second.numel() and overlap(first, second)


def _write(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Put new content into an input, as eager PyTorch leaves it: gradients flow to what it was computed of."""
    flows = content.requires_grad and not (tensor.is_leaf and tensor.requires_grad)
    modes = Modes(None if flows else False, True if tensor.is_inference() else None)
    with modes.entered():
        tensor.copy_(content)
