"""What a module's graphs are, as text: why there is more than one, and what each skips."""

from __future__ import annotations

import collections

from onnxtrain.engine import sparsity
from onnxtrain.ir import shapes
from onnxtrain.ortmodule.sessions import Entry, Sessions


def explain(sessions: Sessions) -> str:
    """Every graph of a module: why it was captured, what it serves, on which path, which sizes are free."""
    if not sessions.calls:
        return "no graph yet: the module was not called"
    lines = calls(sessions)
    for number, entry in enumerate(sessions.entries, 1):
        lines += [f"graph {number}: captured at call {entry.first}, because", *(f"    {r}" for r in entry.reasons)]
        lines.append(f"  served {_count(entry.served, 'call')} in {mode(entry)} mode")
        lines += [f"  {line}" for line in graph_lines(entry)]
    return "\n".join(lines)


def calls(sessions: Sessions) -> list[str]:
    """How many calls of a module there were, and which of them ran in eager PyTorch, and why."""
    lines = [f"{_count(sessions.calls, 'call')}, {_count(len(sessions.entries), 'graph')}"]
    if sessions.initializing:
        lines.append(f"{_count(sessions.initializing, 'call')} in eager PyTorch, which set the module up")
    lines += [f"in eager PyTorch: {text}" for text in dict.fromkeys(map(str, sessions.without_graph.values()))]
    if sessions.eager and not sessions.without_graph:
        lines.append(f"{_count(sessions.eager, 'call')} in eager PyTorch, which saw in tensors what no graph stands on")
    if sessions.unsettled:
        lines.append(
            f"{_count(sessions.unsettled, 'call')} in eager PyTorch: what graphs stand on was another each time"
        )
    return lines


def graph_lines(entry: Entry) -> list[str]:
    """A graph: what its trace ran, its path, its sizes, what was compiled."""
    return [_trace(entry), *_layers(entry), *_path(entry), *_sizes(entry), *entry.session.bound.variants()]


def explain_sparsity(sessions: Sessions) -> str:
    """Which rows each graph computes, and why."""
    if not sessions.entries:
        return "no graph yet: the module was not called"
    lines = []
    for number, entry in enumerate(sessions.entries, 1):
        lines += [f"graph {number}, {mode(entry)} mode", *sparsity.explain_rows(entry.session.bound)]
    return "\n".join(lines)


def explain_memory(sessions: Sessions) -> str:
    """What each training graph could compute again to save memory, and which of it it does."""
    lines = []
    for number, entry in enumerate(sessions.entries, 1):
        for table in entry.session.bound.budget.tables():
            lines += [f"graph {number}", *table.splitlines()]
    return "\n".join(lines) or "no training graph yet: run a step first"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def mode(entry: Entry) -> str:
    """The mode of the module that a graph is for."""
    return "training" if entry.session.was_training else "inference"


def _trace(entry: Entry) -> str:
    """What the trace ran: layers that make the same calls run them once."""
    report = entry.session.bound.report
    if not report.recorded:
        return "not traced: taken from the graph cache"
    again = f", {report.known} of them written from the record of others" if report.known else ""
    return f"traced: {_count(report.recorded + report.known, 'operator call')}{again}"


def _layers(entry: Entry) -> list[str]:
    """The layers that were not traced, and which they are as."""
    return [row.told for row in entry.session.bound.report.layers]


def _path(entry: Entry) -> list[str]:
    """What the calls saw in tensors that a graph serves."""
    path = entry.path
    counts = collections.Counter(map(str, path.looks))
    lines = [f"path: {look}" + (f", {count} times" if count > 1 else "") for look, count in counts.items()]
    return lines + [f"path: {asked}" for asked in path.conditions.told()]


def _sizes(entry: Entry) -> list[str]:
    graph = entry.session.captured.graph
    found = []
    for value in graph.model.graph.inputs[: len(graph.signature.user_inputs)]:
        dims = shapes.known_dims(value)
        fixed = [f"dimension {axis} is always {dim}" for axis, dim in enumerate(dims) if isinstance(dim, int)]
        shape = ", ".join(map(str, dims))
        found.append(f"{value.name}: ({shape})" + (f"; {', '.join(fixed)}" if fixed else ""))
    return found
