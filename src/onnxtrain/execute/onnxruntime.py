"""The onnxruntime backend: the ordinary wheel, tensors bound over DLPack, weights as inputs, nothing copied."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from onnxtrain.errors import BackendError, first_line
from onnxtrain.execute.base import Backend, Executable
from onnxtrain.execute.sessions import session_options
from onnxtrain.files import partial_of
from onnxtrain.ir.functions import OPAQUE
from onnxtrain.ir.graphs import DOMAIN, Plan, Segment
from onnxtrain.ir.parts import cut, merged
from onnxtrain.ir.scalar_ranks import match_ranks
from onnxtrain.ir.standard_form import attach
from onnxtrain.options import Options

_DISABLED = {"EliminateDropout"}  # it also removes Dropout that is in training mode, where nobody reads the mask
_ATOMIC = frozenset(("ScatterElements", "ScatterND"))
_DOMAINS = frozenset(("", "ai.onnx", "ai.onnx.ml", "com.microsoft", DOMAIN))  # of operators that no library has
_SAVED = 2**24  # bytes of saved values for each session of a backward pass: what one costs does not show beside them


def set_seed(seed: int) -> None:
    """Seed the generator that random operators of onnxruntime draw from."""
    ort.set_seed(seed % sys.maxsize)


class _Part:
    """One model of a plan as an onnxruntime session."""

    def __init__(self, model: ir.Model, device: str, chosen: Options) -> None:
        self.device_type, _, index = device.partition(":")
        self.device_index = int(index or 0)
        self.inputs = [str(v.name) for v in model.graph.inputs]
        self.outputs = list(dict.fromkeys(str(v.name) for v in model.graph.outputs))
        model = attach(model)
        match_ranks(model.graph)
        options = session_options()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.use_deterministic_compute = chosen.deterministic
        if chosen.custom_op_library is not None:
            options.register_custom_ops_library(os.fspath(chosen.custom_op_library))
        providers: list[Any] = [_cuda(self.device_index, chosen)] if self.device_type == "cuda" else []
        proto = ir.to_proto(model).SerializeToString()
        try:
            providers.append("CPUExecutionProvider")
            self.session = ort.InferenceSession(proto, options, providers, disabled_optimizers=_DISABLED)
        except Exception as error:  # onnxruntime raises many types
            raise BackendError(
                f"onnxruntime cannot load the plan: {first_line(error)}",
                cure="use backend='torch', or a type and operators that onnxruntime has kernels for",
            ) from error
        self._read = {i.name for i in self.session.get_inputs()}

    def run(self, values: Iterable[ort.OrtValue]) -> dict[str, ort.OrtValue]:
        """All outputs by name, in memory that onnxruntime allocates.

        Raises:
            BackendError: a kernel fails; the message names the node.
        """
        binding = self.session.io_binding()
        for name, value in zip(self.inputs, values, strict=True):
            if name in self._read:
                binding.bind_ortvalue_input(name, value)
        for name in self.outputs:
            binding.bind_output(name, self.device_type, self.device_index)
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime raises many types
            raise BackendError(f"onnxruntime failed: {first_line(error)}", cure="use backend='torch'") from error
        return dict(zip(self.outputs, binding.get_outputs(), strict=True))


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """Segments of a backward pass that run as one session.

    Args:
        part: the session.
        segments: how many.
        gradients: what they make ready: its place among the gradients of the plan, and its name.
        dead: names of what nothing needs after it.
    """

    part: _Part
    segments: int
    gradients: tuple[tuple[int, str], ...]
    dead: frozenset[str]


class OnnxRuntimeExecutable(Executable):
    """A plan as onnxruntime sessions: one for the forward pass, one or more for the backward pass.

    A session holds all that it is given until it ends. So where much is saved, the backward pass is cut: what one
    session has read is freed before the next one runs.
    """

    has_segments = True

    def __init__(self, plan: Plan, device: str, options: Options) -> None:
        super().__init__(plan)
        self._device, self._options = device, options
        self._forward = _Part(plan.forward, device, options)
        most = options.segments if isinstance(options.segments, int) else 1
        self._most = len(plan.segments) if options.segments == "all" else most  # sessions of the backward pass
        self._backward = [] if plan.backward is None else self._stretches(plan.backward)

    def forward(self, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        values = [_bind(x) for x in inputs]
        signature = self.plan.signature
        made = self._forward.run(values)
        self._cut(sum(made[n].tensor_size_in_bytes() for n in self.plan.saved if n in made))
        made = self._apart(made)
        known = dict(zip(signature.inputs, values, strict=True)) | made
        outputs = [known[n] for n in (*signature.outputs, *signature.buffer_updates.values())]
        # inputs are bound again by the backward pass: FSDP2 frees a parameter's memory and gathers it elsewhere
        saved = known | dict(zip(signature.inputs, inputs, strict=True))
        return outputs, [saved[n] for n in self.plan.saved]

    def walk(self, saved: Any, output_gradients: list[Any], made: list[Any]) -> Iterator[None]:
        assert self._backward, "a plan for inference has no backward pass"
        names = (*self.plan.saved, *self.plan.output_gradients.values())
        alive = dict(zip(names, (*saved, *output_gradients), strict=True))
        saved.clear()
        output_gradients.clear()
        for stretch in self._backward:
            alive |= self._apart(stretch.part.run([_bind(alive[name]) for name in stretch.part.inputs]))
            for place, name in stretch.gradients:
                made[place] = alive[name]
            alive = {name: x for name, x in alive.items() if name not in stretch.dead}
            for _ in range(stretch.segments):
                yield

    def _apart(self, made: dict[str, ort.OrtValue]) -> dict[str, ort.OrtValue]:
        """What a session gave, each for itself where that frees memory: else all is there as long as any of it."""
        return {name: _alone(value) for name, value in made.items()} if len(self._backward) > 1 else made

    def _cut(self, saved: int) -> None:
        """Cut the backward pass anew where a step saves at least twice the bytes that it was cut for."""
        most = min(saved // _SAVED, len(self.plan.segments))
        if self.plan.backward is not None and self._options.segments is None and most >= 2 * self._most:
            self._most = most
            self._backward = self._stretches(self.plan.backward)

    def _stretches(self, backward: ir.Model) -> list[_Stretch]:
        """The backward pass as sessions, of which there may be fewer than are wanted."""
        places = {name: place for place, name in enumerate(self.plan.gradients)}
        whole = Segment((*self.plan.gradients,), len(backward.graph))
        groups = merged(self.plan.segments or (whole,), self._most)
        models = cut(backward, [sum(s.nodes for s in group) for group in groups]) if len(groups) > 1 else [backward]
        found: list[_Stretch] = []
        needed: set[str] = set()
        for group, model in zip(reversed(groups), reversed(models), strict=True):
            part = _Part(model, self._device, self._options)
            ready = tuple((places[n], self.plan.gradients[n]) for segment in group for n in segment.gradients)
            found.append(_Stretch(part, len(group), ready, frozenset({*part.inputs, *part.outputs} - needed)))
            needed |= {*part.inputs, *(name for _, name in ready)}
        return found[::-1]


def _alone(value: ort.OrtValue) -> ort.OrtValue:
    """The same tensor, but not as one of those that a binding gave."""
    try:
        return ort.OrtValue.from_dlpack(value)
    except Exception:  # a type that DLPack does not have
        return value


def _bind(tensor: Any) -> ort.OrtValue:
    """A tensor's memory as onnxruntime's, without copying where it is contiguous."""
    if isinstance(tensor, ort.OrtValue):
        return tensor
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().contiguous()
    elif isinstance(tensor, np.ndarray):
        tensor = np.asarray(tensor, order="C")
    if str(getattr(tensor, "dtype", "")) in ("bool", "torch.bool"):  # their DLPack code is not known to onnxruntime
        return ort.OrtValue.ortvalue_from_numpy(np.asarray(tensor))
    return ort.OrtValue.from_dlpack(tensor)


class OnnxRuntimeBackend(Backend):
    """Runs plans on the ordinary onnxruntime wheel."""

    name = "onnxruntime"

    def compile(self, plan: Plan, device: str = "cpu", options: Options | None = None) -> OnnxRuntimeExecutable:
        options = options or Options()
        if not hasattr(ort.OrtValue, "from_dlpack"):
            what = f"onnxruntime {ort.__version__} takes no tensors over DLPack"
            raise BackendError(what, cure="pip install 'onnxruntime>=1.26', or use backend='torch'")
        nodes = [n for model in (plan.forward, plan.backward) if model is not None for n in model.graph.all_nodes()]
        own = options.custom_op_library is not None
        for error in self.unsupported([n for n in nodes if not (own and n.domain not in _DOMAINS)]):
            raise error
        if options.deterministic and device.startswith("cuda"):
            _warn_of_nondeterministic(nodes)
        return OnnxRuntimeExecutable(plan, device, options)

    def runs(self, node: ir.Node) -> bool:
        if node.domain == DOMAIN:
            return node.op_type not in OPAQUE
        version = node.graph.opset_imports.get(node.domain) if node.graph is not None else None
        if version is None or has_kernel(node.domain, node.op_type, version):
            return True  # a domain without version is for onnxruntime to judge
        return _is_function(node, version)


def to_ort_format(
    model: bytes,
    custom_op_library: str | os.PathLike[str] | None = None,
    *,
    at_load: bool = False,
    integers: bool = False,
    as_onnx: bool = False,
) -> bytes:
    """A model in onnxruntime's own format (``.ort``), optimized for any CPU, which its smaller builds read.

    Args:
        model: the ``.onnx`` file's content.
        custom_op_library: the library of its custom operators.
        at_load: keep what may be fused further as a note for the session that loads the file.
        integers: int8 beside QuantizeLinear may be computed as such, which ARM does well.
        as_onnx: give the optimized model as ``.onnx``, to be looked at.
    """
    options = session_options()
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_EXTENDED if at_load else level.ORT_ENABLE_BASIC
    entries = {"session.save_model_format": "ONNX" if as_onnx else "ORT"}
    entries["session.qdqisint8allowed"] = str(int(integers))
    if at_load:
        entries["optimization.minimal_build_optimizations"] = "apply" if as_onnx else "save"
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / ("model.onnx" if as_onnx else "model.ort"))
        try:
            if custom_op_library is not None:
                options.register_custom_ops_library(os.fspath(custom_op_library))
            ort.InferenceSession(model, options, ["CPUExecutionProvider"], disabled_optimizers=_DISABLED)
        except Exception as error:  # onnxruntime raises many types
            what = f"onnxruntime {ort.__version__} cannot bring the model to .ort: {first_line(error)}"
            raise BackendError(what, cure="leave ort_format out, or check the custom_op_library") from error
        return Path(options.optimized_model_filepath).read_bytes()


def write_needed_operators(models: Sequence[Path], path: Path, types: bool) -> None:
    """Write which operators ``.ort`` files need, for a build of onnxruntime that has no others."""
    from onnxruntime.tools.ort_format_model import create_config_from_models

    create_config_from_models([*models], path, types)


def write_adapter(path: Path, parameters: Mapping[str, np.ndarray]) -> None:
    """A file of values for inputs of a model, which ``onnxruntime.LoraAdapter`` loads (from version 1.20 on)."""
    made = ort.AdapterFormat()
    made.set_adapter_version(1)
    made.set_model_version(1)
    made.set_parameters({n: ort.OrtValue.ortvalue_from_numpy(np.asarray(v, order="C")) for n, v in parameters.items()})
    with partial_of(path) as (partial, target):
        made.export_adapter(os.fspath(partial))  # type: ignore[arg-type]  (its stub is wrong)
        partial.replace(target)


@functools.cache
def _kernels() -> dict[tuple[str, str], list[tuple[int, int]]]:
    """First and last opset of the CPU kernels that this onnxruntime has of an operator."""
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for kernel in native.get_all_opkernel_def():
        if kernel.provider == "CPUExecutionProvider":
            found.setdefault((kernel.domain, kernel.op_name), []).append(kernel.version_range)
    return found


def has_kernel(domain: str, op_type: str, opset: int) -> bool:
    """Whether onnxruntime has a CPU kernel of an operator in a version of its domain, for some types at least."""
    if (domain, op_type) == ("", "Constant"):
        return True  # an initializer once it is loaded
    since = opset
    if not domain and onnx.defs.has(op_type, opset):
        since = onnx.defs.get_schema(op_type, opset).since_version
    return any(first <= since <= last for first, last in _kernels().get((domain, op_type), ()))


def _is_function(node: ir.Node, version: int) -> bool:
    """Whether ONNX itself defines the operator by others, which onnxruntime runs instead."""
    if not onnx.defs.has(node.op_type, version, node.domain):
        return False
    schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    return schema.has_function or schema.has_context_dependent_function


def _cuda(index: int, options: Options) -> tuple[str, dict[str, str]]:
    """The CUDA provider with its settings; 1-D convolutions are padded as N, C, 1, D, which cuDNN is faster on."""
    settings = {
        "device_id": str(index),
        "cudnn_conv_algo_search": options.conv_algo_search,
        "cudnn_conv_use_max_workspace": "1",
        "cudnn_conv1d_pad_to_nc1d": "1",
    }
    return "CUDAExecutionProvider", settings


def _warn_of_nondeterministic(nodes: Iterable[ir.Node]) -> None:
    """Warn once for each kernel that has no deterministic form: sums by atomic additions come in any order."""
    for op_type in sorted({n.op_type for n in nodes if n.op_type in _ATOMIC and _adds(n)}):
        warnings.warn(
            f"the CUDA kernel of {op_type} is not deterministic: results differ in their last bits from run to run",
            stacklevel=2,
        )


def _adds(node: ir.Node) -> bool:
    reduction = node.attributes.get("reduction")
    return reduction is not None and reduction.as_string() in ("add", "mul")
