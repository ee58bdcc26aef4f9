"""Low-rank adapters: the same training as in torch, frozen weights untouched, merged models equal to adapted ones."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

from onnxtrain import adapter_inputs, lora, merge_lora, save_adapter
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.errors import ArtifactError
from onnxtrain.onnxblock import optim


class Encoder(torch.nn.Module):
    """One layer of an encoder over tokens, and a head: what BERT is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.query, self.key, self.value = (torch.nn.Linear(8, 8) for _ in range(3))
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / 8**0.5
        x = self.norm(x + scores.softmax(-1) @ self.value(x))
        x = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return self.head(x.mean(1))


class Adapted(torch.nn.Module):
    """LoRA as the PEFT library has it."""

    def __init__(self, layer: torch.nn.Module, a: np.ndarray, b: np.ndarray, scaling: float) -> None:
        super().__init__()
        self.layer, self.scaling = layer.requires_grad_(False), scaling
        self.a, self.b = (torch.nn.Parameter(torch.tensor(v)) for v in (a, b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.layer, torch.nn.Embedding):
            return self.layer(x) + self.scaling * (self.b[x] @ self.a)
        if isinstance(self.layer, torch.nn.Conv2d):
            low = torch.nn.functional.conv2d(x, self.a, stride=self.layer.stride, padding=self.layer.padding)
            return self.layer(x) + self.scaling * torch.nn.functional.conv2d(low, self.b)
        return self.layer(x) + self.scaling * (x @ self.a.T @ self.b.T)


def exported(module: torch.nn.Module, *inputs: torch.Tensor) -> onnx.ModelProto:
    """As torch's exporter writes it, which keeps weights behind Transpose where it does not optimize."""
    file = io.BytesIO()
    dims = tuple({0: torch.export.Dim.DYNAMIC} for _ in inputs)
    program = torch.onnx.export(module.eval(), inputs, dynamo=True, optimize=False, dynamic_shapes=dims, verbose=False)
    program.save(file)
    return onnx.load_from_string(file.getvalue())


def initializers(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}


def run(model: onnx.ModelProto, *inputs: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip([i.name for i in session.get_inputs()], inputs, strict=True)))[0]


def with_adapters(module: torch.nn.Module, model: onnx.ModelProto) -> list[torch.nn.Parameter]:
    """Put the adapters of a model into a module, in place; gives their parameters."""
    content, made = initializers(model), []
    module.requires_grad_(False)
    for name in [n for n in content if n.endswith(".lora_A")]:
        path = name.removesuffix(".weight.lora_A")
        weight = name.removesuffix(".lora_A")
        parts = content[name], content[f"{weight}.lora_B"], float(content[f"{weight}.lora_scaling"])
        adapted = Adapted(module.get_submodule(path), *parts)
        parent, _, last = path.rpartition(".")
        setattr(module.get_submodule(parent), last, adapted)
        made += [adapted.a, adapted.b]
    return made


def trained(model: onnx.ModelProto, folder: Path, batches: list[Any], rate: float) -> tuple[list[float], Any]:
    """Losses, and the model after training its adapters."""
    files = generate_artifacts(
        model,
        ["*.lora_?"],
        loss=LossType.CrossEntropyLoss,
        optimizer=optim.AdamW(eps=1e-8, formula="torch"),
        artifact_directory=folder,
    )
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    module = Module(files["training_model"], state, files["eval_model"])
    optimizer, losses = Optimizer(files["optimizer_model"], module), []
    optimizer.set_learning_rate(rate)
    for batch in batches:
        losses.append(float(module(*batch)))
        optimizer.step()
        module.lazy_reset_grad()
    module.export_model_for_inferencing(folder / "model.onnx")
    return losses, onnx.load(folder / "model.onnx")


RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 11, size=(16, 5))
LABELS = (IDS.sum(1) % 3).astype(np.int64)
TARGETS = ["embedding.weight", "*query.weight", "value.weight", "up*", "down*"]


def test_the_training_of_torch(tmp_path: Path) -> None:
    module = Encoder()
    plain = exported(module, torch.tensor(IDS))
    before = plain.SerializeToString()
    model = lora(plain, TARGETS, rank=2, alpha=8, seed=3)
    assert plain.SerializeToString() == before
    onnx.checker.check_model(model)
    np.testing.assert_allclose(run(model, IDS), run(plain, IDS), rtol=0, atol=1e-6)
    losses, after = trained(model, tmp_path, [(IDS, LABELS)] * 30, 0.02)
    parameters = with_adapters(module, model)
    optimizer = torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.0)
    for ours in losses:
        loss = torch.nn.functional.cross_entropy(module(torch.tensor(IDS)), torch.tensor(LABELS))
        np.testing.assert_allclose(ours, loss.item(), rtol=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    first, last = initializers(model), initializers(after)
    for name in (n for n in first if n in last):
        assert (first[name].tobytes() == last[name].tobytes()) == (not name.endswith((".lora_A", ".lora_B"))), name
    merged = merge_lora(after)
    assert not [n for n in initializers(merged) if "lora" in n]
    assert [n.op_type for n in merged.graph.node] == [n.op_type for n in plain.graph.node]
    adapted = run(after, IDS)
    np.testing.assert_allclose(run(merged, IDS), adapted, rtol=0, atol=1e-6 * np.abs(adapted).max())
    assert np.abs(run(merged, IDS) - run(plain, IDS)).max() > 0.1


def hand_written(nodes: list[Any], weights: dict[str, np.ndarray], x: Any, y: Any) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(v, n) for n, v in weights.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def table(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


FLOAT, X = TensorProto.FLOAT, helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3])
TWO = helper.make_tensor_value_info("y", FLOAT, [4, 5])
FORMS = {
    "MatMul": [helper.make_node("MatMul", ["x", "w"], ["y"])],
    "Gemm": [helper.make_node("Gemm", ["x", "w"], ["y"], alpha=0.5)],
    "Gemm, transposed": [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
        helper.make_node("Gemm", ["t", "w"], ["y"], transA=1),
    ],
    "rows": [helper.make_node("Gemm", ["x", "r"], ["y"], transB=1)],
    "cast and transposed": [
        helper.make_node("Cast", ["r"], ["c"], to=int(FLOAT)),
        helper.make_node("Transpose", ["c"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
    ],
    "twice, one of them the output": [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Neg", ["x"], ["n"]),
        helper.make_node("MatMul", ["n", "w"], ["z"]),
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_product(form: str) -> None:
    nodes, x = FORMS[form], table(4, 3)
    name = "r" if any("r" in n.input for n in nodes) else "w"
    plain = hand_written(nodes, {name: table(5, 3) if name == "r" else table(3, 5)}, X, TWO)
    model, w = lora(plain, name, rank=2, alpha=3), initializers(plain)[name]
    b = next(i for i in model.graph.initializer if i.name == f"{name}.lora_B")
    assert list(b.dims) == [5, 2] and not numpy_helper.to_array(b).any()
    b.CopyFrom(numpy_helper.from_array(table(5, 2), b.name))
    change = 1.5 * numpy_helper.to_array(b) @ initializers(model)[f"{name}.lora_A"]
    expected = (
        x @ (w + (change if name == "r" else change.T)).reshape(w.shape).T.T if name == "w" else x @ (w + change).T
    )
    expected = expected * (0.5 if form == "Gemm" else 1.0)
    np.testing.assert_allclose(run(model, x), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(run(merge_lora(model), x), expected, rtol=1e-5, atol=1e-5)


def test_convolutions_are_adapted(tmp_path: Path) -> None:
    module = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, stride=2, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 3, 1), torch.nn.Flatten()
    )
    images = torch.randn(8, 2, 2, 2)
    model = lora(exported(module, images), "*.weight", rank=1, alpha=2)
    labels = np.arange(8) % 3
    losses, after = trained(model, tmp_path, [(images.numpy(), labels)] * 8, 0.1)
    parameters = with_adapters(module, model)
    assert len(parameters) == 4
    optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.0)
    for ours in losses:
        loss = torch.nn.functional.cross_entropy(module(images), torch.tensor(labels))
        np.testing.assert_allclose(ours, loss.item(), rtol=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    np.testing.assert_allclose(run(merge_lora(after), images.numpy()), run(after, images.numpy()), rtol=1e-5, atol=1e-6)


def quantized() -> onnx.ModelProto:
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale"], ["f"], axis=1),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    weights = {"w": RNG.integers(-128, 128, (3, 5)).astype(np.int8), "scale": np.full(5, 0.01, np.float32)}
    return hand_written(nodes, weights, X, TWO)


def test_quantized_weights_stay_quantized(tmp_path: Path) -> None:
    x, labels, model = table(4, 3), np.array([0, 4, 2, 1]), lora(quantized(), "w", rank=2)
    losses, after = trained(model, tmp_path, [(x, labels)] * 30, 0.1)
    assert losses[-1] < 0.5 * losses[0]
    assert initializers(after)["w"].tobytes() == initializers(model)["w"].tobytes()
    with pytest.raises(ArtifactError, match="w is stored as INT8, which cannot hold its adapter"):
        merge_lora(after)


def backward_operators(files: dict[str, Path]) -> list[str]:
    """The operators of the training model that are not of the evaluation model."""
    forward = {o for n in onnx.load(files["eval_model"]).graph.node for o in n.output}
    return [n.op_type for n in onnx.load(files["training_model"]).graph.node if not forward & set(n.output)]


def test_the_body_has_no_backward_pass_where_the_head_is_trained(tmp_path: Path) -> None:
    model = exported(Encoder(), torch.tensor(IDS))
    loss = {"loss": LossType.CrossEntropyLoss}
    head = backward_operators(generate_artifacts(model, ["head*"], artifact_directory=tmp_path / "head", **loss))
    every = backward_operators(generate_artifacts(model, artifact_directory=tmp_path / "all", **loss))
    assert sum(n in ("MatMul", "Gemm") for n in head) == 1  # the gradient of the head's weight
    assert not {"LayerNormalizationGrad", "GeluGrad", "SoftmaxGrad", "EmbeddingGrad"} & set(head)
    assert {"LayerNormalizationGrad", "GeluGrad", "SoftmaxGrad"} <= set(every)
    state = CheckpointState.load_checkpoint(tmp_path / "head" / "checkpoint")
    assert [p.name for p in state.parameters.values() if p.requires_grad] == ["head.weight", "head.bias"]


def test_adapted_weights_have_no_gradient_of_their_own(tmp_path: Path) -> None:
    model = exported(
        torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)), torch.ones(2, 8)
    )
    files = generate_artifacts(
        lora(model, "*", rank=2), ["*.lora_?"], loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path
    )
    made = onnx.load(files["training_model"])
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in made.graph.value_info}
    forward = {o for n in onnx.load(files["eval_model"]).graph.node for o in n.output}
    products = [n for n in made.graph.node if n.op_type in ("MatMul", "Gemm") and n.output[0] not in forward]
    assert products and not [n for n in products if shapes.get(n.output[0]) in ([64, 8], [8, 64], [64, 3], [3, 64])]


def test_files_of_adapters(tmp_path: Path) -> None:
    model = lora(exported(Encoder(), torch.tensor(IDS)), ["embedding.weight", "query.weight"], rank=2, alpha=8)
    model = lora(model, "up.weight", rank=3)
    for tensor in model.graph.initializer:
        if tensor.name.endswith(".lora_B"):
            tensor.CopyFrom(numpy_helper.from_array(table(*tensor.dims), tensor.name))
    content = initializers(model)
    save_adapter(model, tmp_path / "peft")
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    prefix = "base_model.model."
    np.testing.assert_array_equal(found[f"{prefix}query.lora_A.weight"], content["query.weight.lora_A"])
    np.testing.assert_array_equal(found[f"{prefix}up.lora_B.weight"], content["up.weight.lora_B"])
    assert found[f"{prefix}embedding.lora_embedding_A"].shape == (2, 11)
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert settings["r"] == 2 and settings["lora_alpha"] == 8 and settings["rank_pattern"] == {"up": 3}
    assert settings["target_modules"] == ["embedding", "query", "up"]
    save_adapter(model, tmp_path / "own.onnx_adapter")
    adapter = ort.LoraAdapter()
    adapter.Load(str(tmp_path / "own.onnx_adapter"))
    options = ort.RunOptions()
    options.add_active_adapter(adapter)
    fresh = {n: np.zeros_like(v) if n.endswith(".lora_B") else v for n, v in content.items()}
    base = adapter_inputs(model)
    for tensor in base.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(fresh[tensor.name], tensor.name))
    session = ort.InferenceSession(base.SerializeToString(), providers=["CPUExecutionProvider"])
    (plain,), (adapted,) = session.run(None, {"ids": IDS}), session.run(None, {"ids": IDS}, options)
    assert np.abs(plain - adapted).max() > 0.01
    np.testing.assert_allclose(adapted, run(model, IDS), rtol=1e-5, atol=1e-6)
    merged = merge_lora(adapter_inputs(model))
    assert [i.name for i in merged.graph.input] == ["ids"]
    np.testing.assert_allclose(run(merged, IDS), adapted, rtol=1e-4, atol=1e-5)


def test_wrong_targets_are_errors() -> None:
    model = exported(Encoder(), torch.tensor(IDS))
    with pytest.raises(ArtifactError, match=r"no weight is called qurey\.weight; close names: query\.weight"):
        lora(model, "qurey.weight", rank=2)
    with pytest.raises(ArtifactError, match=r"no adapter fits norm\.weight"):
        lora(model, "norm.weight", rank=2)
    with pytest.raises(ArtifactError, match="rank=0"):
        lora(model, "*", rank=0)
    with pytest.raises(ArtifactError, match=r"query\.weight has an adapter already"):
        lora(lora(model, "query.weight", rank=2), "query.weight", rank=2)
    with pytest.raises(ArtifactError, match="the model has no adapter"):
        merge_lora(model)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Exp", ["w"], ["e"])]
    with pytest.raises(ArtifactError, match="no adapter fits w in Exp"):
        lora(hand_written(nodes, {"w": table(3, 5)}, X, TWO), "w", rank=1)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Gemm", ["x", "w"], ["z"], transB=1)]
    with pytest.raises(ArtifactError, match="both as it is and transposed"):
        lora(hand_written(nodes, {"w": table(3, 3)}, X, TWO), "w", rank=1)
