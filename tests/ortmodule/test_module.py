"""ORTModule as a module: parameters, modes, outputs, gradients, misuse."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import subprocess
import sys
import weakref
from typing import Any, NamedTuple

import parity
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import DebugOptions, LogLevel, OnnxTrainError, Options, ORTModule
from onnxtrain.errors import CaptureError, GradientError, ModuleError, OptionError, UnsupportedDataError


class Small(torch.nn.Module):
    """Two layers, a buffer and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, *, scale: float = 1.0) -> Any:
        if self.training:
            self.calls += 1
        logits = self.second(torch.tanh(self.first(x))) * scale
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def count(self) -> int:
        return sum(p.numel() for p in self.parameters())


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(5, 4), "labels": torch.randint(0, 3, (5,))}


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.fixture(params=["torch", "onnxruntime"])
def pair(request: pytest.FixtureRequest) -> tuple[ORTModule, Small]:
    eager = Small()
    return ORTModule(copy.deepcopy(eager), options=Options(backend=request.param)), eager


def test_is_the_module_it_wraps() -> None:
    inner = Small()
    wrapped = ORTModule(inner)
    assert isinstance(wrapped, torch.nn.Module) and wrapped.module is inner
    assert list(wrapped.state_dict()) == list(inner.state_dict())
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in inner.named_parameters()]
    assert all(a is b for a, b in zip(wrapped.parameters(), inner.parameters(), strict=True))
    assert wrapped.count() == inner.count() and wrapped.first is inner.first
    assert inspect.signature(wrapped.forward) == inspect.signature(inner.forward)
    wrapped.load_state_dict(Small().state_dict())
    wrapped.note = "here"
    assert inner.note == "here"


def test_loss_outside_and_inside(pair: tuple[ORTModule, Small]) -> None:
    wrapped, eager = pair
    given = batch()
    for run in (wrapped, eager):
        out = run(**given)
        (out["loss"] + run(given["x"]).square().mean()).backward()
    for ours, theirs in zip(gradients(wrapped), gradients(eager), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradient_of_another_output_than_the_loss(pair: tuple[ORTModule, Small]) -> None:
    """The first guess is that a scalar gets the gradient; the graph for what really does is built once."""
    wrapped, eager = pair
    given = batch()
    for _ in range(2):
        for run in (wrapped, eager):
            run.zero_grad()
            run(**given)["logits"].square().sum().backward()
        for ours, theirs in zip(gradients(wrapped), gradients(eager), strict=True):
            torch.testing.assert_close(ours, theirs)
    wrapped.eval(), eager.eval()  # no buffer changes here
    for run in (wrapped, eager):
        run.zero_grad()
        out = run(**given)
        (out["loss"] + out["logits"].sum()).backward()
    for ours, theirs in zip(gradients(wrapped), gradients(eager), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_unexpected_gradient_after_a_change_is_refused() -> None:
    wrapped, given = ORTModule(Small()), batch()
    wrapped(**given)["loss"].backward()
    out = wrapped(**given)
    with torch.no_grad():
        wrapped.first.bias.add_(1)
    with pytest.raises(GradientError, match=r"first gradient .* first\.bias changed since"):
        out["logits"].sum().backward()
    wrapped(**given)["logits"].sum().backward()


def test_losses_in_turn_beside_a_buffer_that_changes(pair: tuple[ORTModule, Small]) -> None:
    """Where the forward pass must run again it has the buffers it had, and an output that was missed is expected."""
    for step in range(30):
        given, name = batch(), "logits" if step in (1, 3, 25, 27) else "loss"
        for run in pair:
            run.zero_grad()
            run(**given)[name].square().sum().backward()
        for ours, theirs in zip(gradients(pair[0]), gradients(pair[1]), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert pair[0].calls == pair[1].calls


def test_buffers_are_written_back(pair: tuple[ORTModule, Small]) -> None:
    wrapped, _ = pair
    for expected in (1, 2, 3):
        wrapped(**batch())["loss"].backward()
        assert wrapped.calls.item() == expected
    wrapped.eval()
    wrapped(**batch())
    assert wrapped.calls.item() == 3


def test_train_eval_and_no_grad(pair: tuple[ORTModule, Small]) -> None:
    wrapped, eager = pair
    given = batch()
    for mode in (True, False):
        assert wrapped.train(mode) is wrapped and wrapped.training is mode and wrapped.module.training is mode
        eager.train(mode)
        with torch.no_grad():
            out = wrapped(**given)
        assert out["logits"].grad_fn is None
        torch.testing.assert_close(out["logits"], eager(**given)["logits"])


def test_frozen_and_unfrozen_parameters(pair: tuple[ORTModule, Small]) -> None:
    wrapped, eager = pair
    given = batch()
    for frozen in (True, False, True):
        for run in (wrapped, eager):
            run.first.weight.requires_grad_(not frozen)
            run.zero_grad()
            run(**given)["loss"].backward()
        assert (wrapped.first.weight.grad is None) is frozen
        for ours, theirs in zip(gradients(wrapped), gradients(eager), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_replaced_parameter_is_used(pair: tuple[ORTModule, Small]) -> None:
    wrapped, eager = pair
    x = torch.randn(2, 4)
    wrapped(x)
    wrapped.module.first.weight = torch.nn.Parameter(torch.ones(6, 4))
    eager.first.weight = torch.nn.Parameter(torch.ones(6, 4))
    torch.testing.assert_close(wrapped(x), eager(x))
    wrapped(x).sum().backward()
    assert wrapped.first.weight.grad is not None


def test_gradient_of_an_input(pair: tuple[ORTModule, Small]) -> None:
    wrapped, eager = pair
    x = torch.randn(5, 4)
    found = []
    for run in (wrapped, eager):
        leaf = x.clone().requires_grad_()
        run(leaf).square().sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)


def test_gradients_accumulate_over_several_forwards(pair: tuple[ORTModule, Small]) -> None:
    wrapped, eager = pair
    batches = [batch() for _ in range(3)]
    for run in (wrapped, eager):
        sum(run(**b)["loss"] for b in batches).backward()
    for ours, theirs in zip(gradients(wrapped), gradients(eager), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_python_scalars_are_part_of_the_graph(pair: tuple[ORTModule, Small]) -> None:
    wrapped, eager = pair
    x = torch.randn(2, 4)
    for scale in (1.0, 3.0, 1.0):
        torch.testing.assert_close(wrapped(x, scale=scale), eager(x, scale=scale))


def test_second_backward_is_a_clear_error() -> None:
    loss = ORTModule(Small())(**batch())["loss"]
    loss.backward()
    with pytest.raises(GradientError, match="second time"):
        loss.backward()


def test_a_retained_graph_is_walked_again(pair: tuple[ORTModule, Small]) -> None:
    """As often as it is retained, with the buffers that the forward pass had."""
    given = batch()
    for run in pair:
        out = run(**given)
        out["loss"].backward(retain_graph=True)
        (2 * out["loss"] + out["logits"].sum()).backward(retain_graph=True)
        out["loss"].backward()
    for ours, theirs in zip(gradients(pair[0]), gradients(pair[1]), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert pair[0].calls == pair[1].calls == 1


def test_a_retained_graph_has_the_random_numbers_it_had() -> None:
    eager = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    wrapped, x = ORTModule(copy.deepcopy(eager)), torch.randn(5, 4)
    for run in (wrapped, eager):
        torch.manual_seed(1)
        out = run(x).square()
        torch.rand(3)
        out.sum().backward(retain_graph=True)
        out.mean().backward()
    for ours, theirs in zip(gradients(wrapped), gradients(eager), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_in_place_edit_between_forward_and_backward_is_caught() -> None:
    wrapped = ORTModule(Small())
    loss = wrapped(**batch())["loss"]
    with torch.no_grad():
        wrapped.second.weight.mul_(2)
    with pytest.raises(GradientError, match=r"second\.weight was modified in place"):
        loss.backward()


def test_no_memory_is_held_by_a_forward_without_backward() -> None:
    wrapped = ORTModule(Small())
    wrapped(**batch())["loss"].backward()
    gc.collect()
    gc.disable()
    try:
        out = wrapped(**batch())
        watch = weakref.ref(out["loss"].grad_fn)
        del out
        assert watch() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("verified", [False, True])
def test_the_batch_of_the_first_call_is_not_held(verified: bool) -> None:
    """Nor by what says which calls a graph serves: a graph lives as long as the module."""
    wrapped = ORTModule(Small(), options=Options(verify=verified))
    for _ in range(2):
        given = batch()
        alive = {name: weakref.ref(tensor) for name, tensor in given.items()}
        wrapped(**given)["loss"].backward()
        del given
        gc.collect()
        assert not [name for name, tensor in alive.items() if tensor() is not None]


def test_deepcopy_and_pickle() -> None:
    wrapped = ORTModule(Small())
    given = batch()
    expected = wrapped(**given)["logits"]
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert twin.first is not wrapped.first
        torch.testing.assert_close(twin(**given)["logits"], expected)


def test_moving_to_another_type() -> None:
    wrapped = ORTModule(Small())
    wrapped(torch.randn(2, 4))
    assert wrapped.double() is wrapped
    assert wrapped(torch.randn(2, 4, dtype=torch.float64)).dtype == torch.float64


def test_nested_inputs_and_outputs() -> None:
    class Pair(NamedTuple):
        left: torch.Tensor
        right: Any

    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, items: list[torch.Tensor], options: dict[str, Any]) -> Any:
            y = self.linear(items[0]) + items[1]
            return Pair(y, [y, None, {"sum": y.sum(), "kept": items[0], "flag": options["flag"]}])

    wrapped, given = ORTModule(Nested()), ([torch.randn(2, 3), torch.randn(3)], {"flag": True, "unused": torch.ones(1)})
    out, expected = wrapped(*given), wrapped.module(*given)
    assert isinstance(out, Pair) and out.right[1] is None and out.right[2]["flag"] is True
    assert out.right[0] is out.left
    torch.testing.assert_close(out.left, expected.left)
    torch.testing.assert_close(out.right[2]["kept"], given[0][0])
    out.right[2]["sum"].backward()
    torch.testing.assert_close(wrapped.linear.bias.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_integers_computed_from_sizes_come_back_as_integers(backend: str) -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"y": self.linear(x), "rows": x.shape[0] * 2}

    wrapped = ORTModule(Counts(), options=Options(backend=backend, verify=True))
    for rows in (4, 5):
        out = wrapped(torch.randn(rows, 3))
        out["y"].sum().backward()
        assert out["rows"] == rows * 2 and isinstance(out["rows"], int)


def test_shared_parameter_stays_one() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(7, 4)
            self.head = torch.nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.embedding(ids)), ids)

    eager = Tied()
    wrapped = ORTModule(copy.deepcopy(eager))
    ids = torch.randint(0, 7, (6,))
    for run in (wrapped, eager):
        run(ids).backward()
    assert len(list(wrapped.parameters())) == 1
    torch.testing.assert_close(wrapped.embedding.weight.grad, eager.embedding.weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_the_loss_in_float32(dtype: torch.dtype) -> None:
    eager = Small()
    wrapped, given = ORTModule(copy.deepcopy(eager)), batch()
    outs = []
    for run in (wrapped, eager):
        with torch.autocast("cpu", dtype=dtype):
            out = run(**given)
        out["loss"].backward()
        outs.append(out)
    assert outs[0]["logits"].dtype == dtype and outs[0]["loss"].dtype == torch.float32
    torch.testing.assert_close(outs[0]["loss"], outs[1]["loss"], rtol=1e-2, atol=1e-2)
    for ours, theirs in zip(gradients(wrapped), gradients(eager), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=2e-2)
    wrapped(**given)["loss"].backward()
    assert wrapped(**given)["logits"].dtype == torch.float32, "leaving autocast takes another graph"


def test_non_module_is_refused() -> None:
    with pytest.raises(ModuleError, match="function") as raised:
        ORTModule(lambda x: x)  # type: ignore[arg-type]
    assert "forward" in raised.value.cure
    assert isinstance(raised.value, TypeError) and isinstance(raised.value, OnnxTrainError)


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, ORTModule])
def test_wrappers_are_refused(wrap: Any) -> None:
    with pytest.raises(ModuleError):
        ORTModule(wrap(Small()))


def test_unsupported_input_names_its_place() -> None:
    class Thing:
        pass

    with pytest.raises(UnsupportedDataError, match="Thing") as raised:
        ORTModule(Small())(torch.randn(2, 4), labels=[Thing()])
    assert "'labels'" in str(raised.value) and raised.value.cure


def test_unsupported_output_names_its_place() -> None:
    class Returns(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"y": x, "odd": object()}

    with pytest.raises(UnsupportedDataError, match="odd"):
        ORTModule(Returns())(torch.ones(2))


def test_a_look_that_nobody_sees_names_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    class Hides(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            with torch._C.DisableTorchFunction():
                if y.sum() > 0:
                    y = y * 2
            return y

    with pytest.raises(CaptureError, match="control flow") as raised:
        ORTModule(Hides())(torch.randn(2, 3))
    lines, first = inspect.getsourcelines(Hides.forward)
    branch = first + next(i for i, line in enumerate(lines) if "if y.sum()" in line)
    assert raised.value.source == f"{__file__}:{branch}"
    assert "torch.where" in raised.value.cure
    assert "def forward" not in capfd.readouterr().err


def test_errors_of_the_users_own_code_are_its_own() -> None:
    class Broken(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(5, 2)

    with pytest.raises(CaptureError) as raised:
        ORTModule(Broken())(torch.randn(2, 3))
    assert raised.value.source.startswith(__file__)


class Checks(torch.nn.Module):
    """Says what is wrong with its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        if x.shape[-1] != 4:
            raise ValueError("four columns are needed")
        if scale is not None and scale < 0:
            raise KeyError("scale")
        return self.linear(x) * (1 if scale is None else scale)


def test_errors_of_the_users_own_code_are_of_their_class() -> None:
    """At the first call and after others, and the next call is as before."""
    wrapped = ORTModule(Checks())
    for _ in range(2):
        with pytest.raises(ValueError, match="four columns"):
            wrapped(torch.ones(2, 3))
        with pytest.raises(KeyError, match="scale"):
            wrapped(torch.ones(2, 4), -1)
        for scale in (None, 2, 3.5):
            torch.testing.assert_close(wrapped(torch.ones(2, 4), scale), wrapped.module(torch.ones(2, 4), scale))


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="backend"):
        Options(backend="tpu")
    with pytest.raises(OptionError, match="opset"):
        Options(opset=7)


def test_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "21")
    assert ORTModule(Small(), options=Options(opset=20)).options.opset == 21
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "new")
    with pytest.raises(OptionError, match="ORTMODULE_ONNX_OPSET_VERSION"):
        ORTModule(Small())


def test_debug_options_save_every_stage(tmp_path: Any) -> None:
    import onnx

    debug = DebugOptions(LogLevel.INFO, save_onnx=True, onnx_prefix="small", save_path=tmp_path)
    wrapped = ORTModule(Small(), debug)
    wrapped(**batch())["loss"].backward()
    names = sorted(p.name for p in tmp_path.iterdir())
    stages = ["execution_model_backward", "execution_model", "optimized_pre_grad", "optimized", "torch_exported"]
    assert names == [f"small_{stage}_training.onnx" for stage in stages]
    for path in tmp_path.iterdir():
        onnx.checker.check_model(onnx.load(path))


def test_debug_options_are_checked(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match="LogLevel"):
        DebugOptions(log_level=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="string"):
        DebugOptions(onnx_prefix=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="onnx_prefix"):
        DebugOptions(save_onnx=True)
    with pytest.raises(OSError, match="ORTMODULE_SAVE_ONNX_PATH"):
        DebugOptions(save_onnx=True, onnx_prefix="a", save_path=tmp_path / "missing")


def test_what_was_built_can_be_read() -> None:
    wrapped = ORTModule(Small())
    with pytest.raises(ModuleError, match="not called"):
        wrapped.graph()
    wrapped(**batch())["loss"].backward()
    training = wrapped.graph("training")
    assert "---- backward ----" in training and "saved" in training and "first.weight_grad" in training
    assert "test_module.py:" in training and "_dim0,4]" in training
    assert "ops.Linear(" in wrapped.source("forward") and "del " in wrapped.source("backward")
    assert "gradients" in wrapped.summary()
    with pytest.raises(ModuleError, match="'nothing'"):
        wrapped.graph("nothing")


def test_generated_lines_are_in_tracebacks() -> None:
    import traceback

    wrapped = ORTModule(Small())
    wrapped(torch.randn(2, 4))
    bound = wrapped.__dict__["_ort_last"].bound
    try:
        bound.latest.executable.forward(bound.inputs([torch.randn(2, 5)]))
    except RuntimeError as error:
        text = "".join(traceback.format_exception(error))
    assert "ops.Linear(x" in text


def test_the_terminal_shows_the_summary_alone() -> None:
    """Neither torch.export's chatter nor torch.onnx's."""
    code = "import torch, onnxtrain\nonnxtrain.ORTModule(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == ""
    assert [line for line in done.stderr.splitlines() if not line.startswith((" ", "onnxtrain:"))] == []


class Heads(torch.nn.Module):
    """What of it has a gradient depends on the loss; of some of it the gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2), torch.nn.Linear(4, 3)
        self.prefix, self.rounded = torch.nn.Parameter(torch.randn(1, 2, 4)), torch.nn.Parameter(torch.randn(4))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.cat((self.prefix.expand(x.shape[0], -1, -1), x), 1)[:, 2:]
        x = torch.tanh(self.trunk(x) + torch.round(self.rounded))
        return self.a(x).square().mean(), self.b(x).square().mean(), self.b(x).detach()


@pytest.mark.parametrize("hooks", [False, True])
def test_what_has_no_gradient_is_what_has_none_in_eager(hooks: bool) -> None:
    """Else a step without a loss of its own would decay a head's weights, or go on by its momentum."""
    wrapped, eager = parity.pair(Heads())
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1, weight_decay=0.5) for m in (wrapped, eager)]
    called: list[list[str]] = [[], []]
    for model, names in zip((wrapped, eager), called, strict=True):
        for name, parameter in model.named_parameters() if hooks else ():
            parameter.register_hook(lambda g, name=name, names=names: names.append(name if g is not None else "none"))
    for losses in ((0,), (1,), (0, 1), (0,), (1,), (0,)):
        x = torch.randn(2, 3, 4)
        for model, optimizer in zip((wrapped, eager), optimizers, strict=True):
            optimizer.zero_grad()
            found = model(x)
            sum(found[i] for i in losses).backward()
            optimizer.step()
        for (name, a), b in zip(wrapped.named_parameters(), eager.parameters(), strict=True):
            if not hooks:  # which are called in any case, and get zeros
                torch.testing.assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")
                torch.testing.assert_close(a, b)
    assert {*called[0]} == {*called[1]}


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("program", [lambda x: x.detach().clone(), lambda x: (x.detach() * 1, x * 2), lambda x: x])
def test_outputs_require_gradients_as_in_eager(program: Any, enabled: bool) -> None:
    class Program(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return program(x)

    wrapped, eager = parity.pair(Program())
    x = torch.randn(2, 3, requires_grad=True)
    with torch.set_grad_enabled(enabled):
        for _ in range(2):
            ours, theirs = (torch.utils._pytree.tree_leaves(m(x)) for m in (wrapped, eager))
            assert [y.requires_grad for y in ours] == [y.requires_grad for y in theirs]
