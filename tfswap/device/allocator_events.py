"""Records the events of this process's BFC allocators for a time, by TensorFlow's own recorder.

A recording costs what the program allocates meanwhile, about a microsecond an event, and nothing at other times.

Not handled: a program that records for itself with TensorFlow's profiler. There is one recorder, so nothing is recorded
as long as it does; `yielding` lets it begin at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfswap.analysis.allocator_events import AllocatorEvent, parse_events
from tfswap.device import arena
from tfswap.native.load import load

MOST_EVENTS = 200_000
"""The most events of a recording that are read: about 60 MB of text."""
_GPU_ARENA = re.compile(r"(?:GPU|PluggableDevice)_(\d+)_bfc")
_CPU_ARENA = "bfc_cpu_allocator_for_gpu"
"""The names of allocators (gpu_process_state.cc, pluggable_device_process_state.cc, process_state.cc)."""


def device_of(allocator: str) -> str:
    """The device whose arena an allocator is, "GPU:0"; empty where it is none's, as that of pinned host memory."""
    if found := _GPU_ARENA.fullmatch(allocator):
        return f"GPU:{found[1]}"
    return "CPU:0" if allocator == _CPU_ARENA else ""


def begin_recording() -> bool:
    """Begin to record; returns whether it does. False where another profiler records."""
    return load().c.tfswap_record_allocator_events()


def end_recording() -> list[AllocatorEvent]:
    """End what `begin_recording` began; returns the events, in order of time, of devices' arenas only."""
    size = load().c.tfswap_stop_allocator_events(MOST_EVENTS)
    buffer = ctypes.create_string_buffer(size)
    load().c.tfswap_copy_allocator_events(buffer)
    return [event for event in parse_events(buffer.raw.decode(errors="replace")) if device_of(event.allocator)]


def chunks_in_use(device: str) -> Mapping[int, int]:
    """The bytes of the chunks that are in use in a device's arena, by address."""
    return {address: size for address, size, in_use in arena.snapshot(device).chunks if in_use}


@contextlib.contextmanager
def yielding(end: Callable[[], None]) -> Iterator[None]:
    """While active, `end` is called before the program makes a profiler session of its own."""
    from tensorflow.python.profiler.internal import _pywrap_profiler

    module: Any = _pywrap_profiler
    plain = module.ProfilerSession

    def session(*args: Any, **kwargs: Any) -> Any:
        end()
        return plain(*args, **kwargs)

    module.ProfilerSession = session
    try:
        yield
    finally:
        module.ProfilerSession = plain
