"""Checkpoints of what blocks built, and weights from a checkpoint back into a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.checkpoint import Checkpoint, Form, read, write
from onnxtrain.errors import CheckpointError

Tensor = ir.TensorProtocol | onnx.TensorProto


def save_checkpoint(
    parameters: tuple[Sequence[Tensor], Sequence[Tensor]],
    path_to_checkpoint: Path | str,
    nominal_checkpoint: bool = False,
) -> None:
    """Write the weights that are trained and those that are not, as ``TrainingBlock.parameters()`` gives them.

    Args:
        parameters: both lists of tensors.
        path_to_checkpoint: the file.
        nominal_checkpoint: write names, types and shapes alone; whoever loads it gets the content from elsewhere.
    """
    arrays = [dict(map(_content, part)) for part in parameters]
    trainable, frozen = ({n: Form.of(a) for n, a in part.items()} for part in arrays)
    tensors = {} if nominal_checkpoint else arrays[0] | arrays[1]
    write(Checkpoint(trainable, frozen, tensors), path_to_checkpoint)


def load_checkpoint_to_model(path_to_checkpoint: Path | str, model: onnx.ModelProto) -> None:
    """Replace a model's initializers by the checkpoint's content, in place.

    Raises:
        CheckpointError: the checkpoint has no content, or the model no such initializer.
    """
    checkpoint = read(path_to_checkpoint)
    if checkpoint.is_nominal:
        raise CheckpointError(f"{path_to_checkpoint} has no content", cure="use a checkpoint that is not nominal")
    known = {i.name: i for i in model.graph.initializer}
    for name, array in checkpoint.tensors.items():
        if name not in known:
            raise CheckpointError(f"the model has no initializer {name}", cure="use the model it was made from")
        known[name].CopyFrom(onnx.numpy_helper.from_array(array, name))


def _content(tensor: Tensor) -> tuple[str, np.ndarray]:
    if isinstance(tensor, onnx.TensorProto):
        return tensor.name, onnx.numpy_helper.to_array(tensor)
    return str(tensor.name), tensor.numpy()
