"""The digits of scikit-learn, and a small network with dropout as .onnx, made without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

NETWORK = """
<ir_version: 10, opset_import: ["" : 20]>
digits (float[batch, 64] image) => (float[batch, 10] scores)
{
    hidden = Gemm <transB = 1> (image, first_weight, first_bias)
    active = Relu (hidden)
    ratio = Constant <value_float = 0.2> ()
    drops = Constant <value = bool {1}> ()
    kept, mask = Dropout (active, ratio, drops)
    scores = Gemm <transB = 1> (kept, second_weight, second_bias)
}
"""


def network(hidden: int = 64, seed: int = 0) -> onnx.ModelProto:
    """64 pixels, a hidden layer with dropout, 10 scores; weights uniform as torch.nn.Linear's."""
    random = np.random.default_rng(seed)
    model = parser.parse_model(NETWORK)
    for name, shape in {
        "first_weight": (hidden, 64),
        "first_bias": (hidden,),
        "second_weight": (10, hidden),
        "second_bias": (10,),
    }.items():
        bound = (64 if name.startswith("first") else hidden) ** -0.5
        content = random.uniform(-bound, bound, shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(content, name))
    helper.set_model_props(model, {"made_of": "digits"})
    onnx.checker.check_model(model)
    return model


def write(folder: Path, samples: int | None = None) -> tuple[Path, Path]:
    """Write a file to train on and one to measure on, each a part of the digits.

    Args:
        folder: where they go.
        samples: how many to train on; None is four fifths of all 1797.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int64)
    cut = len(labels) * 4 // 5
    parts = {"train": slice(0, samples or cut), "valid": slice(cut, None)}
    for name, part in parts.items():
        np.savez(folder / f"{name}.npz", image=images[part], labels=labels[part])
    return folder / "train.npz", folder / "valid.npz"
