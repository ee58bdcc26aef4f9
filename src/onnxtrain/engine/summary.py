"""What a bound graph is and what it cost, as text."""

from __future__ import annotations

from onnxtrain.compiler import Compiled
from onnxtrain.engine import sparsity
from onnxtrain.engine.bound import BoundGraph
from onnxtrain.errors import ModuleError
from onnxtrain.ir.drawing import to_dot, to_mermaid
from onnxtrain.ir.graphs import DOMAIN, RECOMPUTED, notes_of
from onnxtrain.ir.printer import in_bytes, to_text
from onnxtrain.ir.python_calls import is_call
from onnxtrain.options import Fallback, Options

_STAGES = ("recall", "export", "translate", "optimize", "skip", "gradient", "plan", "compile")


def summary(bound: BoundGraph) -> str:
    """What was built for a call: nodes, saved values, gradients, and the time of each stage."""
    compiled, report = bound.latest, bound.report
    count, plan = len(compiled.whole_forward.model.graph), compiled.plan
    rows = [f"forward graph    {count} nodes, {len(bound.signature.parameters)} weights"]
    if plan.backward is not None:
        counts = f"{len(plan.saved)} saved values, {len(plan.gradients)} gradients"
        rows.append(f"training graph   {len(plan.forward.graph) + len(plan.backward.graph)} nodes, {counts}")
    removed: dict[str, int] = {}
    for record in report.passes:
        removed[record.name] = removed.get(record.name, 0) + record.nodes_before - record.nodes_after
    changed = [f"{name} {-count:+}" for name, count in removed.items() if count]
    rows.append(f"passes           {', '.join(changed) or 'nothing to do'}")
    rows.append("build time       " + ", ".join(f"{name} {s:.2f} s" for name, s in report.seconds.items()))
    rows.append(f"backend          {type(compiled.executable).__name__}")
    return "\n".join(rows)


def graph_text(compiled: Compiled, stage: str, form: str = "text") -> str:
    """A compiled graph.

    Args:
        compiled: the graph.
        stage: ``"captured"`` (the optimized forward), ``"training"``, ``"forward"`` or ``"backward"``.
        form: ``"text"``; ``"dot"``, as Graphviz draws it; ``"mermaid"``, as Markdown pages show it.

    Raises:
        ModuleError: there is no graph of that stage, or no such form.
    """
    plan = compiled.plan
    models = {"forward": plan.forward, "backward": plan.backward, "captured": compiled.whole_forward.model}
    models["training"] = None if compiled.training is None else compiled.whole_training.model
    model, saved = models.get(stage), () if stage == "captured" else plan.saved
    if model is None:
        raise ModuleError(f"there is no {stage!r} graph of the last call", cure="train first; or ask for 'captured'")
    title = {"training": "training graph", "captured": "forward"}.get(stage, stage)
    if form == "dot":
        return to_dot(model, title=title, saved=saved)
    if form == "mermaid":
        return to_mermaid(model, saved=saved)
    if form != "text":
        raise ModuleError(f"a graph has no form {form!r}", cure="ask for 'text', 'dot' or 'mermaid'")
    recomputed = [str(v.name) for n in model.graph if notes_of(n).get(RECOMPUTED) for v in n.outputs]
    return to_text(model, title=title, saved=saved, recomputed=recomputed)


def first_step(name: str, bound: BoundGraph) -> str:
    """The features in force and what the start cost, said once after the first training step was built."""
    seconds, options = bound.report.seconds, bound.options
    total = sum(seconds.values())
    lines = [f"{name} runs as one graph", *(f"  {label:<24}{state}" for label, state in _features(bound, options))]
    lines += [f"  {row}" for row in summary(bound).splitlines()[:2]]
    exported = sum(seconds.get(stage, 0.0) for stage in ("recall", "export", "translate"))
    lines.append(f"  total initialization overhead is {total:.2f} s, where export takes {exported:.2f} s")
    return "\n".join(lines)


def phases(bound: BoundGraph) -> str:
    """The initialization overhead by phase."""
    return "initialization by phase: " + ", ".join(f"{s} {seconds:.2f} s" for s, seconds in phases_of(bound).items())


def phases_of(bound: BoundGraph) -> dict[str, float]:
    """The seconds of each stage that there was, in their order."""
    seconds = bound.report.seconds
    return {stage: seconds[stage] for stage in _STAGES if stage in seconds}


def _features(bound: BoundGraph, options: Options) -> list[tuple[str, str]]:
    nodes = list(bound.graph.model.graph)
    kept = sum(n.domain == DOMAIN and n.op_type == "ATen" for n in nodes)
    called = sum(map(is_call, nodes))
    casts = len(bound.latest.plan.signature.casts)
    policy = options.policy
    fallback = "off" if Fallback.FALLBACK_DISABLE in policy else f"on: {options.fallback}"
    return [
        ("backend", type(bound.latest.executable).__name__.removesuffix("Executable").lower()),
        ("ATen executor", f"on, {kept} nodes" if kept else "on, no node needs it"),
        ("autograd functions", f"{called} nodes" if called else "none"),
        ("cached parameter casts", f"on, {casts} parameters" if bound.options.cache_casts else "off"),
        ("cast propagation", _cast_propagation(options)),
        ("automatic fallback", fallback),
        ("graph cache", str(options.cache_dir) if options.cache_dir is not None else "off (ORTMODULE_CACHE_DIR)"),
        *sparsity.features(bound),
        ("memory budget", _memory(options)),
        ("kernels by Inductor", "off (Options(codegen=))" if options.codegen == "none" else options.codegen),
    ]


def _memory(options: Options) -> str:
    if options.memory_level:
        return f"off, plans of level {options.memory_level}"
    if options.plans_by_hand:
        return f"off, plans by hand: {', '.join(options.plans_by_hand)}"
    if options.memory_budget is None:
        return "off (Options(memory_budget=))"
    return in_bytes(options.memory_budget) if isinstance(options.memory_budget, int) else str(options.memory_budget)


def _cast_propagation(options: Options) -> str:
    strategy, level = options.propagate_cast_ops_strategy, options.propagate_cast_ops_level
    if strategy == "NONE" or level < 0:
        return "off"
    return " ".join([f"{strategy}, level {level}", *options.propagate_cast_ops_allow])
