"""Which constants of an exported model hold which parameters of the module, found by their content.

Exporters transpose, join and split weights; AdamW changes each element by itself, so that such a model trains as the
module does. Where a weight is computed of others (Conv with BatchNormalization in it, a table of biases looked up, a
kernel that is standardized) it does not: what one step does to the product is not what it does to the factors. Then
the module is compared in that form (``FORMS``), or without what is in no constant as it stands.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval


@dataclasses.dataclass
class Match:
    """What holds what.

    Args:
        holders: constants that consist of parameters alone, each element of which is in one of them.
        copies: constants that hold again what another holds, by its name: weights that were tied.
        absent: parameters that are in no constant as they stand.
    """

    holders: list[str]
    copies: dict[str, str]
    absent: list[str]


def match(constants: Mapping[str, np.ndarray], module: nn.Module) -> Match:
    """Find the parameters of a module among constants: whole in some order, joined, split, or but for rounding."""
    absent = {n: p.detach().numpy() for n, p in module.named_parameters() if p.requires_grad and p.numel()}
    by_content = {_sorted(p): n for n, p in absent.items()}
    found, rest, holders = Match([], {}, []), {}, {}
    for name, content in constants.items():
        held = by_content.get(_sorted(content))
        if held is None:
            rest[name] = content
        elif absent.pop(held, None) is None:
            found.copies[name] = holders[held]
        else:
            holders[held] = name
            found.holders.append(name)
    for take in (_joined, _split, _rounded):
        names = take(rest, absent)
        found.holders += names
        rest = {n: c for n, c in rest.items() if n not in names}
    found.absent = list(absent)
    return found


def _sorted(content: np.ndarray) -> bytes:
    return content.dtype.str.encode() + np.sort(content, axis=None).tobytes()


def _joined(constants: Mapping[str, np.ndarray], absent: dict[str, np.ndarray]) -> list[str]:
    """Constants that are several parameters; those are no longer absent."""
    names = []
    for name, content in constants.items():
        parts = [n for n, p in absent.items() if p.size < content.size and np.isin(p, content).all()]
        if parts and _sorted(np.concatenate([absent[n].ravel() for n in parts])) == _sorted(content):
            names.append(name)
            for part in parts:
                del absent[part]
    return names


def _split(constants: Mapping[str, np.ndarray], absent: dict[str, np.ndarray]) -> list[str]:
    """Constants that are parts of one parameter, which is no longer absent."""
    names = []
    for name, parameter in list(absent.items()):
        parts = [n for n, c in constants.items() if c.size < parameter.size and np.isin(c, parameter).all()]
        if parts and _sorted(np.concatenate([constants[n].ravel() for n in parts])) == _sorted(parameter):
            names += parts
            del absent[name]
    return names


def _rounded(constants: Mapping[str, np.ndarray], absent: dict[str, np.ndarray]) -> list[str]:
    """Constants that are a parameter but for rounding, which is no longer absent."""
    names = []
    for name, content in constants.items():
        if (alike := next((n for n, p in absent.items() if _alike(p, content)), None)) is not None:
            names.append(name)
            del absent[alike]
    return names


def _alike(parameter: np.ndarray, content: np.ndarray) -> bool:
    """Whether one is the other but for rounding: BatchNormalization is multiplied into weights in some order."""
    a, b = np.squeeze(parameter), np.squeeze(content)
    turned = [b, b.T] if b.ndim == 2 else [b]
    scale = float(np.abs(a).max(initial=1e-12))
    return any(a.shape == c.shape and np.allclose(a, c, rtol=1e-4, atol=1e-5 * scale) for c in turned)


class Affine(nn.Module):
    """BatchNormalization with its statistics in scale and shift."""

    def __init__(self, normalize: Any) -> None:
        super().__init__()
        scale = normalize.weight / torch.sqrt(normalize.running_var + normalize.eps)
        self.scale = nn.Parameter(scale.detach())
        self.shift = nn.Parameter((normalize.bias - normalize.running_mean * scale).detach())

    def forward(self, x):
        shape = (-1, *(1 for _ in x.shape[2:]))
        return x * self.scale.view(shape) + self.shift.view(shape)


def affine(module: nn.Module, given: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy where each BatchNormalization is a product and a sum."""
    module = copy.deepcopy(module)
    for name, part in list(module.named_modules()):
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            module.set_submodule(name, _followed(Affine(part), part))
    return module


def _followed(first: nn.Module, normalize: nn.Module) -> nn.Module:
    """What stands for a BatchNormalization, and what some libraries have in the same module after it."""
    after = [part for part in (getattr(normalize, "drop", None), getattr(normalize, "act", None)) if part is not None]
    return nn.Sequential(first, *after)


def plain(module: nn.Module, given: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy as it is."""
    return copy.deepcopy(module)


def fused(module: nn.Module, given: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy with each BatchNormalization multiplied into the convolution or linear layer whose output it reads."""
    module = copy.deepcopy(module)
    made: dict[int, tuple[str, nn.Module, torch.Tensor]] = {}
    pairs: list[tuple[str, str]] = []
    names = {part: name for name, part in module.named_modules()}

    def look(part, inputs, output):
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and id(inputs[0]) in made:
            pairs.append((made[id(inputs[0])][0], names[part]))
        if isinstance(part, nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            made[id(output)] = (names[part], part, output)

    hooks = [part.register_forward_hook(look) for part in module.modules()]
    with torch.no_grad():
        expected = _first(module(**given))
        for hook in hooks:
            hook.remove()
        for before, norm in pairs:
            parts = {name: copy.deepcopy(module.get_submodule(name)) for name in (before, norm)}
            _fuse(module, before, norm)
            if not torch.allclose(_first(module(**given)), expected, rtol=1e-4, atol=1e-5):  # others read it too
                for name, part in parts.items():
                    module.set_submodule(name, part)
    return module


def _first(output: Any) -> torch.Tensor:
    return torch.utils._pytree.tree_leaves(output)[0]


def _fuse(module: nn.Module, before: str, norm: str) -> None:
    layer, normalize = module.get_submodule(before), module.get_submodule(norm)
    fuse = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
    transposed = {"transpose": True} if isinstance(layer, nn.ConvTranspose2d) else {}
    together = fuse(layer, normalize, **transposed)  # type: ignore[arg-type]
    layer.weight, layer.bias = together.weight, together.bias.requires_grad_()
    module.set_submodule(norm, _followed(nn.Identity(), normalize))


FORMS = {"": plain, "BatchNormalization is in the weights": fused, "BatchNormalization is a product and a sum": affine}
