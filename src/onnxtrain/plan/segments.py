"""Where the backward pass can be cut, so that gradients are handed over while the rest of it still runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import Segment

_FEWEST = 4  # nodes of a segment


def segments_of(backward: ir.Model, seeds: Container[str], gradients: Mapping[str, str]) -> tuple[Segment, ...]:
    """The backward pass cut wherever few of its values are alive: in a network of layers, once or twice for each.

    Args:
        backward: the model, its nodes in the order in which they run.
        seeds: names of its inputs that are gradients of outputs.
        gradients: name of a parameter or user input to the output that is its gradient.
    """
    nodes, results = list(backward.graph), {v.name: v for v in backward.graph.outputs}
    last = {v: i for i, n in enumerate(nodes) for v in (*n.outputs, *n.inputs) if v is not None}
    read = {v.name: last.get(v, 0) for v in backward.graph.inputs}
    made = {name: results[gradient] for name, gradient in gradients.items()}
    ready = {n: max(last.get(v, 0), read.get(n, 0)) for n, v in made.items()}  # its parameter is no longer read
    last |= {v: ready[name] for name, v in made.items()}
    given = [v for v in backward.graph.inputs if v in last and str(v.name) in seeds]
    ends = [*_cuts(_alive(nodes, given, last), sorted({*ready.values()})), max(len(nodes) - 1, 0)]
    parts = itertools.pairwise([-1, *ends])
    return tuple(Segment(tuple(n for n, at in ready.items() if a < at <= b), b - a) for a, b in parts)


def reads_in_parts(graph: ir.Graph) -> list[list[str]]:
    """The inputs of a forward graph in the order in which nodes read them, cut wherever few values are alive.

    Args:
        graph: the graph; inputs that no node reads are in the last part.
    """
    nodes, names = list(graph), {v: str(v.name) for v in graph.inputs}
    last = {v: i for i, n in enumerate(nodes) for v in (*n.outputs, *n.inputs) if v is not None}
    last |= dict.fromkeys((v for v in graph.outputs if v in last), len(nodes) - 1)
    place = {names[v]: i for i, n in reversed([*enumerate(nodes)]) for v in n.inputs if v in names}
    place |= {name: max(len(nodes) - 1, 0) for name in names.values() if name not in place}
    ends = [*_cuts(_alive(nodes, (), last), sorted({*place.values()})), len(nodes)]
    ordered = sorted(place, key=place.__getitem__)
    parts = [[n for n in ordered if a < place[n] <= b] for a, b in itertools.pairwise([-1, *ends])]
    return [part for part in parts if part]


def _cuts(alive: Sequence[int], ready: Sequence[int]) -> list[int]:
    """The narrowest place after each node that makes gradients ready, where those beside it are wider."""
    places = [min(range(at, following), key=alive.__getitem__) for at, following in itertools.pairwise(ready)]
    level = [list(found) for _, found in itertools.groupby(places, key=alive.__getitem__)]
    widths = [math.inf, *(alive[found[0]] for found in level), math.inf]
    cuts, begin = [], -1
    for found, before, own, after in zip(level, widths, widths[1:], widths[2:], strict=False):
        for place in found if own < min(before, after) else ():
            if min(place - begin, len(alive) - 1 - place) >= _FEWEST:
                cuts.append(begin := place)
    return cuts


def _alive(nodes: Sequence[ir.Node], given: Sequence[ir.Value], last: Mapping[ir.Value, int]) -> list[int]:
    """How many tensors have a use left after each node, of those given and made; contents of shapes do not count."""
    change = [0] * (len(nodes) + 1)
    for index, values in enumerate([given, *(node.outputs for node in nodes)]):
        for value in values:
            if shapes.data_of(value) is None:
                change[max(index - 1, 0)] += 1
                change[last[value]] -= 1
    return list(itertools.accumulate(change))[:-1]
