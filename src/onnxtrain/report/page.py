"""The report of a run as one page, which needs nothing but itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from onnxtrain.engine import memory_page, profile_page
from onnxtrain.engine.comparison import Report
from onnxtrain.engine.memory_report import MemoryReport
from onnxtrain.engine.pages import Bar, document, facts, folded, paragraph, preformatted, section, table
from onnxtrain.engine.profile_report import ProfileReport
from onnxtrain.engine.sparsity import RowsOfGraph
from onnxtrain.ir.printer import in_bytes
from onnxtrain.report.content import Content
from onnxtrain.report.curves import picture
from onnxtrain.report.graphs import GraphReport, Operator
from onnxtrain.report.modules import Part, tree_of

_SHOWN = 40  # comparisons, the farthest from eager first
_COSTLIEST = 15  # operators
_COMMONEST = 5  # kinds of operators
_UNKNOWN = "no line of the user's"


def page(report: Content) -> str:
    """The page.

    Args:
        report: what is told.
    """
    versions = " · ".join(f"{name} {version}" for name, version in report.versions.items())
    graphs = report.graphs
    return document(
        f"{report.name} with onnxtrain",
        "".join(
            [
                f'<p class="dim">{versions}</p>\n',
                facts(report.facts),
                section("Losses", picture(report.losses) if report.losses else ""),
                section("What was captured", *map(paragraph, report.told), *map(_captured, graphs)),
                section("What the start took", *map(_start, graphs)),
                section("What each pass did", *map(_passes, graphs)),
                section("Which rows are computed", *map(_rows, graphs)),
                section("Time of a step", _time(report.time) or paragraph(report.left_out)),
                section("Memory of a step", _memory(report.memory, report.time) or paragraph(report.left_out)),
                section("Beside eager PyTorch", _verified(report.verification)),
            ]
        ),
    )


def _of(graph: GraphReport) -> str:
    return f"graph {graph.number}, {graph.mode}"


def _captured(graph: GraphReport) -> str:
    """A graph: why it is there, and its operators under the modules and lines that they come from."""
    forward, backward = graph.nodes
    counts = f"{len(graph.operators)} operators captured; runs {forward} forward and {backward} backward"
    told = "\n".join(["captured because", *(f"  {reason}" for reason in graph.reasons), *graph.told])
    body = preformatted(told) + _within(tree_of(graph.operators))
    title = f"Graph {graph.number}, {graph.mode}: served {graph.served} calls. {counts}"
    return folded(title, body, is_open=graph.number == 1)


def _within(part: Part) -> str:
    """A module's own operators by the lines that they come from, then the modules that it calls."""
    lines: dict[str, list[Operator]] = {}
    for operator in part.operators:
        lines.setdefault(operator.source or _UNKNOWN, []).append(operator)
    called = [folded(f"{p.name}: {p.kind.rpartition('.')[2]}, {_kinds(p.all())}", _within(p)) for p in part.parts()]
    if len(lines) == 1 and not called:
        return "".join(_operators(line, found) for line, found in lines.items())
    own = [folded(f"{line}: {_kinds(found)}", _operators("", found)) for line, found in lines.items()]
    return "".join([*own, *called])


def _operators(caption: str, operators: Sequence[Operator]) -> str:
    rows = [(o.operator, o.value, o.type, ", ".join(o.reads)) for o in operators]
    return table(caption, ["operator", "value", "type", "weights that it reads"], rows)


def _kinds(operators: Sequence[Operator]) -> str:
    """How many operators there are of the commonest kinds."""
    kinds = Counter(o.operator for o in operators).most_common()
    most = [f"{count} {kind}" for kind, count in kinds[:_COMMONEST]]
    return ", ".join(
        [*most, *([f"{sum(count for _, count in kinds[_COMMONEST:])} others"] if kinds[_COMMONEST:] else [])]
    )


def _start(graph: GraphReport) -> str:
    longest = max(graph.phases.values(), default=0.0) or 1.0
    rows = [(name, f"{seconds:.3f}", Bar(seconds / longest)) for name, seconds in graph.phases.items()]
    return table(f"{_of(graph)}: {graph.seconds:.2f} s in all", ["stage", "#seconds", ""], rows)


def _passes(graph: GraphReport) -> str:
    shown = [r for r in graph.passes if r.modified or r.note]
    rest = len(graph.passes) - len(shown)
    rows = [(r.name, f"{r.nodes_after - r.nodes_before:+}", f"{1000 * r.seconds:.1f}", r.note) for r in shown]
    told = f"{_of(graph)}" + (f"; {rest} more passes found nothing to do" if rest else "")
    return table(told, ["pass", "#change in nodes", "#ms", "what it says"], rows)


def _rows(graph: GraphReport) -> str:
    """The sets of rows, and why others are not left out."""
    found: RowsOfGraph = graph.rows
    parts = [paragraph(f"{_of(graph)}: {line}") for line in found.told]
    if found.sets:
        sets = [
            (number, each.text, *_share(each.held, each.total), each.state) for number, each in enumerate(found.sets, 1)
        ]
        columns = ["#set", "rows where", "#computed", "#of", "", "in the last step"]
        parts.append(table(f"{_of(graph)}: rows that could be computed alone", columns, sets))
    parts += map(paragraph, found.outputs)
    if found.nodes:
        reasons = Counter(node.needed for node in found.nodes)
        parts.append(
            table(
                f"{_of(graph)}: which rows the values of the graph have",
                ["#values", "rows", ""],
                [(count, reason, Bar(count / len(found.nodes))) for reason, count in reasons.most_common()],
            )
        )
        rows = [(node.value, node.operator, node.needed, node.source) for node in found.nodes]
        parts.append(folded("each value", table("", ["value", "operator", "rows", "line"], rows)))
    return "".join(parts)


def _share(held: int | None, total: int | None) -> tuple[str | int, str | int, str | Bar]:
    return ("", "", "") if held is None else (held, total or 0, Bar(held / max(1, total or 0)))


def _time(time: ProfileReport | None) -> str:
    """The time of a step by operator, beside what the machine needs at least."""
    if time is None:
        return ""
    sizes = ", ".join(f"{name} = {size}" for name, size in time.sizes.items())
    told = f"{1000 * time.total:.3g} ms a step{f', for {sizes}' if sizes else ''}"
    drawn = "Each operator is as wide as it took, filled as far as this machine needs for it at best."
    rows = [
        (name, *(f"{1000 * seconds:.3g}" for seconds in (whole, least)), f"{least / whole:.0%}" if least else "", share)
        for name, whole, least, share in _by_operator(time)
    ]
    columns = ["operator", "#ms", "#ms at best", "#of machine", "share of the step"]
    return "".join(
        [
            paragraph(told),
            paragraph(drawn),
            profile_page.picture(time.costs),
            table("operators, forward and backward", columns, rows[:_COSTLIEST]),
            folded("those that take less", table("", columns, rows[_COSTLIEST:])) if rows[_COSTLIEST:] else "",
            _modules(time),
            folded("as text", preformatted(str(time))),
        ]
    )


def _modules(time: ProfileReport) -> str:
    """The time of a step by module."""
    columns = ["module, and those that it calls", "#ms", "share of the step"]
    rows = [
        ("\N{NO-BREAK SPACE}" * 4 * m.depth + str(m), f"{1000 * m.seconds:.3g}", Bar(m.seconds / time.total))
        for m in time.modules()
    ]
    return table("modules, forward and backward", columns, rows) if rows else ""


def _by_operator(time: ProfileReport) -> Iterator[tuple[str, float, float, Bar]]:
    """Operators, what is around them and the optimizer, the costliest first."""
    whole, least = Counter[str](), Counter[str]()
    for cost in time.costs:
        whole[cost.operator] += cost.seconds  # type: ignore[assignment]
        least[cost.operator] += cost.least  # type: ignore[assignment]
    whole["around the operators"] = time.overhead  # type: ignore[assignment]
    whole["the optimizer"] = time.optimizer or 0.0  # type: ignore[assignment]
    for name, seconds in whole.most_common():
        if seconds:
            yield name, seconds, least[name], Bar(seconds / time.total)


def _memory(memory: MemoryReport | None, time: ProfileReport | None) -> str:
    """The bytes in use over a step."""
    if memory is None:
        return ""
    rows = [("predicted, before the step", in_bytes(memory.peak))]
    if time is not None:
        rows.append(("real, of a step that was measured", in_bytes(time.peak)))
    rows += [
        ("saved from forward to backward", in_bytes(memory.footprint.saved)),
        ("gradients of parameters", in_bytes(memory.gradients)),
        ("weights, beside it", in_bytes(memory.weights)),
        ("inputs, beside it", in_bytes(memory.inputs)),
    ]
    return "".join(
        [
            paragraph("Bytes in use over the lines of the programs; the dashed line is the peak."),
            memory_page.picture(memory.footprint, memory.before),
            table("the peak, and what there is", ["", "#bytes"], rows),
            folded("as text", preformatted(str(memory))),
        ]
    )


def _verified(report: Report | None) -> str:
    """A step beside the same one of eager PyTorch."""
    if report is None or not report.comparisons:
        return ""
    kinds: Mapping[str, int] = Counter(c.kind for c in report.comparisons)
    counts = ", ".join(f"{count} of {kind}s" for kind, count in kinds.items())
    worst = sorted(report.comparisons, key=lambda c: -c.badness)
    losses = [c for c in report.comparisons if c.kind == "loss"]
    shown = [*losses, *(c for c in worst if c.kind != "loss")][:_SHOWN]
    rows = [
        (c.kind, c.name, f"{c.error:.2e}", f"{c.tolerance:.2e}", f"{c.scale:.2e}", "yes" if c.passed else "no")
        for c in shown
    ]
    columns = ["", "tensor", "#largest difference", "#tolerance", "#largest value", "within"]
    return paragraph(f"The first step was compared with eager PyTorch's: {counts}.") + table(
        "losses, then those farthest from eager PyTorch", columns, rows
    )
