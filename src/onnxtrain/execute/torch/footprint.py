"""What memory a step needs: its programs run on tensors without content, and every allocation is seen."""

from __future__ import annotations

import linecache
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from onnxtrain.errors import BackendError
from onnxtrain.execute.base import Executable, Footprint, Use
from onnxtrain.execute.torch.program import FILE, Program
from onnxtrain.execute.torch.remembered import Remembered
from onnxtrain.execute.torch.workspace import workspace

_QUESTIONS = 10_000  # about content that a line may ask
_BLOCK = 512  # bytes of which accelerators allocate multiples
aten = torch.ops.aten


@torch.no_grad()
def footprint(
    executable: Executable, inputs: Sequence[torch.Tensor], device: str, programs: Mapping[str, Program]
) -> Footprint:
    """What a step on inputs like these allocates; nothing is computed.

    Args:
        executable: the program.
        inputs: tensors in the order of ``plan.signature.inputs``; of meta tensors the sizes count.
        device: where the step runs.
        programs: the program of each part.
    """
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):  # a kernel of a user's would get it
        mode = FakeTensorMode(allow_non_fake_inputs=True)
    plan, watch = executable.plan, Watch(device, programs, mode)
    with mode:
        given = [x if _has_content(x) else _empty(x, device) for x in inputs]
        watch.ignore(given)
        with watch:
            outputs, saved = executable.forward(given)
            if plan.backward is not None:
                named = dict(zip(plan.signature.outputs, outputs, strict=False))
                executable.backward(saved, [torch.empty_like(named[name]) for name in plan.output_gradients])
            return watch.footprint()


def _empty(x: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _has_content(x: torch.Tensor) -> bool:
    """Whether a tensor is given as it is: integers may be sizes, places and masks, on which sizes depend."""
    return x.device.type != "meta" and not x.is_floating_point() and not x.is_complex()


class Watch(TorchDispatchMode):
    """Sees what is allocated within it, and how long it is held.

    Integers have their content. What a tensor without content is asked about it is answered with zero; where it
    decides on a size, that is the largest: all elements are found.

    Args:
        device: where the tensors are said to be.
        programs: the program of each part.
        mode: in which tensors without content are made.
    """

    def __init__(self, device: str, programs: Mapping[str, Program], mode: FakeTensorMode) -> None:
        super().__init__()
        self._run = Remembered(mode)
        self._programs = programs
        self._block = 1 if torch.device(device).type == "cpu" else _BLOCK
        self._now = self._most = self._peak = 0
        self._at = ("", "")  # part and line of the program
        self._asked = 0  # how often that line asked what a tensor holds
        self._uses: list[Use] = []
        self._live: dict[int, tuple[str, int]] = {}
        self._holders: list[tuple[str, int]] = []
        self._known: dict[int, Any] = {}

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take these tensors to be there already: they are not counted."""
        self._known |= {s._cdata: s for s in (t.untyped_storage() for t in tensors)}

    def footprint(self) -> Footprint:
        """What was seen."""
        self._end_line()
        return Footprint(tuple(self._uses), tuple(sorted(self._holders, key=lambda h: -h[1])))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call, and see what it makes."""
        if function is torch.ops.prim.device.default:  # every third one, and it makes nothing
            return function(*args)
        if (at := _place(sys._getframe(1))) != self._at:
            self._end_line()
            self._at, self._asked = at, 0
        found = self._result(function, types, args, kwargs or {})
        self._use(workspace(function, args, found))
        for made in [found] if isinstance(found, torch.Tensor) else pytree.tree_leaves(found):
            if isinstance(made, torch.Tensor) and made.device.type != "meta":
                self._see(made)
        return found

    def _result(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function in _COUNTED or (FakeTensor not in types and _any_tensor(args, kwargs)):
            with unset_fake_temporarily():  # of constants and integers
                return function(*args, **kwargs)
        if function is aten._local_scalar_dense.default:
            self._asked += 1
            if self._asked > _QUESTIONS:
                raise BackendError("a loop of an operator ends by what tensors hold")
            return False if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
        if function is aten.equal.default:
            return True
        if call := _LARGEST.get(function):
            return call(*args, **kwargs)
        return self._run(function, args, kwargs)

    def _see(self, made: torch.Tensor) -> None:
        storage = made.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // self._block) * self._block
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self._live[key] = (self._at[1], size)
        self._now += size
        self._use(0)

    def _use(self, more: int) -> None:
        """Take notice of what is in use, with so many bytes more for a moment."""
        self._most = max(self._most, self._now + more)
        if self._most > self._peak:
            self._peak = self._most
            self._holders = [*self._live.values(), *([(self._at[1], more)] if more else [])]

    def _forget(self, key: int, size: int) -> None:
        del self._known[key], self._live[key]
        self._now -= size

    def _end_line(self) -> None:
        if self._at[0]:
            part, line = self._at
            self._uses.append(Use(part, line, self._programs[part].value_of(line), self._most, self._now))
        self._most = self._now


def _place(frame: FrameType | None) -> tuple[str, str]:
    """The part and the line of the generated program that is running."""
    found = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(FILE):
            found = frame
        frame = frame.f_back
    if found is None:
        return "backward", "gradients of the outputs"
    return found.f_code.co_name, linecache.getline(found.f_code.co_filename, found.f_lineno).strip()


def _any_tensor(*given: Any) -> bool:
    return any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(given))


def _all_places(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel(), x.dim(), dtype=torch.long, device=x.device)


def _all_elements(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.broadcast_shapes(x.shape, mask.shape)).flatten()


def _all_indexed(function: Any) -> Callable[..., Any]:
    """A call with indices, of which masks find all elements."""

    def call(x: torch.Tensor, indices: Sequence[torch.Tensor | None], *rest: Any) -> Any:
        return function(x, [place for index in indices for place in _places_of(index)], *rest)

    return call


def _places_of(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [torch.empty(index.numel(), dtype=torch.long, device=index.device) for _ in range(index.dim())]


_COUNTED = (aten.arange.default, aten.arange.start, aten.arange.start_step)  # numbers of rows, which are looked at
_LARGEST: Mapping[Any, Callable[..., Any]] = {
    aten.nonzero.default: _all_places,
    aten.masked_select.default: _all_elements,
    **{f: _all_indexed(f) for f in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)},
}
