"""Damaged files of each kind: cut, with bits changed, of another format, half there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from safetensors.numpy import save

from misuse.room import Room, Row, shared
from onnxtrain import api, onnxblock
from onnxtrain.portable import sealed

KINDS = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")


def use(room: Room, kind: str, content: bytes) -> None:
    """Open a damaged file where a whole one belongs."""
    path, run = room.write(kind, content), shared() / "run"
    if kind == "checkpoint":
        api.CheckpointState.load_checkpoint(path)
    elif kind == "training_model.onnx":
        api.Module(path, room.state())
    elif kind == "eval_model.onnx":
        api.Module(run / "training_model.onnx", room.state(), path)
    else:
        api.Optimizer(path, room.module())


def whole(kind: str) -> bytes:
    return (shared() / "run" / kind).read_bytes()


FAULTS: dict[str, Callable[[bytes], bytes]] = {
    "is empty": lambda c: b"",
    "is cut": lambda c: c[: len(c) // 2],
    "has more at its end": lambda c: c + b"more",
    "has a bit that is changed": lambda c: c[:200] + bytes([c[200] ^ 4]) + c[201:],
    "has zeros": lambda c: c[:64] + b"\0" * 64 + c[128:],
    "is text": lambda c: b"<!DOCTYPE html><html>404</html>",
}


def fault(kind: str, name: str) -> Row:
    def make(room: Room) -> None:
        use(room, kind, FAULTS[name](whole(kind)))

    return Row(f"{kind} {name}", make, f"{kind}.* (is damaged|is no)")


def header(**changes: Any) -> bytes:
    """A checkpoint, whole in itself, whose header is none of ours."""
    import hashlib

    tensor = np.zeros(2, np.float32)
    made = {
        "format": 1,
        "trainable": [["w", "float32", [2]]],
        "frozen": [],
        "settings": {},
        "random": {},
        "properties": {},
    }
    made.update(changes)
    digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode())
    digest.update(json.dumps(["w", "float32", [2]]).encode())
    digest.update(tensor.tobytes())
    return save({"w": tensor}, {"onnxtrain": json.dumps(made | {"sha256": digest.hexdigest()})})


def load(content: Callable[[], bytes]) -> Callable[[Room], None]:
    return lambda room: use(room, "checkpoint", content())


def long_header(size: int) -> bytes:
    return size.to_bytes(8, "little") + b"{}"


def nested_header() -> bytes:
    text = b"[" * 100_000
    return len(text).to_bytes(8, "little") + text


def huge_tensor() -> bytes:
    text = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    return len(text).to_bytes(8, "little") + text


def without(name: str) -> Callable[[Room], None]:
    def make(room: Room) -> None:
        run = room.copied()
        (run / name).unlink()
        room.note()
        room.train(folder=run)

    return make


def mixed(name: str) -> Callable[[Room], None]:
    """One file of another set among those of a run."""

    def make(room: Room) -> None:
        run = room.copied()
        (run / name).write_bytes((shared() / "wide" / name).read_bytes())
        room.train("--valid-share", 0.5, folder=run)

    return make


def marker(content: bytes) -> Callable[[Room], None]:
    """A marker that says what is to be put in place."""

    def make(room: Room) -> None:
        room.copied()
        room.write("run/.artifacts.commit", content)
        api.CheckpointState.load_checkpoint(room.folder / "run" / "checkpoint")

    return make


def marker_pipe(room: Room) -> None:
    room.copied()
    room.fifo("run/.artifacts.commit")
    api.CheckpointState.load_checkpoint(room.folder / "run" / "checkpoint")


def weights_of_other_names(room: Room) -> None:
    onnxblock.load_checkpoint_to_model(room.write("checkpoint", header()), __import__("digits").network(8))


def sealed_with(change: Callable[[onnx.ModelProto], Any]) -> Callable[[Room], None]:
    """A training model that was changed and sealed again."""

    def make(room: Room) -> None:
        proto = onnx.load_model_from_string(whole("training_model.onnx"))
        change(proto)
        use(room, "training_model.onnx", sealed(proto))

    return make


def elsewhere(proto: onnx.ModelProto) -> None:
    tensor = proto.graph.initializer.add(name="v", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")


def facts(text: str) -> Callable[[onnx.ModelProto], Any]:
    def change(proto: onnx.ModelProto) -> None:
        next(p for p in proto.metadata_props if p.key == "onnxtrain.facts").value = text

    return change


TABLE = [
    Row("sealed model with data elsewhere", sealed_with(elsewhere), "data of v in another file"),
    Row("sealed model without facts", sealed_with(facts("{}")), "is the unknown model"),
    Row("sealed model of facts that are none", sealed_with(facts("{")), "is damaged"),
    Row("sealed model of few facts", sealed_with(facts('{"kind": "training"}')), "does not say its inputs"),
    *(fault(kind, name) for kind in KINDS for name in FAULTS),
    Row("checkpoint of a newer format", load(lambda: header(format=2)), "has format 2, this version reads 1"),
    Row("checkpoint of no parameters", load(lambda: header(trainable=[])), "w is none of the model's parameters"),
    Row("checkpoint without content", load(lambda: header(frozen=[["b", "float32", [1]]])), "b has no content"),
    Row(
        "checkpoint of another shape",
        load(lambda: header(trainable=[["w", "float32", [3]]])),
        r"w is float32 \[2\], not",
    ),
    Row("checkpoint of another type", load(lambda: header(trainable=[["w", "int8", [2]]])), "not int8"),
    Row("checkpoint with a list of numbers", load(lambda: header(trainable=3)), "no checkpoint of onnxtrain"),
    Row("checkpoint with settings of a list", load(lambda: header(settings=[1])), "no checkpoint of onnxtrain"),
    Row("checkpoint with properties of a number", load(lambda: header(properties=1)), "no checkpoint of onnxtrain"),
    Row("checkpoint that is safetensors alone", load(lambda: save({"w": np.zeros(2)})), "no checkpoint of onnxtrain"),
    Row("checkpoint that is a pickle", load(lambda: __import__("pickle").dumps({"w": 1})), "is damaged"),
    Row("checkpoint with a header of 2⁶³ bytes", load(lambda: long_header(2**63)), "is damaged"),
    Row("checkpoint with a header of 2⁴⁰ bytes", load(lambda: long_header(2**40)), "is damaged"),
    Row("checkpoint with a header of lists in lists", load(nested_header), "is damaged"),
    Row("checkpoint with a tensor of terabytes", load(huge_tensor), "is damaged"),
    Row("weights of other names into a model", weights_of_other_names, "no initializer w"),
    *(
        Row(f"run without its {name}", without(name), f"{name} cannot be read")
        for name in ("training_model.onnx", "optimizer_model.onnx", "checkpoint")
    ),
    *(Row(f"run with {name} of another set", mixed(name), "of the set") for name in KINDS),
    Row("marker of nothing", marker(b""), "artifacts.commit is damaged"),
    Row("marker that leads out", marker(b'{"become": {".x.partial": "../../x"}, "gone": []}'), "outside of its folder"),
    Row("marker that removes others", marker(b'{"become": {}, "gone": ["/etc/passwd"]}'), "outside of its folder"),
    Row("marker that is a pipe", marker_pipe, "is a pipe, no file"),
]
