"""The predecessor's interface: options by execution provider, a pool, counts, and operators of a user's library."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from compiled import compiled, piece
from torch._dynamo.exc import BackendCompilerFailed

from onnxtrain import Options
from onnxtrain.capture.translations import TRANSLATIONS
from onnxtrain.errors import GradientError, OptionError
from onnxtrain.torchdynamo import OrtBackend, OrtBackendOptions, is_onnxrt_backend_supported, register_custom_op
from onnxtrain.torchdynamo.register_backend import aot_ort, dynamic_aot_ort, make_aot_ort, ort

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@pytest.fixture(autouse=True)
def _empty() -> None:
    torch._dynamo.reset()
    OrtBackend.clear_cached_instances()


def trains(backend: object, **given: object) -> None:
    layer = torch.nn.Linear(4, 2)
    torch.compile(lambda x: layer(x).tanh().sum(), backend=backend, **given)(x := torch.randn(3, 4)).backward()
    expected = torch.autograd.grad(layer(x).tanh().sum(), list(layer.parameters()))
    torch.testing.assert_close([p.grad for p in layer.parameters()], list(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", [ort, aot_ort, dynamic_aot_ort, "onnxrt", OrtBackend()])
def test_names_of_the_predecessor(backend: object) -> None:
    trains(backend)
    assert is_onnxrt_backend_supported()


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (False, 3)])
def test_one_graph_for_all_sizes_or_one_for_each(dynamic: bool, graphs: int) -> None:
    compiler, backend = make_aot_ort(dynamic=dynamic)
    layer = torch.nn.Linear(4, 4)
    made = torch.compile(layer, backend=compiler, dynamic=True)
    for rows in (3, 5, 7, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(made(x), layer(x))
    assert backend.execution_count == 4 and sum(p.captures for p in backend.pieces) == graphs


def test_providers_in_order() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert OrtBackendOptions().providers([cuda]) == (CUDA, CPU)
    assert OrtBackendOptions().providers([]) == (CPU,)
    assert OrtBackendOptions(infer_execution_providers=False).providers([cuda]) == (CPU,)
    assert OrtBackendOptions([CPU], default_execution_providers=[(CUDA, {})]).providers([cpu]) == (CPU, CUDA)
    with pytest.raises(OptionError, match="TensorrtExecutionProvider"):
        OrtBackendOptions(["TensorrtExecutionProvider"])


def test_a_preferred_provider_runs_graphs_by_onnxruntime() -> None:
    backend = OrtBackend(OrtBackendOptions(preferred_execution_providers=[CPU]))
    trains(backend)
    assert type(backend.pieces[0]._session().bound.latest.executable).__name__ == "OnnxRuntimeExecutable"
    only = OrtBackendOptions([CUDA], infer_execution_providers=False, default_execution_providers=[CUDA])
    with pytest.raises(BackendCompilerFailed, match="serves inputs on cpu"):
        trains(OrtBackend(only))


def test_a_graph_without_inputs_has_the_device_of_its_outputs() -> None:
    made = torch.compile(
        lambda: torch.full((3,), 2.0), backend="onnxrt", options={"preferred_execution_providers": [CPU]}
    )
    torch.testing.assert_close(made(), torch.full((3,), 2.0))


def test_backends_are_pooled_by_options() -> None:
    first = OrtBackend.get_cached_instance_for_options(OrtBackendOptions([CPU]))
    assert OrtBackend.get_cached_instance_for_options({"preferred_execution_providers": [CPU]}) is first
    assert OrtBackend.get_cached_instance_for_options() is not first
    for opset in (20, 21):
        for strict in (True, False):
            for prefix in "abc":
                OrtBackend.get_cached_instance_for_options({"opset": opset, "strict": strict, "onnx_prefix": prefix})
    assert len(OrtBackend.get_cached_instances()) == 8 and first not in OrtBackend.get_cached_instances()


def test_options_that_have_no_meaning_here_warn() -> None:
    with pytest.warns(UserWarning, match="ort_session_options"):
        options = OrtBackendOptions(ort_session_options=object())
    assert OrtBackend.get_cached_instance_for_options(options) is not OrtBackend.get_cached_instance_for_options(
        options
    )
    with pytest.raises(OptionError, match="close names: use_aot_autograd"):
        OrtBackend({"use_aot_autogrd": True})
    assert not OrtBackendOptions(export_options=SimpleNamespace(dynamic_shapes=False)).is_dynamic


def test_without_gradients() -> None:
    backend = OrtBackend({"use_aot_autograd": False})
    layer = torch.nn.Linear(4, 2)
    assert not torch.compile(layer, backend=backend)(torch.randn(3, 4)).requires_grad


@torch.library.custom_op("onnxtrain_tests::neg_pos", mutates_args=())
def neg_pos(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.clamp(max=0), x.clamp(min=0)


@neg_pos.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


neg_pos.register_autograd(
    lambda ctx, dn, dp: torch.where(ctx.saved_tensors[0] > 0, dp, dn),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def test_an_operator_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.ops.onnxtrain_tests.neg_pos
    monkeypatch.setitem(TRANSLATIONS, target.default, None)
    del TRANSLATIONS[target.default]
    register_custom_op(target, "NegPos", "ai.onnx.contrib")
    with pytest.raises(OptionError, match="translated already"):
        register_custom_op(target, "NegPos", "ai.onnx.contrib")
    layer = torch.nn.Linear(4, 2)

    def function(x: torch.Tensor) -> torch.Tensor:
        negative, positive = target(x)
        return layer(negative * 2 + positive).sum()

    x = torch.randn(3, 4)
    y = x.clone().requires_grad_()
    compiled(function)(y).backward()
    torch.testing.assert_close(y.grad, torch.autograd.grad(function(y), y)[0])
    assert "onnxtrain_tests::neg_pos" in piece().graph()
    library = pytest.importorskip("onnxruntime_extensions").get_library_path()
    made = compiled(function, backend="onnxruntime", custom_op_library=library)
    torch.testing.assert_close(made(x), function(x))
    assert "ai.onnx.contrib::NegPos(x)" in piece().graph()
    with pytest.raises(GradientError, match="NegPos"):
        made(y).backward()


def test_arguments_of_an_operator_are_inputs_or_attributes() -> None:
    with pytest.raises(OptionError, match="the argument alpha"):
        register_custom_op(torch.ops.aten.celu.default, "Celu", "some.domain")


def test_options_of_ours() -> None:
    backend = OrtBackend({"backend": "reference"})
    trains(backend)
    assert backend.options.options == Options(backend="reference")
