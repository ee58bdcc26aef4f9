"""Plain values under the names of Python code: what a traced call changes there, a graph would not change again."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture.held_content import HeldContent, is_another, is_plain
from onnxtrain.capture.places import Kind, Place
from onnxtrain.capture.reached_code import UNSET, WITHIN, Named, is_read, line_that_writes, named_by
from onnxtrain.capture.taken_items import TakenItems, refused
from onnxtrain.errors import SetUpError


class NamedValues:
    """Numbers, texts, truth values and None under global names, of closures and classes, and in what these name.

    Those of libraries are left out: nothing is computed from what they count.

    Args:
        named: the names.
    """

    def __init__(self, named: Iterable[Named]) -> None:
        every = [*named]
        values = self._values = [(n, n.read()) for n in every if not n.is_unset]
        self._unset = [n for n in every if n.is_unset and n.read() is UNSET]
        self._plain = [(n, v) for n, v in values if n.write is not None and is_plain(v)]
        self._tables = [(Place("", "", Kind.SET), {n.label.removeprefix(WITHIN): v for n, v in values})]
        self._held = HeldContent(self._tables, is_left=False)
        self._taken = TakenItems((n.label.removeprefix(WITHIN), v) for n, v in values if not n.is_librarys)

    def refuse_changed(self, module: torch.nn.Module) -> None:
        """Raise SetUpError where one is another by now, of which code may compute; CaptureError of an iterator.

        Args:
            module: the module whose call it was.
        """
        for named, before in self._plain:
            if is_another(before, now := named.read()):
                raise _counts(module, named.label, before, now)
        if (changed := self._held.changed()) is not None:
            _, label, before, now = changed
            raise _counts(module, label, before, now)
        if made := [n for n in self._unset if n.read() is not UNSET]:
            labels = [n.label for n in made]
            line = line_that_writes(module, made[0].name)
            raise SetUpError(labels, f"sets {', '.join(labels)}, which was not there", line)
        if (taken := self._taken.taken()) is not None:
            raise refused(taken[1], line_that_writes(module, _name(taken[0])))

    def settle(self, module: torch.nn.Module, fill: Callable[[], None], has_left: bool) -> None:
        """Let collections hold what a call in eager PyTorch leaves in them, once: they may be caches.

        Args:
            module: the module whose call it was.
            fill: runs the call in eager PyTorch.
            has_left: whether it left a tensor there that has no content.

        Raises:
            SetUpError: each call leaves more there, of which code may compute; nothing is left then.
        """
        if has_left or self._held.grew_by_sizes():
            self.take_back()
            fill()
        read = {name for name in map(_name, self._held.grown()) if is_read(module, name)}
        if not read:
            return
        once = HeldContent(self._tables, is_left=False)
        fill()
        if again := [label for label in once.grown() if _name(label) in read]:
            self.take_back()
            labels = ", ".join(again)
            raise _changes(module, again, f"leaves more or less in {labels} than before", _name(again[0]))

    def tensors(self) -> list[torch.Tensor]:
        """Those that there are under the names, and in collections there."""
        leaves = itertools.chain.from_iterable(pytree.tree_leaves(value) for _, value in self._values)
        return [x for x in leaves if isinstance(x, torch.Tensor)]

    def restore(self, owners: Mapping[int, torch.Tensor]) -> None:
        """Put tensors back in whose place others were while the call was traced.

        Args:
            owners: the tensors by the identities of those.
        """
        for named, _ in self._values if owners else ():
            now = named.read()
            if named.write is not None and id(now) in owners:
                named.write(owners[id(now)])
            if isinstance(now, list | dict):
                for key, held in list(now.items() if isinstance(now, dict) else enumerate(now)):
                    if id(held) in owners:
                        now[key] = owners[id(held)]

    def give_back(self) -> None:
        """Let names have the tensors that they had."""
        for named, before in self._values:
            if isinstance(before, torch.Tensor) and named.write is not None and named.read() is not before:
                named.write(before)

    def put_back(self) -> None:
        """Let them be again what they were."""
        for named, before in self._plain:
            if named.write is not None and is_another(before, named.read()):
                named.write(before)
        for named in self._unset:
            if named.write is not None and named.read() is not UNSET:
                named.write(UNSET)
        self._held.put_back()

    def take_back(self, but_tensors: bool = False) -> None:
        """Let all be again as it was, in collections too: a call that was given up has left nothing.

        Args:
            but_tensors: whether collections keep what there is more, where tensors are among it.
        """
        self.put_back()
        self._held.take_back(but_tensors)


def names_read(module: torch.nn.Module, ignored: Collection[str] = ()) -> list[Named]:
    """The names that the code of a module's forward pass mentions or sets, but for those that do not concern it."""
    return [named for named in named_by(module) if named.name not in ignored]


def _name(label: str) -> str:
    return re.split("[.: ]+", label.partition("[")[0])[-1]


def _counts(module: torch.nn.Module, label: str, before: Any, now: Any) -> SetUpError:
    return _changes(module, [label], f"changes {label} from {before!r} to {now!r}", _name(label))


def _changes(module: torch.nn.Module, labels: Sequence[str], what: str, name: str) -> SetUpError:
    return SetUpError(
        labels,
        what,
        line_that_writes(module, name),
        "make it a buffer of the module, or change it outside of forward; where nothing is computed from it, "
        f"Options(ignored_attributes=({name!r},))",
    )
