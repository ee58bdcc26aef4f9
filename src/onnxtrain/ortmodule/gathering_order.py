"""Ranks that gather parameters together do so in one order, or wait for each other for ever: their graphs are compared.

Each rank leaves the order of a new graph in the store by which the ranks met, and looks at what others left there for
the same call. None waits for another here: one that has not come so far, or has a graph for the call, left nothing.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from onnxtrain import processes
from onnxtrain.errors import OnnxTrainError
from onnxtrain.ir.shards import Gathering

_SERIAL = itertools.count()
_NUMBERS: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


def compare(module: torch.nn.Module, gathering: Gathering, call: int) -> None:
    """Compare the order in which a graph gathers parameters with those of the other ranks' graphs for the same call.

    Args:
        module: that the graph is of.
        gathering: its order.
        call: the number of the module's call.

    Raises:
        OnnxTrainError: another rank's graph has another order.
    """
    if dist.get_backend() == "fake":  # it has no other ranks
        return
    names = [min(group) for group in gathering.shards.groups]
    own = [[names[group] for group in order] for order in (gathering.forward, gathering.backward)]
    if module not in _NUMBERS:
        _NUMBERS[module] = next(_SERIAL)
    store = dist.PrefixStore(
        f"onnxtrain/gathering/{_NUMBERS[module]}/{call}", dist.distributed_c10d._get_default_store()
    )
    store.set(str(processes.rank()), json.dumps(own))
    for rank in gathering.shards.ranks:
        if rank != processes.rank() and store.check([str(rank)]):
            _compare(type(module).__name__, rank, own, json.loads(store.get(str(rank))))


def _compare(module: str, rank: int, own: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> None:
    for kind, ours, theirs in zip(("forward", "backward"), own, other, strict=True):
        pairs = itertools.zip_longest(ours, theirs, fillvalue="nothing more")
        differing = next(((x, y) for x, y in pairs if x != y), None)
        if differing is not None:
            raise OnnxTrainError(
                f"ranks gather the parameters of {module} in different orders in the {kind} pass: "
                f"{differing[0]} here where rank {rank} gathers {differing[1]}",
                cure="see that all ranks run the same code with the same settings, on inputs of the same structure; "
                "model.explain() shows at each rank what its graph was captured for",
            )
