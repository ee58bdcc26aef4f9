"""Starts without a trace: what a call reads (``readings``) leads to the graph that an earlier process traced for it."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import pickle
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onnxtrain.capture.cache import START, GraphCache, versions
from onnxtrain.capture.captured import Captured, Traced
from onnxtrain.capture.carried import Carried, places_carried
from onnxtrain.capture.descriptions import Describer
from onnxtrain.capture.given import Change
from onnxtrain.capture.made_of_parts import Part
from onnxtrain.capture.places import Place
from onnxtrain.capture.quantized_layers import known_in
from onnxtrain.capture.readings import Reading, UnreadableError, ambient, digest_of_files, reading
from onnxtrain.capture.rewritten import Rewritten
from onnxtrain.capture.schema import Schema, flatten
from onnxtrain.capture.size_guards import SizeGuards
from onnxtrain.capture.source_lines import is_users, places_in

_LOG = logging.getLogger(__name__)
_CHECKED = 1 / 64  # of the starts


@dataclasses.dataclass(frozen=True)
class Kept:
    """What is kept of a start beside its graph.

    Args:
        graph: name of the graph's file, which is a digest of the traced program.
        files: the files with lines that made the graph.
        content: a digest of them.
        outputs: schema of the module's output.
        sources: for each tensor of the output, the position among the graph's outputs.
        guards: what was asked of input sizes.
        left: what a call leaves on the module.
        given: what it changes in the containers among its arguments.
        rewritten: what its inputs hold afterwards.
        borrowed: where the tensors that the graph borrows are: among those that are read, or on the module.
    """

    graph: str
    files: tuple[str, ...]
    content: str
    outputs: Schema
    sources: tuple[int, ...]
    guards: SizeGuards
    left: tuple[Place, ...]
    given: tuple[Change, ...]
    rewritten: tuple[Rewritten, ...]
    borrowed: dict[str, int | Carried | Part]


class Start:
    """What a first call reads, and the graph that there may be for it.

    Args:
        cache: where graphs are kept.
        name: the file that tells which one.
        read: what the call reads.
        inputs: schema of the call.
    """

    def __init__(self, cache: GraphCache, name: str, read: Reading, inputs: Schema) -> None:
        self._cache, self._name, self._read, self._inputs = cache, name, read, inputs

    def recalled(self, is_whole: bool = False) -> Captured | None:
        """The captured call as an earlier process kept it; None where there is none.

        Args:
            is_whole: a short graph (``ir.layers``) is none.
        """
        kept = self._kept()
        graph = None if kept is None else self._cache.kept(kept.graph)
        if kept is None or graph is None or (is_whole and graph.layers):
            return None
        _LOG.info("no trace: an earlier process kept the graph of this call")
        self._read.settle()
        fields = (kept.outputs, kept.sources, kept.guards, kept.left, kept.given, kept.rewritten)
        borrowed = {n: self._read.tensors[x] if isinstance(x, int) else x for n, x in kept.borrowed.items()}
        read, unread = self._read.attributes, self._read.unread
        return Captured(graph, self._inputs, *fields, borrowed=borrowed, read=read, unread=unread, kept=kept.graph)

    def _kept(self) -> Kept | None:
        payload = self._cache.read(self._name)
        try:
            with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of torch, which asks for leaves
                kept = None if payload is None else pickle.loads(payload)
        except Exception as error:  # a class of the module's that is elsewhere now
            _LOG.info("what is kept of this call cannot be read: %s", error)
            return None
        return kept if kept is not None and digest_of_files(kept.files) == kept.content else None

    def keep(self, captured: Captured, traced: Traced, recalled: Captured | None = None) -> None:
        """Keep a call for the next process, if its graph is kept, it looks at no tensor, and what it borrows is read.

        Args:
            captured: the call.
            traced: the trace of it.
            recalled: what was kept of it before; that it is something else is told.
        """
        if recalled is not None and recalled.kept != captured.kept:
            _LOG.error("what the graph cache kept for this call is not what the module computes; it is replaced")
            self._cache.remove(self._name)
        read = {id(tensor): place for place, tensor in enumerate(self._read.tensors)}
        held = captured.borrowed.items()
        borrowed = {name: x if isinstance(x, Carried | Part) else read.get(id(x), -1) for name, x in held}
        if captured.kept is None or captured.path or -1 in borrowed.values():
            return
        files = _files(traced.program)
        call = (captured.outputs, captured.sources, captured.guards)
        after = (captured.left, captured.given, captured.rewritten, borrowed)
        try:
            payload = pickle.dumps(Kept(captured.kept, files, digest_of_files(files), *call, *after))
        except Exception as error:
            _LOG.info("the next process traces again: what the call returns cannot be kept: %s", error)
            return
        self._cache.write(self._name, payload)


def _files(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """The files with lines that made a program; none of torch's, nor ours."""
    modules = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    stacks = {node.meta.get("stack_trace") or "" for module in modules for node in module.graph.nodes}
    return tuple(sorted({file for stack in stacks for file, _ in places_in(stack) if is_users(file)}))


def is_spot_check() -> bool:
    """Whether this start is one of the few that trace although they need not, to compare."""
    return random.SystemRandom().random() < _CHECKED


def start_of(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    cache: GraphCache,
    settings: Sequence[Any],
    ignored: Sequence[str] = (),
) -> Start | None:
    """What a call of a module reads; None where that cannot be told, as of several processes that train together.

    Args:
        module: the module.
        args: positional arguments.
        kwargs: keyword arguments.
        cache: where graphs are kept.
        settings: what else decides on the graph.
        ignored: names of attributes that do not concern the forward pass.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    tensors, schema = flatten((tuple(args), dict(kwargs)))
    try:
        read = reading(module, args, kwargs, ignored)
    except UnreadableError as error:
        _LOG.info("the call is traced in each process: %s", error)
        return None
    except Exception as error:  # a look at a content, or the module's own: the trace says more
        _LOG.info("the call is traced: on tensors without content it raises %s", type(error).__name__)
        return None
    decisive = (*settings, *map(str, places_carried(module)), *known_in(module))
    return Start(cache, _name(read, schema, tensors, decisive), read, schema)


def _name(read: Reading, schema: Schema, tensors: Sequence[torch.Tensor], settings: Sequence[Any]) -> str:
    described = Describer({})
    inputs = [(t.dtype, tuple(t.shape), t.stride(), t.device, t.requires_grad, t.is_leaf) for t in tensors]
    parts = (versions(), ambient(), *map(described.text, (schema.constants, schema.objects, tuple(settings))))
    return hashlib.sha256(repr((read.digest, str(schema.spec), inputs, parts)).encode()).hexdigest() + START
