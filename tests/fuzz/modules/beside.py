"""A module through ORTModule beside the same module in eager PyTorch, at several sizes."""

from __future__ import annotations

import contextlib
import copy
import functools
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuzz.modules.scripts import SCRIPTS
from fuzz.modules.steps import Step, take_step
from fuzz.modules.structures import leaves, mapped
from fuzz.outcomes import Fault
from onnxtrain import Options, ORTModule
from onnxtrain.errors import OnnxTrainError

Inputs = Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]]
Run = Callable[[Any, torch.nn.Module, float], Step]  # what is called, its module, and how much all numbers are off
NOISE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
STEEP = 1e5  # of the noise: what moves more than this is decided by rounding
DOUBTS = 8  # other draws of the noise before a number counts as another


class EagerRefuses(Exception):
    """Eager PyTorch takes no such module or input, or its numbers are decided by rounding."""


def agree(
    module: type[torch.nn.Module],
    inputs: Inputs,
    sizes: Sequence[tuple[int, int]],
    *,
    seed: int = 0,
    training: bool = True,
    loss: str = "weighted",
    moves: bool = False,
    script: str = "",
    **options: Any,
) -> ORTModule:
    """Run a step at each size; outputs, gradients, buffers and what is kept on the module are eager's.

    Args:
        module: made without arguments.
        inputs: arguments of a call, by batch and length.
        sizes: batch and length of each step.
        seed: of weights and inputs.
        training: the mode.
        loss: what goes backwards; one of ``LOSSES``.
        moves: whether the parameters change between the steps.
        script: what is done with the calls, one of ``SCRIPTS``; else a step of each.
        options: for ``Options``.

    Raises:
        EagerRefuses: there is nothing to compare with.
        OnnxTrainError: the module is refused.
        Fault: a number, a type or a structure is another, or what was raised is not ours.
    """
    real = inputs.__globals__.get("REAL", torch.float64)
    eager = _eager(lambda: _seeded(module, seed).to(real).train(training))
    noisy, original, first = (copy.deepcopy(eager) for _ in range(3))
    wrapped = _ours(lambda: ORTModule(original, options=Options(**{"summary": False} | options)))
    calls = [_eager(partial(_seeded, partial(inputs, *size), seed + 100 * size[0] + size[1])) for size in sizes]
    steps = [
        (f"step {place} of size {size}", partial(_step, given, loss, place, moves))
        for place, (size, given) in enumerate(zip(sizes, calls, strict=True))
    ]
    if script:
        steps = [
            (script, lambda called, module, noise: SCRIPTS[script](called, [_moved(c, noise) for c in calls], loss))
        ]
    past = []
    for place, (when, run) in enumerate(steps):
        watch = Lowest(torch.float32 if options.get("backend") == "reference" else real)  # as ONNX's functions are
        with watch:
            theirs = _eager(partial(run, eager, eager, 0.0))
        noise = NOISE[watch.found]
        near = _eager(partial(run, noisy if place else _moved(noisy, noise), noisy, noise))
        ours = _ours(partial(run, wrapped, original, 0.0))
        past.append((run, theirs))
        try:
            _compare(ours, theirs, near, watch.found, when)
        except Fault:
            _doubt(first, past, ours, watch.found)
            raise
    return wrapped


@contextlib.contextmanager
def default_type(real: torch.dtype) -> Iterator[None]:
    """Floating numbers without a type are of this one in the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(real)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _step(given: Any, loss: str, place: int, moves: bool, called: Any, module: torch.nn.Module, noise: float) -> Step:
    arguments = _moved(given, noise)
    torch.manual_seed(place)  # of what the module draws
    return take_step(called, module, arguments, loss, place, moves)


class Lowest(TorchDispatchMode):
    """Notes the coarsest floating type that anything is computed in."""

    def __init__(self, real: torch.dtype) -> None:
        super().__init__()
        self.found = real

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for _, value in leaves(result):
            if isinstance(value, torch.Tensor) and NOISE.get(value.dtype, 0) > NOISE[self.found]:
                self.found = value.dtype
        return result


def _seeded(make: Callable[[], Any], seed: int) -> Any:
    torch.manual_seed(seed)
    return make()


def _eager(run: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run()
        except Exception as error:
            raise EagerRefuses(f"{type(error).__name__}: {error}") from error


def _ours(run: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run()
        except OnnxTrainError:
            raise
        except Exception as error:
            raise Fault(f"raises {type(error).__name__}", f"{error}\n{traceback.format_exc()}") from error


def _moved(value: Any, noise: float) -> Any:
    """The same data (of a module: in place) with each floating number off by a little."""
    if not noise:
        return value
    if isinstance(value, torch.nn.Module):
        with torch.no_grad():
            for held in (*value.parameters(), *(b for b in value.buffers() if b.is_floating_point())):
                held.copy_(_moved(held, noise))
        return value
    return mapped(value, partial(_shaken, noise=noise))


def _shaken(value: Any, noise: float) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    data = value.detach()
    return (data * (1 + noise * torch.randn(data.shape).to(data))).requires_grad_(value.requires_grad)


def _compare(ours: Step, theirs: Step, near: Step, precision: torch.dtype, when: str) -> None:
    """All leaves, each with a tolerance for the precision and for how much rounding moves it."""
    _refuse_chances(theirs, near, precision)
    if ours.kinds != theirs.kinds:
        raise Fault("the structure is another", f"{when}: {ours.kinds}, not {theirs.kinds}")
    if more := ours.shared - theirs.shared:
        raise Fault("an output lies in the memory of something else", f"{when}: {' and '.join(min(more))}")
    if lost := theirs.ordered - ours.ordered:
        raise Fault("outputs: another order in memory", f"{when}: {', '.join(sorted(lost))}")
    for what in ("outputs", "state", "gradients"):
        mine, others, moved = (dict(getattr(step, what)) for step in (ours, theirs, near))
        if list(mine) != list(others):
            raise Fault(f"the {what} are others", f"{when}: {list(mine)}, not {list(others)}")
        for name in others:
            _same(
                f"{when}, {what}{name if what == 'outputs' else f' {name}'}",
                what,
                mine[name],
                others[name],
                moved[name],
                precision,
            )


def _doubt(module: torch.nn.Module, past: Sequence[tuple[Run, Step]], ours: Step, precision: torch.dtype) -> None:
    """Refuse what any of some other draws of noise makes another number: one leaves half of what is at an edge there.

    And what is as far from eager's as eager itself is once each of its operations rounds otherwise: where large terms
    cancel, noise of the inputs shows nothing. And gradients that are eager's once it keeps what it reads: of what was
    changed through ``.data`` after it was read, the gradient is one that eager did not compute with.

    Args:
        module: as it was before the first step.
        past: the steps, and what eager gave.
        ours: the last step, which is in doubt.
        precision: the coarsest type.
    """
    noise = NOISE[precision]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        kept, off = copy.deepcopy(module), _moved(copy.deepcopy(module), noise)
        for run, _ in past:
            theirs, near = _eager(partial(run, kept, kept, 0.0)), _eager(partial(run, off, off, noise))
    with contextlib.suppress(Fault):
        _compare(ours, theirs, near, precision, "")
        raise EagerRefuses("the gradient is one of what was changed through .data after it was read")
    for _ in range(DOUBTS):
        noisy, rounded = (copy.deepcopy(module) for _ in range(2))
        noisy = _moved(noisy, noise)
        for run, theirs in past:
            _refuse_chances(theirs, _eager(partial(run, noisy, noisy, noise)), precision)
            with Rounding(noise / 100):
                near = _eager(partial(run, rounded, rounded, 0.0))
        with contextlib.suppress(Fault):
            _compare(ours, theirs, near, precision, "")
            raise EagerRefuses("a number is decided by rounding within")


_ROUNDED = {
    *("mm", "bmm", "addmm", "baddbmm", "mul", "div", "sum", "mean", "exp", "log", "tanh", "rsqrt", "sqrt", "var"),
    *("var_mean", "std", "std_mean", "linalg_vector_norm", "logsumexp", "pow", "sigmoid", "erf", "cos", "sin"),
    *("gelu", "silu", "_softmax", "_safe_softmax", "_log_softmax", "native_layer_norm", "native_batch_norm"),
    *("convolution", "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm_backward"),
    *("native_batch_norm_backward", "convolution_backward"),
}


class Rounding(TorchDispatchMode):
    """What arithmetic is given is off by a little, in each call on its own; additions, which may be exact, are not.

    Args:
        noise: relative to each number.
    """

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in _ROUNDED and not function._schema.is_mutable:
            args = mapped(args, partial(_rounded, noise=self.noise))
        return function(*args, **(kwargs or {}))


def _rounded(value: Any, noise: float) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return value
    return value * (1 + noise * torch.empty_like(value).normal_(generator=_draws(value.device)))


@functools.cache
def _draws(device: torch.device) -> torch.Generator:
    """A generator of its own: the module draws as before."""
    return torch.Generator(device).manual_seed(0)


def _refuse_chances(theirs: Step, near: Step, precision: torch.dtype) -> None:
    for one, other in ((theirs.gradients, near.gradients), (theirs.outputs, near.outputs), (theirs.state, near.state)):
        for (name, value), (_, moved) in zip(one, other, strict=True):
            _refuse_chance(name, value, moved, precision)


def _refuse_chance(name: str, value: Any, moved: Any, precision: torch.dtype) -> None:
    """Refuse what is no number in eager, and what a little noise makes another number."""
    value, moved = _as_tensor(value), _as_tensor(moved)
    if isinstance(value, int) and value != moved:
        raise EagerRefuses(f"{name} is decided by rounding")
    if not isinstance(value, torch.Tensor):
        return
    if not isinstance(moved, torch.Tensor) or value.shape != moved.shape:
        raise EagerRefuses(f"{name} is decided by rounding")
    if value.is_floating_point() and not value.isfinite().all():
        raise EagerRefuses(f"{name} is not finite")
    if value.numel() and _distance(value, moved) > STEEP * NOISE[precision] * max(1.0, _largest(value)):
        raise EagerRefuses(f"{name} is decided by rounding")


def _as_tensor(value: Any) -> Any:
    """A Python float is compared as a tensor is."""
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().cpu().double() - b.detach().cpu().double()).abs().max()) if a.numel() else 0.0


def _largest(a: torch.Tensor) -> float:
    return float(a.detach().double().abs().max()) if a.numel() else 0.0


def _same(where: str, what: str, mine: Any, other: Any, moved: Any, precision: torch.dtype) -> None:
    if what == "gradients" and (mine is None or other is None):
        if mine is not other:
            raise Fault("a gradient is missing or too many", f"{where}: {mine}, not {other}")
        return
    if type(mine) is type(other):
        mine, other, moved = _as_tensor(mine), _as_tensor(other), _as_tensor(moved)
    if not isinstance(other, torch.Tensor) or not isinstance(mine, torch.Tensor):
        if type(mine) is not type(other) or mine != other:
            raise Fault(f"{what}: another value", f"{where}: {mine!r}, not {other!r}")
        return
    if (mine.dtype, mine.shape, mine.device) != (other.dtype, other.shape, other.device):
        raise Fault(f"{what}: another type, shape or device", f"{where}: {_kind(mine)}, not {_kind(other)}")
    if mine.requires_grad != other.requires_grad:
        raise Fault(f"{what}: requires_grad is another", f"{where}: {mine.requires_grad}, not {other.requires_grad}")
    allowed = TOLERANCE[precision] * max(1.0, _largest(other)) + 30 * _distance(other, moved)
    if not _distance(mine, other) <= allowed:
        raise Fault(f"{what}: a number is another", f"{where}: {mine}, not {other}; off by {_distance(mine, other)}")


def _kind(value: torch.Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.device}"
