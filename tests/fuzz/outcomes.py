"""What becomes of something random that is tried."""

from __future__ import annotations

import dataclasses

PASS, THROWN, REFUSED, FAULT = "pass", "thrown away", "refused", "fault"


@dataclasses.dataclass
class Outcome:
    """What became of it.

    Args:
        kind: ``"pass"``, ``"thrown away"`` (nothing valid), ``"refused"`` (an error that is ours) or ``"fault"``.
        reason: what happened, without names and numbers of this one as far as possible.
        detail: the whole of it.
        compared: gradients that were compared; of files, those that are smooth.
        gradients: all gradients.
        steps: steps of a module.
        dropped: those of them in which rows were left out.
    """

    kind: str
    reason: str = ""
    detail: str = ""
    compared: int = 0
    gradients: int = 0
    steps: int = 0
    dropped: int = 0


class Fault(Exception):
    """What must not be: a reason without numbers, and the detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail
