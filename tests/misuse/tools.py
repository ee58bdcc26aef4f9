"""Misuse of gradient_graph, adapters, dequantize_weights and check_model."""

from __future__ import annotations

import math
from typing import Any

import digits

import onnxtrain
from misuse.room import Room, Row
from onnxtrain import artifacts
from onnxtrain.adapters import adapter_inputs, lora, merge_lora, save_adapter
from onnxtrain.blockers import check_model
from onnxtrain.gradient_graphs import gradient_graph
from onnxtrain.quantized_weights import dequantize_weights


def gradient(*given: Any, **options: Any) -> Any:
    return lambda room: gradient_graph(digits.network(8), *given, **options)


def adapted(*given: Any, **options: Any) -> Any:
    return lambda room: lora(digits.network(8), *given, **options)


def twice(room: Room) -> None:
    lora(lora(digits.network(8), "second_weight", 2), "second_weight", 2)


def checked(model: Any) -> None:
    """A check never raises; what it found is the error."""
    found = check_model(model)
    raise onnxtrain.errors.GraphError(found.blockers[0].what, cure=found.blockers[0].cure)


TABLE = [
    Row("gradient by nothing", gradient([]), "wrt is empty"),
    Row("gradient by no value", gradient("imgae"), "no input or initializer imgae.*close names: image"),
    Row("gradient by a pattern that fits none", gradient("third*"), "no input or initializer third"),
    Row("gradient by a number", gradient(3), "wrt=3 is no list of names"),
    Row("gradient of no output", gradient("image", "logits"), "no output logits"),
    Row("gradient of an inner value", gradient("image", "hidden"), "no output hidden"),
    Row("gradient of a number", gradient("image", 3), "outputs=3 is no list"),
    Row("gradient of no model", lambda r: gradient_graph("none.onnx", "x"), "none.onnx cannot be read"),
    Row("gradient of bytes", lambda r: gradient_graph(b"", "x"), "the model is bytes"),
    Row("gradient of a pipe", lambda r: gradient_graph(r.fifo("m"), "x"), "is a pipe, no file"),
    Row("adapter of rank 0", adapted("*weight", 0), "rank=0"),
    Row("adapter of a rank of a half", adapted("*weight", 1.5), "rank=1.5"),
    Row("adapter of a rank of a bool", adapted("*weight", True), "rank=True"),
    Row("adapter of alpha nan", adapted("*weight", 2, math.nan), "alpha=nan"),
    Row("adapter of alpha 0", adapted("*weight", 2, 0), "alpha=0"),
    Row("adapter of a seed below 0", adapted("*weight", 2, seed=-1), "seed=-1"),
    Row("adapter of nothing", adapted([], 2), "targets"),
    Row("adapter of a number", adapted(3, 2), "targets=3 is no list"),
    Row("adapter of no weight", adapted("third_weight", 2), "no weight is called third_weight"),
    Row("adapter of a bias", adapted("first_bias", 2), "no adapter fits first_bias"),
    Row("adapter beside an adapter", twice, "has an adapter already"),
    Row("adapter of no model", lambda r: lora("none.onnx", "w", 2), "none.onnx cannot be read"),
    Row("adapter of text", lambda r: lora(r.write("m.onnx", b"text"), "w", 2), "m.onnx cannot be read"),
    Row("merging without adapters", lambda r: merge_lora(digits.network(8)), "no adapter"),
    Row("merging of a folder", lambda r: merge_lora(r.folder), "is a folder, no file"),
    Row("inputs without adapters", lambda r: adapter_inputs(digits.network(8)), "no adapter"),
    Row(
        "saving without adapters", lambda r: save_adapter(digits.network(8), r.folder / "a.onnx_adapter"), "no adapter"
    ),
    Row(
        "saving to a folder",
        lambda r: save_adapter(lora(digits.network(8), "*weight", 2), (r.write("a.onnx_adapter/x", b"")).parent),
        "cannot be written",
    ),
    Row(
        "saving below a file",
        lambda r: save_adapter(lora(digits.network(8), "*weight", 2), r.write("f", b"") / "a"),
        "cannot be written",
    ),
    Row("saving for a number", lambda r: save_adapter(lora(digits.network(8), "*weight", 2), 3), "no path"),
    Row("dequantizing floats", lambda r: dequantize_weights(digits.network(8)), "no weight that is stored as integers"),
    Row("dequantizing no model", lambda r: dequantize_weights("none.onnx"), "none.onnx cannot be read"),
    Row("dequantizing a list", lambda r: dequantize_weights([1]), "the model is list"),
    Row("check of no model", lambda r: checked("none.onnx"), "none.onnx cannot be read"),
    Row("check of a device", lambda r: checked("/dev/zero"), "is a device, no file"),
    Row("check of text", lambda r: checked(r.write("m.onnx", b"text")), "m.onnx cannot be read"),
    Row("sealing no file", lambda r: artifacts.seal(r.folder / "none"), "none cannot be read"),
    Row("sealing text", lambda r: artifacts.seal(r.write("m.onnx", b"text")), "is no .onnx model"),
    Row("sealing a checkpoint", lambda r: artifacts.seal(r.copied() / "checkpoint"), "is no .onnx model"),
]
