"""The process that makes loops of kernels: ``python -m onnxtrain.execute.torch.kernel_worker``.

Each line of its input is a job, each line of its output what became of it, as JSON (``kernel_compiler``).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import onnx
import onnx_ir as ir
import torch
from torch._dynamo.source import ConstantSource
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.printers import PythonPrinter

from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.execute.torch.programs import compile_body
from onnxtrain.ir import shapes

_SETTINGS = {"fallback_random": True, "emulate_precision_casts": True}


def main() -> None:
    """Take jobs until there are no more."""
    with _alone() as answers:
        for line in sys.stdin:
            job = json.loads(line)
            try:
                answer = _made(job)
            except Exception as error:  # whatever torch raises
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({"number": job["number"], **answer}), file=answers, flush=True)


@contextlib.contextmanager
def _alone() -> Iterator[TextIO]:
    """The standard output, on which nobody else writes meanwhile; the process waits for those that train."""
    if hasattr(os, "nice"):
        os.nice(10)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield answers


def _made(job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    body = ir.serde.deserialize_model(onnx.ModelProto.FromString(base64.b64decode(job["model"]))).graph
    function = compile_body(body, job["device"]).function
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)  # constants
    sizes = _told_apart([list(shapes.known_dims(v)) for v in body.inputs], job["sizes"])
    given = [
        _given(mode, index, value, own, order, job["device"])
        for index, (value, own, order) in enumerate(zip(body.inputs, sizes, job["orders"], strict=True))
    ]
    with mode, torch.no_grad(), config.patch(_SETTINGS):
        functional = torch.func.functionalize(function, remove="mutations_and_views")
        graph = make_fx(functional, decomposition_table=select_decomp_table())(*given)
        compiled = compile_fx_inner(graph, given)
    source = getattr(compiled, "source_code", None)
    if not isinstance(source, str):
        raise NotImplementedError("Inductor gives no source")
    return {"source": source, **_guards(environment, given)}


def _told_apart(dims: Sequence[Sequence[Any]], sizes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Sizes like those of now, where each symbol has another one, which is no constant either, nor less than 2."""
    taken = {d for own in dims for d in own if isinstance(d, int)}
    found: dict[str, int] = {}
    for dim, size in ((d, s) for a, b in zip(dims, sizes, strict=True) for d, s in zip(a, b, strict=True)):
        if not isinstance(dim, int) and dim.value not in found:
            own = max(size, 2)
            while own in taken:
                own += 1
            found[str(dim.value)] = own
            taken.add(own)
    return [[d if isinstance(d, int) else found[str(d.value)] for d in own] for own in dims]


def _given(
    mode: FakeTensorMode, index: int, value: ir.Value, sizes: Sequence[int], order: Sequence[int], device: str
) -> FakeTensor:
    """A tensor without content, its sizes symbols where the value's are, its axes in an order in memory."""
    kinds = [DimDynamic.STATIC if isinstance(d, int) else DimDynamic.DUCK for d in shapes.known_dims(value)]
    order = order or range(len(sizes))
    example = torch.empty([sizes[axis] for axis in order], dtype=torch_dtype(int(value.dtype or 1)), device=device)
    example = example.permute([order.index(axis) for axis in range(len(sizes))])
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(example, symbolic_context=context, source=ConstantSource(f"input_{index}"))


def _guards(environment: ShapeEnv, given: Sequence[FakeTensor]) -> dict[str, Any]:
    """The places of the symbols, and what has to hold for them, as Python."""
    places: dict[str, tuple[int, int]] = {}
    for index, tensor in enumerate(given):
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt):
                places.setdefault(str(size.node.expr), (index, axis))
    printer = PythonPrinter()
    conditions = [f"({printer.doprint(guard.expr)})" for guard in environment.guards]
    return {"symbols": places, "guards": " and ".join(conditions) or "True"}


if __name__ == "__main__":
    main()
