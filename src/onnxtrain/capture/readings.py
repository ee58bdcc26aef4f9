"""What a call of a module reads: the code that runs, the data that it can see, the functions of torch that it calls.

The call runs with tensors that have no content, which is far less work than to trace it. Two calls that read the same
compute the same, so a graph that an earlier process traced serves the second one.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import hashlib
import inspect
import io
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from onnxtrain.capture.attribute_reads import OWN, Attribute, Reads
from onnxtrain.capture.autocast import device_types
from onnxtrain.capture.descriptions import Describer, TooMuchError, code_digest
from onnxtrain.capture.host_random import HostGenerators
from onnxtrain.capture.left_outside import left_by, take_out
from onnxtrain.capture.like_layers import names_within
from onnxtrain.capture.reached_code import unread
from onnxtrain.capture.recorder import recording
from onnxtrain.capture.rehearsal import fill_caches, untouched
from onnxtrain.capture.replay import lacks_content
from onnxtrain.capture.schema import flatten
from onnxtrain.capture.size_guards import repeated_among
from onnxtrain.capture.source_lines import PACKAGES, caught_among, codes_within, is_foreign, is_ours_or_torchs
from onnxtrain.errors import note, noted

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_OPENS = (builtins.open, io.open, os.open)
_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType, types.WrapperDescriptorType)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor))
_ENVIRONMENT = type(os.environ).__getitem__.__code__


class UnreadableError(Exception):
    """A call reads what is not known to be the same in another process."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a call read.

    Args:
        digest: SHA-256 of all of it.
        settle: does to the module what the call did to it, but for tensors.
        attributes: those among it that are collections, numbers or tensors.
        unread: attributes of users' classes that it did not read.
        tensors: those among it that are neither the module's nor the call's, in the order in which they were read.
    """

    digest: str
    settle: Callable[[], None]
    attributes: frozenset[Attribute]
    unread: frozenset[Attribute]
    tensors: tuple[torch.Tensor, ...]


def reading(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], ignored: Collection[str] = ()
) -> Reading:
    """Run a call on tensors without content, leave the module as it was, and say what it read.

    Raises:
        UnreadableError: it reads a file, or leaves a tensor outside of the module each time, or another profiler is at
            work.
        Exception: what the module raises, and torch's where it looks at the content of a tensor.
    """
    try:
        return _reading(module, args, kwargs, ignored)
    except _LeftOutsideError:
        fill_caches(module, args, kwargs, ignored)
        return _reading(module, args, kwargs, ignored)


class _LeftOutsideError(UnreadableError):
    """A call leaves a tensor outside of the module: in a cache, maybe."""


def _reading(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], ignored: Collection[str]
) -> Reading:
    if sys.getprofile() is not None:
        raise UnreadableError("a profiler is at work")
    named = names_within(module)
    tensors, schema = flatten((tuple(args), dict(kwargs)))
    without = FakeTensorMode(allow_non_fake_inputs=True)
    given = [without.from_tensor(t, static_shapes=True) for t in tensors]
    named |= {id(x): f"input {i}" for i, x in enumerate(given)}
    args, kwargs = schema.restore(given)
    of_module = Describer(named)
    reads, watched, calls = Reads(module), CodeWatch(Describer(named)), _Calls(named)
    try:
        state = _state(module, of_module, ignored)
        kept = untouched(module, (), ignored)
        quiet, read, drawn = recording(), reads.noted(), HostGenerators().untouched()
        with quiet, read, drawn, kept as taken_back, without, watched.running(), calls, Unwatched(), noted() as errors:
            module.forward(*args, **kwargs)
        if (caught := caught_among(errors)) is not None:
            raise UnreadableError(f"the forward pass catches {type(caught).__name__}")
    except (TooMuchError, RecursionError) as error:
        raise UnreadableError(f"{type(error).__name__}: {error}") from error
    finally:
        watched.release()
        where = take_out(left) if (left := left_by(sys.exc_info()[1], calls.release())) else []
    if where:
        raise _LeftOutsideError(f"it leaves a tensor outside of the module: in {', '.join(where)}")
    if watched.unreadable:
        raise UnreadableError(watched.unreadable)
    found = "\n".join((state, *sorted(watched.found), *calls.found, f"again {repeated_among(tensors)}"))
    digest, others = hashlib.sha256(found.encode()).hexdigest(), (*of_module.tensors, *watched.tensors)
    return Reading(digest, taken_back[0], frozenset(reads.found), unread(module, reads.unread()), others)


def _state(module: torch.nn.Module, describer: Describer, ignored: Collection[str]) -> str:
    """All of a module but the content of parameters and buffers, which are inputs of a graph."""
    lines = []
    for path, part in module.named_modules(remove_duplicate=False):
        lines.append(f"{path}: {describer.text(type(part))}")
        for table in (part._parameters, part._buffers):
            lines += [f"  {n} {_form(t)} {describer.text(t)}" for n, t in table.items() if t is not None]
        kept = {n: v for n, v in vars(part).items() if n not in OWN and n not in ignored}
        kept |= {n: list(vars(part)[n].values()) for n in _HOOKS if vars(part)[n] and part is not module}
        lines += [f"  {n} = {describer.text(v)}" for n, v in kept.items()]
    return "\n".join(lines)


def _form(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} {tensor.device} {tensor.requires_grad}"


class CodeWatch:
    """The code that runs, with the global names and closures that it can see, and variables of the environment.

    Args:
        describer: describes what is seen.

    Attributes:
        found: what was seen.
        unreadable: what is not known to be the same in another process; empty where there is nothing.
        tensors: those with content that were seen, once the objects are let go of.
        names: the global names that were seen, by the identity of their table and name: the table, and the value.
        watch: what ``sys.setprofile`` is given. It is kept: it sets and takes away itself while it runs, and Python
            calls what was freed.
    """

    def __init__(self, describer: Describer) -> None:
        self.found: set[str] = set()
        self.unreadable = ""
        self.tensors: list[torch.Tensor] = []
        self.watch = self._event
        self.names: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._describer = describer
        self._known: set[Any] = set()
        self._cells: list[Any] = []  # so that no identity comes again

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch what runs within it."""
        sys.setprofile(self.watch)
        try:
            yield
        finally:
            sys.setprofile(None)

    def release(self) -> None:
        """Let go of the objects that the code saw, but for tensors with content."""
        self.tensors = self._describer.tensors
        self._describer = Describer({})
        self._known.clear()
        self._cells.clear()

    def _event(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code is _ENVIRONMENT:
                key = frame.f_locals["key"]
                self.found.add(f"environment {key}={os.environ._data.get(os.environ.encodekey(key))!r}")  # type: ignore[attr-defined]
            elif code not in self._known or code.co_freevars:
                self._ran(frame, code)
        elif event == "c_call" and arg in _OPENS and (reader := _reader(frame)) is not None:
            self.unreadable = f"{reader.f_code.co_filename}:{reader.f_lineno} reads a file"

    def _ran(self, frame: types.FrameType, code: types.CodeType) -> None:
        if _is_foreign(frame) or code.co_name == "<module>":  # what an import defines is seen where it is read
            self._known.add(code)
            return
        cells = tuple(frame.f_locals.get(n) for n in code.co_freevars) if code.co_freevars else ()
        if (code, tuple(map(id, cells))) in self._known:
            return
        self._known |= {code, (code, tuple(map(id, cells)))}
        self._cells.append(cells)
        sys.setprofile(None)
        try:
            seen = [f"{n}={self._describer.text(v)}" for n, v in zip(code.co_freevars, cells, strict=True)]
            for shown, table, name in _globals(code, frame):
                seen.append(f"{shown}={self._describer.text(table[name])}")
                self.names[id(table), name] = table, table[name]
        finally:
            sys.setprofile(self.watch)
        self.found.add(f"{code.co_qualname} {code_digest(code)} {' '.join(seen)}")


class Unwatched(TorchFunctionMode):
    """Torch's own functions are not watched while they run, where nobody's code can run in them: there is much of it.

    They are what torch has in C, and ``torch.nn.functional``; the code of others that can run in them is a tensor's of
    a class of its own, a mode's, and a hook's of what autograd saves.
    """

    def __init__(self) -> None:
        super().__init__()
        modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
        self._is_alone = all(is_ours_or_torchs(inspect.getfile(type(mode))) for mode in modes)
        self._modes = torch._C._len_torch_dispatch_stack()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        watch = sys.getprofile()
        if watch is None or not self._calls_nobody(func, types, args):
            return func(*args, **(kwargs or {}))
        sys.setprofile(None)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            sys.setprofile(watch)

    def _calls_nobody(self, func: Callable[..., Any], types: Collection[type], args: Sequence[Any]) -> bool:
        """Whether a function is torch's, and runs torch's code only."""
        is_torchs = isinstance(func, _IN_C) or getattr(func, "__module__", "") == "torch.nn.functional"
        is_plain = is_torchs and _PLAIN.issuperset(types) and not any(map(callable, args))
        are_known = self._is_alone and torch._C._len_torch_dispatch_stack() == self._modes
        return is_plain and are_known and torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class GlobalNames:
    """Global names that some code saw, with what they were.

    Args:
        names: as ``CodeWatch`` has them.
    """

    def __init__(self, names: Mapping[tuple[int, str], tuple[dict[str, Any], Any]]) -> None:
        self._names = [(table, name, value, _content(value)) for (_, name), (table, value) in names.items()]

    def are_the_same(self) -> bool:
        """Whether they still are that."""
        return all(table.get(name) is v and _content(v) == text for table, name, v, text in self._names)


def _content(value: Any) -> str:
    """The text of what can change without being another object."""
    may_change = isinstance(value, list | dict | set) or not is_foreign(type(value).__module__)
    return Describer({}, while_traced=True).text(value) if may_change and not isinstance(value, type) else ""


def _is_foreign(frame: types.FrameType) -> bool:
    """Whether code is torch's, ours or Python's own, or of what torch is made of: their versions tell."""
    name = str(frame.f_globals.get("__name__"))
    file = frame.f_code.co_filename
    return is_foreign(name) or name.startswith("namedtuple_") or _is_standard(file) or is_ours_or_torchs(file)


def _is_standard(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(_STANDARD) and not file.startswith(PACKAGES))


def _reader(frame: types.FrameType | None) -> types.FrameType | None:
    """The frame that has a file opened; None where it is an import, or torch."""
    while frame is not None and _is_standard(file := frame.f_code.co_filename):
        if "importlib" in file:
            return None
        frame = frame.f_back
    return None if frame is None or _is_foreign(frame) else frame


def _globals(code: types.CodeType, frame: types.FrameType) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The global names of a function, those of its inner ones too, and what it may read in modules that they name.

    Each as it is shown, with the table that has it, and its name there.
    """
    names = dict.fromkeys(name for inner in codes_within(code) for name in inner.co_names)
    waiting = [("", frame.f_globals), ("", frame.f_builtins)]
    done: set[int] = set()
    while waiting:
        prefix, table = waiting.pop()
        for name in names:
            if name in table:
                value = table[name]
                yield prefix + name, table, name
                if isinstance(value, types.ModuleType) and id(value) not in done:
                    done.add(id(value))
                    waiting.append((f"{prefix}{name}.", vars(value)))


class _Calls(TorchFunctionMode):
    """Lists the functions of torch that are called, with all that they are given."""

    def __init__(self, named: Mapping[int, str]) -> None:
        super().__init__()
        self.found: list[str] = []
        self._named = dict(named)
        self._kept: list[Any] = []
        self._describer = Describer(self._named)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = self._all((args, kwargs or {}))
        try:
            made = func(*args, **(kwargs or {}))
        except Exception as error:
            if lacks_content(error):
                note(error)
            raise
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._named:
                self._named[id(leaf)] = f"{len(self._kept)} {_form(leaf)}"
                self._kept.append(leaf)
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        self.found.append(f"{getattr(func, '__qualname__', func)} {owner} {given}")
        return made

    def release(self) -> Callable[[], list[torch.Tensor]]:
        """Let go of what the functions returned; gives what finds that of it which somebody else keeps."""
        kept = [weakref.ref(t) for t in self._kept]
        self._kept.clear()
        self._describer = Describer({})
        return lambda: [t for find in kept if (t := find()) is not None]

    def _all(self, value: Any) -> str:
        if isinstance(value, tuple | list):
            return f"[{','.join(map(self._all, value))}]"
        if isinstance(value, dict):
            return f"[{','.join(f'{k}={self._all(v)}' for k, v in value.items())}]"
        return self._describer.text(value)


def digest_of_files(files: Collection[str]) -> str:
    """SHA-256 of the content of files; those that are not there count too."""
    digest = hashlib.sha256()
    for file in sorted(files):
        path = Path(file)
        digest.update(repr((file, path.read_bytes() if path.is_file() else None)).encode())
    return digest.hexdigest()


def ambient() -> tuple[Any, ...]:
    """What torch's own switches say."""
    autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in device_types()]
    attention = torch.backends.cuda
    kernels = (attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled(), attention.math_sdp_enabled())
    switches = (torch._C.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
    return (autocast, torch.get_default_dtype(), switches, kernels)
