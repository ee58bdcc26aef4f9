"""Misuse of onnxblock: numbers that no formula takes, and blocks out of place."""

from __future__ import annotations

import math

import digits
import numpy as np
import onnx

from misuse.room import Room, Row
from onnxtrain import onnxblock
from onnxtrain.onnxblock import blocks, loss, optim

NAN, INF = math.nan, math.inf


def in_network(block: onnxblock.Block, *names: str) -> None:
    """Call a block over the small network."""
    with onnxblock.base(digits.network(8)):
        block(*(names or ("scores",)))


class Training(onnxblock.TrainingBlock):
    """The mean square of a value."""

    def build(self, name: str) -> str:
        return loss.MSELoss()(name)


def nothing_asked() -> None:
    block = Training()
    with onnxblock.base(digits.network(8)):
        block("scores")
        block.to_model_proto()


def not_reached() -> None:
    block = Training()
    with onnxblock.base(digits.network(8)):
        block.requires_grad("second_bias")
        block("hidden")
        block.to_model_proto()


def nominal(room: Room) -> None:
    from misuse.room import shared

    onnxblock.load_checkpoint_to_model(shared() / "run" / "nominal_checkpoint", digits.network(8))


def other_model(room: Room) -> None:
    from misuse.room import shared

    onnxblock.load_checkpoint_to_model(shared() / "run" / "checkpoint", onnx.ModelProto())


def other_sizes(room: Room) -> None:
    from misuse.room import shared

    onnxblock.load_checkpoint_to_model(shared() / "wide" / "checkpoint", digits.network(8))


def wrong(name: str, make, match: str) -> Row:
    return Row(name, lambda room: make(), match)


TABLE = [
    wrong("reduction that is none", lambda: loss.MSELoss("median"), "reduction='median'.*(.|\n)*choose mean"),
    wrong("label_smoothing of 2", lambda: loss.CrossEntropyLoss(label_smoothing=2), "label_smoothing=2"),
    wrong("label_smoothing below 0", lambda: loss.CrossEntropyLoss(label_smoothing=-0.1), "label_smoothing=-0.1"),
    wrong("label_smoothing of nan", lambda: loss.CrossEntropyLoss(label_smoothing=NAN), "label_smoothing=nan"),
    wrong("label_smoothing of a bool", lambda: loss.CrossEntropyLoss(label_smoothing=True), "label_smoothing=True"),
    wrong("label_smoothing of a text", lambda: loss.CrossEntropyLoss(label_smoothing="0.1"), "label_smoothing='0.1'"),
    wrong("ignore_index of a half", lambda: loss.CrossEntropyLoss(ignore_index=0.5), "ignore_index=0.5 is no whole"),
    wrong("ignore_index beyond int64", lambda: loss.NLLLoss(ignore_index=2**70), "ignore_index="),
    wrong("axis of a half", lambda: loss.NLLLoss(axis=1.5), "axis=1.5 is no whole"),
    wrong("axis beyond the scores", lambda: in_network(loss.CrossEntropyLoss(axis=5)), "axis=5"),
    wrong("class weights of nan", lambda: loss.CrossEntropyLoss(np.array([1, NAN])), "weight has numbers that are not"),
    wrong("class weights below 0", lambda: loss.CrossEntropyLoss(np.array([1.0, -1])), "or below 0"),
    wrong("class weights of texts", lambda: loss.CrossEntropyLoss(np.array(["a"])), "weight is no array of numbers"),
    wrong("class weights that are ragged", lambda: loss.CrossEntropyLoss([[1], [1, 2]]), "weight is no array"),
    wrong("class weights in two axes", lambda: loss.NLLLoss(np.ones((2, 2))), r"shape \[2, 2\]"),
    wrong(
        "class weights for other classes",
        lambda: in_network(loss.CrossEntropyLoss(np.ones(3))),
        "3 weights, the scores have 10",
    ),
    wrong("no class weights at all", lambda: loss.NLLLoss(np.ones(0)), "weight has numbers"),
    wrong("pos_weight of inf", lambda: loss.BCEWithLogitsLoss(pos_weight=np.array([INF])), "pos_weight has numbers"),
    wrong("beta below 0", lambda: loss.SmoothL1Loss(beta=-1), "beta=-1"),
    wrong("blank below 0", lambda: loss.CTCLoss(blank=-1), "blank=-1"),
    wrong("blank of a half", lambda: loss.CTCLoss(blank=0.5), "blank=0.5"),
    wrong("CTC over two axes", lambda: in_network(loss.CTCLoss()), "CTCLoss takes .time, batch, classes"),
    wrong("weighted loss of none", lambda: loss.WeightedLoss([]), "no blocks"),
    wrong("weighted loss of texts", lambda: loss.WeightedLoss(["mse"]), "no blocks"),
    wrong(
        "weights for another number of losses", lambda: loss.WeightedLoss([loss.MSELoss()], [1, 2]), "1 losses have 2"
    ),
    wrong("weights of nan", lambda: loss.WeightedLoss([loss.MSELoss()], [NAN]), "weights=nan"),
    wrong(
        "two predictions for one loss",
        lambda: in_network(loss.WeightedLoss([loss.MSELoss()]), "scores", "hidden"),
        "given 2",
    ),
    wrong("betas of 1", lambda: optim.AdamW(betas=(1, 1)), "betas=1 .*below 1"),
    wrong("betas below 0", lambda: optim.Adam(betas=(-0.1, 0.9)), "betas=-0.1"),
    wrong("betas of nan", lambda: optim.Lion(betas=(NAN, 0.9)), "betas=nan"),
    wrong("one beta", lambda: optim.AdamW(betas=(0.9,)), "betas=.*two values"),
    wrong("betas of a number", lambda: optim.AdamW(betas=0.9), "betas=0.9 are not two"),
    wrong("three betas", lambda: optim.Lion(betas=(0.9, 0.9, 0.9)), "are not two"),
    wrong("eps below 0", lambda: optim.AdamW(eps=-1e-8), "eps=-1e-08"),
    wrong("eps of 10⁴⁰⁰", lambda: optim.Adam(eps=10**400), "eps=1"),
    wrong("eps of inf", lambda: optim.Adam(eps=INF), "eps=inf"),
    wrong("weight_decay below 0", lambda: optim.SGD(weight_decay=-1), "weight_decay=-1"),
    wrong("weight_decay of a text", lambda: optim.SGD(weight_decay="0.1"), "weight_decay='0.1'"),
    wrong("weight_decay of nan", lambda: optim.AdamW(weight_decay=NAN), "weight_decay=nan"),
    wrong("momentum below 0", lambda: optim.SGD(momentum=-0.5), "momentum=-0.5"),
    wrong("dampening of nan", lambda: optim.SGD(dampening=NAN), "dampening=nan"),
    wrong("nesterov without momentum", lambda: optim.SGD(nesterov=True), "Nesterov"),
    wrong("no_decay of one text", lambda: optim.AdamW(no_decay="*bias"), "no_decay=.*no list"),
    wrong("a formula that is none", lambda: optim.AdamW(formula="paper"), "formula='paper'"),
    wrong("clip_grad of a number", lambda: optim.AdamW(clip_grad=1.0), "clip_grad=1.0 is no block"),
    wrong("max_norm of 0", lambda: optim.ClipGradNorm(0), "max_norm=0"),
    wrong("max_norm of nan", lambda: optim.ClipGradNorm(NAN), "max_norm=nan"),
    wrong("max_norm of a bool", lambda: optim.ClipGradNorm(True), "max_norm=True"),
    wrong("Adafactor's decay above 0", lambda: optim.Adafactor(beta2_decay=0.8), "beta2_decay=0.8"),
    wrong("Adafactor's eps of one", lambda: optim.Adafactor(eps=(1e-3,)), "eps=.*two values"),
    wrong("Adafactor's d below 1", lambda: optim.Adafactor(d=0.5), "d=0.5"),
    wrong("exponent of nan", lambda: blocks.Pow(NAN), "exponent=nan"),
    wrong("clip of texts", lambda: blocks.Clip("0"), "clip_min='0'"),
    wrong("axes of halves", lambda: blocks.ReduceMean(axes=[0.5]), "axes=0.5"),
    wrong("type that is none", lambda: blocks.Cast(99), "to=99"),
    wrong("keys without values", lambda: blocks.LabelEncoder(0, [], []), "keys and values"),
    wrong("keys of mixed types", lambda: blocks.LabelEncoder(0, [1, "a"], [1, 2]), "one type each"),
    wrong("layer of no features", lambda: blocks.Linear(0, 4), "in_features=0"),
    wrong("layer of nan", lambda: blocks.Linear(4, 4, alpha=NAN), "alpha=nan"),
    wrong("opset of 3", lambda: onnxblock.empty_base(3).__enter__(), "opset_version=3"),
    wrong("block outside of a model", lambda: blocks.Add()("a", "b"), "no model is being built"),
    wrong("training block that is not built", lambda: Training().to_model_proto(), "Training is not built"),
    wrong("optimizer that is not built", lambda: optim.SGD().to_model_proto(), "not built"),
    wrong("optimizer over nothing", lambda: in_network(optim.SGD(), []), "no parameter to train"),
    wrong("training of nothing", nothing_asked, "nothing would be trained"),
    wrong("loss that does not reach a weight", not_reached, "does not depend on second_bias"),
    Row("nominal weights into a model", nominal, "has no content"),
    Row("weights into another model", other_model, r"no initializer \w+_weight"),
    Row("weights of other sizes into a model", other_sizes, r"_\w+ is .* in the checkpoint"),
]
