"""What a forward pass keeps outside of the module: caches are filled as in eager PyTorch, state is refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import same_step
from torch._subclasses.fake_tensor import FakeTensor
from transformers import BertConfig, BertForSequenceClassification

from onnxtrain import ORTModule
from onnxtrain.capture import capture, left_outside
from onnxtrain.capture.readings import reading
from onnxtrain.errors import CaptureError

Tensor = torch.Tensor
TABLE: dict[Any, Any] = {}
LIST: list[Tensor] = []
NAMED: Tensor | None = None
OBJECT = types.SimpleNamespace(mask=None)


@dataclasses.dataclass(frozen=True)
class Pair:
    lower: Tensor
    scale: float


def lower(n: int) -> Tensor:
    return torch.ones(n, n).tril()


def _in_a_table(n: int) -> Tensor:
    if n not in TABLE:
        TABLE[n] = lower(n)
    return TABLE[n]


def _in_a_pair(n: int) -> Tensor:
    if n not in TABLE:
        TABLE[n] = (lower(n), n)
    return TABLE[n][0]


def _in_a_record(n: int) -> Tensor:
    if n not in TABLE:
        TABLE[n] = Pair(lower(n), 1.0)
    return TABLE[n].lower


def _under_a_name(n: int) -> Tensor:
    global NAMED
    if NAMED is None or NAMED.shape[0] != n:
        NAMED = lower(n)
    return NAMED


def _in_an_object(n: int) -> Tensor:
    if OBJECT.mask is None or OBJECT.mask.shape[0] != n:
        OBJECT.mask = lower(n)
    return OBJECT.mask


def _in_a_closure() -> Callable[[int], Tensor]:
    kept = None

    def mask(n: int) -> Tensor:
        nonlocal kept
        if kept is None or kept.shape[0] != n:
            kept = lower(n)
        return kept

    return mask


def _in_an_argument(n: int, kept: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    return kept.setdefault(n, lower(n))


CACHES: dict[str, Callable[[int], Tensor]] = {
    "a function's cache": functools.cache(lower),
    "a bounded cache": functools.lru_cache(maxsize=2)(lower),
    "a table": _in_a_table,
    "a pair in a table": _in_a_pair,
    "a record in a table": _in_a_record,
    "a name": _under_a_name,
    "an object": _in_an_object,
    "a variable of an enclosing function": _in_a_closure(),
    "a default argument": _in_an_argument,
}


class Masked(torch.nn.Module):
    def __init__(self, mask: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self._mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return self._mask(x.shape[1]) @ self.linear(x)


@pytest.fixture(autouse=True)
def _empty() -> None:
    global NAMED
    NAMED = OBJECT.mask = None
    TABLE.clear()
    LIST.clear()


@pytest.mark.parametrize("with_cache", [False, True], ids=["plain", "with a cache folder"])
@pytest.mark.parametrize("name", CACHES)
def test_caches_hold_what_eager_leaves_there(name: str, with_cache: bool, tmp_path, monkeypatch) -> None:
    if with_cache:
        monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path))
    module = Masked(CACHES[name])
    wrapped, eager = ORTModule(module), copy.deepcopy(module)
    for size in ((2, 3), (1, 5), (4, 1), (3, 3)):
        same_step(wrapped, eager, torch.randn(*size, 4))
        assert not isinstance(module._mask(size[1]), FakeTensor)
        torch.testing.assert_close(module._mask(size[1]), lower(size[1]))


class Mapped(Masked):
    """Writes, within functions that are mapped and differentiated, to what they make."""

    def _energy(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x).add_(x)
        y[0] = 1.0
        return (y * x.sin()).prod()

    def forward(self, x: Tensor) -> Tensor:
        curvature = torch.vmap(torch.vmap(torch.func.hessian(self._energy)))(x).sum(-1)
        return super().forward(x) + curvature


@pytest.mark.parametrize("name", ["a name", "a table"])
def test_caches_beside_functions_that_are_mapped_and_differentiated(name: str) -> None:
    module = Mapped(CACHES[name])
    wrapped, eager = ORTModule(module), copy.deepcopy(module)
    for size in ((2, 3), (1, 5), (3, 3)):
        same_step(wrapped, eager, torch.randn(*size, 4))


def test_a_cache_of_one_place_serves_two_sizes_in_a_call_from_one_graph() -> None:
    class Twice(Masked):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self._mask(x.shape[0]).sum()

    module = Twice(_under_a_name)
    wrapped, eager = ORTModule(module), copy.deepcopy(module)
    for size in ((2, 3), (5, 4), (3, 6)):
        same_step(wrapped, eager, torch.randn(*size, 4))
        assert NAMED is not None and not isinstance(NAMED, FakeTensor)
    assert len(wrapped.__dict__["_ort_sessions"].entries) == 1


class Averaged(Masked):
    """Leaves another tensor in a table at each call."""

    def forward(self, x: Tensor) -> Tensor:
        TABLE["mean"] = 0.9 * TABLE.get("mean", 0.0) + x.mean()
        return self.linear(x) * TABLE["mean"]


class Auxiliary(Masked):
    """Collects losses in a list, to be differentiated."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        LIST.append(y.square().mean())
        return y


@pytest.mark.parametrize(("kind", "where"), [(Averaged, "TABLE"), (Auxiliary, "LIST")])
def test_state_outside_of_the_module_is_refused_by_name_and_nothing_without_content_stays(kind, where) -> None:
    with pytest.raises(CaptureError, match=rf"leaves a tensor outside of the module: in .*{where}") as raised:
        capture(kind(lower), (torch.randn(2, 3, 4),), {})
    assert f"{__file__}:" in raised.value.source
    assert not any(isinstance(x, FakeTensor) for x in (*TABLE.values(), *LIST))


class Failing(Masked):
    """Fills a cache, then does what cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ torch.ones(3, 3)


def test_a_trace_that_fails_leaves_caches_empty() -> None:
    with pytest.raises(CaptureError, match="cannot be captured"):
        capture(Failing(_in_a_table), (torch.randn(2, 3, 4),), {})
    assert not TABLE


class Refused(Masked):
    """Looks at a number in a cell of its own, and fails after it."""

    def forward(self, x: Tensor) -> Tensor:
        halves = [x / 2, x / 2]
        longest = functools.partial(max, key=lambda t: float(halves[0].sum() + t.sum()))
        return longest(halves) @ torch.ones(3, 3)


def test_what_a_trace_that_fails_has_made_goes_with_its_frames(monkeypatch) -> None:
    """The collector passes through all objects of a process: seconds, where there are many."""
    passed: list[Any] = []
    monkeypatch.setattr(left_outside.gc, "get_referrers", lambda *held: passed.append(held) or [])
    monkeypatch.setattr(left_outside.gc, "collect", lambda *generation: passed.append(generation))
    for fails in (Refused(lower), Failing(lower)):
        with pytest.raises(CaptureError):
            capture(fails, (torch.randn(2, 3, 4),), {})
    assert not passed


def test_what_a_call_returns_is_not_left_outside() -> None:
    """To find the graph of an earlier process the forward pass runs once, whatever it puts its results in."""
    config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model, ids = BertForSequenceClassification(config), torch.tensor([[1, 2, 3]])
    runs = itertools.count()
    model.bert.register_forward_pre_hook(lambda module, args: print(next(runs)))
    reading(model, (), {"input_ids": ids, "labels": torch.tensor([1])})
    assert next(runs) == 1
