"""What people do with a model other than one step after the other; each script gives the same in eager PyTorch."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

from fuzz.modules.steps import Step, backward, kept, move, moved, own, state, total
from fuzz.modules.structures import Leaf, leaves, mapped
from onnxtrain import ORTModule

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


class _Record:
    """Collects what is compared.

    Args:
        model: the module, wrapped or not.
        loss: what goes backwards.
    """

    def __init__(self, model: nn.Module, loss: str) -> None:
        self.model, self.loss = model, loss
        self.found = Step([], [], [], [])

    def call(self, call: Any, model: nn.Module | None = None) -> Any:
        """The output of a call."""
        args, kwargs = own(call)
        return (model or self.model)(*args, **kwargs)

    def note(self, output: Any) -> None:
        """Compare an output as it is now."""
        self.found.outputs += [(f" {len(self.found.outputs)} {p}", kept(v)) for p, v in leaves(output)]

    def step(self, call: Any, place: int = 0, model: nn.Module | None = None) -> None:
        """A call and its backward pass, and its output."""
        output = self.call(call, model)
        backward(output, self.loss, place)
        self.note(output)

    def gradients(self, model: nn.Module | None = None) -> None:
        """Compare the gradients that the parameters have now."""
        found: list[Leaf] = [(n, p.grad) for n, p in (model or self.model).named_parameters()]
        place = len(self.found.gradients)
        self.found.gradients += [(f"{place} {n}", None if g is None else g.detach().clone()) for n, g in found]


def accumulated(record: _Record, calls: Calls) -> None:
    """Gradients of all calls add up."""
    for place, call in enumerate(calls):
        record.step(call, place)
    record.gradients()


def backwards_reversed(record: _Record, calls: Calls) -> None:
    """All calls, then their backward passes from the last to the first, twice."""
    for _ in range(2):
        outputs = [record.call(call) for call in calls]
        for output in reversed(outputs):
            backward(output, record.loss, 0)
        record.note(outputs)
        record.gradients()


def one_of_two(record: _Record, calls: Calls) -> None:
    """Two calls at a time, of which only the first goes backwards."""
    for call in calls:
        first, second = record.call(call), record.call(calls[0])
        backward(first, record.loss, 0)
        record.note((first, second))
    record.gradients()


def modes_in_turn(record: _Record, calls: Calls) -> None:
    """Training, evaluation with and without gradients, and training again."""
    for place, call in enumerate(calls):
        record.model.train()
        record.step(call, place)
        record.model.eval()
        with torch.no_grad():
            record.note(record.call(call))
        record.step(call, place)
    record.gradients()


def copied(record: _Record, calls: Calls) -> None:
    """A deep copy between steps: both go on, each on its own."""
    record.step(calls[0])
    other = copy.deepcopy(record.model)
    move(record.model)
    for call in calls:
        record.step(call, model=other)
        record.step(call)
    record.gradients()
    record.gradients(other)


def loaded(record: _Record, calls: Calls) -> None:
    """The state is written, the parameters move, and it is read again."""
    written = io.BytesIO()
    torch.save(record.model.state_dict(), written)
    for call in calls:
        record.step(call)
        move(record.model)
    written.seek(0)
    record.model.load_state_dict(torch.load(written))
    record.step(calls[-1])
    record.gradients()


def frozen_in_turn(record: _Record, calls: Calls) -> None:
    """Every second parameter receives no gradient for a while."""
    parameters = list(record.model.parameters())
    for place, call in enumerate([*calls, *calls]):
        for other in parameters[::2]:
            other.requires_grad_(place % 2 == 0)
        record.step(call, place)
        record.gradients()


def twice_backwards(record: _Record, calls: Calls) -> None:
    """A graph that is kept and walked twice."""
    for place, call in enumerate(calls):
        output = record.call(call)
        trained = [v for _, v in leaves(output) if isinstance(v, torch.Tensor) and v.requires_grad]
        if trained:
            loss = total(trained, record.loss, place)
            loss.backward(retain_graph=True)
            loss.backward()
        record.note(output)
    record.gradients()


def asked_for(record: _Record, calls: Calls) -> None:
    """Gradients of some parameters only, as torch.autograd.grad gives them."""
    for place, call in enumerate(calls):
        trained = [v for _, v in leaves(record.call(call)) if isinstance(v, torch.Tensor) and v.requires_grad]
        chosen = list(record.model.parameters())[place % 2 :: 2]
        if trained and chosen:
            found = torch.autograd.grad(total(trained, record.loss, place), chosen, allow_unused=True)
            record.found.gradients += [(f"{place} {i}", g) for i, g in enumerate(found)]


def _weight_norm_by_its_formula(model: nn.Module) -> Any:
    """In eager PyTorch, whose ``_weight_norm`` has a wrong second derivative: ``gradgradcheck`` refuses it."""
    if isinstance(model, ORTModule):
        return contextlib.nullcontext()
    return mock.patch.object(torch, "_weight_norm", lambda v, g, dim: v * (g / torch.norm_except_dim(v, 2, dim)))


def differentiated_again(record: _Record, calls: Calls) -> None:
    """Gradients of parameters and inputs, and those of a weighted sum of their squares."""
    for place, call in enumerate(calls):
        args, kwargs = own(call)
        given = [v for _, v in leaves((args, kwargs)) if isinstance(v, torch.Tensor) and v.requires_grad]
        with _weight_norm_by_its_formula(record.model):
            output = record.model(*args, **kwargs)
        trained = [v for _, v in leaves(output) if isinstance(v, torch.Tensor) and v.requires_grad]
        chosen = [*given, *list(record.model.parameters())[place % 2 :: 2]]
        chosen = [p for p in chosen if p.requires_grad]
        if trained and chosen:
            loss = total(trained, record.loss, place)
            found = torch.autograd.grad(loss, chosen, create_graph=True, allow_unused=True)
            record.found.gradients += [(f"{place} {i}", None if g is None else g.detach()) for i, g in enumerate(found)]
            again = [g.double().square().sum() * (i + 1) for i, g in enumerate(found) if g is not None]
            tracked = [part for part in again if part.requires_grad]
            (torch.stack([*tracked, loss]).sum()).backward()
            record.found.gradients += [(f"{place} input {i}", v.grad) for i, v in enumerate(given)]
        record.gradients()
        record.note(output)


def losses_in_turn(record: _Record, calls: Calls) -> None:
    """Each output goes back on its own, through one forward pass."""
    for call in calls:
        output = record.call(call)
        trained = [v for _, v in leaves(output) if isinstance(v, torch.Tensor) and v.requires_grad]
        for place, value in enumerate(trained):
            total([value], record.loss, 0).backward(retain_graph=place + 1 < len(trained))
            record.gradients()
        record.note(output)


def stepped_within(record: _Record, calls: Calls) -> None:
    """Each parameter moves as soon as its gradient is there."""
    for parameter in record.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(moved)
    for place, call in enumerate(calls):
        output = record.call(call)
        record.note(output)  # what is read later is computed with what the parameters are then
        backward(output, record.loss, place)


def first_without(record: _Record, calls: Calls) -> None:
    """The first calls are made without gradients and in inference mode."""
    with torch.no_grad():
        record.note(record.call(calls[0]))
    with torch.inference_mode():
        record.note([v.clone() for _, v in leaves(record.call(calls[-1])) if isinstance(v, torch.Tensor)])
    for call in calls:
        record.step(call)
    record.gradients()


def read_late(record: _Record, calls: Calls) -> None:
    """Outputs are read after the backward pass and after the parameters have gone back to what they were."""
    for place, call in enumerate(calls):
        output = record.call(call)
        backward(output, "last", place)
        record.note(output)
        record.step(call, place)
    record.gradients()


def halved(record: _Record, calls: Calls) -> None:
    """Each batch in two parts, whose gradients add up; tensors of another first size are given to both."""
    for call in calls:
        sizes = [v.shape[0] for _, v in leaves(call) if isinstance(v, torch.Tensor) and v.dim()]
        half = max(sizes, default=0) // 2
        for part in (slice(None, half), slice(half, None)) if half else (slice(None),):
            record.step(_sliced(call, part, max(sizes, default=0)))
    record.gradients()


def _sliced(value: Any, part: slice, size: int) -> Any:
    return mapped(value, lambda leaf: _part(leaf, part, size))


def _part(leaf: Any, part: slice, size: int) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size:
        return leaf.detach()[part].requires_grad_(leaf.requires_grad)
    return leaf


def padding_replaced(record: _Record, calls: Calls) -> None:
    """Other ids at padded positions: what depends on them in eager does so here, and nothing else does."""
    for args, kwargs in calls:
        ids, mask, labels = args
        for shift in (0, 1, 7):
            record.step(((torch.where(mask == 0, (ids + shift) % 20, ids), mask, labels), kwargs))
    record.gradients()


_PLAYED: tuple[Callable[[_Record, Calls], None], ...] = (
    accumulated, backwards_reversed, one_of_two, modes_in_turn, copied, loaded, frozen_in_turn, twice_backwards,
    asked_for, differentiated_again, losses_in_turn, stepped_within, first_without, read_late, halved, padding_replaced,
)  # fmt: skip


def _script(play: Callable[[_Record, Calls], None]) -> Callable[[nn.Module, Calls, str], Step]:
    def run(model: nn.Module, calls: Calls, loss: str) -> Step:
        record = _Record(model, loss)
        play(record, calls)
        record.found.state += state(model.module if isinstance(model, ORTModule) else model)
        return record.found

    return run


SCRIPTS = {play.__name__: _script(play) for play in _PLAYED}
