"""Settings and counters of the copies, for this process.

All of it is process-wide: there is one host pool, and one lane of copies per direction.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
import functools
import math
import os
import secrets
from collections.abc import Callable, Iterator

from tfswap.errors import TfswapError
from tfswap.native.load import CLook, CStats, load
from tfswap.support.sizes import parse_limit

_UNLIMITED = 2**64 - 1
_TEXT_BYTES = 4096  # of a message; a path may be so long


class _Unchanged(enum.Enum):
    """What an argument of `configure` is when it was not given: None already means "no limit"."""

    UNCHANGED = enum.auto()


_UNCHANGED = _Unchanged.UNCHANGED


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What `configure` set.

    Attributes:
        host_memory_limit: bytes that the host pool may take from the system, None for no limit.
        copy_threads: threads per direction; with 0, kernels that swap make their copies themselves, and the step waits
            for each. On a GPU the copies run on its copy engines instead, and what goes to disk has threads of its own.
        bandwidth_bytes_per_s: throttle of each direction of each device, None for none. CPU copies only.
        latency_us: what each copy waits in addition, in microseconds. CPU copies only.
        disk_bandwidth_bytes_per_s, disk_latency_us: the same of what goes to disk and comes back.
        disk_compression: what goes to disk is compressed on its way, without loss, where that saves anything.
    """

    host_memory_limit: int | None
    copy_threads: int
    bandwidth_bytes_per_s: float | None
    latency_us: float
    disk_bandwidth_bytes_per_s: float | None = None
    disk_latency_us: float = 0.0
    disk_compression: bool = False


@dataclasses.dataclass(frozen=True)
class SwapStats:
    """Counted since the process started, or since `reset_stats`, for all that swaps in it.

    Attributes:
        out_bytes, in_bytes: copied to host memory, and back.
        out_copies, in_copies: how many copies that were. Empty tensors are not copied.
        out_busy_s, in_busy_s: from each copy's start to its end, summed.
        disk_out_bytes, disk_in_bytes, disk_out_copies, disk_in_copies, disk_out_busy_s, disk_in_busy_s: the same of
            what went to disk instead.
        release_stall_s, await_stall_s: how long Release and Await ops waited, summed.
        at_once_s: how long steps made small copies themselves, on their own threads.
        pool_in_use_bytes: host memory held by handles and copies now.
        pool_reserved_bytes: host memory taken from the system now.
        pool_peak_bytes: the most that was in use.
        pool_limit_bytes: the most that may be taken: what `configure` allows, and no more than all that use the pool
            may take together. 2**64 - 1 for no limit.
        disk_in_use_bytes, disk_reserved_bytes, disk_peak_bytes: the same of files; with several files, the sum.
        spilled_bytes: put into host memory by sparse encodings that were denser than planned.
        disk_written_bytes, disk_read_bytes: what files had to take and give of disk_out_bytes and disk_in_bytes, in
            whole blocks: less where it was compressed.
    """

    out_bytes: int
    in_bytes: int
    out_copies: int
    in_copies: int
    out_busy_s: float
    in_busy_s: float
    disk_out_bytes: int
    disk_in_bytes: int
    disk_out_copies: int
    disk_in_copies: int
    disk_out_busy_s: float
    disk_in_busy_s: float
    release_stall_s: float
    await_stall_s: float
    at_once_s: float
    pool_in_use_bytes: int
    pool_reserved_bytes: int
    pool_peak_bytes: int
    pool_limit_bytes: int
    disk_in_use_bytes: int
    disk_reserved_bytes: int
    disk_peak_bytes: int
    spilled_bytes: int
    disk_written_bytes: int
    disk_read_bytes: int


@dataclasses.dataclass(frozen=True)
class StepStats:
    """What swapping did in one step, the latest of a function; so far, where it still runs.

    A step that fails or is cancelled is counted as far as it came. What its copies do after the next step has begun is
    nobody's.

    Attributes:
        out_bytes, in_bytes: copied to host memory, and back.
        disk_out_bytes, disk_in_bytes: copied to disk, and back.
        disk_written_bytes, disk_read_bytes: what the file had to take and give of these, in whole blocks: less where it
            was compressed (`tfswap.ops.configure`).
        copying_s: from each copy's start to its end, summed.
        stalled_s: how long the step waited for copies, or made small ones itself.
        pool_peak_bytes, disk_peak_bytes: the most that its tensors held of host memory, and on disk.
        cache_hits: tensors that stayed on the device, though the plan for larger arguments moves them.
        device_peak_bytes: the device allocator's peak after the step, None where it has none. It is that of the program
            so far: its statistics are the user's, and never reset here. Call
            `tf.config.experimental.reset_memory_stats` before a step to have the step's own.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    disk_out_bytes: int = 0
    disk_in_bytes: int = 0
    copying_s: float = 0.0
    stalled_s: float = 0.0
    pool_peak_bytes: int = 0
    disk_peak_bytes: int = 0
    cache_hits: int = 0
    device_peak_bytes: int | None = None
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0

    @property
    def overlap(self) -> float:
        """The share of the time copying that the step did not wait for; 1.0 where nothing was copied."""
        return max(0.0, 1.0 - self.stalled_s / self.copying_s) if self.copying_s else 1.0


def configure(
    *,
    host_memory_limit: int | str | _Unchanged | None = _UNCHANGED,
    copy_threads: int | _Unchanged = _UNCHANGED,
    bandwidth_bytes_per_s: float | _Unchanged | None = _UNCHANGED,
    latency_us: float | _Unchanged = _UNCHANGED,
    disk_bandwidth_bytes_per_s: float | _Unchanged | None = _UNCHANGED,
    disk_latency_us: float | _Unchanged = _UNCHANGED,
    disk_compression: bool | _Unchanged = _UNCHANGED,
) -> Configuration:
    """Changes the settings that are given, immediately and for copies under way too. Others stay as they are.

    What each one is, `Configuration` says.

    Args:
        host_memory_limit: bytes, or a size ("6GiB"); 0 for none at all, None for no limit.
        disk_compression: planes of bytes, compressed by TensorFlow's zstd, for a disk that steps wait for: it takes
            time of the host's cores. Plans do not count on it, and its memory is part of what `spill_dir` takes anyway.

    Returns the settings now in force.

    Raises:
        TfswapError: no such size or number, a negative one, no thread at all, or this TensorFlow has no zstd.
    """
    now = configuration()
    wanted = Configuration(
        host_memory_limit=_host_bytes(_chosen(host_memory_limit, now.host_memory_limit)),
        copy_threads=_chosen(copy_threads, now.copy_threads),
        bandwidth_bytes_per_s=_chosen(bandwidth_bytes_per_s, now.bandwidth_bytes_per_s),
        latency_us=_chosen(latency_us, now.latency_us),
        disk_bandwidth_bytes_per_s=_chosen(disk_bandwidth_bytes_per_s, now.disk_bandwidth_bytes_per_s),
        disk_latency_us=_chosen(disk_latency_us, now.disk_latency_us),
        disk_compression=_chosen(disk_compression, now.disk_compression),
    )
    _check(wanted)
    c = load().c
    if not c.tfswap_set_disk_compression(wanted.disk_compression):
        raise TfswapError("disk_compression is True, and this TensorFlow exports no zstd: leave it off")
    if wanted.host_memory_limit != now.host_memory_limit:
        limit = wanted.host_memory_limit
        c.tfswap_set_host_limit(_UNLIMITED if limit is None else limit)
    if wanted.copy_threads != now.copy_threads:
        c.tfswap_set_copy_threads(wanted.copy_threads)
    throttle = (wanted.bandwidth_bytes_per_s, wanted.latency_us)
    if throttle != (now.bandwidth_bytes_per_s, now.latency_us):
        c.tfswap_set_throttle(wanted.bandwidth_bytes_per_s or 0.0, wanted.latency_us)
    throttle = (wanted.disk_bandwidth_bytes_per_s, wanted.disk_latency_us)
    if throttle != (now.disk_bandwidth_bytes_per_s, now.disk_latency_us):
        c.tfswap_set_disk_throttle(wanted.disk_bandwidth_bytes_per_s or 0.0, wanted.disk_latency_us)
    return configuration()


def configuration() -> Configuration:
    """The settings in force."""
    c = load().c
    limit = c.tfswap_host_limit()
    return Configuration(
        host_memory_limit=None if limit == _UNLIMITED else limit,
        copy_threads=c.tfswap_copy_threads(),
        bandwidth_bytes_per_s=c.tfswap_bandwidth() or None,
        latency_us=c.tfswap_latency_us(),
        disk_bandwidth_bytes_per_s=c.tfswap_disk_bandwidth() or None,
        disk_latency_us=c.tfswap_disk_latency_us(),
        disk_compression=c.tfswap_disk_compression(),
    )


def reserve(host_bytes: int) -> None:
    """Takes host memory for a plan's swapped tensors now, in one block, instead of step by step.

    Does nothing when the pool has such a block already. CPU pool only: of a GPU's pinned pool the step itself
    reserves what it needs, when TensorFlow makes it.

    Raises:
        ValueError: `host_bytes` is negative.
        MemoryError: the host limit forbids it, or the system has no more.
    """
    if host_bytes < 0:
        raise ValueError(f"reserve() takes a number of bytes, got {host_bytes}")
    failure = load().c.tfswap_reserve(host_bytes)
    if failure == 0:
        return
    now = stats()
    cause, remedy = f"host_memory_limit={now.pool_limit_bytes}", "Raise host_memory_limit="
    if failure != 1:
        cause = "the system has no more"
        remedy = "Free memory on this machine, let some of it go to disk (host_memory_limit= and spill_dir=)"
    raise MemoryError(
        f"tfswap can't reserve {host_bytes} bytes of host memory: {cause} "
        f"({now.pool_reserved_bytes} bytes are reserved already). {remedy}, or swap less (a higher memory_limit=)."
    )


def register(owner: int, host_limit: int | None, spill_dir: str | None = None, spill_limit: int | None = None) -> None:
    """Registers `owner` as a user of the host pool that may take so many bytes, of it and in a file in `spill_dir`;
    None for no limit, and for no such file.

    The pool's limit is the sum over all owners. That may be repeated, counts once, and ends with as many calls of
    `unregister`. The kernels of a rewritten step register by themselves, as long as they are there.

    Raises:
        OSError: there can't be a file in `spill_dir`, or no host memory for what goes there.
    """
    host, spill = (_UNLIMITED if limit is None else limit for limit in (host_limit, spill_limit))
    why = ctypes.create_string_buffer(_TEXT_BYTES)
    load().c.tfswap_register(owner, host, os.fsencode(spill_dir or ""), spill, why, _TEXT_BYTES)
    if why.value:
        raise OSError(why.value.decode(errors="replace"))


def unregister(owner: int) -> None:
    """Takes back one `register` of that owner."""
    load().c.tfswap_unregister(owner)


def reserve_disk(owner: int, disk_bytes: int, step: str) -> None:
    """Takes space for a plan's tensors now, in the file that `owner` is registered for.

    Args:
        step: for messages.

    Raises:
        OSError: the limit forbids it, or there is no more.
    """
    why = ctypes.create_string_buffer(_TEXT_BYTES)
    load().c.tfswap_reserve_disk(owner, disk_bytes, step.encode(), why, _TEXT_BYTES)
    if why.value:
        raise OSError(why.value.decode(errors="replace"))


def stats() -> SwapStats:
    """What was copied and waited for so far."""
    raw = CStats()
    load().c.tfswap_stats(ctypes.byref(raw))
    return SwapStats(**{field.name: getattr(raw, field.name) for field in dataclasses.fields(SwapStats)})


def step_stats(owner: int, device_peak_bytes: int | None = None, cache_hits: int = 0) -> StepStats:
    """What swapping did in the owner's latest step; see StepStats for what the ops do not count themselves."""
    raw = CStats()
    load().c.tfswap_step_stats(owner, ctypes.byref(raw))
    return StepStats(
        out_bytes=raw.out_bytes,
        in_bytes=raw.in_bytes,
        disk_out_bytes=raw.disk_out_bytes,
        disk_in_bytes=raw.disk_in_bytes,
        copying_s=raw.out_busy_s + raw.in_busy_s + raw.disk_out_busy_s + raw.disk_in_busy_s,
        stalled_s=raw.release_stall_s + raw.await_stall_s + raw.at_once_s,
        pool_peak_bytes=raw.pool_peak_bytes,
        disk_peak_bytes=raw.disk_peak_bytes,
        cache_hits=cache_hits,
        device_peak_bytes=device_peak_bytes,
        disk_written_bytes=raw.disk_written_bytes,
        disk_read_bytes=raw.disk_read_bytes,
    )


def keep_states(owner: int) -> None:
    """From now on random ops of this owner's steps go on where those of its earlier plans have stopped."""
    load().c.tfswap_keep_states(owner)


def forget_owner(owner: int) -> None:
    """Nobody asks for this owner's steps any more."""
    load().c.tfswap_forget_owner(owner)
    load().c.tfswap_drop_states(owner)


def reset_stats() -> None:
    """Sets all counters to zero, and the pool's peak to what is in use now."""
    load().c.tfswap_reset_stats()


def _chosen(given, now):
    return now if given is _UNCHANGED else given


def _host_bytes(limit: int | str | None) -> int | None:
    """What `configure` allows: as a limit of a step's, but for 0, with which the pool takes nothing."""
    if limit is None:
        return None
    if limit == 0 and not isinstance(limit, bool):
        return 0
    return parse_limit(limit, name="host_memory_limit")


def _check(wanted: Configuration) -> None:
    threads = wanted.copy_threads
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 0:
        raise TfswapError(f"copy_threads is {threads!r}: give a whole number of 0 or more")
    for name in ("bandwidth_bytes_per_s", "disk_bandwidth_bytes_per_s"):
        bandwidth = getattr(wanted, name)
        if bandwidth is not None and not (_is_number(bandwidth) and 0 < bandwidth < math.inf):
            raise TfswapError(f"{name} is {bandwidth!r}: give a positive number, or None for no throttle")
    for name in ("latency_us", "disk_latency_us"):
        latency = getattr(wanted, name)
        if not (_is_number(latency) and 0 <= latency < math.inf):
            raise TfswapError(f"{name} is {latency!r}: give a number of 0 or more")
    if not isinstance(wanted.disk_compression, bool):
        raise TfswapError(f"disk_compression is {wanted.disk_compression!r}: give True or False")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def l3_cache_bytes() -> int:
    """The last-level cache as TensorFlow's kernels see it, some of which size their buffers by it."""
    return load().c.tfswap_l3_cache_bytes()


def onednn_dtypes() -> tuple[str, ...]:
    """Types of elements that oneDNN's kernels take on this processor, of those that they may, in order."""
    import tensorflow as tf

    asked = (tf.bfloat16, tf.float16, tf.float32)
    return tuple(dtype.name for dtype in asked if load().c.tfswap_onednn_takes(dtype.as_datatype_enum))


def new_gate() -> int:
    """A gate for a step, by its number. Random: a function that another process saved may bring its own gate here."""
    gate = secrets.randbits(62)
    watch_gate(gate)
    return gate


@contextlib.contextmanager
def instantiating() -> Iterator[None]:
    """Meanwhile planned steps that this thread calls are made, with their kernels and constants, and not run.

    What such a call returns is no result.
    """
    from tensorflow.python.eager import context

    only = load().c.tfswap_instantiate_only
    with context.execution_mode(context.SYNC):
        only(True)
        try:
            yield
        finally:
            only(False)


def watch_gate(gate: int) -> None:
    """Keeps from now on what TensorFlow makes behind this gate, for `executed`."""
    load().c.tfswap_watch_gate(gate)


def forget_gate(gate: int) -> None:
    """Nobody asks about the step behind this gate any more."""
    load().c.tfswap_forget_gate(gate)


def new_step(token: str) -> int:
    """A number for what Python runs inside of other functions; `token` is its name there. Random, as of a gate."""
    step = secrets.randbits(62)
    load().c.tfswap_set_step(step, token.encode())
    return step


def forget_step(step: int) -> None:
    """Python has nothing any more for the step of this number."""
    load().c.tfswap_set_step(step, b"")


@contextlib.contextmanager
def limits_unchecked() -> Iterator[None]:
    """While active, steps of files run wherever there is room, in all of the process: their values are asked for."""
    load().c.tfswap_check_limits(False)
    try:
        yield
    finally:
        load().c.tfswap_check_limits(True)


def executed(gate: int) -> bytes:
    """What TensorFlow made the step behind this gate from, a FunctionDefLibrary: its function on each device, and what
    these call. Empty where it has not been made since the last time.
    """
    take = load().c.tfswap_take_executed
    room, buffer = 0, None
    while size := take(gate, buffer, room):
        if buffer is not None and size <= room:
            return buffer.raw[:size]
        room, buffer = size, ctypes.create_string_buffer(size)
    return b""


@functools.cache
def looker() -> Callable[[int, bool], CLook]:
    """What looks at an allocator: all that a call has to know before its step and after it, in one, since each asks.

    It takes the allocator, as ArenaMap gives it, 0 for none; and whether a step comes next, which finds the arena in
    the layout that is reported. It keeps the interpreter's lock: it takes a microsecond or so, and another thread that
    got the lock meanwhile would keep it for thousands.
    """
    return ctypes.PYFUNCTYPE(CLook, ctypes.c_uint64, ctypes.c_bool)(("tfswap_look", load().c))
