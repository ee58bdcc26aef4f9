"""What the order of a step's operators could still gain: ``python -m benchmarks.order``.

For each run of the preset ``memory``: the peak as it is, and a number of bytes below which no order comes. While an
operator runs, all is in use that one before it made and one after it reads; the least of that, over every way to put
the other operators before or after it, is a minimum cut. Operators run once, on the same operands, whichever their
order: what is computed again is none of this.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import networkx as nx
import onnx_ir as ir
import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from benchmarks.workloads import PRESETS, WORKLOADS, Run, batches
from onnxtrain import Options, ORTModule
from onnxtrain.engine.memory_report import Planned, planned
from onnxtrain.execute import Footprint
from onnxtrain.ir import shapes
from onnxtrain.ir.concrete import bytes_of
from onnxtrain.ir.graphs import TrainingGraph, is_backward
from onnxtrain.ir.traits import Trait, traits_of

_ALWAYS = 2**60  # bytes: what may not be cut
_MIB = 2**20


@dataclasses.dataclass
class Storage:
    """Memory that one operator makes.

    Args:
        size: bytes.
        maker: the operator.
        readers: the operators that read it or a view of it.
        kept: whether it outlives the step: outputs and gradients.
    """

    size: int
    maker: int
    readers: set[int]
    kept: bool


class Step:
    """The operators of a step, each a number in their order, and what has to be before what.

    Args:
        training: the step's graph.
        sizes: of named dimensions.
        footprint: what was seen of it: which operators run, which views are copies, and what kernels take for a while.
    """

    def __init__(self, training: TrainingGraph, sizes: Mapping[str, int], footprint: Footprint) -> None:
        self._sizes = sizes
        seen = _seen(footprint)
        nodes = _running(training)
        self.border = len(nodes)  # between forward and backward
        self.count = self.border + 1
        owners = self._owners(nodes, seen)
        kept = _kept(training)
        makers = {owners.get(v, v): i for i, n in enumerate(nodes) for v in n.outputs if v not in owners}
        held = {owners.get(v, v) for v in training.model.graph.outputs if v.name in kept}
        self.storages = {v: Storage(self._bytes(v), i, set(), v in held) for v, i in makers.items()}
        self.before: list[set[int]] = [set() for _ in range(self.count)]
        made = {v: i for i, n in enumerate(nodes) for v in n.outputs}
        for index, node in enumerate(nodes):
            for value in node.inputs:
                if (
                    value is not None
                    and shapes.data_of(value) is None
                    and (owner := owners.get(value, value)) in makers
                ):
                    self.storages[owner].readers.add(index)
                    self.before[index].add(made[value])
        self._divide(training, nodes, made)
        self.after: list[set[int]] = [set() for _ in range(self.count)]
        for index, needs in enumerate(self.before):
            for other in needs:
                self.after[other].add(index)
        self.made = [sum(s.size for s in self.storages.values() if s.maker == i) for i in range(self.count)]
        self.extra, self.overwrites = [0] * self.count, [False] * self.count
        for index, node in enumerate(nodes):
            before, most, rest = seen.get(_name(node, seen), (0, 0, 0))
            self.extra[index] = max(0, most - max(before + self.made[index], rest))
            self.overwrites[index] = Trait.ELEMENTWISE in traits_of(node) or most - before < self.made[index]

    def _owners(self, nodes: Iterable[ir.Node], seen: Mapping[str, tuple[int, int, int]]) -> dict[ir.Value, ir.Value]:
        """For each value that is a view, and not a copy after all, the value whose memory it has."""
        found: dict[ir.Value, ir.Value] = {}
        for node in nodes:
            source = node.inputs[0] if node.inputs else None
            before, most, _ = seen.get(name := _name(node, seen), (0, 0, 0))
            may_share = source is not None and (
                Trait.VIEW in traits_of(node) or not name
            )  # unseen: gives what it reads
            if may_share and most - before <= self._bytes(node.outputs[0]) // 2:
                found |= dict.fromkeys(node.outputs, found.get(source, source))
        return found

    def _divide(self, training: TrainingGraph, nodes: Sequence[ir.Node], made: Mapping[ir.Value, int]) -> None:
        """Let the border come after all that outputs need, and before all that needs their gradients."""
        shown = {*training.signature.outputs, *training.signature.buffer_updates.values()}
        needs, seeds = self.before[self.border], {*training.output_gradients.values()}
        needs |= {made[v] for v in training.model.graph.outputs if v.name in shown and v in made}
        needs |= {i for i, n in enumerate(nodes) if not is_backward(n) and _stays(n)}
        for index, node in enumerate(nodes):
            reads_seed = any(v is not None and v.name in seeds for v in node.inputs)
            if reads_seed or (is_backward(node) and _stays(node)):
                self.before[index].add(self.border)

    def _bytes(self, value: ir.Value) -> int:
        return 0 if shapes.data_of(value) is not None else bytes_of(value, self._sizes) or 0

    def order(self) -> list[int]:
        """The order as it is."""
        backward = min((i for i in range(self.border) if self.border in self._all(i, self.before)), default=self.border)
        return [*range(backward), self.border, *range(backward, self.border)]

    def peak(self, order: Sequence[int]) -> int:
        """Most bytes in use at once where the operators run in an order."""
        done: set[int] = set()
        most = 0
        for index in order:
            most = max(most, self.needed(index, done))
            done.add(index)
        return most

    def needed(self, index: int, done: set[int]) -> int:
        """Bytes in use while an operator runs after some others."""
        now, later = self.live(done), {*done, index}
        if self.overwrites[index]:  # it may write over what it reads
            return max(now, self.live(later)) + self.extra[index]
        return now + self.made[index] + self.extra[index]

    def live(self, done: set[int]) -> int:
        """Bytes in use after some operators: what one of them made and another one reads."""
        return sum(s.size for s in self.storages.values() if s.maker in done and (s.kept or not s.readers <= done))

    def least(self, most: int = 0) -> int:
        """Bytes below which no order comes: the largest of what single operators need at least.

        Args:
            most: what is known to be needed; operators that need no more are passed over.
        """
        order, found = self.order(), most
        in_use = {index: self.needed(index, {*order[:place]}) for place, index in enumerate(order)}
        for index in sorted(in_use, key=lambda i: -in_use[i]):
            if in_use[index] <= found:
                break
            found = max(found, self.least_while(index))
        return found

    def least_while(self, index: int) -> int:
        """Bytes that are in use at least while an operator runs, in any order."""
        before, after = self._all(index, self.before), self._all(index, self.after)
        new = 0 if self.overwrites[index] else self.made[index]
        cuts = (self._cut(before, {*after, index}) + new, self._cut({*before, index}, after))
        return max(cuts) + self.extra[index]

    def _all(self, index: int, beside: Sequence[set[int]]) -> set[int]:
        found, waiting = set[int](), [index]
        while waiting:
            new = beside[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    def _cut(self, before: set[int], after: set[int]) -> int:
        """The least that is in use between operators of which some have run and some have not."""
        graph = nx.DiGraph()
        graph.add_nodes_from(("before", "after"))

        def place(index: int) -> Any:
            return "before" if index in before else "after" if index in after else index

        for index, needs in enumerate(self.before):
            graph.add_edges_from(((place(index), place(other)) for other in needs), capacity=_ALWAYS)
        for number, storage in enumerate(s for s in self.storages.values() if s.size):
            graph.add_edge(place(storage.maker), ("storage", number), capacity=storage.size)
            readers = {place(r) for r in storage.readers} | ({"after"} if storage.kept else set())
            graph.add_edges_from(((("storage", number), reader) for reader in readers), capacity=_ALWAYS)
        graph.remove_edges_from(list(nx.selfloop_edges(graph)))
        return nx.minimum_cut_value(graph, "before", "after", flow_func=nx.algorithms.flow.shortest_augmenting_path)


def _seen(footprint: Footprint) -> dict[str, tuple[int, int, int]]:
    """By the value that a line makes, bytes in use before it, at most, and after it."""
    found, before = dict[str, tuple[int, int, int]](), 0
    for use in footprint.uses:
        if use.value:
            found[use.value] = before, use.most, use.rest
        before = use.rest
    return found


def _name(node: ir.Node, seen: Container[str]) -> str:
    """The name by which a node was seen; empty where it was not."""
    return next((str(v.name) for v in node.outputs if v.name in seen), "")


def _running(training: TrainingGraph) -> list[ir.Node]:
    """The nodes whose results are read, but for sizes, which are numbers."""
    kept = _kept(training)
    read = {v for v in training.model.graph.outputs if v.name in kept}
    found = []
    for node in reversed(list(training.model.graph)):
        if node.op_type != "Constant" and any(v in read for v in node.outputs):
            found.append(node)
            read |= {v for v in node.inputs if v is not None and shapes.data_of(v) is None}
    return found[::-1]


def _stays(node: ir.Node) -> bool:
    return bool((Trait.EFFECT | Trait.RANDOM) & traits_of(node))


def _kept(training: TrainingGraph) -> set[str]:
    signature = training.signature
    return {*signature.outputs, *signature.buffer_updates.values(), *training.gradients.values()}


def plan_of(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], options: Options | None = None) -> Planned:
    """How a step of a module on a batch is planned."""
    session, tensors = ORTModule(model, options=options)._graphs().session_of((), dict(batch))
    return planned(session.bound, tensors)


def step_of(plan: Planned) -> Step:
    """The operators of a planned step."""
    training = plan.fit.compiled.training
    assert training is not None
    return Step(training, plan.sizes, plan.footprint)


def _planned_run(run: Run) -> Planned:
    workload = WORKLOADS[run.workload]
    torch.manual_seed(0)
    model = workload.build(run.size).train()
    return plan_of(model, batches(workload, run.size, 1, 0, grouped=False)[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of runs."""
    known = PRESETS["memory"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.order", description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{', '.join(known)}; default: all")
    given = parser.parse_args(arguments)
    if unknown := set(given.runs) - set(known):
        parser.error(f"unknown runs {', '.join(sorted(unknown))}")
    logging.set_verbosity_error()
    table = Table("", "peak MiB", "least of any order MiB", "an order may gain")
    for name in given.runs or known:
        plan = _planned_run(known[name])
        peak, least = plan.footprint.peak, step_of(plan).least()
        table.add_row(name, f"{peak / _MIB:.1f}", f"{least / _MIB:.1f}", f"{1 - least / peak:.1%}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
