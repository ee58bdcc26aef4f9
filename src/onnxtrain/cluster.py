"""What a step is planned for that is to run on many ranks: how many, how they share, what each one can do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from onnxtrain.errors import OptionError, close_to
from onnxtrain.memory_options import number_of_bytes

STRATEGIES = {
    "ddp": "DistributedDataParallel(ORTModule(module)): each rank has all",
    "zero1": "DeepSpeed's stage 1: the optimizer's state is in shards",
    "zero2": "DeepSpeed's stage 2: gradients, too",
    "zero3": "DeepSpeed's stage 3: parameters, too",
    "fsdp2": "fully_shard(ORTModule(module)): all in shards, gathered as a whole",
    "fsdp2-layers": "fully_shard(layer) for each layer within one ORTModule: gathered one at a time",
}
OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}  # numbers of state for each element
_UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6))


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Ranks on which a step is to run, for ``ORTModule.plan``; none of them is needed for it.

    Args:
        ranks: how many there may be, such as ``(8, 64, 1024)``.
        strategies: how they share, see ``STRATEGIES``; all of them by default.
        optimizer: ``"sgd"``, ``"momentum"``, ``"adam"`` or ``"adamw"``: how much state there is for each element.
        memory: bytes of a rank, as a number or as ``"80GB"``; None where it is not known.
        link: bytes a second that a rank can send while it receives as many; None leaves out what communication takes.
        speed: floating point operations a second in products of large matrices, as a number or as ``"400T"``; None
            for what this machine does.
        bandwidth: bytes a second of the memory; None for this machine's.
        bucket: elements of DeepSpeed's ``reduce_bucket_size``, of which it makes a buffer at every rank.

    Raises:
        OptionError: something is not one of these.
    """

    ranks: Sequence[int]
    strategies: Sequence[str] = tuple(STRATEGIES)
    optimizer: str = "adamw"
    memory: int | str | None = None
    link: float | str | None = None
    speed: float | str | None = None
    bandwidth: float | str | None = None
    bucket: int = 500_000_000

    def __post_init__(self) -> None:
        if not self.ranks or not all(isinstance(n, int) and n > 0 for n in self.ranks):
            raise OptionError(f"ranks={self.ranks!r} are no numbers of ranks", cure="write (8, 64), say")
        for name in self.strategies:
            _known("strategy", name, STRATEGIES)
        _known("optimizer", self.optimizer, OPTIMIZERS)
        if not isinstance(self.bucket, int) or self.bucket < 0:
            raise OptionError(f"bucket={self.bucket!r} is no number of elements", cure="write 50_000_000, say")
        for name, read in _READ.items():
            if (stated := getattr(self, name)) is not None:
                object.__setattr__(self, name, read(name, stated))


def _known(what: str, name: str, among: Sequence[str] | dict[str, object] | dict[str, int] | dict[str, str]) -> None:
    if name not in among:
        raise OptionError(f"there is no {what} {name!r}{close_to(name, among)}", cure=f"name {', '.join(among)}")


def _bytes(name: str, stated: int | float | str) -> int:
    found = number_of_bytes(stated)
    if found is None:
        raise OptionError(f"{name}={stated!r} is no number of bytes", cure="write '80GB', or '50GB' of a second")
    return found


def _operations(name: str, stated: float | str) -> float:
    """Operations a second: a number, or one with T, G or M behind it."""
    text, factor = str(stated).strip(), 1.0
    for unit, size in _UNITS:
        if text.upper().endswith(unit):
            text, factor = text[:-1], size
    try:
        found = float(text) * factor
    except ValueError:
        found = 0.0
    if not found > 0:
        raise OptionError(f"{name}={stated!r} are no operations a second", cure="write '400T' or 4e14")
    return found


_READ: dict[str, Callable[..., float]] = {
    "memory": _bytes,
    "link": _bytes,
    "bandwidth": _bytes,
    "speed": _operations,
}
__all__ = ["OPTIMIZERS", "STRATEGIES", "Cluster"]
