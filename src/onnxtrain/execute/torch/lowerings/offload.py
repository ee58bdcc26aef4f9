"""Saved values that wait elsewhere for the backward pass: in the host's memory, or in files that are mapped into it."""

from __future__ import annotations

import functools
import mmap
import os
import tempfile
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from onnxtrain.errors import BackendError
from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor


@lowering("Offload", domain=DOMAIN)
def offload(x: Tensor, *, folder: str = "") -> Tensor:
    """A copy that takes no memory of the device, in the order in memory that x has.

    From an accelerator it is copied while other kernels run.

    Args:
        x: the value.
        folder: where its file is; empty for memory of the host, from which an accelerator reads by itself.
    """
    if isinstance(x, FakeTensor):
        return torch.empty_like(x, device="meta")
    if detect_fake_mode() is not None:  # a value with content among others without: it stays
        return x
    away = (
        _in_file(torch.empty_like(x, device="meta"), folder)
        if folder
        else torch.empty_like(x, device="cpu", pin_memory=True)
    )
    if x.device.type == "cpu":
        return away.copy_(x)
    stream = _stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        away.copy_(x, non_blocking=True)
    x.record_stream(stream)
    return away


@lowering("Fetch", domain=DOMAIN)
def fetch(away: Tensor, *, device: str) -> Tensor:
    """The value on its device again; to an accelerator it is under way until ``Fetched`` has it."""
    place = torch.device(device)
    if isinstance(away, FakeTensor):
        return torch.empty_like(away, device=place)
    if detect_fake_mode() is not None:
        return away
    if place.type == "cpu":
        return torch.empty_like(away).copy_(away)
    stream = _stream(place)
    made: Any = torch.empty_like(away, device=place)
    stream.wait_stream(torch.cuda.current_stream(place))  # by which this memory may have been read until now
    with torch.cuda.stream(stream):
        made.copy_(away, non_blocking=True)
        made.is_there = stream.record_event()
    made.record_stream(stream)
    return made


@lowering("Fetched", domain=DOMAIN, view=True)
def fetched(x: Any) -> Tensor:
    """The value when it is there."""
    if x.device.type != "cpu" and hasattr(x, "is_there"):
        torch.cuda.current_stream(x.device).wait_event(x.is_there)
    return x


@functools.cache
def _stream(device: torch.device) -> Any:
    """The stream of a device on which values come and go, one after the other."""
    return torch.cuda.Stream(device)


def _in_file(form: Tensor, folder: str) -> Tensor:
    """Memory without content of the form of a tensor, in a file that is gone when nobody has the memory any longer.

    Raises:
        BackendError: there is no room for it.
    """
    size = form.untyped_storage().nbytes()
    if not size:
        return torch.empty_like(form, device="cpu")
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # a write to memory without room behind it ends the process
        except OSError as error:
            raise BackendError(
                f"a value of {size} bytes cannot be kept in {folder}: {error.strerror}",
                cure="choose a folder with more room: Options(memory_offload=)",
            ) from error
        memory = mmap.mmap(file.fileno(), size)
    return torch.frombuffer(memory, dtype=form.dtype).as_strided(form.shape, form.stride())
