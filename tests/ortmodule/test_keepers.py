"""Layers that hand tensors to an object which keeps them by layer, as Transformers' caches do: four are traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from onnxtrain import ORTModule
from tests.ortmodule.test_like_layers import COUNT, WIDTH, Stack, blocks, rows
from tests.parity import pair, same_step

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # the norms of Llama compute in float32


class Cache:
    """Keeps keys and values by layer."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.scales = [1.0 + n for n in range(COUNT)]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        self.kept[layer_idx] = keys, values
        return keys, values

    def __len__(self) -> int:
        return len(self.kept)


class Attends(nn.Module):
    """A layer that hands its keys and values over."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.key, self.value, self.out = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        keys, values = cache.update(self.key(x), self.value(x), self.number)
        return x + self.out(keys.softmax(-1) * values)


class Keeps(Stack):
    """Gives what was kept beside the result."""

    def __init__(self, layers: list[nn.Module], make: Callable[[], Any] = Cache) -> None:
        super().__init__(layers)
        self._make = [make]

    def forward(self, x: Tensor) -> Any:
        x, cache = self.first(x), self._make[0]()
        for layer in self.layers:
            x = layer(x, cache)
        return self.last(x), {f"layer {n}": kept for n, kept in cache.kept.items()}


def check(module: nn.Module, expected: int, loss: Callable[[Any], Tensor] | None = None) -> ORTModule:
    """Train a step at several sizes beside eager PyTorch; whether layers had stand-ins."""
    wrapped, eager = pair(module.double())
    given = {} if loss is None else {"loss": loss}
    for shape in ((5, 4), (3, 4), (1, 4)):
        same_step(wrapped, eager, torch.randn(shape, dtype=torch.float64), **given)
    assert rows(wrapped) == expected
    return wrapped


def of_result(output: Any) -> Tensor:
    return output[0].square().sum()


def of_layer(number: int) -> Callable[[Any], Tensor]:
    return lambda output: output[1][f"layer {number}"][1].square().sum()


def test_what_every_layer_kept_is_given() -> None:
    check(Keeps(blocks(Attends)), 1, of_result)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, COUNT - 2, COUNT - 1])
def test_what_a_layer_kept_is_trained(number: int) -> None:
    """Layers after it have no gradient, and neither has what a layer computes after it."""
    check(Keeps(blocks(Attends)), 1, of_layer(number))


def test_all_that_was_kept_is_trained() -> None:
    check(Keeps(blocks(Attends)), 1)


class HandsInput(Attends):
    """What is kept depends on no parameter of the layer itself."""

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        keys, values = cache.update(x * 2, self.value(x), self.number)
        return x + self.out(keys[:, :5] * values)


class HandsTwice(Attends):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        cache.update(x, x, layer_idx=self.number)
        return super().forward(x, cache)


class Part(nn.Module):
    """A part of a layer that has the number, and hands over by name."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx, self.key = number, nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return cache.update(keys=self.key(x), values=x, layer_idx=self.layer_idx)[0]


class HasPart(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.part, self.out = Part(number), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return x + self.out(self.part(x, cache).tanh())


@pytest.mark.parametrize("kind", [HandsInput, HandsTwice, HasPart])
def test_ways_to_hand_over(kind: type[nn.Module]) -> None:
    check(Keeps(blocks(kind)), 1, of_result)


class Adds(Attends):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return super().forward(x, cache) * (self.number + 1)


class Compares(Attends):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return super().forward(x, cache) * (2 if self.number == 5 else 1)


class Indexes(Attends):
    SCALES = (1.0, 2.0, 3.0) * COUNT

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return super().forward(x, cache) * self.SCALES[self.number]


class Names(Attends):
    TABLE = {str(n): float(n + 1) for n in range(COUNT)}

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return super().forward(x, cache) * self.TABLE[f"{self.number}"]


class IsTrue(Attends):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return super().forward(x, cache) * (2 if self.number else 1)


class IsOfType(Attends):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return super().forward(x, cache) * (2 if isinstance(self.number, int) else 1)


class Nothing(Attends):
    """The first layers have no number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scale = None if number < 3 else number

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return super().forward(x, cache) * (1 if self.scale is None else 2)


class Counts(Attends):
    """Reads how much is kept so far."""

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return super().forward(x, cache) * (1 + len(cache))


class ReadsKept(Attends):
    """Reads what the first layer kept."""

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        x = super().forward(x, cache)
        return x + cache.kept[0][0].mean()


class ReadsScale(Attends):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return super().forward(x, cache) * cache.scales[0]


class Marks(Attends):
    """Leaves something on what keeps."""

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        x = super().forward(x, cache)
        cache.latest = x
        return x


ASKING = (Adds, Compares, Indexes, Names, IsTrue, IsOfType, Nothing, Counts, ReadsKept, ReadsScale, Marks)


@pytest.mark.parametrize("kind", ASKING, ids=lambda k: k.__name__)
def test_layers_that_ask_their_number_or_the_keeper_are_all_traced(kind: Callable[[int], nn.Module]) -> None:
    check(Keeps(blocks(kind)), 0, of_result)


class Scales(Cache):
    """Gives each layer something else."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        keys, values = super().update(keys, values, layer_idx)
        return keys * self.scales[layer_idx], values


class ScalesOne(Cache):
    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        keys, values = super().update(keys, values, layer_idx)
        return (keys * 2 if layer_idx == 5 else keys), values


class GivesBefore(Cache):
    """Gives each layer what the one before handed over."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        super().update(keys, values, layer_idx)
        return self.kept[max(0, layer_idx - 1)]


class Sums(Cache):
    """Keeps a sum over the layers, which each of them is given."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        super().update(keys, values, layer_idx)
        self.kept[-1] = (keys, self.kept[-1][1] + values) if -1 in self.kept else (keys, values)
        return self.kept[-1]


class Lags(Cache):
    """Gives most layers what the first one handed over, and the last ones something else."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        super().update(keys, values, layer_idx)
        return self.kept[max(0, layer_idx - 4)]


class LagsSum(Cache):
    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        super().update(keys, values, layer_idx)
        return keys + self.kept[max(0, layer_idx - 4)][0], values


class Leaves(Cache):
    """Keeps what all but one layer handed over."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        return super().update(keys, values, layer_idx) if layer_idx != 1 else (keys, values)


class Summed(Keeps):
    """What was kept is read by the whole, too."""

    def forward(self, x: Tensor) -> Any:
        made, kept = super().forward(x)
        return made + sum(keys.sum() for keys, _ in kept.values()), kept


@pytest.mark.parametrize("make", [Cache, Leaves])
def test_what_was_kept_is_read_by_the_whole(make: Callable[[], Any]) -> None:
    check(Summed(blocks(Attends), make), 0, of_result)


class HandsApart(Attends):
    """The next layer depends on the values alone, and what is kept on the keys."""

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        cache.update(self.key(x), self.key(x), self.number)
        return x + self.out(self.value(x))


@pytest.mark.parametrize("number", [0, 2, 4, COUNT - 1])
def test_what_is_kept_has_gradients_of_its_own(number: int) -> None:
    check(Keeps(blocks(HandsApart)), 1, of_layer(number))


class Past(Cache):
    """Each layer attends to other constants."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        past = torch.full((1, 5), float(layer_idx + 1), dtype=keys.dtype)
        return super().update(keys + past, values, layer_idx)


class Slices(Cache):
    """One layer in the middle is given a part."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        keys, values = super().update(keys, values, layer_idx)
        return (keys[:1], values) if layer_idx == 4 else (keys, values)


OTHER_EACH = (Scales, ScalesOne, GivesBefore, Lags, LagsSum, Sums, Past, Slices)


@pytest.mark.parametrize("make", OTHER_EACH, ids=lambda k: k.__name__)
def test_keepers_that_do_something_else_for_each_layer(make: Callable[[], Any]) -> None:
    check(Keeps(blocks(Attends), make), 0, of_result)


class GivesFirst(Cache):
    """Gives every layer what the first one handed over."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        super().update(keys, values, layer_idx)
        return self.kept[0]


def test_a_keeper_that_gives_the_same_to_each_layer() -> None:
    check(Keeps(blocks(Attends), GivesFirst), 1, of_result)


class Adding(Cache):
    """Does the same for each layer."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        return super().update(torch.cat([keys, keys]).chunk(2)[0] * 0.5, values.relu(), layer_idx)


@pytest.mark.parametrize("loss", [of_result, of_layer(4)])
def test_keepers_that_compute_the_same_for_each_layer(loss: Callable[[Any], Tensor]) -> None:
    check(Keeps(blocks(Attends), Adding), 1, loss)


class Told(Keeps):
    """Notes of which class the keeper is between its layers."""

    def __init__(self, layers: list[nn.Module], found: list[type]) -> None:
        super().__init__(layers)
        self._found = (found.append,)

    def forward(self, x: Tensor) -> Any:
        x, cache = self.first(x), Cache()
        for layer in self.layers:
            x = layer(x, cache)
            self._found[0](type(cache))
        return self.last(x), {f"layer {n}": kept for n, kept in cache.kept.items()}


@pytest.mark.parametrize("kind", [Attends, Counts, ReadsKept])
def test_the_keeper_is_what_it_was(kind: type[nn.Module]) -> None:
    """It has its class again after each layer, alike or not."""
    found: list[type] = []
    ORTModule(Told(blocks(kind), found))(torch.ones(2, 4))
    assert {*found} == {Cache}


def _gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 7, "vocab_size": 99}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))


def _llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=7, vocab_size=99))


def _qwen() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, num_hidden_layers=7, vocab_size=99))


def _mistral() -> nn.Module:
    """Its cache keeps a window, and makes a constant for each layer before any is called."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MistralConfig(**sizes, num_hidden_layers=7, vocab_size=99, sliding_window=64)
    return transformers.MistralForCausalLM(config)


def _kept(cache: Any) -> list[Tensor]:
    return [t for layer in cache.layers for t in (layer.keys, layer.values)]


@pytest.mark.parametrize("make", [_gpt2, _llama, _mistral, _qwen])
def test_models_of_transformers_with_their_cache(make: Callable[[], nn.Module]) -> None:
    """The loss, what every layer kept, and gradients from the keys of the fifth layer."""
    torch.manual_seed(0)
    module = make().double().eval()  # without dropout
    wrapped, eager = pair(module)
    ids = torch.randint(3, 90, (3, 12))
    for length, part in ((12, False), (9, True), (5, False)):
        _check_step(wrapped, eager, ids[:, :length], part)


@pytest.mark.parametrize("make", [_gpt2, _llama, _mistral, _qwen])
def test_steps_of_transformers_are_not_built_of_all_layers(make: Callable[[], nn.Module]) -> None:
    wrapped, ids = ORTModule(make()), torch.randint(3, 90, (3, 12))
    wrapped(input_ids=ids, labels=ids).loss.backward()
    assert wrapped.__dict__["_ort_sessions"].entries[0].session.bound._short.layers


def _check_step(wrapped: ORTModule, eager: nn.Module, ids: Tensor, part: bool = False) -> None:
    """The loss, what every layer kept, and all gradients: from the loss, or from what the fifth layer kept."""
    found = []
    for model in (wrapped, eager):
        model.zero_grad()
        out = model(input_ids=ids, labels=ids)
        assert type(out.past_key_values) is DynamicCache
        (out.past_key_values.layers[4].keys.square().sum() if part else out.loss).backward()
        found.append((out, {n: p.grad for n, p in model.named_parameters()}))
    (ours, grads), (theirs, wanted) = found
    torch.testing.assert_close(_kept(ours.past_key_values), _kept(theirs.past_key_values))
    torch.testing.assert_close(ours.loss, theirs.loss)
    assert [n for n, g in grads.items() if g is None] == [n for n, g in wanted.items() if g is None]
    torch.testing.assert_close(*({n: g for n, g in x.items() if g is not None} for x in (grads, wanted)), **CLOSE)
    assert rows(wrapped) == 1


def test_a_cache_that_is_given_is_written() -> None:
    """The second call attends to what the first one kept."""
    torch.manual_seed(0)
    wrapped, eager = pair(_llama().double().eval())
    ids = torch.randint(3, 90, (2, 10))
    found = []
    with torch.no_grad():
        for model in (wrapped, eager):
            first = model(input_ids=ids[:, :6])
            cache = copy.deepcopy(first.past_key_values)
            found.append((model(input_ids=ids[:, 6:], past_key_values=cache).logits, _kept(cache)))
    torch.testing.assert_close(*found)


def test_a_second_start_with_a_cache(tmp_path: Any) -> None:
    torch.manual_seed(0)
    module, ids = _gpt2().eval(), torch.randint(3, 90, (3, 12))
    for _ in range(2):
        _check_step(*pair(module, cache_dir=tmp_path), ids)


def test_without_waiting_outputs() -> None:
    torch.manual_seed(0)
    wrapped, eager = pair(_gpt2().double().eval(), lazy_outputs=False)
    ids = torch.randint(3, 90, (3, 12))
    _check_step(wrapped, eager, ids)
