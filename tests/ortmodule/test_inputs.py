"""Inputs and outputs of any structure: behaviour.md §3.3 and §3.4, sentence by sentence."""

from __future__ import annotations

import collections
import dataclasses
import enum
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributions as D
from parity import Applied, Calls, captures, pair, same, same_step
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput, ModelOutput

from onnxtrain import Options, ORTModule
from onnxtrain.errors import UnsupportedDataError
from onnxtrain.utils import extract_data_and_schema, unflatten_data_using_schema


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float = 2.0


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("x",)
    x: torch.Tensor


class Kind(enum.Enum):
    DOUBLE = 2
    TRIPLE = 3


class Attributes(dict[str, Any]):
    """A dict whose entries are attributes."""

    __getattr__ = dict.__getitem__


@dataclasses.dataclass
class Output(ModelOutput):
    loss: torch.Tensor | None = None
    parts: tuple[torch.Tensor, ...] | None = None


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (5, 4)))


class Weighted(torch.nn.Module):
    """A weight that every test module uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))


def module_of(function: Any) -> torch.nn.Module:
    """A module whose forward is ``function(weight, ...)`` with the function's own signature after the weight."""

    class Made(Weighted):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(self.weight, *args, **kwargs)

    return Made()


INPUTS: dict[str, Any] = {
    "list": (lambda w, a: a[0] * w + a[1], ([x(), x()],)),
    "tuple": (lambda w, a: a[0] * w + a[1], ((x(), x()),)),
    "dict": (lambda w, a: a["p"] * w + a["q"], ({"p": x(), "q": x()},)),
    "ordered dict": (lambda w, a: a["p"] * w, (collections.OrderedDict(p=x()),)),
    "named tuple": (lambda w, a: a.left * w + a.right, (Pair(x(), x()),)),
    "model output": (lambda w, a: a.last_hidden_state * w, (BaseModelOutput(last_hidden_state=x()),)),
    "dataclass": (lambda w, a: a.x * w * a.scale, (Batch(x()),)),
    "frozen dataclass with slots": (lambda w, a: a.x * w, (Slotted(x()),)),
    "namespace": (lambda w, a: a.x * w * a.scale, (SimpleNamespace(x=x(), scale=2.0),)),
    "dict of a class of its own": (lambda w, a: a.x * w, (Attributes(x=x()),)),
    "enumeration": (lambda w, a, kind: a * w * kind.value, (x(), Kind.TRIPLE)),
    "batch encoding": (lambda w, a: a["x"] * w, (BatchEncoding({"x": x()}),)),
    "nested": (lambda w, a: a["p"][0][1] * w + a["q"].left, ({"p": [(1, x())], "q": Pair(x(), None)},)),
    "None in a list": (lambda w, a: a[1] * w if a[0] is None else w, ([None, x()],)),
    "None in a dict": (lambda w, a: a["x"] * w if a["m"] is None else w, ({"m": None, "x": x()},)),
    "bool": (lambda w, a, flag: a * w if flag else w, (x(), True)),
    "int and float": (lambda w, a, i, f: a * w * f + i, (x(), 3, 0.5)),
    "str": (lambda w, a, mode: torch.relu(a * w) if mode == "relu" else a * w, (x(), "relu")),
    "integer tensor": (lambda w, a: w[a] * 2, (torch.tensor([0, 3, 3]),)),
    "bool tensor": (lambda w, a: torch.where(a, w, -w), (torch.tensor([True, False, True, True]),)),
    "uint8 tensor": (lambda w, a: w * a.float(), (torch.tensor([1, 0, 2, 255], dtype=torch.uint8),)),
    "unused": (lambda w, a, b: a * w, (x(), x(3))),
    "unused in a dict": (lambda w, a: a["x"] * w, ({"x": x(), "label": x(3)},)),
    "not contiguous": (lambda w, a: a * w, (x(4, 5).T,)),
    "expanded": (lambda w, a: a * w, (x(1, 4).expand(5, 4),)),
    "a slice": (lambda w, a: a * w, (x(10, 8)[::2, 1:5],)),
    "the same tensor twice": (lambda w, a, b: a * w + b, (lambda t: (t, t))(x())),
    "no dimensions": (lambda w, a: a * w, (torch.tensor(3.0),)),
    "with gradient": (lambda w, a: a * w, (x().requires_grad_(),)),
    "no rows": (lambda w, a: (a * w).sum(), (x(2, 4)[:0],)),
}


@pytest.mark.parametrize("name", INPUTS)
def test_input(name: str) -> None:
    function, args = INPUTS[name]
    wrapped, eager = pair(module_of(function))
    for _ in range(2):
        same_step(wrapped, eager, *args)
    assert captures(wrapped) == 1


class Signature(Weighted):
    """Every kind of parameter."""

    def forward(
        self, a: torch.Tensor, b: torch.Tensor | None = None, *rest: torch.Tensor, scale: float = 2.0, **named: Any
    ) -> torch.Tensor:
        y = a * self.weight * scale
        for other in (b, *rest, *named.values()):
            y = y if other is None else y + other
        return y


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((x(),), {}),
        ((), {"a": x()}),
        ((x(), None), {"scale": 3.0}),
        ((x(), x(), x(), x()), {}),
        ((x(),), {"more": x(), "again": x()}),
        ((x(), x(), x()), {"scale": 0.5, "z": x(), "y": None}),
    ],
)
def test_positional_keyword_variable_and_default_parameters(args: Any, kwargs: Any) -> None:
    wrapped, eager = pair(Signature())
    same_step(wrapped, eager, *args, **kwargs)


def test_order_of_keywords_is_irrelevant() -> None:
    wrapped, eager = pair(Signature())
    given = {"b": x(), "a": x(), "scale": 3.0}
    same_step(wrapped, eager, **given)
    same_step(wrapped, eager, **dict(reversed(given.items())))
    assert captures(wrapped) == 1


def test_objects_are_an_error_that_says_where() -> None:
    wrapped = ORTModule(module_of(lambda w, a: w))
    with pytest.raises(UnsupportedDataError, match=r"\['q'\]\[1\].*object"):
        wrapped({"q": [1, object()]})


def test_a_constant_string_brings_no_warning() -> None:
    wrapped = ORTModule(module_of(lambda w, a, mode: a * w))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        wrapped(x(), "mode")


OUTPUTS: dict[str, Any] = {
    "tensor": lambda w, a: a * w,
    "tuple": lambda w, a: (a * w, a + w),
    "list": lambda w, a: [a * w, a + w],
    "named tuple": lambda w, a: Pair(a * w, a + w),
    "dict": lambda w, a: {"p": a * w, "q": a + w},
    "ordered dict": lambda w, a: collections.OrderedDict(p=a * w),
    "model output": lambda w, a: BaseModelOutput(last_hidden_state=a * w),
    "a subclass of it": lambda w, a: Output(loss=(a * w).sum(), parts=(a * w, a + w)),
    "nested": lambda w, a: {"p": [a * w, (a + w, None)], "q": Pair(a - w, 3)},
    "None": lambda w, a: (a * w, None),
    "constants": lambda w, a: (a * w, 1, 2.5, "text", True),
    "the same tensor twice": lambda w, a: (lambda y: (y, y))(a * w),
    "an input unchanged": lambda w, a: (a, a * w),
    "the weight itself": lambda w, a: (w, a * w),
    "integers": lambda w, a: (a * w, (a * w).argmax(-1)),
    "booleans": lambda w, a: (a * w, a > 0),
    "detached": lambda w, a: (a * w, (a * w).detach()),
    "without gradient": lambda w, a: (a * w, a + 1),
    "a constant": lambda w, a: (a * w, torch.ones(3)),
    "sizes": lambda w, a: (a * w, a.shape[0]),
    "a detached view": lambda w, a: (a.detach()[:, :2], a * w, a),
    "views of each other": lambda w, a: (lambda y: (y, y.reshape(-1), y[:, :2]))(a * w),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_output(name: str) -> None:
    wrapped, eager = pair(module_of(OUTPUTS[name]))
    for given in (x(), x(3, 4), x().requires_grad_()):
        same_step(wrapped, eager, given)


def test_a_dataclass_as_output() -> None:
    wrapped, eager = pair(module_of(lambda w, a: Batch(a * w, 3.0)))
    given = x()
    ours, theirs = wrapped(given), eager(given)
    assert isinstance(ours, Batch) and ours.scale == 3.0
    torch.testing.assert_close(ours.x, theirs.x)
    ours.x.sum().backward()
    assert wrapped.weight.grad is not None


def test_a_namespace_and_a_dict_of_a_class_of_its_own_as_output() -> None:
    wrapped, eager = pair(module_of(lambda w, a: SimpleNamespace(y=Attributes(z=a * w), kind=Kind.DOUBLE)))
    given = x()
    ours, theirs = wrapped(given), eager(given)
    assert ours.kind is Kind.DOUBLE and type(ours.y) is Attributes
    torch.testing.assert_close(ours.y.z, theirs.y.z)


DISTRIBUTIONS: dict[str, Any] = {
    "normal": lambda w, a: D.Normal(a * w, w.exp()),
    "categorical": lambda w, a: D.Categorical(logits=a * w),
    "independent": lambda w, a: D.Independent(D.Normal(a * w, 1.0), 1),
    "log-normal": lambda w, a: D.LogNormal(a * w, w.exp()),
    "squashed": lambda w, a: D.TransformedDistribution(D.Normal(a * w, w.exp()), [D.SigmoidTransform()]),
    "mixture": lambda w, a: D.MixtureSameFamily(D.Categorical(logits=a * w), D.Normal(a * w, w.exp())),
    "multivariate": lambda w, a: D.MultivariateNormal(a * w, scale_tril=w.exp().diag()),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_as_output(name: str) -> None:
    """A policy of reinforcement learning; sampled from, and asked for its density."""
    wrapped, eager = pair(module_of(DISTRIBUTIONS[name]))
    for rows in (5, 3):
        given, found = x(rows, 4), []
        for module in (wrapped, eager):
            torch.manual_seed(0)
            made = module(given)
            drawn = made.sample()
            made.log_prob(drawn).mean().backward()
            found.append((type(made), drawn, module.weight.grad))
        same(*found)


def test_a_class_of_the_users_own_is_an_error() -> None:
    class Custom:
        def __init__(self, y: torch.Tensor) -> None:
            self.y = y

    with pytest.raises(UnsupportedDataError, match=r"output at the top is a .*Custom"):
        ORTModule(module_of(lambda w, a: Custom(a * w)))(x())


def test_outputs_that_are_not_floating_take_no_gradient() -> None:
    wrapped = ORTModule(module_of(lambda w, a: (a * w, (a * w).argmax(-1))))
    _, integers = wrapped(x())
    assert not integers.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        integers.backward(torch.ones_like(integers))


@pytest.mark.parametrize("used", [0, 1, 2])
def test_missing_gradients_of_outputs(used: int) -> None:
    wrapped, eager = pair(module_of(lambda w, a: (a * w, a + w, (a * w * w).sum())))
    for _ in range(2):
        same_step(wrapped, eager, x(), loss=lambda out: out[used].square().sum())


def test_gradients_that_are_not_contiguous() -> None:
    wrapped, eager = pair(module_of(lambda w, a: a * w * w))
    weights = x(4, 5).T
    for module in (wrapped, eager):
        module(torch.ones(5, 4)).backward(weights)
    torch.testing.assert_close(wrapped.weight.grad, eager.weight.grad)
    for module in (wrapped, eager):
        module(torch.ones(5, 4)).backward(torch.ones(1).expand(5, 4))
    torch.testing.assert_close(wrapped.weight.grad, eager.weight.grad)


@pytest.mark.parametrize(
    "data",
    [
        [x(), (x(), None)],
        {"a": x(), "b": [1, 2.5, "text", True]},
        Pair(x(), {"q": x()}),
        collections.OrderedDict(b=x(), a=x()),
        BaseModelOutput(last_hidden_state=x()),
    ],
)
def test_flatten_and_unflatten_by_schema(data: Any) -> None:
    tensors, schema = extract_data_and_schema(data)
    assert all(isinstance(t, torch.Tensor) for t in tensors)
    same(unflatten_data_using_schema(tensors, schema), data)
    doubled = unflatten_data_using_schema([t * 2 for t in tensors], schema)
    assert type(doubled) is type(data)
    with pytest.raises(UnsupportedDataError, match="tensors"):
        unflatten_data_using_schema([*tensors, x()], schema)


def test_constants_as_tensors() -> None:
    tensors, schema = extract_data_and_schema({"a": 1, "b": 2.5, "c": "text", "d": None}, constant_as_tensor=True)
    assert [t.item() for t in tensors] == [1, 2.5]
    again = unflatten_data_using_schema([t + 1 for t in tensors], schema)
    assert (again["a"].item(), again["b"].item(), again["c"], again["d"]) == (2, 3.5, "text", None)
    with pytest.raises(UnsupportedDataError):
        extract_data_and_schema([object()])


class Embedded(torch.nn.Module):
    """Tokens as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.linear(self.embedding(ids)).square().mean()


_IDS = torch.arange(18).reshape(3, 6) % 9
VIEWS = {
    "without the last": _IDS[:, :-1],
    "transposed": _IDS.T,
    "expanded": _IDS[:1].expand(3, 6),
    "from the second": _IDS[1:, 1:],
    "every second": _IDS[:, ::2],
    "flat": _IDS.view(-1)[3:],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_as_the_first_input(name: str) -> None:
    """Teacher forcing: ``ids[:, :-1]``."""
    wrapped, eager = pair(Embedded())
    same_step(wrapped, eager, VIEWS[name])
    same_step(wrapped, eager, VIEWS[name].clone())
    assert captures(wrapped) == 1


_GIVEN: dict[str, Any] = {
    "without the last": lambda b, n: torch.randn(b, n + 1, 4)[:, :-1],
    "every second": lambda b, n: torch.randn(b, n, 8)[..., ::2],
    "transposed": lambda b, n: torch.randn(n, b, 4).transpose(0, 1),
    "expanded": lambda b, n: torch.randn(b, 1, 4).expand(b, n, 4),
    "expanded over the batch": lambda b, n: torch.randn(1, n, 4).expand(b, n, 4),
    "in order": lambda b, n: torch.randn(b, n, 4),
}
_SIZES = ((2, 5), (3, 6), (1, 7), (2, 1), (1, 1), (4, 2))


@pytest.mark.parametrize("name", _GIVEN)
def test_a_branch_on_the_order_in_memory(name: str) -> None:
    wrapped, eager = pair(Applied(lambda y: y * 2 if y.is_contiguous() else y.sin()))
    asked, asking = pair(Calls(lambda x: x * 2 if x.is_contiguous() else x.sin()))
    for sizes in _SIZES:
        x = _GIVEN[name](*sizes)
        torch.testing.assert_close(asked(x), asking(x))
        torch.testing.assert_close(wrapped(x), eager(x))


@pytest.mark.parametrize("name", _GIVEN)
def test_contiguous_is_a_copy_where_it_is_one(name: str) -> None:
    module = ORTModule(Calls(lambda x: x.contiguous()), options=Options(summary=False))
    for sizes in _SIZES:
        x = _GIVEN[name](*sizes)
        found, expected = module(x), x.contiguous()
        assert found.equal(expected) and found.is_contiguous()
        assert (found.data_ptr() == x.data_ptr()) == (expected.data_ptr() == x.data_ptr()), sizes


def test_the_first_call_in_inference_mode() -> None:
    """SentenceTransformer's ``encode``; training goes on after it."""
    wrapped, eager = pair(Embedded())
    with torch.inference_mode():
        torch.testing.assert_close(wrapped(_IDS + 0), eager(_IDS + 0))
    same_step(wrapped, eager, _IDS)


def test_inputs_whose_names_are_those_of_weights() -> None:
    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.mul = torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(4))
            self.register_buffer("sum_1", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x @ self.x) * self.mul * self.sum_1).sum()

    same_step(*pair(Named()), torch.randn(3, 4))
