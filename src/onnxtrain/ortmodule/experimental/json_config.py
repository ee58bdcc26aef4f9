"""Options of an ORTModule from a JSON file, with the keys that onnxruntime-training had."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onnxtrain.errors import OptionError
from onnxtrain.options import Options, json_config_path
from onnxtrain.ortmodule.module import ORTModule, reconfigure

_LOG = logging.getLogger(__name__)


def load_from_json(ortmodule: ORTModule, path: str | os.PathLike[str] | None = None) -> None:
    """Set options, for training and evaluation alike; graphs are built again.

    The environment still wins over what the file says.

    Args:
        ortmodule: the wrapped module.
        path: the file; the variable ``ORTMODULE_JSON_CONFIG_PATH`` takes precedence.

    Raises:
        KeyError: a key is not known.
        OptionError: a value cannot be used; there is no file, or it is not JSON.
    """
    chosen = json_config_path(path)
    try:
        settings = json.loads(chosen.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"the JSON configuration {chosen} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise OptionError(f"the JSON configuration {chosen} is not an object", cure='write {"OnnxOpsetVersion": 20}')
    if unknown := [key for key in settings if key not in _KEYS]:
        raise KeyError(f"{unknown[0]!r} is not known; the keys are {', '.join(_KEYS)}")

    def change(options: Options) -> Options:
        for key, value in settings.items():
            options = _KEYS[key](options, value)
        return options

    reconfigure(ortmodule, change)


def _sets(name: str, kind: type) -> Callable[[Options, Any], Options]:
    def apply(options: Options, value: Any) -> Options:
        if type(value) is not kind:
            raise OptionError(f"{name}={value!r} is not {kind.__name__}")
        return dataclasses.replace(options, **{name: value})

    return apply


def _has_no_choice(reason: str) -> Callable[[Options, Any], Options]:
    def apply(options: Options, value: Any) -> Options:
        _LOG.info("the JSON configuration's value %r changes nothing: %s", value, reason)
        return options

    return apply


def _fallback(options: Options, value: Any) -> Options:
    names = [value] if isinstance(value, str) else list(value)
    return dataclasses.replace(options, fallback="|".join(names))


def _debug(options: Options, value: Any) -> Options:
    settings: dict[str, Any] = dict(value)
    changes: dict[str, Any] = {}
    for key in settings:
        if key not in ("LogLevel", "SaveONNX", "ONNXPrefix", "SaveONNXPath"):
            raise KeyError(f"DebugOptions.{key} is not known")
    if "LogLevel" in settings:
        changes["log_level"] = str(settings["LogLevel"]).upper()
    if settings.get("SaveONNX"):
        if not settings.get("ONNXPrefix"):
            raise OptionError("DebugOptions.SaveONNX needs ONNXPrefix: how the file names begin")
        changes |= {
            "save_onnx": Path(settings.get("SaveONNXPath") or Path.cwd()),
            "onnx_prefix": settings["ONNXPrefix"],
        }
    return dataclasses.replace(options, **changes)


def _cast_propagation(options: Options, value: Any) -> Options:
    names = {"Strategy": "strategy", "Level": "level", "Allow": "allow"}
    settings: dict[str, Any] = dict(value)
    if unknown := [key for key in settings if key not in names]:
        raise KeyError(f"PropagateCastOps.{unknown[0]} is not known; the keys are {', '.join(names)}")
    if "Allow" in settings:
        settings["Allow"] = tuple(settings["Allow"])
    return dataclasses.replace(options, **{f"propagate_cast_ops_{names[key]}": v for key, v in settings.items()})


def _efficient_gradient(options: Options, value: Any) -> Options:
    if type(value) is not bool:
        raise OptionError(f"UseMemoryEfficientGradient={value!r} is not bool")
    return dataclasses.replace(options, segments="all") if value else options


_KEYS: dict[str, Callable[[Options, Any], Options]] = {
    "PropagateCastOps": _cast_propagation,
    "UseExternalGPUAllocator": _has_no_choice("torch's memory is always used"),
    "EnableCustomAutogradFunction": _sets("custom_autograd", bool),
    "EnableGradAccOptimization": _sets("cache_casts", bool),
    "UseStaticShape": _sets("static_shapes", bool),
    "RunSymbolicShapeInference": _has_no_choice("symbolic shapes are always inferred"),
    "SkipCheck": _has_no_choice("no check is skipped"),
    "DebugOptions": _debug,
    "UseMemoryEfficientGradient": _efficient_gradient,
    "FallbackPolicy": _fallback,
    "OnnxOpsetVersion": _sets("opset", int),
}
