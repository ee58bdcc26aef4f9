"""Which outputs of a graph will receive a gradient, learned from those that did."""

from __future__ import annotations

from collections.abc import Sequence

_STEPS = 10  # in a row that use fewer outputs, until the others are no longer expected


class Expected:
    """The outputs whose gradients the next step is compiled for.

    What the first backward pass shows replaces the guess. An output that receives a gradient later is expected
    besides: losses may come in turn, and each that is missed costs another forward pass.

    Args:
        guess: outputs that probably receive a gradient.
        order: all outputs, in the order that names are given in.
    """

    def __init__(self, guess: Sequence[str], order: Sequence[str]) -> None:
        self.names, self._order = tuple(guess), tuple(order)
        self._is_guess = True
        self._fewer: tuple[str, ...] = ()
        self._count = 0

    def learn(self, received: Sequence[str]) -> None:
        """A backward pass brought gradients for these outputs."""
        now = self._sorted(received)
        if self._is_guess or not {*now} <= {*self.names}:
            self.names = now if self._is_guess else self._sorted((*self.names, *now))
            self._is_guess, self._count = False, 0
            return
        self._count = self._count + 1 if now == self._fewer else 1
        self._fewer = now
        if self._count >= _STEPS:
            self.names = now

    def add(self, name: str) -> None:
        """One more output received a gradient."""
        self.names = self._sorted((*self.names, name))

    def _sorted(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(n for n in self._order if n in names)
