"""Nodes of a program put into branches, loops and functions that compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import helper

from fuzz.program import Program
from fuzz.units import Rejected, Value, reads, tensor, type_of

DOMAINS = ("fuzz", "pkg.torch.ops", "my domain", "Ünï/1.0")
_NAMES = ("Block", "aten_add|inlined_1", "layer norm", "torch.nn.modules.linear.Linear.0", "Gelu", "f/g")


class Wrapper:
    """Wraps runs of a program's nodes.

    Args:
        program: whose nodes are wrapped; its random numbers are used.

    Attributes:
        functions: those made so far.
        extra: values made besides, which an output may hold.
    """

    def __init__(self, program: Program) -> None:
        self.p, self.functions = program, list[onnx.FunctionProto]()
        self.extra: list[str] = []
        self._count = 0

    def wrap(self) -> None:
        """Put one run of nodes into something."""
        p = self.p
        length = p.number(1, min(8, len(p.nodes)))
        start = p.number(0, len(p.nodes) - length)
        run = p.nodes[start : start + length]
        taken, given = _ends(p, run, p.nodes[start + length :])
        if not given or not all(isinstance(p.values[n], np.ndarray) for n in (*taken, *given)):
            return
        kinds: Sequence[Callable[..., list[onnx.NodeProto]]] = (self._branch, self._loop, self._scan, self._function)
        self._count += 1
        made = p.choose(kinds)(run, taken, given)
        p.nodes[start : start + length] = made

    def _new(self, kind: str, value: Value) -> str:
        made = self.p.name(kind)
        self.p.values[made] = value
        return made

    def _held(self, content: np.ndarray) -> str:
        made = self._new("k", content)
        self.p.initializers.append(made)
        return made

    def _branch(self, run: list[onnx.NodeProto], taken: list[str], given: list[str]) -> list[onnx.NodeProto]:
        """``If``, whose other branch computes something else."""
        p, way = self.p, bool(self.p.number(0, 1))
        flag = self._held(np.array(way))
        before = []
        if p.chance(0.5):  # a condition that is computed
            computed = self._new("v", np.array(not way))
            before.append(helper.make_node("Not", [flag], [computed]))
            flag, way = computed, not way
        elif p.chance(0.3):
            p.initializers.remove(flag)
            p.inputs.append(flag)
        same, other = _renamed(run, given, "_s"), _renamed(run, given, "_o")
        changed = []
        for name in given:
            op, kind = ("Neg", "") if p.values[name].dtype == np.float32 else ("Identity", "")
            changed.append(helper.make_node(op, [name + "_o"], [name + "_n"], name=kind))
        bodies = [
            self._body(same, [], [n + "_s" for n in given], given),
            self._body([*other, *changed], [], [n + "_n" for n in given], given),
        ]
        then, otherwise = bodies if way else reversed(bodies)
        return [*before, helper.make_node("If", [flag], given, then_branch=then, else_branch=otherwise)]

    def _body(
        self, nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str], like: Sequence[str]
    ) -> onnx.GraphProto:
        """A body whose outputs have the types of these values; constants that it alone reads may move into it."""
        infos = [self._info(n, n) for n in inputs]
        made = [self._info(o, n, not inputs) for o, n in zip(outputs, like, strict=True)]
        return helper.make_graph(nodes, self.p.choose(["body", "then/else", "x"]), infos, made)

    def _info(self, name: str, like: str, may_lack: bool = False) -> onnx.ValueInfoProto:
        """A value of a body: with its rank, or without a type."""
        if may_lack and self.p.chance(0.3):
            return onnx.ValueInfoProto(name=name)
        value = self.p.values[like]
        return onnx.ValueInfoProto(name=name, type=type_of(value, [None] * np.ndim(value)))

    def _loop(self, run: list[onnx.NodeProto], taken: list[str], given: list[str]) -> list[onnx.NodeProto]:
        """``Loop`` that computes the same again and again, grows it a little, and keeps all that it made."""
        p, rounds = self.p, self.p.number(1, 3)
        i, going, h = self._new("i", np.array(0)), self._new("b", np.array(True)), None
        body = _renamed(run, given, "_r")
        outs, stacks, after = [], [], []
        for name in given:
            first = p.values[name]
            factor = np.stack([first * (1 + 0.25 * k) if first.dtype.kind == "f" else first for k in range(rounds)])
            out = name + "_r"
            if first.dtype == np.float32:
                step, grown = self._new("f", np.float32(0)), name + "_g"
                quarter = f"{step}q"
                p.values[quarter] = np.float32(0.25)
                body += [
                    helper.make_node("Cast", [i], [step], to=1),
                    helper.make_node("Constant", [], [quarter], value=tensor(np.float32(0.25), "")),
                    helper.make_node("Mul", [step, quarter], [f"{step}m"]),
                    helper.make_node("Mul", [out, f"{step}m"], [f"{step}p"]),
                    helper.make_node("Add", [out, f"{step}p"], [grown]),
                ]
                out = grown
            outs.append(out)
            stacks.append(self._new("s", factor.astype(first.dtype)))
        states, finals = [], []
        source = next((n for n in given if p.values[n].dtype == np.float32), None)
        body_outs, like = [f"{going}_out"], [going]
        body.insert(0, helper.make_node("Identity", [going], [f"{going}_out"]))
        if source is not None and p.chance(0.6):
            h = self._new("h", p.random())
            start = p.weight(p.random())
            body += _state(h, source + "_r")
            states, finals = [start], [self._new("v", p.random())]
            body_outs.append(f"{h}_out")
            like.append(h)
        graph = self._body(body, [i, going, *([h] if h else [])], [*body_outs, *outs], [*like, *given])
        count = self._held(np.array(rounds, np.int64))
        flag = self._held(np.array(True)) if p.chance(0.5) else ""
        loop = helper.make_node("Loop", [count, flag, *states], [*finals, *stacks], body=graph)
        for name, stack in zip(given, stacks, strict=True):
            after += self._taken(stack, 0, name)
            if p.values[name].dtype == np.float32:
                last = self._new("v", p.values[stack][-1])
                after += self._taken(stack, rounds - 1, last)
                self.extra.append(last)
        self.extra += finals
        return [loop, *after]

    def _taken(self, stack: str, place: int, name: str) -> list[onnx.NodeProto]:
        index = self._held(np.array(place, np.int64))
        return [helper.make_node("Gather", [stack, index], [name], axis=0)]

    def _scan(self, run: list[onnx.NodeProto], taken: list[str], given: list[str]) -> list[onnx.NodeProto]:
        """``Scan`` over two forms of one value that the nodes read."""
        p = self.p
        real = [n for n in taken if p.values[n].dtype == np.float32 and n not in p.initializers]
        if not real:
            return run
        v = p.choose(real)
        array = p.values[v]
        axes, half = self._held(np.array([0], np.int64)), self._held(np.array(0.9, np.float32))
        small, one, two = (self._new("v", a) for a in (array * 0.9, array[None], array[None] * 0.9))
        both = self._new("v", np.stack([array, array * 0.9]).astype(np.float32))
        before = [
            helper.make_node("Mul", [v, half], [small]),
            helper.make_node("Unsqueeze", [v, axes], [one]),
            helper.make_node("Unsqueeze", [small, axes], [two]),
            helper.make_node("Concat", [one, two], [both], axis=0),
        ]
        row = self._new("r", array)
        body = _renamed(run, given, "_c", {v: row})
        states, finals, state_in, state_out = [], [], [], []
        source = next((n for n in given if p.values[n].dtype == np.float32), None)
        if source is not None and p.chance(0.6):
            h = self._new("h", p.random())
            body += _state(h, source + "_c")
            states, finals, state_in, state_out = (
                [p.weight(p.random())],
                [self._new("v", p.random())],
                [h],
                [f"{h}_out"],
            )
        stacks = [self._new("s", np.stack([p.values[n]] * 2)) for n in given]
        graph = self._body(body, [*state_in, row], [*state_out, *(n + "_c" for n in given)], [*state_in, *given])
        more = {"scan_input_directions": [0]} if p.chance(0.3) else {}
        scan = helper.make_node("Scan", [*states, both], [*finals, *stacks], body=graph, num_scan_inputs=1, **more)
        after = []
        for name, stack in zip(given, stacks, strict=True):
            after += self._taken(stack, 0, name)
        self.extra += finals
        return [*before, scan, *after]

    def _function(self, run: list[onnx.NodeProto], taken: list[str], given: list[str]) -> list[onnx.NodeProto]:
        """A call of a function of the model; numbers that are attributes may be attributes of the function."""
        p = self.p
        domain = p.choose(DOMAINS)
        name = f"{p.choose(_NAMES)}{self._count if p.chance(0.8) else ''}"
        if any((f.domain, f.name) == (domain, name) for f in self.functions):
            name += str(self._count)
        inner = _renamed(run, given, "_f" if p.chance(0.5) else "")
        attributes, defaults, said = _parametrized(p, inner)
        outputs = [n + "_f" if any(n + "_f" in node.output for node in inner) else n for n in given]
        imports = [
            *p.imports,
            *(helper.make_opsetid(d, 1) for d in sorted({n.domain for n in _all(inner) if n.domain})),
        ]
        made = helper.make_function(domain, name, taken, outputs, inner, imports, list(attributes), defaults)
        if p.chance(0.3):
            made.doc_string = "a function\nof several lines"
        self.functions.append(made)
        if not any(o.domain == domain for o in p.imports):
            p.imports.append(helper.make_opsetid(domain, 1))
        calls = [helper.make_node(name, taken, given, domain=domain, **said)]
        if p.chance(0.3):  # called twice
            again = [self._new("v", p.values[n]) for n in given]
            calls.append(helper.make_node(name, taken, again, domain=domain, **said))
            self.extra += [n for n in again if p.values[n].dtype == np.float32]
        return calls


def _all(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """These nodes and those of their bodies."""
    return [found for n in nodes for found in (n, *(i for a in n.attribute if a.HasField("g") for i in _all(a.g.node)))]


def _parametrized(
    p: Program, nodes: list[onnx.NodeProto]
) -> tuple[list[str], list[onnx.AttributeProto], dict[str, int | float]]:
    """Turn some numbers into attributes of a function: those to be said, those with defaults, and what is said."""
    required, defaults, said = [], [], {}
    for node in nodes:
        for attribute in node.attribute:
            kind = attribute.type
            if kind not in (onnx.AttributeProto.INT, onnx.AttributeProto.FLOAT) or not p.chance(0.5):
                continue
            name = f"{attribute.name}_{len(required) + len(defaults)}"
            value = attribute.i if kind == onnx.AttributeProto.INT else attribute.f
            if p.chance(0.5):
                defaults.append(helper.make_attribute(name, value))
            else:
                required.append(name)
                said[name] = value
            attribute.CopyFrom(onnx.AttributeProto(name=attribute.name, type=kind, ref_attr_name=name))
    return required, defaults, said


def _state(h: str, source: str) -> list[onnx.NodeProto]:
    """A state without dimensions: ``h' = tanh(h + mean(source))``."""
    return [
        helper.make_node("ReduceMean", [source], [f"{h}_mean"], keepdims=0),
        helper.make_node("Add", [h, f"{h}_mean"], [f"{h}_sum"]),
        helper.make_node("Tanh", [f"{h}_sum"], [f"{h}_out"]),
    ]


def _ends(p: Program, run: Sequence[onnx.NodeProto], later: Sequence[onnx.NodeProto]) -> tuple[list[str], list[str]]:
    """What a run of nodes reads, and what of it is read later or not at all."""
    made = [o for n in run for o in n.output if o]
    taken = list(dict.fromkeys(n for node in run for n in reads(node) if n not in made))
    used = {n for node in later for n in reads(node)}
    inside = {n for node in run for n in reads(node)}
    return taken, [n for n in made if n in used or n not in inside]


def _renamed(
    run: Sequence[onnx.NodeProto], given: Sequence[str], ending: str, more: dict[str, str] | None = None
) -> list[onnx.NodeProto]:
    """Copies of nodes whose values, those of bodies too, have other names."""
    inner = {o: o + ending for n in _all(run) for o in n.output if o}
    for node in _all(run):
        for attribute in node.attribute:
            held = [*attribute.g.input, *attribute.g.initializer] if attribute.HasField("g") else []
            inner |= {v.name: v.name + ending for v in held}
    return [_copied(n, inner | (more or {})) for n in run]


def _copied(node: onnx.NodeProto, names: dict[str, str]) -> onnx.NodeProto:
    made = onnx.NodeProto()
    made.CopyFrom(node)
    rename_node(made, names)
    return made


def rename_node(node: onnx.NodeProto, names: dict[str, str]) -> None:
    """Give values other names in a node and its bodies, in place."""
    node.input[:] = [names.get(n, n) for n in node.input]
    node.output[:] = [names.get(n, n) for n in node.output]
    for attribute in node.attribute:
        if attribute.HasField("g"):
            rename_graph(attribute.g, names)


def rename_graph(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    """Give values other names in a graph, in place."""
    for held in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        held.name = names.get(held.name, held.name)
    for node in graph.node:
        rename_node(node, names)


__all__ = ["Rejected", "Wrapper", "rename_graph"]
