"""Complex numbers that are looked at as real ones or conjugated: what these views are of, once they are written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import Node

aten = torch.ops.aten
Call: TypeAlias = Callable[[Any, tuple[Any, ...]], Any]
_CONJUGATES = frozenset(("conj", "_conj", "mH", "matrix_H", "adjoint"))


def whole_of(name: str, above: Node, content: Any, call: Call) -> Any:
    """The complex numbers that a view by this operator shows, where it has another content; None for other views.

    Args:
        name: the operator's, without its namespace.
        above: what the view is of, as it was.
        content: of the view.
        call: writes a call.
    """
    if name == "view_as_real":
        return call(aten.view_as_complex.default, (content,))
    if name == "view_as_complex":
        return _pairs(content, call)
    if not is_complex(above):
        return None
    if name == "real":
        return call(aten.complex.default, (content, call(aten.imag.default, (above,))))
    if name == "imag":
        return call(aten.complex.default, (call(aten.real.default, (above,)), content))
    return conjugated(name, content, call) if name in ("conj", "_conj") else None


def conjugated(name: str, content: Any, call: Call) -> Any:
    """A content, conjugated where the view by this operator shows the conjugates of complex numbers."""
    return call(aten.conj_physical.default, (content,)) if name in _CONJUGATES and is_complex(content) else content


def scattered(target: Any, above: Any, part: Any, dim: int | None, rest: Sequence[Any], call: Call) -> Any:
    """A tensor with another content in a part of it, along an axis.

    For complex numbers torch has no gradient of it; it has one for the pairs of real numbers that they are.
    """
    if not is_complex(above):
        return call(target, (above, part, dim, *rest))
    axis = (dim or 0) % above.meta["val"].dim()
    made = call(target, (_pairs(above, call), _pairs(part, call), axis, *rest))
    return call(aten.view_as_complex.default, (made,))


def is_complex(content: Any) -> bool:
    """Whether a tensor of the graph is of complex numbers."""
    return isinstance(content, Node) and content.meta["val"].is_complex()


def _pairs(content: Any, call: Call) -> Any:
    return call(aten.view_as_real.default, (call(aten.resolve_conj.default, (content,)),))
