"""Misuse of ``generate_artifacts``: options, names, losses, places."""

from __future__ import annotations

import digits
import numpy as np
import onnx
from onnx import helper, numpy_helper

from misuse.room import Room, Row
from onnxtrain import onnxblock
from onnxtrain.artifacts import LossType, OptimType


def network(**names: str) -> onnx.ModelProto:
    """The small network with other names for some of its values."""
    made = digits.network(8)
    for node in made.graph.node:
        node.input[:] = [names.get(n, n) for n in node.input]
        node.output[:] = [names.get(n, n) for n in node.output]
    for value in (*made.graph.input, *made.graph.output, *made.graph.initializer):
        value.name = names.get(value.name, value.name)
    return made


def whole_numbers() -> onnx.ModelProto:
    """A model without floating weights."""
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.INT64, ["n", 2]) for n in "xy")
    w = numpy_helper.from_array(np.array([1, 2]), "w")
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [w])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


class NoLoss(onnxblock.Block):
    """A block that gives back no scalar."""

    def build(self, name: str) -> str:
        return name


class Nowhere(onnxblock.Block):
    """A block that gives back a name that is none."""

    def build(self, name: str) -> str:
        return "nowhere"


def occupied(room: Room) -> None:
    room.generate(artifact_directory=room.write("taken", b""))


def a_folder_is_there(room: Room) -> None:
    (room.folder / "checkpoint").mkdir()
    room.note()
    room.generate()


def a_pipe_is_there(room: Room) -> None:
    room.fifo("training_model.onnx")
    room.generate()


TABLE = [
    Row("model of bytes", lambda r: r.generate(b"onnx"), "the model is bytes"),
    Row("model of a number", lambda r: r.generate(3), "the model is int"),
    Row("model of a list", lambda r: r.generate([digits.network(8)]), "the model is list"),
    Row("no such model", lambda r: r.generate(r.folder / "none.onnx"), "none.onnx.*cannot be read: No such file"),
    Row("model is a folder", lambda r: r.generate(r.folder), "is a folder, no file"),
    Row("model is a pipe", lambda r: r.generate(r.fifo("model.onnx")), "is a pipe, no file"),
    Row("model is a device", lambda r: r.generate("/dev/zero"), "is a device, no file"),
    Row("model of no name", lambda r: r.generate(""), "cannot be read"),
    Row("model of a name with zeros", lambda r: r.generate("a\0b.onnx"), "null"),
    Row("empty model", lambda r: r.generate(onnx.ModelProto()), "the model"),
    Row("requires_grad of no weight", lambda r: r.generate(requires_grad=["weight"]), "no floating initializer weight"),
    Row(
        "requires_grad of a near name", lambda r: r.generate(requires_grad=["first_wait"]), "close names: first_weight"
    ),
    Row(
        "requires_grad of a pattern that fits none", lambda r: r.generate(requires_grad=["third*"]), "called like third"
    ),
    Row("requires_grad is empty", lambda r: r.generate(requires_grad=[]), "requires_grad is empty"),
    Row("requires_grad is one text", lambda r: r.generate(requires_grad="first*"), "requires_grad='first.*no list"),
    Row("requires_grad of numbers", lambda r: r.generate(requires_grad=[1]), "requires_grad=.*no list of names"),
    Row("requires_grad of an input", lambda r: r.generate(requires_grad=["image"]), "no floating initializer image"),
    Row("frozen_params is one text", lambda r: r.generate(frozen_params="x"), "frozen_params='x' is no list"),
    Row("frozen_params of no weight", lambda r: r.generate(frozen_params=["bias"]), "no floating initializer bias"),
    Row(
        "trained and frozen",
        lambda r: r.generate(requires_grad=["first_bias"], frozen_params=["first_bias"]),
        "both|in requires_grad and in frozen",
    ),
    Row("all is frozen", lambda r: r.generate(frozen_params=["*"]), "nothing would be trained"),
    Row(
        "no weights",
        lambda r: r.generate(whole_numbers(), loss=None),
        "nothing would be trained|is no|not that of a scalar",
    ),
    Row("outputs are one text", lambda r: r.generate(additional_output_names="scores"), "no list of names"),
    Row(
        "outputs that are none",
        lambda r: r.generate(additional_output_names=["score"]),
        "no value score.*close names: scores",
    ),
    Row("loss inputs that are none", lambda r: r.generate(loss_input_names=["logits"]), "no value logits"),
    Row("no loss inputs", lambda r: r.generate(loss_input_names=[]), "loss_input_names is empty"),
    Row(
        "loss inputs are one text",
        lambda r: r.generate(loss_input_names="scores"),
        "loss_input_names='scores' is no list",
    ),
    Row(
        "two loss inputs for one",
        lambda r: r.generate(loss_input_names=["scores", "hidden"]),
        "CrossEntropyLoss reads one",
    ),
    Row("loss of a text", lambda r: r.generate(loss="mse"), "loss is str"),
    Row("loss of a number", lambda r: r.generate(loss=2), "loss is int"),
    Row("loss is a class", lambda r: r.generate(loss=onnxblock.loss.MSELoss), "loss is ABCMeta"),
    Row("loss of another kind", lambda r: r.generate(loss=OptimType.SGD), "loss is OptimType"),
    Row("loss that is no scalar", lambda r: r.generate(loss=NoLoss()), "not that of a scalar"),
    Row("loss of no value", lambda r: r.generate(loss=Nowhere()), "no value nowhere"),
    Row("loss with reduction none", lambda r: r.generate(loss=onnxblock.loss.MSELoss("none")), "not that of a scalar"),
    Row("no loss and no scalar output", lambda r: r.generate(loss=None), "not that of a scalar"),
    Row(
        "target of an input's name",
        lambda r: r.generate(network(image="labels")),
        "the input labels is FLOAT, not INT64",
    ),
    Row("optimizer of a text", lambda r: r.generate(optimizer="adamw"), "optimizer is str"),
    Row("optimizer of another kind", lambda r: r.generate(optimizer=LossType.MSELoss), "optimizer is LossType"),
    Row("optimizer is a class", lambda r: r.generate(optimizer=onnxblock.optim.SGD), "optimizer is ABCMeta"),
    Row(
        "optimizer is a loss", lambda r: r.generate(optimizer=onnxblock.loss.MSELoss()), "MSELoss is given as optimizer"
    ),
    Row("loss is an optimizer", lambda r: r.generate(loss=onnxblock.optim.SGD()), "SGD is given as loss"),
    Row("place is a file", occupied, "cannot be written"),
    Row(
        "place below a file", lambda r: r.generate(artifact_directory=r.write("f", b"") / "below"), "cannot be written"
    ),
    Row("place is a number", lambda r: r.generate(artifact_directory=3), "the place of the files is no path"),
    Row("prefix is a number", lambda r: r.generate(prefix=3), "the place of the files is no path"),
    Row("prefix is too long", lambda r: r.generate(prefix="x" * 300), "cannot be written: File name too long"),
    Row("a folder has the name of a file", a_folder_is_there, "checkpoint cannot be written: it is a folder"),
    Row("a pipe has the name of a file", a_pipe_is_there, "training_model.onnx cannot be written: it is a pipe"),
    Row("no such library", lambda r: r.generate(custom_op_library=r.folder / "none.so"), "none.so.*cannot be read"),
    Row("library is a folder", lambda r: r.generate(custom_op_library=r.folder), "is a folder, no file"),
    Row("library is a pipe", lambda r: r.generate(custom_op_library=r.fifo("ops.so")), "is a pipe, no file"),
    Row("library is a number", lambda r: r.generate(custom_op_library=7), "cannot be read"),
    Row(
        "library is none, for .ort",
        lambda r: r.generate(custom_op_library=r.write("ops.so", b"no"), ort_format=True),
        "ops.so",
    ),
]
