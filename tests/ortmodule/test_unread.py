"""What a module has and its forward pass does not read needs no graph; what it reads does, however it comes to it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref

import pytest
import torch
import torchmetrics
import tqdm
from parity import captures

from onnxtrain import ORTModule


class _Helper:
    """What a module has beside its layers: an optimizer, and numbers."""

    factor = 1.0

    def __init__(self, *parameters: torch.nn.Parameter) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.count, self.scale = 0, 1.0

    def scaled(self) -> float:
        return self.scale


class _Logs(torch.nn.Module):
    """A module that has a helper, a text, a bar and a metric; forward reads none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.helper, self.config = _Helper(*self.layer.parameters()), _Settings()
        self.status, self.metric = "begins", torchmetrics.MeanMetric()
        self.bar = tqdm.tqdm(total=9, disable=True)
        self.how, self.scaled = "plain", self.helper.scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


@dataclasses.dataclass
class _Settings:
    rate: float = 1.0


def _after(module: _Logs, step: int, loss: torch.Tensor) -> None:
    """What a loop does after a step."""
    module.helper.optimizer.step()
    module.helper.schedule.step()
    module.helper.count += 1
    module.config = _Settings(rate=0.1**step)
    module.status, module.last = f"{step}: {loss}", loss.item()
    module.metric.update(loss.detach())
    module.bar.n += 1


def test_what_a_helper_a_text_a_bar_and_a_metric_count() -> None:
    """None of it needs a graph; what the loop adds after the first step needs one, for forward may ask for it."""
    module = _Logs()
    eager, wrapped = copy.deepcopy(module), ORTModule(module)
    for step in range(4):
        x = torch.randn(3, 4)
        loss, want = wrapped(x), eager(x)
        torch.testing.assert_close(loss, want)
        for one, its in ((module, loss), (eager, want)):
            its.backward()
            _after(one, step, its)
    assert captures(wrapped) == 2, wrapped.explain()


class _ByMethod(_Logs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scaled()


class _OfNobody(_ByMethod):
    """A method of an object that is held by nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = _Helper(*self.layer.parameters()).scaled


class _ByPartial(_Logs):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = functools.partial(lambda helper: helper.scale, self.helper)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scaled()


class _ByReference(_Logs):
    def __init__(self) -> None:
        super().__init__()
        self.reference = weakref.ref(self.helper)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        helper = self.reference()
        assert helper is not None
        return super().forward(x) * helper.scale


class _OfClass(_Logs):
    """Of two helpers one has its own factor; the other one's is its class's at first."""

    def __init__(self) -> None:
        super().__init__()
        self.other = _Helper(*self.layer.parameters())
        self.other.factor = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.helper.factor


class _ByTable(_Logs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * getattr(self, "__dict__")["gain"]  # noqa: B009


class _ByName(_Logs):
    """The method that reads all that there is has a name that is made while it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, f"_{self.how}")(x)

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * vars(self)["gain"]


class _Absent(_Logs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if hasattr(self, "gain") else 1)


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        *((_ByMethod, "helper.scale"), (_ByPartial, "helper.scale"), (_ByReference, "helper.scale")),
        (_OfNobody, "scaled.__self__.scale"),
        *((_OfClass, "helper.factor"), (_ByTable, "gain"), (_ByName, "gain"), (_Absent, "gain")),
    ],
)
def test_what_is_read_in_a_roundabout_way(kind: type[_Logs], changed: str) -> None:
    """An attribute that forward reads is compared, however it comes to it."""
    module = kind()
    if kind is not _Absent:
        module.gain = 1.0
    wrapped, (*owner, name) = ORTModule(module), changed.split(".")
    for step in range(4):
        x = torch.randn(3, 4)
        torch.testing.assert_close(wrapped(x), module(x))
        setattr(functools.reduce(getattr, owner, module), name, step + 2.0)
        if kind is _Absent and step % 2:
            del module.gain


def test_another_attribute_in_the_place_of_one() -> None:
    """Where one that is not read is gone and there is another, as many as before, forward may read that."""

    class Model(_Logs):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * getattr(self, "gain", 1.0)

    module, x = Model(), torch.randn(3, 4)
    wrapped = ORTModule(module)
    wrapped(x)
    del module.status
    module.gain = 3.0
    torch.testing.assert_close(wrapped(x), module(x))
