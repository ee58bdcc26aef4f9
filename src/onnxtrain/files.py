"""Files are read whole and written whole: nothing but regular files is opened, and nothing is left half-written.

A new file has a hidden ``.partial`` name until it is complete. Its writer holds a lock on it, so that whoever writes
there next can tell what a kill left from what another process is writing.

Several files that belong together appear at once: all are complete under their partial names before a small marker
says which of them become what. Whoever opens a file of a folder where a kill left such a marker finishes it first.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from onnxtrain.errors import ArtifactError, OnnxTrainError, WriteError, first_line

try:
    import fcntl
except ImportError:  # Windows, where a file that is open can neither be renamed nor removed
    fcntl = None  # type: ignore[assignment]

_MARKER = "artifacts.commit"
_LARGEST_MARKER = 2**16
_OLD = 24 * 3600  # seconds, after which a partial file is dead where there are no locks


def read_file(path: str | os.PathLike[str], error: type[OnnxTrainError], cure: str) -> bytes:
    """The content of a regular file.

    Args:
        path: the file.
        error: what is raised where there is none, or what is there is a folder, a pipe or a device.
        cure: what to do then.
    """
    check_file(path, error, cure)
    try:
        return Path(path).read_bytes()
    except OSError as found:
        raise error(f"{os.fspath(path)} cannot be read: {found.strerror}", cure=cure) from found


def check_file(path: str | os.PathLike[str], error: type[OnnxTrainError], cure: str) -> int:
    """The size of a regular file that fits into memory; errors as for ``read_file``."""
    try:
        found = os.stat(os.fspath(path))  # a number would be an open file
    except (OSError, ValueError, TypeError) as problem:  # a name that is none: a number, or zeros in it
        what = getattr(problem, "strerror", None) or first_line(problem)
        raise error(f"{path!s} cannot be read: {what}", cure=cure) from problem
    if not stat.S_ISREG(found.st_mode):
        raise error(f"{os.fspath(path)} cannot be read: it is a {_kind(found.st_mode)}, no file", cure=cure)
    if found.st_size > memory():
        raise error(f"{os.fspath(path)} has {found.st_size:,} bytes, more than this machine has memory", cure=cure)
    return found.st_size


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))
    return next((name for test, name in kinds if test(mode)), "device")


def memory() -> int:
    """Bytes of memory that the machine has; where it does not say, more than any has."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 2**63


def read_artifact(path: str | os.PathLike[str], error: type[OnnxTrainError], cure: str) -> bytes:
    """``read_file`` of a file of artifacts: a set that a kill left half in its place is finished first."""
    folder = Path(path).parent if isinstance(path, str | os.PathLike) else None
    if folder is not None and "\0" not in str(folder):  # such a path has an error of its own
        finish(folder)
    return read_file(path, error, cure)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a partial name, flush it to the disk, then rename: a kill leaves the old or the new file.

    A link stays and what it leads to is replaced; the new file has the mode of the old one. What kills left of earlier
    writes of this file is removed.

    Raises:
        WriteError: it cannot be written.
    """
    with partial_of(path) as (partial, target):
        partial.write_bytes(content)
        _flush(partial)
        partial.replace(target)


@contextlib.contextmanager
def partial_of(path: Path) -> Iterator[tuple[Path, Path]]:
    """A new empty file to be filled and renamed, and the file that it is to become; without a rename it is removed.

    Raises:
        WriteError: whatever fails within with an ``OSError``.
    """
    with _as_write_errors(path), contextlib.ExitStack() as stack:
        target = path.resolve() if path.is_symlink() else path
        target.parent.mkdir(parents=True, exist_ok=True)
        finish(target.parent)
        _refuse_others(target)
        remove_partials(target)
        yield stack.enter_context(_partial(target)), target


@contextlib.contextmanager
def _as_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OnnxTrainError:
        raise
    except (OSError, ValueError) as error:
        what = f"{path} cannot be written: {getattr(error, 'strerror', None) or first_line(error)}"
        raise WriteError(what, cure="check the path, the rights and the space there") from error


def _refuse_others(target: Path) -> None:
    """What is no file is not replaced by one."""
    if target.exists() and not target.is_file():
        kind = _kind(target.stat().st_mode)
        raise WriteError(f"{target} cannot be written: it is a {kind}, no file", cure="give the path of a file")


@contextlib.contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """A new partial file of a target with its mode, locked as long as it is needed; what a marker names stays."""
    path = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    with _locked(path, os.O_CREAT | os.O_EXCL, wait=True):
        try:
            if target.exists():
                os.chmod(path, stat.S_IMODE(target.stat().st_mode))
            yield path
        finally:
            if not any(path.name in marker.read_text() for marker in _markers(path.parent)):
                path.unlink(missing_ok=True)


def _markers(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f".*{_MARKER}") if path.is_file()]


@contextlib.contextmanager
def _locked(path: Path, flags: int = 0, wait: bool = False) -> Iterator[bool]:
    """Open and lock a file; says whether it is ours, which a lock that another process holds denies."""
    opened = os.open(path, os.O_RDWR | flags, 0o666)
    if fcntl is None:
        os.close(opened)
        yield time.time() - path.stat().st_mtime > _OLD
        return
    try:
        yield _lock(opened, wait)
    finally:
        os.close(opened)


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _lock(opened: int, wait: bool = False) -> bool:
    if fcntl is None:
        return False  # the file is open, which is as good
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: only what is old is known to be dead
        return time.time() - os.fstat(opened).st_mtime > _OLD
    return True


def remove_partials(target: Path) -> None:
    """Remove what kills left of earlier writes of a file; what another process is writing stays."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(path.lstat().st_mode):
                continue
            with _locked(path) as is_dead:
                if is_dead:
                    finish(target.parent)  # its writer may have left a marker that names it
                    path.unlink(missing_ok=True)


def write_set(folder: Path, prefix: str, files: Mapping[str, bytes], gone: Iterable[str] = ()) -> None:
    """Write files that belong together: a kill at any moment leaves all the old ones or, once opened, all the new.

    Args:
        folder: where they go; it is made where there is none.
        prefix: of their names; each prefix has a set of its own.
        files: content by name.
        gone: names of files of the set before that the new one does not have, which are removed.

    Raises:
        WriteError: they cannot be written; the old ones are still there.
    """
    marker = folder / f".{prefix}{_MARKER}"
    with _as_write_errors(folder), contextlib.ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        finish(folder)
        for name in (*files, *gone, marker.name):
            _refuse_others(folder / name)
            remove_partials(folder / name)
        partials = {name: stack.enter_context(_partial(folder / name)) for name in files}
        for name, content in files.items():
            partials[name].write_bytes(content)
            _flush(partials[name])
        plan = {"become": {path.name: name for name, path in partials.items()}, "gone": [*gone]}
        _put_in_place(marker, plan)


def _put_in_place(marker: Path, plan: Mapping[str, Any]) -> None:
    """Commit to a plan and carry it out; from the marker on, nothing goes back."""
    try:
        with _partial(marker) as partial:
            partial.write_text(json.dumps(plan))
            _flush(partial)
            while not _place(partial, marker):  # another process is about to put its own set in place
                finish(marker.parent)
    finally:
        finish(marker.parent)


def _place(partial: Path, marker: Path) -> bool:
    """Give a marker its name where no other has it."""
    try:
        os.link(partial, marker)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        partial.replace(marker)
    return True


def finish(folder: Path) -> None:
    """Put sets of files in place that a kill left half there.

    Raises:
        ArtifactError: that is not possible, or a marker is not one of ours.
    """
    for marker in folder.glob(f".*{_MARKER}"):
        try:
            _finish(marker)
        except OSError as error:
            what = f"the artifacts in {folder} were cut off while they were put in place: {first_line(error)}"
            raise ArtifactError(what, cure="open them once with the right to write there") from error


def _finish(marker: Path) -> None:
    cure = f"remove {marker}, and generate the artifacts again"
    if not os.path.lexists(marker):
        return
    if check_file(marker, ArtifactError, cure) > _LARGEST_MARKER:
        raise ArtifactError(f"{marker} is larger than {_LARGEST_MARKER} bytes", cure=cure)
    if hasattr(os, "geteuid") and marker.lstat().st_uid != os.geteuid():  # it could say what is to be removed
        raise ArtifactError(f"{marker} belongs to another user", cure="let its owner open the artifacts once")
    with contextlib.suppress(FileNotFoundError), marker.open("rb") as file:
        _lock(file.fileno(), wait=True)
        if not marker.exists() or not os.path.samestat(marker.stat(), os.fstat(file.fileno())):
            return  # its writer has just finished
        become, gone = _plan(file.read(), marker, cure)
        for partial, name in become.items():
            with contextlib.suppress(FileNotFoundError):  # renamed before the kill
                (marker.parent / partial).replace(marker.parent / name)
        for name in gone:
            (marker.parent / name).unlink(missing_ok=True)
        _flush_folder(marker.parent)
        if fcntl is not None:
            marker.unlink()
    if fcntl is None:  # a file that is open cannot be removed there
        marker.unlink(missing_ok=True)


def _plan(content: bytes, marker: Path, cure: str) -> tuple[dict[str, str], list[str]]:
    """What a marker says: partial files and what they become, and what goes; all in its own folder."""
    try:
        plan = json.loads(content)
        become, gone = dict(plan["become"]), list(plan["gone"])
        names = [*become, *become.values(), *gone]
        sound = all(isinstance(n, str) and Path(n).name == n not in ("", "..") for n in names)
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{marker} is damaged: {first_line(error)}", cure=cure) from error
    if not sound or not all(n.startswith(".") and n.endswith(".partial") for n in become):
        raise ArtifactError(f"{marker} is damaged: it names files outside of its folder", cure=cure)
    return become, gone


def _flush_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some systems do not open folders
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
