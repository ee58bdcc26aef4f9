"""torch's recorder without what nobody reads.

Each line of a stack is looked up once, no code is generated, no equations of sizes are solved, what is written to
attributes is seen by ``left_behind`` alone, which leaves lists the objects that they are, and what calls return is
remembered by ``known_calls`` alone: torch's own memory of it (``fake_tensor_cache_enabled``) costs more than it saves
beside that. Modules are themselves, too: where one has two names torch gives others in the places of all of them, by
which nobody knows who is read or written.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import proxy as fx_proxy
from torch.fx.experimental import proxy_tensor

from onnxtrain.capture.graph_code import CODE_WHEN_RUN
from onnxtrain.capture.known_calls import Count, known_calls
from onnxtrain.capture.layouts import layouts
from onnxtrain.capture.quiet import quiet
from onnxtrain.capture.replaced import replaced
from onnxtrain.capture.source_lines import is_users

_OUTERMOST = str(Path(__file__).with_name("export.py"))  # what calls the user's forward pass
_is_users = functools.cache(is_users)


class _Stack:
    """The user's lines at a recorded call, in place of ``torch.utils._traceback.CapturedTraceback``.

    Where there are none within the forward pass, the innermost line.
    """

    def __init__(self, frames: list[traceback.FrameSummary]) -> None:
        self._frames = frames

    @classmethod
    def extract(cls, **options: Any) -> _Stack:
        """The stack of the caller."""
        innermost = frame = sys._getframe(1)
        frames = []
        while frame is not None and frame.f_code.co_filename != _OUTERMOST:
            if _is_users(frame.f_code.co_filename):
                frames.append(_frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back  # type: ignore[assignment]
        code = innermost.f_code
        return cls(frames[::-1] or [_frame(code.co_filename, innermost.f_lineno, code.co_name)])

    def summary(self) -> traceback.StackSummary:
        """The frames, outermost first."""
        return traceback.StackSummary(self._frames)


@functools.lru_cache(65536)
def _frame(file: str, line: int, name: str) -> traceback.FrameSummary:
    return traceback.FrameSummary(file, line, name, line=linecache.getline(file, line), lookup_line=False)


@contextlib.contextmanager
def recorder() -> Iterator[Count]:
    """Within it torch.export records in less time; gives how many calls it recorded, and how many were known."""
    from torch._dynamo import config  # a second of imports, which recalled graphs do without
    from torch._export.passes import lift_constants_pass, replace_set_grad_with_hop_pass
    from torch.export import _trace

    light = replaced(
        (fx_proxy, "CapturedTraceback", _Stack),
        CODE_WHEN_RUN,
        (proxy_tensor, "_extract_tensor_metadata", lambda value: None),
        (proxy_tensor._ModuleStackTracer, "getattr", proxy_tensor.PythonKeyTracer.getattr),
        (_trace, "_replace_unbacked_bindings", lambda module: None),
        (_trace, "_detect_attribute_assignment", lambda module: contextlib.nullcontext()),  # it leaves copies of lists
        (_trace, "apply_runtime_assertion_pass", lambda module, signature: (module, signature)),
        (_trace, "produce_guards_and_solve_constraints", _unsolved),
        (replace_set_grad_with_hop_pass, "_is_set_grad_enabled_sub_mod", _switches_gradients),
        (lift_constants_pass, "_unused_constant", functools.partial(_unread, lift_constants_pass._unused_constant)),
    )
    _frame.cache_clear()  # files may have been written anew
    with light, layouts(), config.patch(fake_tensor_cache_enabled=False), known_calls() as count:
        yield count


def _unread(of_torch: Callable[[torch.fx.Node], Any], constant: torch.fx.Node) -> Any:
    """What goes with a constant that nothing reads: torch takes its last reader away, and asks then who reads it."""
    return of_torch(constant) if constant.users else [constant]


def _switches_gradients(node: torch.fx.Node, omit_if_same_with_ambient: bool = False) -> bool:
    """Whether a part of a split program has gradients switched, under autocast too, which each part enters first."""
    if node.op != "call_module":
        return False
    part: Any = getattr(node.graph.owning_module, str(node.target))
    before = (torch.amp.autocast_mode._enter_autocast,)
    first = next((n for n in part.graph.nodes if n.op != "placeholder" and n.target not in before), None)
    if first is None or first.target is not torch._C._set_grad_enabled:
        return False
    return first.args[0] != torch.is_grad_enabled() if omit_if_same_with_ambient else True


@contextlib.contextmanager
def recording(gradients: bool = True) -> Iterator[None]:
    """What torch.export runs the user's module in, by default with gradients enabled."""
    with quiet(), torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield


def take_out_raised(program: torch.export.ExportedProgram) -> int:
    """Take calls without a result out of a program, which the module tried and does without; says how many."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    found = [n for graph in graphs for n in graph.nodes if _has_raised(n)]
    for node in found:
        node.graph.erase_node(node)
    return len(found)


def _has_raised(node: torch.fx.Node) -> bool:
    target: Any = node.target
    gives = isinstance(target, torch._ops.OpOverload) and bool(target._schema.returns)
    return gives and node.meta.get("val") is None and not node.users


def _unsolved(*, fake_mode: Any, **others: Any) -> None:
    """Nothing is solved for sizes: what was asked of them is a guard (``size_guards``), solvable or not."""
    fake_mode.shape_env.frozen = True


__all__ = ["recorder", "take_out_raised"]
