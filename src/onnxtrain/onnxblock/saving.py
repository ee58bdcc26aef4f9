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
    write(checkpoint_of(parameters, nominal_checkpoint), path_to_checkpoint)


def checkpoint_of(
    parameters: tuple[Sequence[Tensor], Sequence[Tensor]], is_nominal: bool = False, set_id: str = ""
) -> Checkpoint:
    """The checkpoint of the weights that are trained and those that are not, without their content where nominal."""
    arrays = [dict(map(_content, part)) for part in parameters]
    trainable, frozen = ({n: Form.of(a) for n, a in part.items()} for part in arrays)
    tensors = {} if is_nominal else arrays[0] | arrays[1]
    return Checkpoint(trainable, frozen, tensors, set_id=set_id)


def load_checkpoint_to_model(path_to_checkpoint: Path | str, model: onnx.ModelProto) -> None:
    """Replace a model's initializers by the checkpoint's content, in place.

    Raises:
        CheckpointError: the checkpoint has no content, or the model no such initializer.
    """
    checkpoint = read(path_to_checkpoint)
    if checkpoint.is_nominal:
        raise CheckpointError(f"{path_to_checkpoint} has no content", cure="use a checkpoint that is not nominal")
    known = {i.name: i for i in model.graph.initializer}
    cure = "use the model it was made from"
    for name, form in checkpoint.forms.items():
        if name not in known:
            raise CheckpointError(f"the model has no initializer {name}", cure=cure)
        found = Form(onnx.helper.tensor_dtype_to_np_dtype(known[name].data_type).name, tuple(known[name].dims))
        if found != form:
            raise CheckpointError(f"{name} is {form} in the checkpoint, {found} in the model", cure=cure)
    for name, array in checkpoint.tensors.items():
        known[name].CopyFrom(onnx.numpy_helper.from_array(array, name))


def _content(tensor: Tensor) -> tuple[str, np.ndarray]:
    if isinstance(tensor, onnx.TensorProto):
        return tensor.name, onnx.numpy_helper.to_array(tensor)
    return str(tensor.name), tensor.numpy()
