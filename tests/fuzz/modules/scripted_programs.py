"""Random modules that are used in other ways than step after step, or on another backend."""

from __future__ import annotations

import dataclasses

import numpy as np

from fuzz.modules import tensor_programs, transformers
from fuzz.modules.program import Program
from fuzz.modules.scripts import SCRIPTS

_OF_TRANSFORMERS = ("halved", "padding_replaced")  # their inputs are ids, a mask and labels of one size


def generate(seed: int) -> Program:
    """The program of a seed."""
    rng = np.random.default_rng([seed, 32])
    of_rows = bool(rng.random() < 0.5)
    program = (transformers if of_rows else tensor_programs).generate(seed)
    settings = [s for s in program.settings.split(", ") if s and not s.startswith("moves")]
    scripts = [s for s in SCRIPTS if of_rows or s not in _OF_TRANSFORMERS]
    if rng.random() < 0.2:
        backend, real = (("onnxruntime", "float32"), ("reference", "float64"))[int(rng.integers(2))]
        return dataclasses.replace(program, real=real, settings=", ".join([*settings, f"backend={backend!r}"]))
    settings.append(f"script={scripts[int(rng.integers(len(scripts)))]!r}")
    if rng.random() < 0.6:
        settings.append(f"segments={int(rng.integers(1, 9))}")
    if rng.random() < 0.4:
        settings.append("memory_budget='min'")
    return dataclasses.replace(program, settings=", ".join(settings))
