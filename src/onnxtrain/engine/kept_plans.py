"""Plans within a memory budget, kept beside the graphs they were made for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.cache import PLAN, GraphCache, versions
from onnxtrain.compiler import Compiled
from onnxtrain.execute import Footprint, Use
from onnxtrain.ir.graphs import is_backward
from onnxtrain.options import Options
from onnxtrain.plan.recompute import Choice

Kept = tuple[list[Choice], Footprint | None, Footprint | None]
"""What is computed again, what a step needs without that, and what it needs with it."""


def name_of(base: Compiled, sizes: Mapping[str, int], options: Options, device: str) -> str:
    """The file of a plan: by the graph, the sizes, the budget, and what kernels take memory by.

    Args:
        base: the step as it computes nothing again.
        sizes: of named dimensions.
        options: the budget and the backend.
        device: where it runs.
    """
    kernels = (torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())
    asked = (options.backend, options.memory_budget, bool(options.memory_offload))
    stated = (versions(), asked, device, kernels, sorted(sizes.items()))
    digest = hashlib.sha256(repr(stated).encode())
    for line in _lines(base.whole_training.model.graph):
        digest.update(line)
    return f"{digest.hexdigest()}{PLAN}"


def _values(graph: ir.Graph) -> list[ir.Value]:
    """The values of a graph in order: names of values differ where a graph comes from a file."""
    return [*graph.inputs, *graph.initializers.values(), *(v for n in graph for v in n.outputs)]


def _lines(graph: ir.Graph) -> Iterator[bytes]:
    """What a graph is, without names of values."""
    numbers = {value: i for i, value in enumerate(_values(graph))}
    yield repr([(str(v.name), str(v.type), str(v.shape)) for v in graph.inputs]).encode()
    yield repr([numbers.get(v) for v in graph.outputs]).encode()
    yield from (v.const_value.tobytes() for v in graph.initializers.values() if v.const_value is not None)
    for node in graph:
        read = [None if v is None else numbers[v] for v in node.inputs]
        yield repr((node.domain, node.op_type, is_backward(node), read, len(node.outputs))).encode()
        for attribute in node.attributes.values():
            yield ir.to_proto(attribute).SerializeToString(deterministic=True)


def read(cache: GraphCache, name: str, base: Compiled) -> Kept | None:
    """A plan from its file; None where there is none.

    Args:
        cache: the folder.
        name: the file.
        base: the step as it computes nothing again.
    """
    payload = cache.read(name)
    if payload is None:
        return None
    values = _values(base.whole_training.model.graph)
    found = json.loads(payload)
    chosen = [_choice(fields, values) for fields in found["chosen"]]
    return chosen, _footprint(found["before"]), _footprint(found["footprint"])


def write(cache: GraphCache, name: str, base: Compiled, kept: Kept) -> None:
    """Keep a plan.

    Args:
        cache: the folder.
        name: the file.
        base: the step as it computes nothing again.
        kept: the plan.
    """
    chosen, before, footprint = kept
    told = {"before": before, "footprint": footprint}
    fields: dict[str, Any] = {n: None if f is None else dataclasses.asdict(f) for n, f in told.items()}
    numbers = {v: i for i, v in enumerate(_values(base.whole_training.model.graph))}
    named = {str(v.name): i for v, i in numbers.items()}
    fields["chosen"] = [_numbered(choice, numbers, named) for choice in chosen]
    cache.write(name, json.dumps(fields).encode())


def _numbered(choice: Choice, numbers: Mapping[ir.Value, int], named: Mapping[str, int]) -> dict[str, Any]:
    dropped, kept = ([named[name] for name in names] for names in (choice.dropped, choice.kept))
    made = [numbers[v] for v in choice.made]  # which may have no names
    moved = None if choice.moved is None else numbers[choice.moved]
    return vars(choice) | {"dropped": dropped, "kept": kept, "made": made, "moved": moved}


def _choice(fields: Mapping[str, Any], values: Sequence[ir.Value]) -> Choice:
    dropped, kept = (tuple(str(values[i].name) for i in fields[field]) for field in ("dropped", "kept"))
    made = tuple(values[i] for i in fields["made"])
    moved = None if fields["moved"] is None else values[fields["moved"]]
    return Choice(dropped, kept, made, fields["at"], fields["gain"], fields["seconds"], moved)


def _footprint(fields: Mapping[str, Any] | None) -> Footprint | None:
    if fields is None:
        return None
    holders: Sequence[Any] = fields["holders"]
    return Footprint(tuple(Use(**use) for use in fields["uses"]), tuple((line, size) for line, size in holders))
