"""A training step of the graph beside the same step of eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture import Captured, Carried, Given, Kind, Part, Watch, flatten
from onnxtrain.engine import randomness
from onnxtrain.engine.comparison import Reference, Report, compare
from onnxtrain.errors import ModuleError
from onnxtrain.execute.torch.effects import silenced
from onnxtrain.ortmodule.checks import is_gathered


class Verification(Reference):
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
        copies: dict[int, torch.Tensor] = {}
        self.eager = unshared(module, copies)
        self._borrowed = {name: self._copied(held, copies) for name, held in captured.borrowed.items()}
        self.inputs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
        self.random = randomness.state()
        self.outputs: dict[str, torch.Tensor] = {}
        self.report = Report([])

    def _copied(self, held: torch.Tensor | Carried | Part, copies: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What the copy of the module borrows; state that has a history begins anew with its content."""
        if not isinstance(held, torch.Tensor):
            return held.of(self.eager).requires_grad_(held.of(self.module).requires_grad)
        return copies.get(id(held), held)

    def check_forward(self, outputs: Mapping[str, torch.Tensor], zeros: Mapping[str, torch.Tensor]) -> None:
        """Compare outputs and buffer updates with the copy's."""
        rewritten = {made.position: made for made in self.captured.rewritten}
        with randomness.replayed(self.random), torch.enable_grad(), silenced():
            inputs = [x.clone() if i in rewritten else x for i, x in enumerate(self.inputs)]
            args, kwargs = self.captured.inputs.restore(inputs)
            given, left, borrowed = Given(args, kwargs), self.captured.left, self.captured.borrowed.values()
            watch = Watch(self.eager, counted={held.place for held in borrowed if isinstance(held, Carried)})
            made = self.eager(*args, **kwargs)
            if self.captured.leaves:
                now, written = watch.changes().left, given.changes()
                there = (now[place] if place in now else place.content(self.eager) for place in left)  # as it was
                made = made, tuple(there), tuple(written[c] for c in self.captured.given)
            found, _ = flatten(made, "output", self.captured.outputs, given=given.keys)
        names = self.captured.graph.signature.outputs  # some of them only what was looked at
        self.outputs = {names[i]: y for i, y in zip(self.captured.sources, found, strict=True)}
        self.outputs |= {names[made.output]: inputs[i] for i, made in rewritten.items()}
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
        """Compare gradients with the copy's."""
        pairs = [(self.outputs[n], dy) for n, dy in dys.items() if dy is not None and self.outputs[n].requires_grad]
        leaves = dict(zip(self.captured.graph.signature.user_inputs, self.inputs, strict=True))
        leaves |= dict(self.eager.named_parameters(remove_duplicate=False)) | self._borrowed
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


def unshared(module: torch.nn.Module, copies: dict[int, torch.Tensor] | None = None) -> torch.nn.Module:
    """A copy of the module that shares nothing with it.

    Args:
        module: the module.
        copies: filled with the copies of its tensors, by the identities of these.

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
    copies = {} if copies is None else copies
    copies |= {id(v): v.detach().clone() for v in held if not v.is_leaf}  # left by the step before
    return copy.deepcopy(module, copies)
