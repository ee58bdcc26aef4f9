"""Translated graphs kept on disk: the key is the traced program itself, so an entry cannot be stale.

Whether a program has to be traced at all, ``starts`` tells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch

from onnxtrain.capture.descriptions import bytes_of
from onnxtrain.capture.source_lines import user_place
from onnxtrain.ir.graphs import ForwardGraph, Signature
from onnxtrain.ir.layers import Layers
from onnxtrain.ir.shapes import infer_graph

_LOG = logging.getLogger(__name__)
_DIGEST = hashlib.sha256
_DIGEST_SIZE = _DIGEST().digest_size
_SIGNATURE = "onnxtrain.signature"  # key in Model.metadata_props while an entry is on disk
_EXACT = "onnxtrain.floats"  # key in Node.metadata_props: attributes as they were; a file keeps 32 bits of a float
_FLOATS = (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS)
_SUFFIX, _PARTIAL, START, PLAN = ".graph", ".partial", ".start", ".plan"
_ABANDONED = 3600.0  # seconds after which a half-written file belongs to a process that was killed
_NAMESPACES = frozenset(("aten", "prim", "prims", "higher_order", "onnxtrain", "math", "_operator"))
_PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript", "numpy", "sympy", "typing-extensions")


class GraphCache:
    """A folder of translated graphs, shared by any number of processes.

    An entry is the SHA-256 of its content, then an ONNX model; it is written to a name of its own and renamed.

    Args:
        folder: where entries lie; made when the first one is written.
        limit: bytes that all entries together may take; those unused longest are removed.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def graph(
        self,
        program: torch.export.ExportedProgram,
        settings: Sequence[Any],
        translate: Callable[[], tuple[ForwardGraph, bool]],
    ) -> tuple[ForwardGraph, str | None]:
        """The graph of a program, from its file, or translated and kept; the file, None where it is not kept.

        Args:
            program: the program.
            settings: what else the graph depends on.
            translate: gives the graph, and whether these two alone say what it is.
        """
        foreign = _foreign(program)
        if foreign:
            _LOG.info("the graph is not kept: what %s does is not part of the program's text", foreign)
            return translate()[0], None
        name = f"{key(program, settings)}{_SUFFIX}"
        found = self.kept(name)
        if found is None:
            found, is_told = translate()
            if not is_told:
                _LOG.info("the graph is not kept: its translation asked about sizes")
                return found, None
            self.write(name, graph_bytes(found))
        return found, name

    def kept(self, name: str) -> ForwardGraph | None:
        """The graph of a file; None where there is none."""
        payload = self.read(name)
        return None if payload is None else _from_bytes(payload)

    def read(self, name: str) -> bytes | None:
        """The content of a file of this folder; None where there is none, or only a damaged one."""
        path = self.folder / name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.warning("the graph cache %s cannot be read: %s", self.folder, error)
            return None
        digest, payload = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
        if _DIGEST(payload).digest() != digest:
            _LOG.warning("the graph cache entry %s is damaged; it is discarded and made again", path)
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        _LOG.info("taken from the graph cache: %s", path)
        return payload

    def remove(self, name: str) -> None:
        """Forget a file of this folder."""
        (self.folder / name).unlink(missing_ok=True)

    def write(self, name: str, payload: bytes) -> None:
        """Keep a file in this folder."""
        path = self.folder / name
        partial = path.with_name(f"{path.stem}.{os.getpid()}.{uuid.uuid4().hex}{_PARTIAL}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(_DIGEST(payload).digest() + payload)
            partial.replace(path)
            self._shrink()
        except OSError as error:
            _LOG.warning("the graph cache %s cannot be written: %s", self.folder, error)
            with contextlib.suppress(OSError):
                partial.unlink()

    def _shrink(self) -> None:
        """Remove what killed processes left half-written, then the entries unused longest until the rest fits."""
        now = time.time()
        for path, state in _files(self.folder, _PARTIAL):
            if now - state.st_mtime > _ABANDONED:
                path.unlink(missing_ok=True)
        found = [entry for suffix in (_SUFFIX, START, PLAN) for entry in _files(self.folder, suffix)]
        entries = sorted(found, key=lambda entry: entry[1].st_mtime)
        total = sum(state.st_size for _, state in entries)
        for path, state in entries[:-1]:
            if total <= self.limit:
                break
            path.unlink(missing_ok=True)
            total -= state.st_size


def _files(folder: Path, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.glob(f"*{suffix}"):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            yield path, path.stat()


def key(program: torch.export.ExportedProgram, settings: Sequence[Any]) -> str:
    """A digest of all that decides the translation: the program, its constants, the settings, and the versions."""
    digest = _DIGEST(repr((versions(), tuple(settings))).encode())
    for name, module in program.graph_module.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            digest.update(name.encode())
            for node in module.graph.nodes:
                digest.update(_text(node).encode())
    digest.update(repr((program.graph_signature, program.range_constraints)).encode())
    for name, tensor in sorted(program.constants.items()):
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
        digest.update(bytes_of(tensor))  # type: ignore[arg-type]
    return digest.hexdigest()


def _text(node: torch.fx.Node) -> str:
    """A node with everything that the translation reads of it: the call, the types it returns, the source line."""
    place = user_place(node.meta.get("stack_trace") or "")
    target = node.target if isinstance(node.target, str | torch._ops.OpOverload) else _qualified(node.target)
    parts = (node.op, node.name, target, node.args, node.kwargs, _type(node.meta.get("val")), place)
    return "|".join(map(str, parts)) + "\n"


def _qualified(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}" if hasattr(target, "__qualname__") else str(target)


def _type(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.device, value.requires_grad
    return tuple(map(_type, value)) if isinstance(value, list | tuple) else value


def _foreign(program: torch.export.ExportedProgram) -> str:
    """What the program calls or holds that its text does not show; empty where there is nothing."""
    for name, constant in program.constants.items():
        if not isinstance(constant, torch.Tensor):
            return name
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            target = node.target
            if isinstance(target, torch._ops.OpOverload) and _is_foreign(target):
                return str(target)
    return ""


def _is_foreign(target: torch._ops.OpOverload) -> bool:
    """Operators of others, and calls of a ``torch.autograd.Function``: their objects live in this process alone."""
    return target.namespace not in _NAMESPACES or target is torch.ops.onnxtrain.python_op.default


@functools.cache
def versions() -> tuple[str, ...]:
    """Versions of everything that translates; of onnxtrain itself the text."""
    digest = _DIGEST()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return (digest.hexdigest(), *(importlib.metadata.version(name) for name in _PACKAGES))


def graph_bytes(graph: ForwardGraph) -> bytes:
    """All of a graph as bytes: of two that are equal they are the same."""
    s = graph.signature
    rows = [dataclasses.astuple(row) for row in graph.layers]
    places = (s.views, s.in_order, s.is_out_of_order)
    fields = (s.user_inputs, s.parameters, s.buffers, s.outputs, s.buffer_updates, places, rows)
    model = graph.model.clone()
    model.metadata_props[_SIGNATURE] = json.dumps(fields)
    for node in model.graph.all_nodes():
        floats = {a.name: a.value for a in node.attributes.values() if a.type in _FLOATS}
        if floats:
            node.metadata_props[_EXACT] = json.dumps(floats)
    return ir.to_proto(model).SerializeToString()


def _from_bytes(payload: bytes) -> ForwardGraph:
    model = ir.from_proto(onnx.load_model_from_string(payload))
    fields = json.loads(model.metadata_props.pop(_SIGNATURE))
    user_inputs, parameters, buffers, outputs, updates, (views, in_order, is_out_of_order), rows = fields
    for node in model.graph.all_nodes():
        for name, exact in json.loads(node.metadata_props.pop(_EXACT, "{}")).items():
            node.attributes[name] = ir.Attr(name, node.attributes[name].type, exact)
    infer_graph(model.graph)  # the content of shape tensors is not part of the file
    roles = tuple(user_inputs), tuple(parameters), tuple(buffers), tuple(outputs)
    signature = Signature(*roles, updates, views=views, in_order=tuple(in_order), is_out_of_order=is_out_of_order)
    return ForwardGraph(model, signature, tuple(Layers(*row) for row in rows))
