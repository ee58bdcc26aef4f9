"""Programs for an accelerator, run without one: on tensors that have no content, on a device that has no kernels.

    python tests/accelerator.py operators                # every row of the table of operators
    python tests/accelerator.py BertModel resnet18 ...   # a training step of architectures

It prints a line of JSON for each: where it failed, and where the host would wait for the device. Found are operands on
another device, what is read to the host, and sizes that content decides. A process knows one such device and keeps it,
so this is a program of its own.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from onnxtrain import ORTModule
from onnxtrain.execute import Executable, backend
from onnxtrain.execute.torch import codegen
from onnxtrain.execute.torch.dtypes import as_tensor
from onnxtrain.ir.graphs import Plan

footprint = importlib.import_module("onnxtrain.execute.torch.footprint")
aten = torch.ops.aten
NAME, DEVICE = "none", "none:0"
ARCHITECTURES = (  # whose steps wait for nothing
    *("BertForMaskedLM", "RobertaForSequenceClassification", "DistilBertForMaskedLM"),
    *("AlbertForSequenceClassification", "ElectraForSequenceClassification", "IBertForSequenceClassification"),
    *("XLNetForSequenceClassification", "RoFormerForMaskedLM", "MPNetForMaskedLM"),
    *("DebertaV2ForMaskedLM", "ModernBertForMaskedLM", "FNetForMaskedLM"),
    *("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM"),
    *("GemmaForCausalLM", "PhiForCausalLM", "MambaForCausalLM", "BloomForCausalLM", "OPTForCausalLM"),
    *("T5ForConditionalGeneration", "BartForConditionalGeneration", "WhisperForConditionalGeneration", "CLIPModel"),
    *("ViTForImageClassification", "ResNetForImageClassification", "SegformerForSemanticSegmentation"),
    *("SwinForImageClassification", "ConvNextForImageClassification", "MobileNetV2ForImageClassification"),
)


class Waits(TorchDispatchMode):
    """Sees where the host waits, and answers with zero, or with all elements, for there is no content.

    Attributes:
        found: how often an operator of the program waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = collections.Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_device = any(x.device.type == NAME for x in given)
        if on_device and function is aten._local_scalar_dense.default:
            self._note()
            return False if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
        if on_device and function is aten.equal.default:
            self._note()
            return True
        if on_device and function in footprint._LARGEST and _asks(args[1:]):
            self._note()
            return footprint._LARGEST[function](*args, **kwargs)
        if given and not any(isinstance(x, FakeTensor) for x in given):
            with unset_fake_temporarily():  # numbers on the host
                return function(*args, **kwargs)
        made = function(*args, **kwargs)
        if on_device and isinstance(made, torch.Tensor) and made.device.type != NAME:
            self._note()
        return made

    def _note(self) -> None:
        part, line = footprint._place(sys._getframe(2))
        name = line.partition("ops.")[2].partition("(")[0]
        self.found[f"{part} {name}{' of a number at run time' if 'host(' in line else ''}"] += 1


def _asks(rest: Sequence[Any]) -> bool:
    """Whether content decides on a size: of the operand, of a mask, of an index that is one."""
    indices = rest[0] if rest and isinstance(rest[0], list | tuple) else None
    return indices is None or any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def waits(plan: Plan, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """Where the host waits in a step of a plan, and how often.

    Args:
        plan: the step.
        inputs: tensors of the sizes of its inputs.
    """
    mode, seen = FakeTensorMode(allow_non_fake_inputs=True), Waits()
    executable = _compiled(plan, mode)
    with torch.no_grad(), mode:
        given = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE) for x in inputs]
        with seen, _tensors_made_there():
            outputs, saved = executable.forward(given)
            named = dict(zip(plan.signature.outputs, outputs, strict=False))
            made = [*outputs]
            if plan.backward is not None:
                made += executable.backward(saved, [torch.empty_like(named[n]) for n in plan.output_gradients])
    places = {x.device.type for x in made if x is not None}
    assert places <= {NAME}, f"results on {places}"
    return dict(seen.found)


def _compiled(plan: Plan, mode: FakeTensorMode) -> Executable:
    """The plan for the device, with constants that lie there."""

    def constant(array: Any, device: str) -> torch.Tensor:
        x = as_tensor(array, "cpu")
        if device == "cpu":
            return x
        with mode:
            return torch.empty(x.shape, dtype=x.dtype, device=device)

    kept, codegen.as_tensor = codegen.as_tensor, constant
    try:
        return backend("torch").compile(plan, DEVICE)
    finally:
        codegen.as_tensor = kept


@contextlib.contextmanager
def _tensors_made_there() -> Iterator[None]:
    """``torch.tensor`` of numbers makes a tensor without content on the device, and one with it on the host."""
    kept = torch.tensor

    def tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = "cpu") -> torch.Tensor:
        with unset_fake_temporarily():
            made = kept(data, dtype=dtype)
        on_host = torch.device(device).type == "cpu"
        return made if on_host else torch.empty(made.shape, dtype=made.dtype, device=device)

    torch.tensor = tensor
    try:
        yield
    finally:
        torch.tensor = kept


def of_operators() -> Iterator[tuple[str, dict[str, int] | str]]:
    """Each row of the table, with gradients where there are some."""
    from op_cases import CASES
    from op_runs import prepare

    for case in CASES:
        row = prepare(case, np.float32, gradients=case.differentiable)
        yield case.id, _tried(row.plan, [torch.from_numpy(np.array(a)) for a in row.arrays])


def of_architectures(names: Sequence[str]) -> Iterator[tuple[str, dict[str, int] | str]]:
    """A training step of each."""
    import architectures

    architectures.prepare()
    for name in names:
        model = architectures.MODELS[name]
        torch.manual_seed(0)
        wrapped, batch = ORTModule(model.build()), model.batch()
        wrapped(**batch)
        session, tensors = wrapped._graphs().session_of((), batch)
        assert session is not None, "it has no graph"
        bound = session.bound
        inputs = dict(zip(bound.signature.inputs, bound.inputs(tensors), strict=True))
        rows = {} if bound.latest_choice is None else bound.latest_choice[0].named_rows
        found = _tried(bound.latest.plan, [*inputs.values(), *rows.values()])
        for plan in bound._row_plans.values():
            if plan.inspection is not None:  # the host reads what it finds, all at once
                inspector = bound._compile_inspection(plan.inspection.graph).plan
                found = found or _tried(inspector, [inputs[n] for n in inspector.signature.inputs])
        yield name, found


def _tried(plan: Plan, inputs: Sequence[torch.Tensor]) -> dict[str, int] | str:
    try:
        return waits(plan, inputs)
    except Exception as error:  # it is what is looked for
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def main(what: Sequence[str]) -> None:
    """Print what is found."""
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "coverage")]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    _setup_privateuseone_for_python_backend(NAME)
    for name, found in of_operators() if list(what) == ["operators"] else of_architectures(what):
        print(json.dumps([name, found]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
