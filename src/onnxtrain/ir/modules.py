"""The modules that nodes come from, written as torch.onnx's exporter does, for tools that show graphs by module.

``layer.0: package.Block/layer.0.norm: torch.nn.modules.normalization.LayerNorm/layer_norm: aten.layer_norm.default`` is
what is said of a node: the modules that were being called, the outermost first, then the call itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx_ir as ir

NAMESPACE = "namespace"  # key in Node.metadata_props
_PART = re.compile(r"(.*?): ([^/]*)(?:/|$)")  # a module's name may have a slash in it, a class has none
Module = tuple[str, str]  # name, as in named_modules, and class


def namespace(modules: Iterable[Module], call: str, target: str) -> str:
    """What is written of a node.

    Args:
        modules: those around it, the outermost first.
        call: its name in the trace.
        target: the operator that was called.
    """
    return "/".join(f"{name}: {kind}" for name, kind in (*modules, (call, target)))


def modules_of(node: ir.Node) -> tuple[Module, ...]:
    """The modules that a node comes from, the outermost first; not the one that the whole graph is of."""
    said = _PART.findall(node.metadata_props.get(NAMESPACE, ""))
    return tuple((name, kind) for name, kind in said[:-1] if name)
