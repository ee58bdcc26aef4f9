"""What a module's graphs are, as text: the summary of the first step, and why there is more than one graph."""

from __future__ import annotations

import collections

from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.python_calls import is_call
from onnxtrain.options import Fallback, Options
from onnxtrain.ortmodule import sparsity
from onnxtrain.ortmodule.session import Session
from onnxtrain.ortmodule.sessions import Entry, Sessions

_STAGES = ("recall", "export", "translate", "optimize", "skip", "gradient", "plan", "compile")


def summary(session: Session) -> str:
    """What was built for a call: nodes, saved values, gradients, and the time of each stage."""
    compiled, report = session.latest, session.report
    rows = [f"forward graph    {len(compiled.forward.model.graph)} nodes, {len(session.signature.parameters)} weights"]
    if compiled.training is not None:
        counts = f"{len(compiled.plan.saved)} saved values, {len(compiled.plan.gradients)} gradients"
        rows.append(f"training graph   {len(compiled.training.model.graph)} nodes, {counts}")
    removed: dict[str, int] = {}
    for record in report.passes:
        removed[record.name] = removed.get(record.name, 0) + record.nodes_before - record.nodes_after
    changed = [f"{name} {-count:+}" for name, count in removed.items() if count]
    rows.append(f"passes           {', '.join(changed) or 'nothing to do'}")
    rows.append("build time       " + ", ".join(f"{name} {s:.2f} s" for name, s in report.seconds.items()))
    rows.append(f"backend          {type(compiled.executable).__name__}")
    return "\n".join(rows)


def first_step(name: str, session: Session) -> str:
    """The features in force and what the start cost, said once after the first training step was built."""
    seconds, options = session.report.seconds, session.options
    total = sum(seconds.values())
    lines = [f"{name} runs as one graph", *(f"  {label:<24}{state}" for label, state in _features(session, options))]
    lines += [f"  {row}" for row in summary(session).splitlines()[:2]]
    exported = sum(seconds.get(stage, 0.0) for stage in ("recall", "export", "translate"))
    lines.append(f"  total initialization overhead is {total:.2f} s, where export takes {exported:.2f} s")
    return "\n".join(lines)


def phases(session: Session) -> str:
    """The initialization overhead by phase."""
    seconds = session.report.seconds
    return "initialization by phase: " + ", ".join(f"{s} {seconds[s]:.2f} s" for s in _STAGES if s in seconds)


def _features(session: Session, options: Options) -> list[tuple[str, str]]:
    nodes = list(session.captured.graph.model.graph)
    kept = sum(n.domain == DOMAIN and n.op_type == "ATen" for n in nodes)
    called = sum(map(is_call, nodes))
    casts = len(session.latest.plan.signature.casts)
    policy = options.policy
    fallback = "off" if Fallback.FALLBACK_DISABLE in policy else f"on: {options.fallback}"
    return [
        ("backend", type(session.latest.executable).__name__.removesuffix("Executable").lower()),
        ("ATen executor", f"on, {kept} nodes" if kept else "on, no node needs it"),
        ("autograd functions", f"{called} nodes" if called else "none"),
        ("cached parameter casts", f"on, {casts} parameters" if session.options.cache_casts else "off"),
        ("cast propagation", _cast_propagation(options)),
        ("automatic fallback", fallback),
        ("graph cache", str(options.cache_dir) if options.cache_dir is not None else "off (ORTMODULE_CACHE_DIR)"),
        *sparsity.features(session),
        ("not available yet", "memory optimizer, Triton"),
    ]


def _cast_propagation(options: Options) -> str:
    strategy, level = options.propagate_cast_ops_strategy, options.propagate_cast_ops_level
    if strategy == "NONE" or level < 0:
        return "off"
    return " ".join([f"{strategy}, level {level}", *options.propagate_cast_ops_allow])


def explain(sessions: Sessions) -> str:
    """Every graph of a module: why it was captured, what it serves, on which path, which sizes are free."""
    if not sessions.entries:
        return "no graph yet: the module was not called"
    lines = [f"{_count(sessions.calls, 'call')}, {_count(len(sessions.entries), 'graph')}"]
    if sessions.eager:
        lines.append(f"{_count(sessions.eager, 'call')} in eager PyTorch, which saw in tensors what no graph stands on")
    for number, entry in enumerate(sessions.entries, 1):
        lines += [f"graph {number}: captured at call {entry.first}, because", *(f"    {r}" for r in entry.reasons)]
        served = f"  served {_count(entry.served, 'call')} in {_mode(entry)} mode"
        lines += [served, _trace(entry), *_path(entry), *_sizes(entry)]
        lines += [f"  {variant}" for variant in entry.session.variants()]
    return "\n".join(lines)


def explain_sparsity(sessions: Sessions) -> str:
    """Which rows each graph computes, and why."""
    if not sessions.entries:
        return "no graph yet: the module was not called"
    lines = []
    for number, entry in enumerate(sessions.entries, 1):
        lines += [f"graph {number}, {_mode(entry)} mode", *sparsity.explain_rows(entry.session)]
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _mode(entry: Entry) -> str:
    return "training" if entry.session.was_training else "inference"


def _trace(entry: Entry) -> str:
    """What the trace ran: layers that make the same calls run them once."""
    report = entry.session.report
    if not report.recorded:
        return "  not traced: taken from the graph cache"
    again = f", {report.known} of them written from the record of others" if report.known else ""
    return f"  traced: {_count(report.recorded + report.known, 'operator call')}{again}"


def _path(entry: Entry) -> list[str]:
    """What the calls saw in tensors that a graph serves."""
    path = entry.path
    counts = collections.Counter(map(str, path.looks))
    lines = [f"  path: {look}" + (f", {count} times" if count > 1 else "") for look, count in counts.items()]
    return lines + [f"  path: {asked}" for asked in path.conditions.told()]


def _sizes(entry: Entry) -> list[str]:
    graph = entry.session.captured.graph
    found = []
    for value in graph.model.graph.inputs[: len(graph.signature.user_inputs)]:
        dims = shapes.known_dims(value)
        fixed = [f"dimension {axis} is always {dim}" for axis, dim in enumerate(dims) if isinstance(dim, int)]
        shape = ", ".join(map(str, dims))
        found.append(f"  {value.name}: ({shape})" + (f"; {', '.join(fixed)}" if fixed else ""))
    return found
