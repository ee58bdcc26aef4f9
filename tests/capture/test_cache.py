"""Translated graphs on disk: the same graph again, never a stale or damaged one, for any number of processes."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onnxtrain import Options
from onnxtrain.capture import GraphCache, trace, translate
from onnxtrain.capture.cache import key
from onnxtrain.compiler import Report, capture_module
from onnxtrain.gradient import (
    Context,
    gradient,
    register_custom_stop_gradient_edges,
    rules,  # noqa: F401  (fills RULES)
)
from onnxtrain.gradient.registry import RULES, STOP_EDGES
from onnxtrain.ir.printer import to_text

BYTES = 2**24


class Mlp(torch.nn.Module):
    """Has a double attribute, a table of constants, and a flag that changes its code path."""

    def __init__(self, eps: float = 1e-12) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4, eps=eps)
        self.gate = False
        self.table = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x)) + self.table
        return torch.sigmoid(y) if self.gate else torch.tanh(y)


def traced(module: torch.nn.Module, *inputs: torch.Tensor, **options: Any) -> Any:
    return trace(module, inputs or (torch.randn(3, 4),), {}, **options)


def key_of(module: torch.nn.Module, *inputs: torch.Tensor, settings: Any = ()) -> str:
    return key(traced(module, *inputs).program, settings)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.graph"))


def test_an_entry_gives_the_same_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, cache = traced(Mlp().double(), torch.randn(3, 4, dtype=torch.float64)), GraphCache(tmp_path, BYTES)
    fresh = translate(call, cache=cache)
    monkeypatch.setattr("onnxtrain.capture.to_graph", lambda *_: pytest.fail("translated again"))
    again = translate(call, cache=cache)
    assert to_text(again.graph.model) == to_text(fresh.graph.model)
    assert again.graph.signature == fresh.graph.signature


def test_the_key_is_the_same_in_another_trace_and_for_other_sizes_and_weights() -> None:
    assert key_of(Mlp()) == key_of(Mlp(), torch.randn(7, 4))


@pytest.mark.parametrize("change", ["flag", "epsilon", "table", "patch", "mode", "dtype", "rank", "settings"])
def test_whatever_changes_the_program_changes_the_key(change: str) -> None:
    module, x = Mlp(eps=1e-5 if change == "epsilon" else 1e-12), torch.randn(3, 4)
    if change == "flag":
        module.gate = True
    if change == "table":
        module.table = torch.arange(4.0) + 1
    if change == "patch":
        module.linear.forward = lambda x: x * 2  # type: ignore[method-assign]
    if change == "mode":
        module.append = torch.nn.Dropout(0.5)
        module.forward = lambda x: module.append(Mlp.forward(module, x))  # type: ignore[method-assign]
    if change == "dtype":
        module, x = module.double(), x.double()
    if change == "rank":
        x = x[None]
    assert key_of(module, x, settings=(21,) if change == "settings" else ()) != key_of(Mlp())


def test_an_entry_cut_short_at_any_byte_or_altered_is_made_again(tmp_path: Path, caplog: Any) -> None:
    cache, call = GraphCache(tmp_path, BYTES), traced(Mlp())
    expected = to_text(translate(call, cache=cache).graph.model)
    (entry,) = entries(tmp_path)
    content = entry.read_bytes()
    for size in range(len(content)):
        entry.write_bytes(content[:size])
        assert cache.read(entry.name) is None and not entry.exists()
    for place in range(0, len(content), 97):
        entry.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert cache.read(entry.name) is None
    entry.write_bytes(content[:-1])
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        assert to_text(translate(call, cache=cache).graph.model) == expected
    assert "damaged" in caplog.text and entry.read_bytes() == content


def test_the_folder_stays_within_its_limit_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    import os

    translate(traced(Mlp()), cache=GraphCache(tmp_path, BYTES))
    (first,) = entries(tmp_path)
    os.utime(first, (1, 1))
    abandoned, young = tmp_path / "x.1.partial", tmp_path / "y.2.partial"
    for path in (abandoned, young):
        path.write_bytes(b"half")
    os.utime(abandoned, (1, 1))
    translate(traced(Mlp(eps=1e-3)), cache=GraphCache(tmp_path, first.stat().st_size + 10))
    assert first not in entries(tmp_path) and len(entries(tmp_path)) == 1
    assert not abandoned.exists() and young.exists()


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: Any) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        translate(traced(Mlp()), cache=GraphCache(blocked / "cache", BYTES))
    assert "cannot be" in caplog.text


def test_operators_of_the_users_own_library_are_not_kept(tmp_path: Path) -> None:
    @torch.library.custom_op("cache_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(torch.empty_like)

    class Custom(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return double(x)

    translate(traced(Custom()), cache=GraphCache(tmp_path, BYTES))
    assert entries(tmp_path) == []


class Doubled(torch.nn.Module):
    """Its translation asks whether half a size is 1, and stands on the answer where it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, : x.shape[1] // 2].mul_(2)
        return y


def test_a_graph_whose_translation_asked_about_sizes_is_not_kept(tmp_path: Path) -> None:
    """Another process would take the entry without the question, and so without its guard."""
    for size, kept in ((2, 0), (4, 1)):
        translate(trace(Doubled(), (torch.randn(3, size),), {}), cache=GraphCache(tmp_path, BYTES))
        assert len(entries(tmp_path)) == kept


@pytest.fixture
def tables() -> Iterator[None]:
    """What a test registers is forgotten afterwards."""
    before = [(table, dict(table)) for table in (RULES, STOP_EDGES)]
    yield
    for table, content in before:
        table.clear()
        table.update(content)


def captured(folder: Path) -> str:
    """The text of a graph whose tanh has a rule, so that torch need not take its gradient."""
    options = Options(cache_dir=folder)
    return to_text(capture_module(Mlp(), (torch.randn(3, 4),), {}, options, Report()).graph.model)


def test_gradient_rules_of_users_decide_on_the_graph_and_are_not_part_of_an_entry(tmp_path: Path, tables: None) -> None:
    assert "ATen(" not in captured(tmp_path) and len(entries(tmp_path)) == 1

    @gradient("Tanh", replace=True)
    def refuses(ctx: Context, dy: Any, x: Any) -> Any:
        raise ctx.unsupported("the gradient of Tanh")

    assert "aten::tanh" in captured(tmp_path), "the entry is of another rule"
    assert len(entries(tmp_path)) == 1


def test_stop_edges_are_part_of_the_key(tmp_path: Path, tables: None) -> None:
    captured(tmp_path)
    for _ in range(2):
        register_custom_stop_gradient_edges([0], "", "Tanh")
        captured(tmp_path)
    assert len(entries(tmp_path)) == 2
    register_custom_stop_gradient_edges([], "", "Tanh")
    captured(tmp_path)
    assert len(entries(tmp_path)) == 3


PROGRAM = """
    import sys, torch
    from pathlib import Path
    from onnxtrain import ORTModule, Options
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    wrapped = ORTModule(module, options=Options(cache_dir=Path(sys.argv[1]), log_level="INFO"))
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for _ in range(2):
        loss = wrapped(torch.ones(3, 4)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(loss.item())
"""


@pytest.mark.slow
def test_processes_that_start_together_share_one_good_entry(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    outputs = [p.communicate(timeout=240) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] and float(outputs[0][0]) > 0
    assert len(entries(tmp_path)) == 1 and not list(tmp_path.glob("*.partial"))
    third = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no trace:" in third.stderr and third.stdout == outputs[0][0]
