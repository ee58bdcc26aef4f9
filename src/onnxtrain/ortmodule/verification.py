"""verify: a training step of the graph beside the same step of eager PyTorch, tensor by tensor."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture import Captured, Kind, Watch, arguments_of, flatten
from onnxtrain.errors import ModuleError, VerificationError
from onnxtrain.execute.torch.effects import silenced
from onnxtrain.ortmodule import randomness
from onnxtrain.ortmodule.checks import is_gathered

_RELATIVE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
_NOISE = 1e-2  # of the relative tolerance: what counts as rounding noise beside the largest tensor of the same kind


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One tensor of a step, graph against eager.

    Args:
        kind: ``"loss"``, ``"output"``, ``"gradient"`` or ``"buffer"``.
        name: the tensor's name.
        error: largest absolute difference.
        scale: largest absolute value in eager.
        tolerance: largest difference that passes.
    """

    kind: str
    name: str
    error: float
    scale: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance (NaN is not)."""
        return self.error <= self.tolerance

    @property
    def badness(self) -> float:
        """The difference in units of the tolerance."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.tolerance if self.tolerance > 0.0 and self.error == self.error else float("inf")

    def __str__(self) -> str:
        limits = f"tolerance {self.tolerance:.2e}, largest value {self.scale:.2e}"
        return f"{self.kind} {self.name}: error {self.error:.2e} ({limits})"


@dataclasses.dataclass
class Report:
    """All comparisons of one step.

    Args:
        comparisons: one for each tensor.
    """

    comparisons: list[Comparison]

    @property
    def worst(self) -> Comparison:
        """The comparison farthest from, or nearest to, its tolerance."""
        return max(self.comparisons, key=lambda c: c.badness)

    def raise_if_failed(self) -> None:
        """Raise VerificationError where a tensor is out of tolerance; the message names the worst ones."""
        failed = sorted((c for c in self.comparisons if not c.passed), key=lambda c: -c.badness)
        if failed:
            rows = "\n".join(f"    {c}" for c in failed[:10])
            raise VerificationError(
                f"{len(failed)} of {len(self.comparisons)} tensors differ from eager PyTorch\n{rows}",
                cure="report it with the module; train with eager PyTorch until it is resolved",
            )

    def __str__(self) -> str:
        kinds = list(dict.fromkeys(c.kind for c in self.comparisons))
        rows = [f"{kind}: {sum(c.kind == kind for c in self.comparisons)} compared" for kind in kinds]
        return "\n".join([*rows, f"worst: {self.worst}"])


def compare(kind: str, pairs: Mapping[str, tuple[torch.Tensor | None, torch.Tensor | None]]) -> list[Comparison]:
    """Compare tensors of one kind; None stands for zeros, as eager leaves out gradients that are zero."""
    scales = {name: _largest(eager) for name, (_, eager) in pairs.items()}
    largest = max((s for s in scales.values() if s == s), default=0.0)
    made = []
    for name, (ours, eager) in pairs.items():
        model = eager if eager is not None else ours
        if model is None:
            continue
        relative = _RELATIVE.get(model.dtype, 0.0)
        noise = relative * _NOISE * largest if kind == "gradient" else relative * _NOISE
        made.append(Comparison(kind, name, _difference(ours, eager), scales[name], relative * scales[name] + noise))
    return made


def _largest(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None or tensor.numel() == 0 else tensor.detach().double().abs().max().item()


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None:
        return _largest(a if b is None else b)
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    x, y = a.detach().double(), b.detach().double()
    same = (x == y) | (x.isnan() & y.isnan())
    return torch.where(same, 0.0, (x - y).abs()).max().item()


class Verification:
    """Eager's side of one step: a copy of the module from before the step, run on the same inputs and random numbers.

    Args:
        module: the user's module; it is copied, not changed.
        captured: its graph, for the order of inputs and outputs.
        tensors: the step's input tensors.

    Raises:
        ModuleError: the module is sharded.
    """

    def __init__(self, module: torch.nn.Module, captured: Captured, tensors: Sequence[torch.Tensor]) -> None:
        self.captured = captured
        self.module = module
        self.eager = _copy(module)
        self.inputs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
        self.random = randomness.state()
        self.outputs: dict[str, torch.Tensor] = {}
        self.report = Report([])

    def check_forward(self, outputs: Mapping[str, torch.Tensor], zeros: Mapping[str, torch.Tensor]) -> None:
        """Compare outputs and buffer updates.

        Args:
            outputs: the outputs that were computed, by name.
            zeros: for those that are zeros beside some rows, these rows, counted over the first two axes.

        Raises:
            VerificationError: one is out of tolerance.
        """
        args, kwargs = self.captured.inputs.restore(self.inputs)
        with randomness.replayed(self.random), torch.enable_grad(), silenced():
            watch, left = Watch(self.eager), self.captured.left
            made = self.eager(*args, **kwargs)
            whole = (made, tuple(watch.changes().left[place] for place in left)) if left else made
            found, _ = flatten(whole, "output", self.captured.outputs)
        names = self.captured.graph.signature.outputs  # some of them only what was looked at
        self.outputs = {names[i]: y for i, y in zip(self.captured.sources, found, strict=True)}
        pairs = {n: (ours, _beside(self.outputs[n], zeros.get(n))) for n, ours in outputs.items() if n in self.outputs}
        self.report.comparisons += compare("loss", {n: p for n, p in pairs.items() if p[0].dim() == 0})
        self.report.comparisons += compare("output", {n: p for n, p in pairs.items() if p[0].dim() > 0})
        later = {place.label for place in left if place.kind is Kind.BUFFER}  # these are outputs, left after the step
        after, buffers = dict(self.module.named_buffers()), self.eager.named_buffers()
        self.report.comparisons += compare("buffer", {n: (after[n], b) for n, b in buffers if n not in later})
        self.report.raise_if_failed()

    def check_backward(
        self, dys: Mapping[str, torch.Tensor | None], gradients: Mapping[str, torch.Tensor | None]
    ) -> None:
        """Compare gradients for the same gradients of the outputs.

        Raises:
            VerificationError: one is out of tolerance.
        """
        pairs = [(self.outputs[n], dy) for n, dy in dys.items() if dy is not None and self.outputs[n].requires_grad]
        leaves = dict(zip(self.captured.graph.signature.user_inputs, self.inputs, strict=True))
        leaves |= dict(self.eager.named_parameters(remove_duplicate=False))
        wanted = {name: leaves[name] for name in gradients}
        seeds = [dy for _, dy in pairs]
        found = torch.autograd.grad([y for y, _ in pairs], list(wanted.values()), seeds, allow_unused=True)
        eager = dict(zip(wanted, found, strict=True))
        self.report.comparisons += compare("gradient", {n: (g, eager[n]) for n, g in gradients.items()})
        self.report.raise_if_failed()


def _beside(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """A tensor with zeros beside some rows of its first two axes."""
    if rows is None:
        return tensor
    flat = tensor.detach().flatten(0, 1)
    return torch.zeros_like(flat).index_copy(0, rows, flat[rows]).view_as(tensor)


def _copy(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of the module that shares nothing with it.

    Raises:
        ModuleError: its parameters are in shards, of which FSDP2 makes no copies.
    """
    if is_gathered(module):
        raise ModuleError(
            f"a step of {type(module).__name__} cannot be verified: that takes a copy of it, and a module that is "
            "sharded cannot be copied",
            cure="before it is sharded: onnxtrain.verify(module, batch), then fully_shard(ORTModule(module))",
        )
    held = (v for inner in module.modules() for v in pytree.tree_leaves(vars(inner)) if isinstance(v, torch.Tensor))
    return copy.deepcopy(module, {id(v): v.detach() for v in held if not v.is_leaf})  # left by the step before


def verify(model: torch.nn.Module, batch: Any, *, backend: str = "auto") -> Report:
    """Compare one training step through the graph with eager PyTorch; neither the model nor its buffers change.

    The loss is the sum of the scalar outputs, or of all floating outputs where there is no scalar.

    Args:
        model: a module, or an ORTModule.
        batch: a mapping is passed as keyword arguments, a tuple or list as positional ones, else one argument.
        backend: the backend to check; an ORTModule keeps its own.

    Returns:
        A report: print it, or ask for its ``worst`` comparison.

    Raises:
        VerificationError: loss, an output, a gradient or a buffer is out of tolerance; the message names the worst.
        ModuleError: it is not a module, or a sharded one.
    """
    from onnxtrain.options import Options
    from onnxtrain.ortmodule.module import ORTModule

    if not isinstance(model, torch.nn.Module):
        raise ModuleError(
            f"verify needs a torch.nn.Module, not a {type(model).__name__}", cure="pass the module itself"
        )
    options = model.options if isinstance(model, ORTModule) else Options(backend=backend)
    inner = model.module if isinstance(model, ORTModule) else model
    wrapped = ORTModule(_copy(inner), options=dataclasses.replace(options, verify=True))
    args, kwargs = arguments_of(batch)
    with randomness.replayed(randomness.state()), torch.enable_grad(), silenced():
        outputs, _ = flatten(wrapped(*args, **kwargs), "output")
        floating = [y for y in outputs if y.requires_grad]
        scalars = [y for y in floating if y.dim() == 0]
        chosen = scalars or floating
        if chosen:
            torch.autograd.backward([y.sum() for y in chosen])
    assert wrapped.verification is not None
    return wrapped.verification
