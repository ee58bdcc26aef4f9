"""What a forward pass changes in the containers that it is given: as after eager's, in the caller's own."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity import captures
from torch import nn
from transformers import DynamicCache

from onnxtrain import Options, ORTModule

Tensor = torch.Tensor


@dataclasses.dataclass
class Batch:
    x: Tensor
    seen: int = 0


class Net(nn.Module):
    """A layer, and what a test does with it."""

    def __init__(self, code: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(3, 3), code

    def forward(self, batch: Any) -> Any:
        return self.code(self.linear, batch)


def _set(layer: nn.Module, batch: Any) -> Any:
    batch["y"] = layer(batch["x"])
    batch["size"] = batch["x"].shape[0]
    batch["mean"] = batch["y"].mean().item()
    return batch["y"]


def _popped(layer: nn.Module, batch: Any) -> Any:
    y = layer(batch.pop("x"))
    del batch["label"]
    return y


def _appended(layer: nn.Module, batch: Any) -> Any:
    x, hidden = batch
    for _ in range(2):
        x = layer(x)
        hidden.append(x)
    return x


def _replaced(layer: nn.Module, batch: Any) -> Any:
    batch[0] = layer(batch[0])
    batch.reverse()
    return batch[-1]


def _attributes(layer: nn.Module, batch: Any) -> Any:
    batch.x = batch.x * 2
    batch.y = layer(batch.x)
    batch.seen = True
    return batch.y


def _nested(layer: nn.Module, batch: Any) -> Any:
    batch["inner"].y = layer(batch["x"])
    batch["all"][0]["y"] = batch["inner"].y * 2
    return batch["inner"].y


CASES: dict[str, tuple[Callable[[nn.Module, Any], Any], Callable[[Tensor], Any]]] = {
    "entries set": (_set, lambda x: {"x": x}),
    "entries removed": (_popped, lambda x: {"x": x, "label": x * 2, "left": 3}),
    "entries of an ordered dict": (_set, lambda x: collections.OrderedDict(x=x)),
    "a list extended": (_appended, lambda x: (x, [x * 3])),
    "a deque extended": (_appended, lambda x: (x, collections.deque([x * 3]))),
    "items replaced": (_replaced, lambda x: [x, x * 2, 1]),
    "attributes of a dataclass": (_attributes, lambda x: Batch(x)),
    "attributes of a namespace": (_attributes, lambda x: SimpleNamespace(x=x)),
    "containers in containers": (_nested, lambda x: {"x": x, "inner": SimpleNamespace(), "all": [{"z": 1}]}),
}


def _content(given: Any) -> Any:
    """A container as plain ones."""
    if isinstance(given, dict):
        return {k: _content(v) for k, v in given.items()}
    if isinstance(given, list | tuple | collections.deque):
        return [_content(v) for v in given]
    return _content(vars(given)) if hasattr(given, "__dict__") and not isinstance(given, Tensor) else given


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_callers_container_is_changed(name: str, verify: bool) -> None:
    code, container = CASES[name]
    module = Net(code)
    wrapped = ORTModule(copy.deepcopy(module), options=Options(summary=False, verify=verify))
    for rows in (4, 2, 5):
        x = torch.randn(rows, 3)
        ours, theirs = container(x), container(x)
        found, expected = wrapped(ours), module(theirs)
        torch.testing.assert_close(_content(ours), _content(theirs))
        for y in (found, expected):
            y.square().sum().backward()
        torch.testing.assert_close(wrapped.linear.weight.grad, module.linear.weight.grad)
    assert captures(wrapped) == 1


def test_gradients_flow_through_what_was_put_in() -> None:
    module = Net(_set)
    wrapped = ORTModule(copy.deepcopy(module))
    for model in (module, wrapped):
        batch = {"x": torch.ones(4, 3)}
        model(batch)
        batch["y"].square().sum().backward()
    torch.testing.assert_close(wrapped.linear.weight.grad, module.linear.weight.grad)


def test_a_container_that_is_returned_is_the_callers() -> None:
    def code(layer: nn.Module, batch: Any) -> Any:
        batch["y"] = layer(batch["x"])
        return {"batch": batch, "list": [batch["held"]]}

    wrapped = ORTModule(Net(code))
    for rows in (4, 2):
        batch = {"x": torch.randn(rows, 3), "held": [1]}
        made = wrapped(batch)
        assert made["batch"] is batch and made["list"][0] is batch["held"] and list(batch) == ["x", "held", "y"]


def test_a_cache_of_keys_and_values_is_filled() -> None:
    def code(layer: nn.Module, cache: Any) -> Any:
        x = layer(torch.ones(1, 3))[None, None]
        return cache.update(x, x * 2, 0)[1], cache

    wrapped, cache = ORTModule(Net(code)), DynamicCache()
    for length in (1, 2, 3):
        values, made = wrapped(cache)
        assert made is cache and cache.get_seq_length() == length
        torch.testing.assert_close(values, cache.layers[0].values)


def test_a_rehearsal_leaves_the_callers_container_alone() -> None:
    """It runs where the content of a tensor decides, before the trace."""

    def code(layer: nn.Module, batch: Any) -> Any:
        y = layer(batch.pop("x"))
        batch["log"].append("large" if y.abs().max() > 1e6 else "small")
        return y

    wrapped, log = ORTModule(Net(code)), []
    for rows in (4, 2):
        wrapped({"x": torch.randn(rows, 3), "log": log})
    assert log == ["small", "small"]
