"""The reference backend: ONNX's own evaluator in numpy, slow and independent of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxtrain.errors import BackendError, first_line
from onnxtrain.execute.base import Backend, Executable
from onnxtrain.ir.graphs import Plan
from onnxtrain.ir.standard_form import attach
from onnxtrain.options import Options


class GatherElements(OpRun):
    """onnx's own implementation fails for leading axes of size 1 (onnx 1.23)."""

    op_domain = ""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
        where = np.where(indices < 0, indices + data.shape[axis], indices)
        others = [
            np.arange(n).reshape([-1 if i == k else 1 for k in range(data.ndim)]) for i, n in enumerate(indices.shape)
        ]
        others[axis] = where
        return (data[tuple(others)],)


class _Part:
    """One model of a plan as an evaluator."""

    def __init__(self, model: ir.Model) -> None:
        model = attach(model)
        self.inputs = [str(v.name) for v in model.graph.inputs]
        self.outputs = list(dict.fromkeys(str(v.name) for v in model.graph.outputs))
        self.evaluator = ReferenceEvaluator(ir.to_proto(model), new_ops=[GatherElements])

    def run(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs by name.

        Raises:
            BackendError: the evaluator cannot run an operator on what it is given: of some it has not all cases.
        """
        try:
            made = self.evaluator.run(self.outputs, dict(zip(self.inputs, arrays, strict=True)))
        except Exception as error:  # whatever numpy or an operator raises
            raise BackendError(
                f"ONNX's reference evaluator failed: {first_line(error)}", cure="use another backend"
            ) from error
        # in order: DLPack takes an array of negative strides for one that has no end
        return {name: np.asarray(array, order="C") for name, array in zip(self.outputs, made, strict=True)}


class ReferenceExecutable(Executable):
    """A plan as two evaluators."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        try:
            self._forward = _Part(plan.forward)
            self._backward = None if plan.backward is None else _Part(plan.backward)
        except (NotImplementedError, RuntimeError) as error:
            raise BackendError(
                f"ONNX's reference evaluator cannot run the plan: {error}", cure="use another backend"
            ) from error

    def forward(self, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        arrays = [_array(x) for x in inputs]
        signature = self.plan.signature
        known = dict(zip(signature.inputs, arrays, strict=True)) | self._forward.run(arrays)
        outputs = [*signature.outputs, *signature.buffer_updates.values()]
        is_view = {n: signature.views.get(n, n) in signature.inputs for n in outputs}
        own = {n: known[n] if is_view[n] else known[n].copy() for n in outputs}  # the graph keeps its constants
        return [own[n] for n in outputs], [known[n] for n in self.plan.saved]

    def walk(self, saved: Any, output_gradients: list[Any], made: list[Any]) -> Iterator[None]:
        assert self._backward is not None, "a plan for inference has no backward pass"
        found = self._backward.run([*saved, *(_array(dy) for dy in output_gradients)])
        made[:] = [found[name].copy() for name in self.plan.gradients.values()]
        yield


def _array(tensor: Any) -> np.ndarray:
    if hasattr(tensor, "detach") and str(tensor.dtype) == "torch.bfloat16":  # which numpy does not know by itself
        return tensor.detach().float().numpy().astype(ml_dtypes.bfloat16)
    return np.asarray(tensor.detach() if hasattr(tensor, "detach") else tensor)


class ReferenceBackend(Backend):
    """Runs plans in numpy."""

    name = "reference"

    def compile(self, plan: Plan, device: str = "cpu", options: Options | None = None) -> ReferenceExecutable:
        return ReferenceExecutable(plan)
