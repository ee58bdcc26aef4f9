"""Any ATen operator by name, and its gradient as torch takes it."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
_IN_ONE_PIECE = (
    frozenset(  # medians read an expanded axis beyond its end; the others ask for the strides of new tensors
        ("aten::median.dim", "aten::nanmedian.dim", "aten::view_as_complex", "aten::view.dtype")
    )
)
_LARGEST = 16  # elements of one byte in one of the largest type


@lowering("ATen", domain=DOMAIN, view=True)
def aten(
    *inputs: Tensor,
    operator: str,
    overload: str,
    arguments: str,
    keywords: str,
    results: int = 1,
    seeded: int = 0,
    outputs: int = 1,
    device: str = "cpu",
) -> Any:
    """Call the operator with its recorded arguments; one more output is the random state it started from."""
    state = (_random_state(device),) if seeded and outputs > results else ()
    made = _call(inputs, operator, overload, arguments, keywords)
    found = (*made, *state) if isinstance(made, tuple | list) else (made, *state)
    return found[0] if outputs == 1 else found


@lowering("ATenGrad", domain=DOMAIN, view=True)
def aten_grad(
    *operands: Tensor | None,
    inputs: int,
    seeded: int = 0,
    levels: Sequence[int] = (),
    outputs: int = 1,
    needed: Sequence[bool] = (),
    device: str = "cpu",
    **call: str,
) -> Any:
    """Run the operator again under autograd and take its vector-Jacobian product, or that one's, and so on."""
    counts = [inputs, *levels]
    given, dys = operands[: counts[-1]], operands[counts[-1] :]
    leaves = [_leaf(x, is_needed or bool(levels)) for x, is_needed in zip(given, needed, strict=True)]
    state = operands[levels[0] - 1 if levels else -1] if seeded else None
    with torch.enable_grad(), _replayed(state, device):
        found = _gradients(functools.partial(_call, **call), counts, [*leaves, *dys], needed)
    filled = [_dense(dx, x) if n else None for dx, x, n in zip(found, given, needed, strict=True)]
    return filled[0] if outputs == 1 else tuple(filled)


def _gradients(
    call: Callable[..., Any],
    counts: Sequence[int],
    given: Sequence[Tensor | None],
    needed: Sequence[bool],
    again: bool = False,
) -> list[Tensor | None]:
    """Gradients of a call, or where there are more counts, of its gradients.

    Args:
        call: gives the results for the first operands.
        counts: how many operands the call has, then its gradient, then that one's.
        given: operands, then the gradients of what is differentiated.
        needed: for each operand, whether its gradient is asked for.
        again: whether the gradients are differentiated themselves.
    """
    leaves, dys = given[: counts[-1]], given[counts[-1] :]
    if len(counts) == 1:
        made = call(leaves)
        results = list(made) if isinstance(made, tuple | list) else [made]
    else:
        asked = [i < len(dys) and dys[i] is not None for i in range(counts[-2])]
        results = _gradients(call, counts[:-1], leaves, asked, again=True)
    pairs = [(y, dy) for y, dy in zip(results, dys, strict=False) if dy is not None and y is not None]
    pairs = [(y, dy) for y, dy in pairs if y.requires_grad]
    wanted = {i: x for i, (x, n) in enumerate(zip(leaves, needed, strict=True)) if n and x is not None}
    wanted = {i: x for i, x in wanted.items() if x.requires_grad}
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if pairs and wanted:
        ys, seeds = zip(*pairs, strict=True)
        found = torch.autograd.grad(ys, list(wanted.values()), seeds, allow_unused=True, create_graph=again)
    by_place = dict(zip(wanted, found, strict=True))
    return [by_place.get(i) for i in range(counts[-1])]


def _leaf(x: Tensor | None, is_needed: bool) -> Tensor | None:
    if x is None:
        return None
    return x.detach().requires_grad_(is_needed and (x.is_floating_point() or x.is_complex()))


def _dense(dx: Tensor | None, x: Tensor | None) -> Tensor | None:
    if dx is None:
        return None if x is None else torch.zeros_like(x)
    return dx if dx.layout == torch.strided else dx.to_dense()


def _random_state(device: str) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.startswith("cuda") else torch.get_rng_state()


@contextlib.contextmanager
def _replayed(state: Tensor | None, device: str) -> Iterator[None]:
    """Random numbers are drawn from a state, and the generator is left as it was."""
    if state is None:
        yield
        return
    is_cuda = device.startswith("cuda")
    with torch.random.fork_rng([torch.device(device)] if is_cuda else []):
        if is_cuda:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        yield


def _call(inputs: Sequence[Tensor | None], operator: str, overload: str, arguments: str, keywords: str) -> Any:
    function, takes_tensor, args, kwargs = _parsed(operator, overload, arguments, keywords)
    inputs = [x if x is None else _in_one_piece(x) for x in inputs] if operator in _IN_ONE_PIECE else inputs
    given = [_number(_decode(a, inputs), takes) for a, takes in zip(args, takes_tensor, strict=False)]
    return function(*given, **{k: _decode(a, inputs) for k, a in kwargs.items()})


def _in_one_piece(x: Tensor) -> Tensor:
    """A tensor as it lies when it is new: a graph expands, slices and permutes where eager PyTorch copies."""
    is_new = x.is_contiguous() and x.storage_offset() % _LARGEST == 0
    return x if is_new else x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(4096)
def _parsed(
    operator: str, overload: str, arguments: str, keywords: str
) -> tuple[Any, list[bool], list[Any], dict[str, Any]]:
    function = _overload(operator, overload)
    takes_tensor = ["Tensor" in str(p.type) for p in function._schema.arguments]
    return function, takes_tensor, json.loads(arguments), json.loads(keywords)


def _overload(operator: str, overload: str) -> Any:
    namespace, name = operator.split("::")
    return getattr(getattr(getattr(torch.ops, namespace), name.split(".")[0]), overload)


def _number(argument: Any, takes_tensor: bool) -> Any:
    """A size that the graph computes is a tensor; where the operator takes numbers it is made one."""
    return argument.tolist() if isinstance(argument, Tensor) and not takes_tensor else argument


def _decode(argument: Any, inputs: Sequence[Tensor | None]) -> Any:
    if isinstance(argument, list):
        return [_decode(a, inputs) for a in argument]
    if isinstance(argument, dict):
        if "input" in argument:
            return inputs[argument["input"]]
        if "default" in argument:  # what a call of another operator has left out
            operator, overload, position = argument["default"]
            return _overload(operator, overload)._schema.arguments[position].default_value
        if "number" in argument:
            return inputs[argument["number"]].item()  # type: ignore[union-attr]
        if "complex" in argument:
            return complex(*argument["complex"])
        return _named(argument["text"])
    return argument


def _named(text: str) -> Any:
    """A dtype, device, layout or memory format from its printed form."""
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    return torch.device(text)
