"""A graph under construction of which every value is known: a node that does not compute is not added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from fuzz.units import Rejected, Unit, Value, _outcome

LARGEST, HIGHEST = 3000, 30.0  # elements of a value, and how large they may be


class Program:
    """Nodes, the values they have, and where these come from.

    Args:
        rng: all choices are made by it.
        opset: of ONNX.

    Attributes:
        values: content of every value.
        initializers: names of those that are initializers; ``weights`` are those that may be trained.
        inputs: names of those that are the user's.
        tried: calls that did not compute, by operator.
        drawn: names of random numbers, which nothing else reads: they are others in each run.
    """

    def __init__(self, rng: np.random.Generator, opset: int) -> None:
        self.rng, self.opset = rng, opset
        self.imports = [helper.make_opsetid("", opset)]
        self.nodes: list[onnx.NodeProto] = []
        self.values: dict[str, Value] = {}
        self.initializers: list[str] = []
        self.weights: list[str] = []
        self.inputs: list[str] = []
        self.tried: list[str] = []
        self.drawn: set[str] = set()
        self._count = 0

    def chance(self, share: float) -> bool:
        """True in this share of cases."""
        return bool(self.rng.random() < share)

    def choose(self, of: Sequence[Any]) -> Any:
        """One of them."""
        return of[int(self.rng.integers(len(of)))]

    def number(self, low: int, high: int) -> int:
        """A whole number of low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def name(self, kind: str) -> str:
        """A name that is not used yet."""
        self._count += 1
        return f"{kind}{self._count}"

    def constant(self, content: Any, kind: str = "c") -> str:
        """A constant: an initializer, or a Constant node."""
        array = np.asarray(content)
        if self.chance(0.25) and array.dtype.kind not in "OUS":
            return self.emit("Constant", [], value=onnx.numpy_helper.from_array(array))[0]
        return self._held(array, kind)

    def weight(self, content: Any) -> str:
        """An initializer that may be trained."""
        made = self._held(np.asarray(content, np.float32), "w")
        self.weights.append(made)
        return made

    def input(self, content: Any) -> str:
        """An input of the graph."""
        made = self.name("x")
        self.values[made] = np.asarray(content)
        self.inputs.append(made)
        return made

    def _held(self, array: np.ndarray, kind: str) -> str:
        made = self.name(kind)
        self.values[made] = array
        self.initializers.append(made)
        return made

    def random(self, *shape: int) -> np.ndarray:
        """Small random numbers."""
        return self.rng.uniform(-1, 1, shape).astype(np.float32)

    def emit(
        self,
        op: str,
        operands: Sequence[str | None],
        outputs: int = 1,
        attributes: Sequence[onnx.AttributeProto] = (),
        **more: Any,
    ) -> list[str]:
        """Add a node; the names of its outputs.

        Raises:
            Rejected: onnxruntime does not compute it, or what comes out is too large or no number.
        """
        names = [n or "" for n in operands]
        while names and not names[-1]:
            names.pop()
        made = [self.name("v") for _ in range(outputs)]
        node = helper.make_node(op, names, made, name=self.name("n") if self.chance(0.7) else "", **more)
        node.attribute.extend(attributes)
        self.add(node)
        return made

    def add(self, node: onnx.NodeProto) -> None:
        """Add a node that is made already; errors are those of ``emit``."""
        feeds = {n: self.values[n] for n in dict.fromkeys(node.input) if n}
        constants = {n: feeds.pop(n) for n in list(feeds) if n in self.initializers and _is_setting(feeds[n])}
        try:
            _check_call(node, self.imports)
            unit = Unit(node, self.imports, (), constants, feeds)
            made = _outcome(unit.session(False), feeds)
            for value in made:
                _check(value)
        except Rejected:
            self.tried.append(node.op_type)
            raise
        self.nodes.append(node)
        self.values |= zip(unit.outputs, made, strict=True)

    def attempt(self, write: Callable[[], Any]) -> bool:
        """Run what adds nodes; where it is rejected nothing is added."""
        nodes, lists = len(self.nodes), [list(m) for m in (self.initializers, self.weights, self.inputs)]
        try:
            write()
            return True
        except Rejected:
            for node in self.nodes[nodes:]:
                for name in node.output:
                    self.values.pop(name, None)
            del self.nodes[nodes:]
            for name in {*self.initializers, *self.inputs} - {*lists[0], *lists[2]}:
                self.values.pop(name, None)
            self.initializers, self.weights, self.inputs = lists
            return False

    def array(self, name: str) -> np.ndarray:
        """The content of a value."""
        return self.values[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a value."""
        return self.values[name].shape

    def floats(self) -> list[str]:
        """Values in float32 that are the same in each run."""
        return [n for n, v in self._steady() if v.dtype == np.float32]

    def _steady(self) -> list[tuple[str, np.ndarray]]:
        return [(n, v) for n, v in self.values.items() if isinstance(v, np.ndarray) and n not in self.drawn]

    def numbers(self) -> list[str]:
        """Values of any type of number that nodes have made."""
        made = {o for n in self.nodes for o in n.output}
        return [n for n, v in self._steady() if n in made and v.dtype.kind in "fib"]

    def made(self) -> list[str]:
        """Values in float32 that nodes have made, and inputs."""
        held = {*self.initializers}
        constants = {n.output[0] for n in self.nodes if n.op_type == "Constant"}
        return [n for n in self.floats() if n not in held and n not in constants]

    def pick(self, where: Callable[[np.ndarray], bool] = lambda array: True) -> str:
        """A value in float32, one of the last more often than of the first.

        Raises:
            Rejected: there is none such.
        """
        known = [n for n in self.made() if where(self.values[n])]
        if not known:
            raise Rejected("no such value")
        recent = known[-4:] if self.chance(0.6) else known
        return self.choose(recent)


def _is_setting(value: Value) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind != "f"


def _check_call(node: onnx.NodeProto, imports: Sequence[onnx.OperatorSetIdProto]) -> None:
    context = onnx.checker.C.CheckerContext()
    context.ir_version, context.opset_imports = 10, {o.domain: o.version for o in imports}
    try:
        onnx.checker.check_node(node, context)
    except onnx.checker.ValidationError as error:
        raise Rejected(str(error)) from error


def _check(value: Value) -> None:
    if not isinstance(value, np.ndarray):
        return
    if not 0 < value.size <= LARGEST:
        raise Rejected("empty or large")
    if value.dtype.kind == "f" and not (np.isfinite(value).all() and np.abs(value).max() <= HIGHEST):
        raise Rejected("not finite or large")
