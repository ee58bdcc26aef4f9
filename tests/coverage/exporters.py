"""What writes .onnx files: both of torch's exporters as people call them, Keras, skl2onnx and ONNX's own helpers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import foreign
import onnx
import torch
from specimens import LIBRARIES, Specimen
from torch import nn

from onnxtrain.ir import opsets

NEWEST = min(opsets.NEWEST, onnx.defs.onnx_opset_version())
Write = Callable[[int | None, Path], None]


class ExporterError(Exception):
    """The exporter does not write this model."""


class Called(nn.Module):
    """A module whose arguments are positional and whose output is a tensor: what TorchScript's exporter takes."""

    def __init__(self, inner: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.inner, self.names = inner, names

    def forward(self, *tensors):
        return first_output(self.inner(**dict(zip(self.names, tensors, strict=True))))


def first_output(output):
    """The first tensor of what a module returns."""
    return torch.utils._pytree.tree_leaves(output)[0]


def dynamo(specimen: Specimen, module: nn.Module) -> Write:
    """``torch.onnx.export`` with its defaults, which captures with torch.export."""
    given = specimen.batch()
    axes = {0: "batch", 1: "length"} if specimen.text else {0: "batch"}
    shapes = {name: _per_input(name, axes) for name in given}

    def write(opset: int | None, path: Path) -> None:
        settings = {"kwargs": given, "dynamic_shapes": shapes, "opset_version": opset}
        torch.onnx.export(module, (), path, verbose=False, **settings)

    return write


def _per_input(name: str, axes: dict[int, str]) -> dict[int, str]:
    """Names of the axes of one input; an encoder's and a decoder's lengths are two."""
    decodes = name.startswith("decoder")
    return {axis: f"decoder_{of}" if decodes and axis else of for axis, of in axes.items()}


def torchscript(specimen: Specimen, module: nn.Module, training: bool = False) -> Write:
    """The exporter of old with its defaults; ``training``: as it is called for a model that will be trained."""
    given = specimen.batch()
    names = tuple(given)
    called = Called(module, names).eval()
    axes = {0: "batch", 1: "length"} if specimen.text else {0: "batch"}
    settings = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False} if training else {}

    def write(opset: int | None, path: Path) -> None:
        torch.onnx.export(
            called,
            tuple(given.values()),
            path,
            dynamo=False,
            opset_version=opset,
            input_names=list(names),
            output_names=["output"],
            dynamic_axes={name: _per_input(name, axes) for name in names},
            **settings,
        )

    return write


@dataclasses.dataclass(frozen=True)
class Exporter:
    """One way to write a module.

    Args:
        start: prepares what writes a module at an opset.
        libraries: whose architectures it writes.
        training: whether the module is written as it is in training mode.
        opsets: the opsets that it is asked for; None is its default.
        needs: what must be installed.
    """

    start: Callable[[Specimen, Any], Write]
    libraries: tuple[str, ...] = LIBRARIES
    training: bool = False
    opsets: tuple[int | None, ...] = (None, 13, 17, 18, 20, 21, 22, 23)
    needs: tuple[str, ...] = ()


ALL: dict[str, Exporter] = {
    "dynamo": Exporter(dynamo),
    "TorchScript": Exporter(torchscript),
    "TorchScript, training": Exporter(functools.partial(torchscript, training=True), training=True),
    "tf2onnx": Exporter(
        foreign.keras_model, ("keras",), opsets=(None, 13, 15, 17, 18), needs=("tensorflow", "keras", "tf2onnx")
    ),
    "skl2onnx": Exporter(
        foreign.scikit_learn, ("skl2onnx",), opsets=(None, 13, 15, 17, 18, 20, 21, 22, 23), needs=("skl2onnx",)
    ),
    "onnx.helper": Exporter(foreign.by_helper, ("onnx",), opsets=tuple(range(13, NEWEST + 1))),
}


def missing() -> list[str]:
    """What is not installed that an exporter or an architecture needs."""
    needed = dict.fromkeys((*LIBRARIES, *(name for e in ALL.values() for name in e.needs)))
    return [name for name in needed if importlib.util.find_spec(name) is None]


EXPORTERS = {name: e for name, e in ALL.items() if not {*e.needs} & {*missing()}}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Exporters do not talk; a module is captured once for all opsets, and decomposed once for the same operators."""
    from torch.onnx._internal.exporter import _decomp, _fx_passes

    def captured(model, *given, strict=True, **settings):
        return id(model), strict

    def decomposed(program, registry):
        return id(program), frozenset(_decomp.get_onnx_implemented_overloads(registry))

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as patched:
        warnings.simplefilter("ignore")
        for holder, name, key in (
            (torch.export, "export", captured),
            (_fx_passes, "decompose_with_registry", decomposed),
        ):
            patched.enter_context(mock.patch.object(holder, name, _once(getattr(holder, name), key)))
        yield


def _once(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is called once for each key: what it gave or raised is kept."""
    known: dict[Any, tuple[Any, Any, Exception | None]] = {}

    @functools.wraps(function)
    def once(*given, **settings):
        found = key(*given, **settings)
        if found not in known:
            try:
                known[found] = given, function(*given, **settings), None  # what is given lives on, and so does its id
            except Exception as error:
                known[found] = given, None, error
        _, result, error = known[found]
        if error is not None:
            raise error
        return result

    return once
