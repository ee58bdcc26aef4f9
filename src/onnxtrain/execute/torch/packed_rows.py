"""Where packed rows lie: row ``b * length + p`` of a padded batch is position p of sequence b."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

Tensor = torch.Tensor
MINUS_INFINITY = float("-inf")
_BLOCK = 1 << 20  # scores at a time, where one head has fewer: what follows finds them in the cache


@dataclasses.dataclass(frozen=True)
class Part:
    """What belongs to one sequence, or to some heads of it.

    Args:
        rows: its queries.
        columns: its keys.
        heads: which of them.
        drawn: its elements of the mask of dropout.
        shape: of its scores: (heads, rows, columns).
        make_addend: gives what is added to the scores of all heads.
    """

    rows: slice
    columns: slice
    heads: slice
    drawn: slice
    shape: tuple[int, int, int]
    make_addend: Callable[[], Tensor | None]

    @property
    def empty(self) -> bool:
        """Whether it has no score."""
        return not math.prod(self.shape)

    def queries(self, x: Tensor) -> Tensor:
        """(heads, rows, width) of packed queries."""
        return x[self.rows, self.heads].transpose(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """(heads, columns, width) of packed keys or values."""
        return x[self.columns, self.heads].transpose(0, 1)

    def addend(self) -> Tensor | None:
        """What is added to its scores, in a shape that broadcasts to theirs: made anew, to be dropped when it was."""
        made = self.make_addend()
        return made[self.heads] if made is not None and made.shape[0] > 1 else made

    def pieces(self) -> Iterator[Part]:
        """The same by groups of heads that have few scores each."""
        heads, rows, columns = self.shape
        step = max(1, _BLOCK // max(rows * columns, 1))
        if step >= heads:
            yield self
            return
        for first in range(0, heads, step):
            last = min(first + step, heads)
            start, size = self.drawn.start, rows * columns
            drawn = slice(start + first * size, start + last * size)
            shape = (last - first, rows, columns)
            yield Part(self.rows, self.columns, slice(first, last), drawn, shape, self.make_addend)


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where the packed rows lie in the padded batch.

    Args:
        q_rows, k_rows: row numbers of queries and keys.
        q_shape, k_shape: (sequences, length) of queries and keys.
        mask: what is added to the scores, of rank 4; or None.
        causal: whether a query sees no key after itself.
        dtype: type of what is added to the scores: torch's kernel reads another than that of doubles wrongly.
        is_told: whether nothing is computed, and only what memory is in use is to be told.
    """

    q_rows: Tensor
    k_rows: Tensor
    q_shape: tuple[int, int]
    k_shape: tuple[int, int]
    mask: Tensor | None
    causal: bool
    dtype: torch.dtype = torch.float32
    is_told: bool = False

    @property
    def aligned(self) -> bool:
        """Whether queries and keys are the same rows."""
        return self.q_shape == self.k_shape and (self.q_rows is self.k_rows or torch.equal(self.q_rows, self.k_rows))

    @property
    def can_blind(self) -> bool:
        """Whether a query that has a key may see none."""
        mask = self.mask
        hidden = mask is not None and mask.numel() > 0 and mask.amin().item() == MINUS_INFINITY
        return hidden or (self.causal and not self.aligned)

    def parts(self, heads: int, causal: bool) -> list[Part]:
        """The sequences in order; of those of which only the memory is told the largest ones."""
        found, count = [], 0
        for entry, (row, column) in enumerate(zip(*self._places(), strict=True)):
            shape = (heads, row.stop - row.start, column.stop - column.start)
            drawn = slice(count, count := count + math.prod(shape))
            addend = functools.partial(self._addend, entry, row, column, causal)
            found.append(Part(row, column, slice(0, heads), drawn, shape, addend))
        return _largest(found) if self.is_told else found

    def count(self, heads: int) -> int:
        """The number of all scores."""
        rows, columns = self._places()
        return heads * sum((r.stop - r.start) * (c.stop - c.start) for r, c in zip(rows, columns, strict=True))

    def _places(self) -> tuple[list[slice], list[slice]]:
        """For each sequence, where its queries and its keys are."""
        return _slices(self.q_rows.numpy(), self.q_shape), _slices(self.k_rows.numpy(), self.k_shape)

    def _addend(self, entry: int, row: slice, column: slice, causal: bool) -> Tensor | None:
        rows = self.q_rows.numpy()[row] - entry * self.q_shape[1]
        columns = self.k_rows.numpy()[column] - entry * self.k_shape[1]
        addend = None
        if self.mask is not None:
            own = self.mask[entry if self.mask.shape[0] > 1 else 0]
            addend = _taken(_taken(own, 1, rows), 2, columns)
        if not causal:
            return addend
        late = torch.from_numpy(columns[None, :] > rows[:, None])
        unseen = torch.zeros(1, *late.shape, dtype=self.dtype).masked_fill_(late, MINUS_INFINITY)
        return unseen if addend is None else addend + unseen


def _largest(parts: list[Part]) -> list[Part]:
    """Those with most queries, most keys and most scores: one is computed at a time, and takes no more than these."""
    sizes = [(p.shape[1], p.shape[2], p.shape[1] * p.shape[2]) for p in parts]
    kept = {max(range(len(parts)), key=lambda i: sizes[i][k]) for k in range(3)} if parts else set[int]()
    return [parts[i] for i in sorted(kept)]


def _slices(rows: np.ndarray, shape: tuple[int, int]) -> list[slice]:
    """For each sequence, where its rows are."""
    ends = np.searchsorted(rows, np.arange(shape[0] + 1) * shape[1]).tolist()
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


def _taken(mask: Tensor, axis: int, places: np.ndarray) -> Tensor:
    """The mask at these places of an axis, a view where they are neighbours."""
    if mask.shape[axis] == 1:
        return mask
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places):
        return mask.narrow(axis, first, len(places))
    return mask.index_select(axis, torch.from_numpy(places))


def scale_of_kept(ratio: float) -> float:
    """By what weights that are kept are multiplied."""
    return 0.0 if ratio == 1.0 else 1.0 / (1.0 - ratio)
