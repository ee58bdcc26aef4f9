"""nn.Module → Graph: capture the forward pass of a module, training semantics included."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from onnxtrain.capture.attribute_reads import (
    OWN,
    Attribute,
    Item,
    are_settings,
    are_told,
    attribute,
    attributes_of,
    configurations_of,
    inner_of,
    is_array,
    is_collection,
    is_number,
    is_scalar,
    may_change,
    owners_of,
    within,
)
from onnxtrain.capture.autocast import Autocast, device_of, device_types
from onnxtrain.capture.autograd_functions import Functions
from onnxtrain.capture.cache import GraphCache, graph_bytes
from onnxtrain.capture.captured import Captured, Traced
from onnxtrain.capture.carried import (
    Carried,
    attributes_carried,
    can_be_carried,
    count,
    count_no_longer,
    numbers_carried,
    places_carried,
    places_of,
)
from onnxtrain.capture.convert import Refusals, to_graph
from onnxtrain.capture.descriptions import PLAIN
from onnxtrain.capture.export import export
from onnxtrain.capture.flat_module import PREFIX, FlatModule
from onnxtrain.capture.given import Change, Given, at, change
from onnxtrain.capture.left_behind import Watch, places_read, refuse_read
from onnxtrain.capture.left_outside import LeftOutsideError
from onnxtrain.capture.library_layers import prepare
from onnxtrain.capture.like_layers import rows_of
from onnxtrain.capture.looks import ARGUMENT, COUNTED, Key, Look, content_of, numbers_given, same
from onnxtrain.capture.made_of_parts import Part, as_attributes, class_of, parts_of, refuse_wrappers
from onnxtrain.capture.named_values import names_read
from onnxtrain.capture.owned_tensors import owned_by
from onnxtrain.capture.places import LEFT_IN, Kind, Place, asks_length, leave
from onnxtrain.capture.reached_code import Named, unread
from onnxtrain.capture.rehearsal import Answers, fill_caches, line_that_draws, rehearse
from onnxtrain.capture.replaced import replaced
from onnxtrain.capture.replay import Path
from onnxtrain.capture.rewritten import copies, is_trained_leaf, write_back
from onnxtrain.capture.schema import (
    Numbers,
    Schema,
    arguments_of,
    can_be_counted,
    flatten,
    input_names,
    is_batch,
    named_parameters,
)
from onnxtrain.capture.size_guards import SizeGuards, environment_of, form_of, order_of, repeated_among, size_guards
from onnxtrain.capture.size_questions import apart_from_memory
from onnxtrain.capture.source_lines import is_foreign, is_librarys
from onnxtrain.capture.stand_ins import StandIns, with_stand_ins
from onnxtrain.capture.starts import Start, is_spot_check, start_of
from onnxtrain.capture.supplementary import register_custom_function_schema_supplementary
from onnxtrain.capture.symbolic_sizes import Axis, axes_of
from onnxtrain.ir.graphs import ForwardGraph

_ONE_AT_A_TIME = threading.RLock()  # torch.export keeps what it records in globals


def trace(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    static_shapes: bool = False,
    constant: Collection[Axis] = (),
    numbers: Numbers | None = None,
    functions: Functions | None = None,
    ignored: Collection[str] = (),
    answers: Answers | None = None,
    short: bool = False,
) -> Traced:
    """Record one call of a module.

    Args:
        module: the module.
        args: positional arguments.
        kwargs: keyword arguments.
        static_shapes: sizes are constants; else all input dimensions are dynamic.
        constant: input axes of which the sizes are constants in any case.
        numbers: for a structure of arguments, the positions of numbers that are captured as tensors.
        functions: what becomes of classes of ``torch.autograd.Function``; by default each call is a node.
        ignored: names of attributes that do not concern the forward pass.
        answers: what looks at the content of tensors saw; empty where there was no rehearsal yet; None where there will
            be none: checks are left out.
        short: whether of layers that are alike only some are traced, so that the graph is a short one (``ir.layers``).

    Raises:
        UnsupportedDataError: an input or output has a type that a graph cannot take.
        ContentError: the forward pass looks at the content of a tensor, of which there is no answer.
        CaptureError: the module cannot be traced.
    """
    prepare(module)
    tensors, inputs = flatten((tuple(args), dict(kwargs)), numbers=numbers)
    refuse_wrappers(owned_by(module), {f"input {i}": tensor for i, tensor in enumerate(tensors)})
    autocast, repeated = Autocast.current(device_of(module, tensors).type), repeated_among(tensors)
    fill = functools.partial(fill_caches, module, args, kwargs, ignored)
    fixed, named = axes_of(tensors) if static_shapes else frozenset(constant), names_read(module, ignored)

    def traced(stand_ins: StandIns) -> Traced:
        given = numbers_given(args, kwargs, inputs.numbers)
        flat = FlatModule(module, inputs, autocast, functions, ignored, answers, repeated, stand_ins, named, given)
        owned = [*dict(module.named_parameters()), *dict(module.named_buffers())]
        names = input_names(module.forward, args, kwargs, inputs.numbers, owned)
        program = _program(flat, _told_apart(tensors), names, fixed, fill)
        stand_ins.take_out(program, PREFIX)
        flat.result.names.settle(module, fill, has_left=flat.result.outside is not None)
        flat.result.settle()
        sizes, buffers = tuple(t.shape for t in tensors), dict.fromkeys(dict(module.named_buffers()), False)
        return Traced(
            program, flat, inputs, tuple(names), buffers | flat.result.written, sizes, layers=stand_ins.layers
        )

    with _ONE_AT_A_TIME, as_attributes(module), _parameters_of_their_own(module):
        rows = rows_of(module, ignored) if short and (answers is None or not answers.rehearsed) else ()
        made = with_stand_ins(rows, ignored, traced)
        if made.layers and made.borrowed:  # layers that are alike may borrow others, alike only by now
            made = traced(StandIns(()))
    form = form_of(tensors, module.parameters()) if made.flat.result.assumed.form else None
    return dataclasses.replace(made, form=form, order=order_of(tensors) if _gives_axes(made.program) else None)


def _gives_axes(program: torch.export.ExportedProgram) -> bool:
    """Whether outputs have axes that could lie in memory in another order."""
    wanted = set(program.graph_signature.user_outputs)
    returned = next(n for n in program.graph.nodes if n.op == "output").args[0]
    return any(getattr(n.meta.get("val"), "ndim", 0) > 1 for n in returned if getattr(n, "name", None) in wanted)


def _program(
    flat: FlatModule,
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    constant: frozenset[Axis],
    fill: Callable[[], None],
) -> torch.export.ExportedProgram:
    """What a call is recorded as; caches outside of the module are left as a call in eager PyTorch leaves them."""
    try:
        return export(flat, tensors, names, constant)
    except LeftOutsideError as error:
        if error.has_history:
            raise
        before = flat.result.names
        flat.take_back()
        fill()
        constant |= axes_of(tensors, size=1)  # of the sizes that the caches have now
        try:
            return export(flat, tensors, names, constant)
        except LeftOutsideError:
            before.give_back()
            raise


def _parameters_of_their_own(module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Parameters in the place of plain tensors (``torch.func.functional_call``): torch.export asks for them."""
    tables = [m._parameters for m in module.modules()]
    others = [
        (t, n, p) for t in tables for n, p in t.items() if p is not None and not isinstance(p, torch.nn.Parameter)
    ]
    made = {id(p): torch.nn.Parameter(p.detach(), requires_grad=p.requires_grad) for _, _, p in others}
    return replaced(*((table, name, made[id(tensor)]) for table, name, tensor in others))


def _told_apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, copies where one comes again: torch.export would take both for one input."""
    seen: set[int] = set()
    made = []
    for tensor in tensors:
        again = id(tensor) in seen
        made.append(tensor.detach().clone().requires_grad_(tensor.requires_grad) if again else tensor)
        seen.add(id(tensor))
    return made


def translate(
    traced: Traced,
    *,
    opset: int = 20,
    cache: GraphCache | None = None,
    refusals: Refusals | None = None,
    decisive: Sequence[Any] = (),
) -> Captured:
    """The ONNX graph of a traced call.

    Args:
        traced: the call.
        opset: ONNX opset of the graph.
        cache: where graphs are kept.
        refusals: the nodes of a graph that later stages cannot take; what they stand for becomes ATen nodes.
        decisive: what else than the graph and this package's own code ``refusals`` goes by; part of an entry's key.

    Raises:
        CaptureError: an operator cannot be translated, or the call keeps state that a graph cannot.
    """
    result, borrowed, environment = traced.flat.result, traced.borrowed, environment_of(traced.program)
    trained = {name: b.is_trained for name, b in borrowed.items()}
    trained |= dict.fromkeys(traced.flat.carried, False)

    def guards() -> SizeGuards:
        repeated = tuple(traced.flat.repeated.items())
        return size_guards(traced.program, result.assumed, traced.form, repeated, traced.order)

    def made() -> ForwardGraph:
        with _ONE_AT_A_TIME, apart_from_memory(environment, result.assumed.of_memory):
            graph = to_graph(traced.program, traced.input_names, traced.buffers, opset, refusals, trained)
            return dataclasses.replace(graph, layers=traced.layers)

    def told() -> tuple[ForwardGraph, bool]:
        asked = guards()
        return made(), guards() == asked

    given = traced.input_names, tuple(traced.buffers.items())
    settings = (*given, opset, refusals is None, traced.layers, *trained.items(), *decisive)
    graph, kept = (made(), None) if cache is None else cache.graph(traced.program, settings, told)
    assert result.schema is not None, "the forward ran, or export raised"
    for error in (e for name, e in result.reformed.items() if name in graph.signature.buffers):
        raise error
    constants = filter(torch.is_tensor, traced.program.constants.values())
    refuse_read(traced.flat.module, places_read(traced.flat.module, result.left, constants, result.read))
    parts = parts_of(traced.flat.module) if borrowed else {}
    others = {name.removeprefix(PREFIX): parts.get(id(b.tensor), b.tensor) for name, b in borrowed.items()}
    lent = {**others, **traced.flat.adopted, **traced.flat.carried}
    seen = result.left, result.given, result.rewritten, result.path, lent, frozenset(result.read)
    unasked = unread(traced.flat.module, result.unread)  # after the trace, which has stand-ins in their places
    return Captured(graph, traced.inputs, result.schema, result.sources, guards(), *seen, unasked, kept)


def capture(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, opset: int = 20) -> Captured:
    """Trace one call of a module and translate it."""
    return translate(trace(module, args, kwargs), opset=opset)


__all__ = [
    "LEFT_IN",
    "OWN",
    "PLAIN",
    "ARGUMENT",
    "COUNTED",
    "Answers",
    "Attribute",
    "Autocast",
    "Axis",
    "Change",
    "Captured",
    "Carried",
    "Functions",
    "Given",
    "GraphCache",
    "Key",
    "Item",
    "Kind",
    "Look",
    "Named",
    "Numbers",
    "Part",
    "Path",
    "Place",
    "Schema",
    "Start",
    "Traced",
    "Watch",
    "are_settings",
    "are_told",
    "arguments_of",
    "asks_length",
    "at",
    "can_be_carried",
    "capture",
    "change",
    "attribute",
    "attributes_carried",
    "count",
    "count_no_longer",
    "can_be_counted",
    "class_of",
    "attributes_of",
    "configurations_of",
    "content_of",
    "copies",
    "device_of",
    "device_types",
    "flatten",
    "graph_bytes",
    "inner_of",
    "is_array",
    "is_batch",
    "is_collection",
    "is_number",
    "is_foreign",
    "is_librarys",
    "is_scalar",
    "may_change",
    "is_spot_check",
    "is_trained_leaf",
    "leave",
    "register_custom_function_schema_supplementary",
    "line_that_draws",
    "named_parameters",
    "numbers_carried",
    "places_carried",
    "places_of",
    "names_read",
    "owners_of",
    "rehearse",
    "same",
    "start_of",
    "trace",
    "translate",
    "within",
    "write_back",
]
