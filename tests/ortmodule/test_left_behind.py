"""What a forward pass leaves on the module: as after eager's, at every step."""

from __future__ import annotations

import array
import collections
import copy
import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import captures

from onnxtrain import Options, ORTModule
from onnxtrain.errors import CaptureError

Tensor = torch.Tensor


class Base(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.register_buffer("mean", torch.zeros(4))
        self.aux: Any = None
        self.seen = 0
        self.losses: list[Tensor] = []
        self.named: dict[str, Tensor] = {}


class Assigned(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return (x @ self.weight - self.mean).square().mean()


class ReadAndAssigned(Base):
    """The gradient is one of what was read, not of what is there now."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight * (self.mean + 1)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return y.square().mean()


class OldReturned(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        old = self.mean
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return (x @ self.weight * old).square().mean(), old


class DataReplaced(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.mean.data = 0.9 * self.mean.data + 0.1 * x.mean(0).detach()
        return (x @ self.weight - self.mean).square().mean()


class Auxiliary(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        self.aux = y.square().mean()
        return y.sum()


class Expert(Auxiliary):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        self.aux = {"balance": y.softmax(-1).square().mean(), "size": x.shape[0]}
        return y


class Experts(torch.nn.Module):
    """Mixture of experts: the losses of the layers are added outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Expert(), Expert()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum()


class Logged(Base):
    """Numbers for a log, under every kind of name."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, float]]:
        y = x @ self.weight
        loss = y.square().mean()
        self.aux = loss.item()
        self.seen = x.shape[0]
        self.losses.append(loss.item())
        self.named["mean"] = float(y.mean())
        return loss, {"positive": (y > 0).sum().item(), "percent": 100 * y.mean().item(), "all": float(loss)}


class Summed(Base):
    """A number that is read and set anew at each call."""

    def forward(self, x: Tensor) -> Tensor:
        loss = (x @ self.weight).square().mean()
        self.seen = self.seen + loss.item()
        return loss * (1 + self.seen)


class Collecting(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        self.losses.append(y.square().mean())
        self.named["last"] = y.mean()
        return y.sum()


class Started(Base):
    """Fits itself to its first batch."""

    def forward(self, x: Tensor) -> Tensor:
        if self.aux is None:
            self.aux = True
            self.mean = x.mean(0).detach()
        return ((x - self.mean) @ self.weight).square().mean()


class Fitted(Base):
    """Keeps what it computes of a length in a buffer, as ConViT does with distances of patches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.zeros(1, 1), persistent=False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.grid.shape[0] != len(x):
            grid = torch.zeros(len(x), 1)
            grid[:] = torch.arange(len(x), dtype=torch.float32)[:, None]
            self.grid, self.scale = grid.to(x.dtype), None
        return ((x @ self.weight) * self.grid).square().mean()


def _train(module: Base | Experts, loss: Callable[[Any, Tensor], Tensor], steps: int = 4, **options: Any) -> ORTModule:
    wrapped, eager = ORTModule(module, options=Options(**options)), copy.deepcopy(module)
    for step in range(steps):
        x = torch.randn(3 + step, 4)
        for model in (wrapped, eager):
            loss(model, model(x)).backward()
        for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(module.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)
    return wrapped


def test_a_buffer_that_is_assigned_is_updated() -> None:
    assert captures(_train(Assigned(), lambda model, y: y)) == 1


@pytest.mark.parametrize("kind", [Assigned, ReadAndAssigned, OldReturned])
@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_who_holds_a_buffer_that_is_assigned_keeps_what_it_held(kind: type[Base], backend: str) -> None:
    module = kind()
    wrapped, eager = ORTModule(module, options=Options(backend=backend)), copy.deepcopy(module)
    held: dict[Any, list[Tensor]] = {wrapped: [], eager: []}
    for x in torch.randn(3, 5, 4):
        for model, means in held.items():
            model(x)
            means.append(model.mean)
    torch.testing.assert_close(held[wrapped], held[eager])
    assert len(set(map(id, held[wrapped]))) == 3 and captures(wrapped) == 1


@pytest.mark.parametrize("kind", [ReadAndAssigned, DataReplaced])
def test_a_buffer_is_read_as_it_was(kind: type[Base]) -> None:
    assert captures(_train(kind(), lambda model, y: y)) == 1


def test_a_buffer_that_is_returned_is_what_it_was() -> None:
    """Also where no gradients are computed."""
    wrapped = _train(OldReturned(), lambda model, y: y[0])
    before = wrapped.mean.clone()
    with torch.no_grad():
        _, old = wrapped(torch.randn(3, 4))
    torch.testing.assert_close(old, before)
    assert not torch.equal(wrapped.mean, before)


class Momentum(torch.nn.Module):
    """An encoder that follows another one, and a queue of what it gave, as in contrastive learning."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.query, self.key, self.how = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), how
        self.key.requires_grad_(False)
        self.register_buffer("queue", torch.ones(8, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    @torch.no_grad()
    def _follow(self) -> None:
        pairs = list(zip(self.key.parameters(), self.query.parameters(), strict=True))
        if self.how == "foreach":
            torch._foreach_lerp_([k for k, _ in pairs], [q for _, q in pairs], 0.1)
        for key, query in pairs:
            if self.how == "data":
                key.data = key.data * 0.9 + query.data * 0.1
            elif self.how == "in place":
                key.mul_(0.9).add_(query, alpha=0.1)
            elif self.how == "out":
                torch.lerp(key, query, 0.1, out=key)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "data with gradients":
            for _ in range(2):
                self.key.weight.data.copy_(self.query.weight * 0.5)
        self._follow()
        with torch.no_grad():
            keys, first = self.key(x), int(self.pointer)
            self.queue[first : first + len(keys)] = keys
            self.pointer[0] = (first + len(keys)) % 8
        return self.query(x) @ self.queue.clone().T


@pytest.mark.parametrize("how", ["data", "in place", "foreach", "out", "data with gradients"])
def test_an_encoder_that_follows_another_one(how: str) -> None:
    """Also where the call is rehearsed, since it reads where the queue begins."""
    module = Momentum(how)
    wrapped, eager = ORTModule(module), copy.deepcopy(module)
    for _ in range(5):
        x = torch.randn(4, 4)
        losses = [model(x).square().mean() for model in (wrapped, eager)]
        torch.testing.assert_close(*losses)
        for model, loss in zip((module, eager), losses, strict=True):
            loss.backward()
            with torch.no_grad():
                model.query.weight.sub_(0.1 * model.query.weight.grad)
    torch.testing.assert_close(list(module.parameters()), list(eager.parameters()))
    torch.testing.assert_close(list(module.buffers()), list(eager.buffers()))


def test_an_auxiliary_loss_is_added_outside() -> None:
    wrapped = _train(Auxiliary(), lambda model, y: y + model.aux)
    assert captures(wrapped) == 1, "the loss is not read before it is set"
    assert wrapped.aux.requires_grad and type(wrapped.module.aux) is torch.Tensor


def test_numbers_read_out_of_tensors_are_returned_and_left() -> None:
    module = Logged().double()
    eager = copy.deepcopy(module)
    wrapped = ORTModule(module)
    for rows in (3, 5, 4, 3, 6):
        x = torch.randn(rows, 4, dtype=torch.float64)
        (loss, ours), (expected, theirs) = wrapped(x), eager(x)
        torch.testing.assert_close(loss, expected)
        assert ours == pytest.approx(theirs) and list(map(type, ours.values())) == list(map(type, theirs.values()))
        names = ("aux", "seen", "losses", "named")
        found, known = ([getattr(m, n) for n in names] for m in (module, eager))
        assert found[1] == known[1] and type(found[0]) is float
        assert found[0] == pytest.approx(known[0]) and found[2] == pytest.approx(known[2])
        assert found[3] == pytest.approx(known[3])
    assert captures(wrapped) <= 3, "one before the attributes were numbers, one when they are"


def test_a_number_that_is_read_and_set() -> None:
    """One graph before it is a float, one when it is."""
    wrapped = _train(Summed(), lambda model, y: y, steps=11)
    assert captures(wrapped) == 2


def test_losses_of_layers_are_added_outside() -> None:
    wrapped = _train(Experts(), lambda m, y: y + m.first.aux["balance"] + 2 * m.second.aux["balance"])
    assert wrapped.first.aux["size"] == 6, "sizes are numbers"


def test_collections_grow_as_in_eager() -> None:
    wrapped = _train(Collecting(), lambda model, y: y + model.losses[-1] + model.named["last"])
    assert len(wrapped.losses) == 4 and list(wrapped.named) == ["last"]


def test_a_flag_that_the_first_call_sets_makes_a_graph_of_its_own() -> None:
    assert captures(_train(Started(), lambda model, y: y)) == 2


@pytest.mark.parametrize("verify", [False, True])
def test_a_buffer_that_no_one_reads_may_get_another_form(verify: bool) -> None:
    """A graph that makes it anew, and one that reads it, for each length."""
    module = Fitted()
    wrapped = _train(module, lambda model, y: y, steps=2, verify=verify)
    assert module.grid.shape == (4, 1) and module.scale is None and captures(wrapped) == 2
    wrapped(torch.randn(4, 4)).backward()
    wrapped(torch.randn(4, 4)).backward()
    assert captures(wrapped) == 3, "the last graph serves as long as the length stays"


class Hooked(Base):
    """Registers a hook in its first call, and marks that it did: Transformers' ``output_hidden_states``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Identity()
        self.outputs: list[Tensor] | None = None

    def _keep(self, module: torch.nn.Module, args: Any, output: Tensor) -> None:
        if self.outputs is not None:
            self.outputs.append(output)

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "_is_hooked", False):
            self.inner.register_forward_hook(self._keep)
            self._is_hooked = True
        self.outputs = outputs = []
        for scale in (1.0, 2.0):
            self.inner(scale * x[:, :1] @ self.weight[:1])
        self.outputs = None
        return sum((i + 1) * y.sum() for i, y in enumerate(outputs)) / len(outputs)


def test_hooks_that_the_forward_pass_registers_are_registered_once() -> None:
    wrapped = ORTModule(Hooked(), options=Options(hooks="trace"))
    eager = Hooked()
    eager.load_state_dict(wrapped.state_dict())
    for size in (1, 3):  # a size of 1 is traced more than once
        x = torch.randn(size, 4)
        torch.testing.assert_close(wrapped(x), eager(x))
    assert len(wrapped.inner._forward_hooks) == 1 and captures(wrapped) <= 2


def test_verification_compares_what_is_left_too() -> None:
    wrapped = _train(Auxiliary(), lambda model, y: y + model.aux, verify=True)
    assert wrapped.verification is not None


def test_nothing_of_the_trace_is_left() -> None:
    class Fails(Base):
        def forward(self, x: Tensor) -> Tensor:
            self.aux, self.mean = x * 2, self.mean + x.mean(0)
            self.losses.append(x)
            self.weight.data = torch.ones(7)
            return x @ self.weight

    module = Fails()
    mean = module.mean
    with pytest.raises(CaptureError, match="replaces the data"):
        ORTModule(module)(torch.randn(3, 4))
    assert module.aux is None and module.mean is mean and module.losses == []


class Counts(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1  # counted
        return (x @ self.weight).sum() * self.seen


class CountsInArray(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] += 1  # counted
        return (x @ self.weight).sum()


class Grows(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = torch.cat([self.mean, self.mean])  # grown
        return (x @ self.weight).sum() + self.mean.sum()


@pytest.mark.parametrize(
    ("kind", "said", "line"),
    [
        (CountsInArray, r"changes the number seen\[0\] from 0 to 1", "counted"),
        (Grows, "assigns the buffer mean", "grown"),
    ],
)
def test_state_that_a_graph_cannot_keep_is_refused(kind: type[Base], said: str, line: str) -> None:
    """A counter would stand still, a tensor be a constant; the error names the line and what to write."""
    module = kind()
    module.seen = array.array("l", [0]) if kind is CountsInArray else 0
    wrapped = ORTModule(module)
    with pytest.raises(CaptureError, match=said) as caught:
        for _ in range(2):
            wrapped(torch.randn(3, 4)).backward()
    file, _, number = caught.value.source.rpartition(":")
    assert file == __file__ and f"# {line}" in linecache.getline(file, int(number))
    assert caught.value.cure


def test_a_counter_that_nothing_is_computed_from_is_ignored_by_name() -> None:
    wrapped = ORTModule(Counts(), options=Options(ignored_attributes=("seen",)))
    wrapped(torch.randn(3, 4)).backward()
    assert captures(wrapped) == 1


class Cached(torch.nn.Module):
    """Recurrent layers, which hold a list of their own weights, and a module that sets such a list itself."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.linear = torch.nn.GRU(4, 4, num_layers=2), torch.nn.Linear(4, 4)
        self.weights: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.weights = [self.linear.weight, self.linear.bias]
        return torch.nn.functional.linear(self.recurrent(x)[0], *self.weights)


def test_a_list_of_the_module_s_own_weights_keeps_them() -> None:
    wrapped = ORTModule(Cached())
    x = torch.randn(3, 2, 4)
    for _ in range(2):
        wrapped(x).sum().backward()
    recurrent = wrapped.module.recurrent
    assert all(a is b for a, b in zip(recurrent._flat_weights, recurrent.parameters(), strict=True))
    assert captures(wrapped) == 1
    for _ in range(2):
        wrapped.module(x).sum().backward()  # the wrapped module is eager PyTorch's still


class Listed(Base):
    """A list that is emptied and filled again, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.weight).square()
        if self.how == "clear":
            self.losses.clear()
        elif self.how == "another":
            self.losses = []
        elif self.how == "slice" and self.losses:
            self.losses[:] = [y.sum()]
        self.losses.append(y.mean())
        return y.sum()


@pytest.mark.parametrize("how", ["clear", "another", "slice", "append"])
def test_a_list_has_what_eager_leaves_in_it(how: str) -> None:
    module = Listed(how)
    expected, kept = copy.deepcopy(module), module.losses
    wrapped = ORTModule(module, options=Options(summary=False))
    for n in (2, 3, 2, 5):
        x = torch.randn(n, 4)
        wrapped(x).backward()
        expected(x).backward()
        torch.testing.assert_close(module.losses, expected.losses)
        assert (module.losses is kept) is (how != "another")
    torch.testing.assert_close(module.weight.grad, expected.weight.grad)
    assert captures(wrapped) <= 2 or how not in ("clear", "another", "append")


class Replaces(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.losses[-1] = (x @ self.weight).sum()  # replaced
        return self.losses[-1].square()


def test_a_list_that_is_changed_in_part_is_refused() -> None:
    module = Replaces()
    module.losses += [torch.ones(()), torch.ones(())]
    with pytest.raises(CaptureError, match=r"changes a part of the list losses"):
        ORTModule(module)(torch.ones(2, 4))
    assert all(map(torch.equal, module.losses, [torch.ones(()), torch.ones(())]))


class RemembersIn(Base):
    """State in a list or a dict, which is empty at first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        if self.how == "dict":
            y = y + self.named["last"] if "last" in self.named else y
            self.named["last"] = y.detach().mean(0)
        elif self.how == "list":
            y = y + self.losses[-1] if self.losses else y
            self.losses.append(y.detach().mean(0))
        else:
            y = y + self.losses[0] if self.losses else y
            self.losses[:] = [y.detach().mean(0)]
        return y.sum()


@pytest.mark.parametrize("how", ["dict", "list", "slice"])
def test_state_in_a_list_or_a_dict(how: str) -> None:
    """Read and set anew; a list of which each call reads and that grows is refused."""
    module = RemembersIn(how)
    expected = copy.deepcopy(module)
    wrapped = ORTModule(module, options=Options(summary=False))
    x = torch.ones(2, 4)
    torch.testing.assert_close(wrapped(x), expected(x))  # reads nothing
    if how != "list":
        for size in (3, 2, 4):
            torch.testing.assert_close(wrapped(torch.ones(size, 4)), expected(torch.ones(size, 4)))
        torch.testing.assert_close((module.named, module.losses), (expected.named, expected.losses))
        return
    with pytest.raises(CaptureError, match=r"reads a tensor of losses and leaves another there"):
        wrapped(x)
    assert len(module.losses) == 1


class Fills(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        self.named["aux"] = y.mean()
        if self.training:
            self.losses.append(y.sum())
        return y.sum()


def test_a_mode_that_changes_to_and_fro_has_a_graph_for_each() -> None:
    module = Fills()
    wrapped = ORTModule(module, options=Options(summary=False))
    for step in range(9):
        wrapped.train(step % 2 == 0)
        module.losses.clear()
        wrapped(torch.ones(2, 4))
    assert captures(wrapped) == 3  # the first of them did not know what calls leave


class Told(Base):
    """Tells and notes truth values."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y = x @ self.weight
        positive = x.sum() > 0
        self.seen, self.aux = positive.item(), x.shape[0] > 3  # type: ignore[assignment]
        self.losses.append(bool(x[0, 0] > 0))  # type: ignore[arg-type]
        self.named["last"] = (x > 0)[0].tolist()  # type: ignore[assignment]
        return y, {
            "positive": bool(positive),
            "large": x.shape[0] > 3,
            "signs": (x > 0)[-1].tolist(),
            "not": not x.shape[0] > 2,
        }


def test_truth_values_are_returned_and_left() -> None:
    module = Told().double()
    eager, wrapped = copy.deepcopy(module), ORTModule(module)
    for rows in (2, 4, 1, 4, 5, 2):
        x = torch.randn(rows, 4, dtype=torch.float64)
        (y, ours), (expected, theirs) = wrapped(x), eager(x)
        torch.testing.assert_close(y, expected)
        assert ours == theirs and list(map(type, ours.values())) == list(map(type, theirs.values()))
        names = ("aux", "seen", "losses", "named")
        assert [getattr(module, n) for n in names] == [getattr(eager, n) for n in names]
        assert type(module.seen) is type(module.aux) is bool


class Noted(Base):
    """Notes a number, or a tensor, that another mode reads."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.named = {"n": 0}  # type: ignore[dict-item]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = x @ self.weight
        if self.how == "of a branch":
            self.seen = 1 if x.shape[0] > 3 else 0
        elif self.how == "of a look":
            self.seen, self.aux = (1, 5) if mask.sum() > 3 else (0, 0)
        elif self.how == "set, then read":
            self.seen = int(mask.sum()) if mask.sum() > 3 else -1
            y = y * self.seen
        elif self.how == "in a dict":
            self.named["n"] = int(mask.sum() > 3)  # type: ignore[assignment]
        elif self.training:
            self.seen, self.aux = int(mask.sum()), x.detach().mean(0)
        else:
            y = y * self.seen if self.how == "a number of the other mode" else y - self.aux
        return y


@pytest.mark.parametrize(
    "how",
    [
        *("of a branch", "of a look", "set, then read", "in a dict"),
        *("a number of the other mode", "a tensor of the other mode"),
    ],
)
def test_what_one_call_leaves_another_one_finds(how: str) -> None:
    module = Noted(how).double()
    module.aux = torch.ones(4).double()
    eager, wrapped = copy.deepcopy(module), ORTModule(module)
    for rows, hidden, training in (
        (2, 1, 1),
        (4, 6, 1),
        (2, 1, 0),
        (4, 6, 1),
        (4, 6, 0),
        (3, 2, 1),
        (3, 2, 0),
        (2, 0, 1),
    ):
        x, mask = torch.randn(rows, 4, dtype=torch.float64), torch.arange(8) < hidden
        wrapped.train(bool(training))
        eager.train(bool(training))
        torch.testing.assert_close(wrapped(x, mask), eager(x, mask))
        assert (module.seen, module.named) == (eager.seen, eager.named)
        torch.testing.assert_close(module.aux, eager.aux)


_KNOWN: dict[int, Tensor] = {}


class Keeps(Base):
    """Notes a tensor of a cache outside of it, which it does not read from the module."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] not in _KNOWN:
            _KNOWN[x.shape[0]] = torch.arange(x.shape[0], dtype=x.dtype)
        self.aux = _KNOWN[x.shape[0]].detach()
        return (x @ self.weight) * self.aux[:, None]


def test_a_tensor_of_a_cache_is_left() -> None:
    module = Keeps()
    eager, wrapped = copy.deepcopy(module), ORTModule(module)
    for rows in (2, 3, 2, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(wrapped(x), eager(x))
        torch.testing.assert_close(module.aux, eager.aux)


class Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.sum, self.count = self.sum + value, self.count + 1


class Nested(Base):
    """Leaves more in collections within others, and objects in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.history: Any = {"train": {"loss": [], "rows": {}}, "layers": ([], [1.0])}
        self.meters = collections.defaultdict(Meter)

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.weight).square().mean()
        train, layers = self.history["train"], self.history["layers"]
        train["loss"].append(y)
        train["rows"][x.shape[0]] = y.item()
        layers[0].append(x.shape[0])
        self.meters["loss"].update(y.item())
        return y * layers[1][0]


def test_what_is_left_in_collections_within_others() -> None:
    module = Nested().double()
    eager = copy.deepcopy(module)
    wrapped = ORTModule(module)
    for step, rows in enumerate((3, 5, 3, 6, 4)):
        for model in (module, eager):
            if step == 2:
                model.history["train"]["loss"].clear()
                model.history["layers"][1][0] = 2.0
        x = torch.randn(rows, 4, dtype=torch.float64)
        torch.testing.assert_close(wrapped(x), eager(x))
        torch.testing.assert_close(module.history, eager.history)
        (ours,), (theirs,) = module.meters.values(), eager.meters.values()
        assert type(ours.sum) is float and ours.sum == pytest.approx(theirs.sum) and ours.count == theirs.count
