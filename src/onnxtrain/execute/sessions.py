"""What all sessions of onnxruntime in a process share: one arena, and processors that none of them holds in vain."""

from __future__ import annotations

import contextlib
import functools

import onnxruntime as ort

_FATAL_ONLY = 4  # onnxruntime's log severity; its errors are raised all the same


def session_options() -> ort.SessionOptions:
    """Options of a session that takes turns with others.

    Memory is of one arena: what one session frees the next one has. It is without a second plan of its content:
    onnxruntime plans memory for each shape of a batch it sees, and with batches of many shapes these plans cost almost
    as much memory again as they arrange. The threads of a session, which wait for more work awake, sleep as soon as its
    run ends: the next session, and PyTorch, have threads of their own, and there are no more processors for them.
    """
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    options.enable_mem_pattern = False
    _share_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


@functools.cache
def _share_arena() -> None:
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    with contextlib.suppress(Exception):  # the program has registered one already, which serves as well
        ort.create_and_register_allocator(memory, None)
