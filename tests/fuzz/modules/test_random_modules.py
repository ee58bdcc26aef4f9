"""A fixed share of the random modules agrees with eager, and what does not is noticed; `make fuzz N=` runs more."""

from __future__ import annotations

import ast

import pytest
import torch

from fuzz.kinds import Wish, outcome
from fuzz.modules import changing_programs, layer_stacks, scripted_programs, tensor_programs, transformers
from fuzz.modules.beside import EagerRefuses, agree
from fuzz.modules.check import check, shrunk
from fuzz.modules.program import Argument, Program
from fuzz.outcomes import FAULT, PASS, REFUSED, Fault
from fuzz.run import report
from onnxtrain.gradient.registry import RULES

TENSORS = (0, 1, 3, 5, 9, 12)
CHANGES = (1, 2, 3, 4, 5, 6, 8, 10)
ROWS = (0, 2, 4)
SCRIPTS = (1, 2, 3)
LAYERS = tuple(range(8))


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [("tensors", TENSORS), ("changes", CHANGES), ("rows", ROWS), ("scripts", SCRIPTS), ("layers", LAYERS)],
)
def test_random_modules_agree(kind: str, seeds: tuple[int, ...]) -> None:
    done = {str(seed): outcome(seed, Wish(kind)) for seed in seeds}
    assert all(found["kind"] == PASS for found in done.values()), report(done)
    if kind == "rows":
        assert all(found["dropped"] for found in done.values()), report(done)


@pytest.mark.parametrize("kind", [tensor_programs, changing_programs, transformers, scripted_programs, layer_stacks])
def test_a_seed_makes_the_same_program_again(kind) -> None:
    generate = kind.generate
    programs = [generate(seed) for seed in range(6)]
    assert [generate(seed).text for seed in range(6)] == [p.text for p in programs]
    assert len({p.text for p in programs}) == 6
    for program in programs:
        ast.parse(program.text)
        assert len(program.sizes) >= 3 and any(1 in size for size in program.sizes)


def _program(*body: str, returns: str) -> Program:
    arguments = (Argument("x", "torch.randn(B, L, dtype=REAL).requires_grad_()"), Argument("y", "torch.ones(B)"))
    return Program(0, arguments, (), body, returns, ((2, 3), (3, 5), (1, 4)))


def test_a_wrong_gradient_is_noticed_and_its_program_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    body = ("v1 = x.exp()", "v2 = x.tanh()", "v3 = v2 * v1", "v4 = y.sum()\nv4 = v4 + 1")
    program = _program(*body, returns="(v3, v1, v4)")
    assert check(program).kind == PASS
    monkeypatch.setitem(RULES, ("", "Tanh"), lambda ctx, dy, x: dy)
    found = check(program)
    assert (found.kind, found.reason) == (FAULT, "gradients: a number is another")
    small = shrunk(program, found)
    assert small.body == ("v2 = x.tanh()",) and small.returns == "v2" and len(small.sizes) == 1
    assert [a.name for a in small.arguments] == ["x"] and "v2 = x.tanh()" in small.text


def test_what_eager_refuses_is_thrown_away() -> None:
    assert "RuntimeError" in check(_program("v1 = x.view(7, 11)", returns="v1")).reason
    assert "rounding" in check(_program("v1 = (x * 1e13).sin()", returns="v1")).reason
    assert "rounding" in check(_program("v1 = (x * 1e13).sin()", returns="int(v1.sum() * 1e3)")).reason


def test_a_write_that_reads_what_it_writes_is_thrown_away() -> None:
    assert "reads what it writes" in check(_program("v1 = x.clone()", "v1 += v1[:, 1:2]", returns="v1")).reason
    assert check(_program("v1 = x.clone()", "v1 += v1[:, 1:2].clone()", returns="v1")).kind == PASS
    assert check(_program("v1 = x.clone()", "v1 += v1", returns="v1")).kind == PASS


def test_a_refusal_says_its_line_and_cure() -> None:
    found = check(_program("v1 = x + x.data_ptr() % 2", returns="v1"))
    assert found.kind in (REFUSED, FAULT) and "ContentError" in found.reason
    assert found.kind == FAULT or ("/random/program_0.py:" in found.detail and "cure:" in found.detail)


class Numbered(torch.nn.Module):
    """A module whose output tells how it was made."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x * 2}


def test_inputs_that_cannot_be_made_have_no_answer() -> None:
    agree(Numbered, lambda b, l: ((torch.ones(b, l),), {}), [(2, 3)])  # noqa: E741
    with pytest.raises(EagerRefuses):
        agree(Numbered, lambda b, l: ((torch.ones(b, l) / 0,), {}), [(2, 3)])  # noqa: E741


def test_another_structure_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxtrain.engine.step import run
    from onnxtrain.ortmodule.session import Session

    monkeypatch.setattr(Session, "run", lambda self, tensors: tuple(run(self.bound, tensors)))
    with pytest.raises(Fault, match="structure"):
        agree(Numbered, lambda b, l: ((torch.ones(b, l),), {}), [(2, 3)])  # noqa: E741
