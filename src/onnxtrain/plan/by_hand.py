"""Memory plans by hand: what of a training graph can be computed again, by clusters of operators, and what is taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import onnx_ir as ir
import sympy

from onnxtrain.errors import OptionError, close_to
from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import Plan, TrainingGraph
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.memory_options import PlanRequest
from onnxtrain.plan.formulas import MOVES
from onnxtrain.plan.recompute import Choice, Search, makers, views_of

RECOMPUTE, COMPROMISE = 1, 2
_MOST = 15  # nodes that run again for one value
_SHOWN = 5  # clusters that an error names
_LAYERS = "1:1"  # the probe of plans layer by layer
_NORMS = ("LayerNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization", "RMSNormalization", "RMSNorm")
_PRODUCTS = ("MatMul", "Gemm", "Einsum", "Linear", "LinearWithoutBias")
_CHEAP = Trait.ELEMENTWISE | Trait.VIEW


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Saved values of one node that can be computed again.

    Args:
        choice: the values, and what runs again.
        kind: ``RECOMPUTE``, or ``COMPROMISE`` where something smaller is saved instead.
        saving: the bytes that are no longer saved, over the names of sizes.
        share: of the bytes of the values.
    """

    choice: Choice
    kind: int
    saving: sympy.Expr
    share: float

    @property
    def cluster(self) -> str:
        """The operators that run again, each followed by a plus."""
        return self.choice.cluster


def probe_in_force(probe: str, level: int) -> str:
    """The probe that a level has: layer by layer nothing is computed again from another layer."""
    return _LAYERS if level else probe


def candidates(
    training: TrainingGraph, plan: Plan, sizes: Mapping[str, int], device: str, probe: str
) -> list[Candidate]:
    """All that can be computed again, the last of the forward pass first.

    Each is told as if it were the only one: what it is computed from is saved, an input, a weight, or what another one
    computes again.

    Args:
        training: the graph.
        plan: made of it.
        sizes: of named dimensions.
        device: where it runs.
        probe: ``"level:boundary"``, as ``Options.memory_probe`` has it.
    """
    search = Search(training, plan, sizes, device)
    level, boundary = probe.split(":")
    held = {search.owner(v).producer() for v in layer_inputs(search.forward)} if boundary == "1" else set()

    def may_run(node: ir.Node) -> bool:
        return node not in held and _is_allowed(node, level == "1")

    made: dict[ir.Node, list[ir.Value]] = {}
    for owner in search.groups:
        node = owner.producer()
        assert node is not None
        made.setdefault(node, []).append(owner)
    last_first = sorted(made, key=search.order.__getitem__, reverse=True)
    found = [_candidate(search, tuple(made[node]), may_run) for node in last_first]
    return [candidate for candidate in found if candidate]


def _candidate(search: Search, owners: tuple[ir.Value, ...], may_run: Callable[[ir.Node], bool]) -> Candidate | None:
    """How the values that a node makes are computed again; None where they are not.

    What they are made of and cannot be computed again is saved instead where it is smaller: what the node reads, or
    what that is made of.
    """
    whole = search.look(owners, True, may_run, _MOST)
    looks, kind = [whole], RECOMPUTE
    if whole is not None and whole.extra:
        views = (v for owner in owners for value in search.groups[owner] for v in (*views_of(value, owner), owner))
        last = {*makers(views)}
        looks = [search.look(owners, True, lambda node: node in last and may_run(node), _MOST), whole]
        kind = COMPROMISE
    found = ((look, search.choice(owners, look)) for look in looks if look is not None)
    look, choice = next(((look, choice) for look, choice in found if choice), (None, None))
    if look is None or choice is None:
        return None
    lost = {search.owner(v) for v in look.extra} - {search.owner(v) for v in search.kept}
    saving = sum(map(_symbolic, owners), sympy.Integer(0)) - sum(map(_symbolic, lost), sympy.Integer(0))
    return Candidate(choice, kind, saving, choice.gain / sum(map(search.size, owners)))


def _symbolic(value: ir.Value) -> sympy.Expr:
    """The bytes of a value over the names of sizes."""
    size = sympy.Integer(1)
    for dim in shapes.dims_of(value) or ():
        size *= shapes.as_expression(dim)
    return size * sympy.Rational(value.dtype.itemsize if value.dtype is not None else 0)


def _is_allowed(node: ir.Node, advanced: bool) -> bool:
    """Whether an operator is among those of a level."""
    if _CHEAP & traits_of(node) or node.op_type in MOVES or node.op_type == "CumSum":
        return True
    return advanced and (node.op_type in (*_NORMS, *_PRODUCTS) or _mixes_rows(node))


def _mixes_rows(node: ir.Node) -> bool:
    """Whether a node is attention, or the part of it that every form of it has."""
    return node.op_type == "Softmax" or node.op_type.endswith("Attention")


def layer_inputs(forward: Iterable[ir.Node]) -> list[ir.Value]:
    """The inputs of a transformer's layers: of normalizations that attention follows, before there is another one.

    Args:
        forward: the nodes of the forward pass.
    """
    nodes = [*forward]
    known = {*nodes}
    leads = dict[ir.Node, bool]()  # whether attention follows a node, not through a normalization
    for node in reversed(nodes):
        after = [use.node for value in node.outputs for use in value.uses() if use.node in known]
        leads[node] = any(_mixes_rows(n) or (leads.get(n, False) and n.op_type not in _NORMS) for n in after)
    starts = [node.inputs[0] for node in nodes if node.op_type in _NORMS and leads[node]]
    return [value for value in starts if value is not None]


def selected(found: Sequence[Candidate], requests: Iterable[PlanRequest], level: int) -> list[Candidate]:
    """What is computed again.

    Args:
        found: what can be, the last of the forward pass first.
        requests: how much of which cluster, where the level is 0.
        level: 1 for all of it, 2 with what something smaller is saved for.
    """
    if level:
        return [c for c in found if c.kind <= level]
    asked, taken = {r.cluster: r for r in requests}, dict[str, int]()
    chosen = []
    for candidate in reversed(found):
        request, count = asked.get(candidate.cluster), taken.get(candidate.cluster, 0)
        if request is None or candidate.kind > request.kind or 0 <= request.count <= count:
            continue
        taken[candidate.cluster] = count + 1
        chosen.append(candidate)
    return chosen


def check_known(requests: Iterable[PlanRequest], known: Collection[tuple[str, int]]) -> None:
    """Check that what is asked for is there.

    Args:
        requests: how much of which cluster.
        known: the clusters that there are, each with its kind.

    Raises:
        OptionError: a cluster is not there, or only by a compromise that was not asked for.
    """
    clusters = sorted({cluster for cluster, _ in known})
    others = f"; there are {', '.join(clusters[:_SHOWN])}" if clusters else "; there is nothing else"
    for request in requests:
        if request.kind and request.cluster not in clusters:
            raise OptionError(
                f"the memory plan {request}: nothing that {request.cluster} gives is saved and can be computed again"
                f"{close_to(request.cluster, clusters) or others}",
                cure='choose one of those that explain("memory") lists; ORTMODULE_MEMORY_OPT_PROBE_RECOMPUTE_CONFIG '
                "says how far they are looked for",
            )
        if request.kind and not any((request.cluster, kind) in known for kind in range(1, request.kind + 1)):
            raise OptionError(
                f"the memory plan {request}: something smaller has to be saved for {request.cluster}",
                cure=f"write '{request.cluster}:{COMPROMISE}:{request.count}'",
            )
