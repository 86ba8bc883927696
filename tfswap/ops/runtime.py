"""Settings and counters of swapping.

All are of the whole process: it has one host pool, and one queue of copies per direction.
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
from collections.abc import Callable, Iterator, Mapping

from tfswap.errors import TfswapError
from tfswap.native.load import CArenaReading, CStats, load
from tfswap.ops.prometheus import Metrics
from tfswap.support.sizes import parse_limit

_UNLIMITED = 2**64 - 1
_TEXT_BYTES = 4096  # the longest message, with a path in it


class _Unchanged(enum.Enum):
    """The default of `configure`'s arguments. None is taken: it means "no limit"."""

    UNCHANGED = enum.auto()


_UNCHANGED = _Unchanged.UNCHANGED


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The settings of swapping in this process.

    Attributes:
        host_memory_limit: bytes that the host pool may take from the system, None for no limit.
        copy_threads: threads per direction. With 0 the kernels copy on the step's own threads, and the step waits for
            each copy. On a GPU the copy engines copy instead. Copies to and from disk have their own threads.
        bandwidth_bytes_per_s: the highest rate of copies per direction and device, None for unlimited. CPU only.
        latency_us: a delay added to each copy, in microseconds. CPU only.
        disk_bandwidth_bytes_per_s, disk_latency_us: the same for copies to and from disk.
        disk_compression: whether tensors are compressed on their way to disk, without loss, where that saves space.
    """

    host_memory_limit: int | None
    copy_threads: int
    bandwidth_bytes_per_s: float | None
    latency_us: float
    disk_bandwidth_bytes_per_s: float | None = None
    disk_latency_us: float = 0.0
    disk_compression: bool = False


@dataclasses.dataclass(frozen=True)
class SwapStats(Metrics):
    """Counters of all swapping in this process, since it started or since `reset_stats`.

    Attributes:
        out_bytes, in_bytes: bytes copied to host memory, and back.
        out_copies, in_copies: the number of these copies. Empty tensors are not copied.
        out_busy_s, in_busy_s: the durations of these copies, summed.
        disk_out_bytes, disk_in_bytes, disk_out_copies, disk_in_copies, disk_out_busy_s, disk_in_busy_s: the same for
            copies to disk, and back.
        release_stall_s, await_stall_s: how long Release and Await ops waited, summed.
        inline_copy_s: how long steps copied small tensors on their own threads.
        pool_in_use_bytes: host memory in use now, for handles, copies, and variables at home on the host.
        pool_reserved_bytes: host memory taken from the system now.
        pool_peak_bytes: the highest `pool_in_use_bytes`.
        pool_limit_bytes: the most that the pool may take from the system: the lower of `configure`'s limit and the sum
            of its owners' limits. 2**64 - 1 for no limit.
        home_bytes: of `pool_in_use_bytes`, those of variables at home on the host.
        disk_in_use_bytes, disk_reserved_bytes, disk_peak_bytes: the same for spill files, summed over them.
        spilled_bytes: bytes in host memory of sparse encodings that had more values than planned.
        disk_written_bytes, disk_read_bytes: bytes written and read for disk_out_bytes and disk_in_bytes, in whole
            blocks. Compression makes them fewer.
        lent_out_bytes, lent_in_bytes, lent_out_copies, lent_in_copies, lent_out_busy_s, lent_in_busy_s: as those
            without `lent_`, for copies to another device's memory, and back.
    """

    GROWING = frozenset(
        f"{where}{way}_{what}"
        for where in ("", "disk_", "lent_")
        for way in ("out", "in")
        for what in ("bytes", "copies", "busy_s")
    ) | {"release_stall_s", "await_stall_s", "inline_copy_s", "spilled_bytes", "disk_written_bytes", "disk_read_bytes"}

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
    inline_copy_s: float
    pool_in_use_bytes: int
    pool_reserved_bytes: int
    pool_peak_bytes: int
    pool_limit_bytes: int
    home_bytes: int
    disk_in_use_bytes: int
    disk_reserved_bytes: int
    disk_peak_bytes: int
    spilled_bytes: int
    disk_written_bytes: int
    disk_read_bytes: int
    lent_out_bytes: int
    lent_in_bytes: int
    lent_out_copies: int
    lent_in_copies: int
    lent_out_busy_s: float
    lent_in_busy_s: float


@dataclasses.dataclass(frozen=True)
class StepStats(Metrics):
    """Counters of a function's latest step. While it runs, they are what it has done so far.

    A step that fails or is cancelled is counted up to there. Copies of a step that end after the next one has begun are
    not counted.

    Attributes:
        out_bytes, in_bytes: bytes copied to host memory, and back.
        disk_out_bytes, disk_in_bytes: bytes copied to disk, and back.
        disk_written_bytes, disk_read_bytes: bytes written and read for these, in whole blocks. Compression makes them
            fewer (`tfswap.ops.configure`).
        copying_s: the durations of the copies, summed.
        stalled_s: how long the step waited for copies, and copied small tensors on its own threads.
        pool_peak_bytes, disk_peak_bytes: the most that its tensors took of host memory, and on disk.
        lent_out_bytes, lent_in_bytes, lent_peak_bytes: the same for memory of other devices.
        cache_hits: tensors that stayed on the device, though the plan for larger arguments moves them.
        device_peaks: by the name of each device of the step, its allocator's peak after the step, None where it keeps
            none. It is the program's peak so far, for tfswap never resets the allocator's statistics. For the step's
            own peak, call `tf.config.experimental.reset_memory_stats` before the step. The other counters are of all
            devices together.
    """

    GROUP = "tfswap_step"

    out_bytes: int = 0
    in_bytes: int = 0
    disk_out_bytes: int = 0
    disk_in_bytes: int = 0
    copying_s: float = 0.0
    stalled_s: float = 0.0
    pool_peak_bytes: int = 0
    disk_peak_bytes: int = 0
    cache_hits: int = 0
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    lent_out_bytes: int = 0
    lent_in_bytes: int = 0
    lent_peak_bytes: int = 0
    device_peaks: Mapping[str, int | None] = dataclasses.field(default_factory=dict)

    @property
    def device_peak_bytes(self) -> int | None:
        """The peak of the first device; None where its allocator keeps none."""
        return next(iter(self.device_peaks.values()), None)

    @property
    def overlap(self) -> float:
        """The share of `copying_s` that the step did not wait for; 1.0 where nothing was copied."""
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
    """Changes the given settings, immediately and for copies under way too. `Configuration` describes each.

    Args:
        host_memory_limit: bytes, or a size ("6GiB"); 0 for no host memory, None for no limit.
        disk_compression: compresses with TensorFlow's zstd, after sorting the bytes of elements by their place. Use it
            where steps wait for a slow disk: it takes time of the host's cores. Plans do not count on its savings. It
            needs no memory beyond what `spill_dir` takes.

    Returns the settings now in force.

    Raises:
        TfswapError: an argument is no such size or number, or is negative, or this TensorFlow has no zstd.
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


def reserve(host_bytes: int, *, more: bool = False) -> None:
    """Takes one block of host memory from the system for a plan's swapped tensors, where the pool has none as large.

    For the CPU's pool only. A step on a GPU reserves pinned memory itself, when TensorFlow instantiates it.

    Args:
        more: have these bytes in addition to those in use.

    Raises:
        ValueError: `host_bytes` is negative.
        MemoryError: the host limit forbids it, or the system has no more.
    """
    if host_bytes < 0:
        raise ValueError(f"reserve() takes a number of bytes, got {host_bytes}")
    failure = load().c.tfswap_reserve(host_bytes, more)
    if failure == 0:
        return
    now = stats()
    cause, remedy = f"host_memory_limit={now.pool_limit_bytes}", "Raise host_memory_limit="
    if failure != 1:
        cause = "the system has no more"
        remedy = "Free memory on this machine, store a part on disk (host_memory_limit= and spill_dir=)"
    raise MemoryError(
        f"tfswap can't reserve {host_bytes} bytes of host memory: {cause} "
        f"({now.pool_reserved_bytes} bytes are reserved already). {remedy}, or swap less (a higher memory_limit=)."
    )


def register(owner: int, host_limit: int | None, spill_dir: str | None = None, spill_limit: int | None = None) -> None:
    """Registers an owner of host memory. The pool's limit is the sum of its owners' limits.

    An owner that registers again counts once, until it has called `unregister` as often. The kernels of a rewritten
    step register themselves while they exist.

    Args:
        host_limit: bytes of the pool that it may take, None for no limit.
        spill_dir: where it has a spill file, None for none.
        spill_limit: bytes that it may take there, None for no limit.

    Raises:
        OSError: the file can't be made, or the host has no memory for the buffers of its copies.
    """
    host, spill = (_UNLIMITED if limit is None else limit for limit in (host_limit, spill_limit))
    why = ctypes.create_string_buffer(_TEXT_BYTES)
    load().c.tfswap_register(owner, host, os.fsencode(spill_dir or ""), spill, why, _TEXT_BYTES)
    if why.value:
        raise OSError(why.value.decode(errors="replace"))


def unregister(owner: int) -> None:
    """Undoes one `register` of that owner."""
    load().c.tfswap_unregister(owner)


def reserve_disk(owner: int, disk_bytes: int, step: str) -> None:
    """Reserves space for a plan's tensors in the owner's spill file.

    Args:
        step: the step's name, for messages.

    Raises:
        OSError: the limit forbids it, or the disk has no space.
    """
    why = ctypes.create_string_buffer(_TEXT_BYTES)
    load().c.tfswap_reserve_disk(owner, disk_bytes, step.encode(), why, _TEXT_BYTES)
    if why.value:
        raise OSError(why.value.decode(errors="replace"))


def stats() -> SwapStats:
    """The counters of this process."""
    raw = CStats()
    load().c.tfswap_stats(ctypes.byref(raw))
    return SwapStats(**{field.name: getattr(raw, field.name) for field in dataclasses.fields(SwapStats)})


def step_stats(owner: int) -> StepStats:
    """The counters of the owner's latest step, but for those that the ops do not count."""
    raw = CStats()
    load().c.tfswap_step_stats(owner, ctypes.byref(raw))
    return StepStats(
        out_bytes=raw.out_bytes,
        in_bytes=raw.in_bytes,
        disk_out_bytes=raw.disk_out_bytes,
        disk_in_bytes=raw.disk_in_bytes,
        copying_s=sum(getattr(raw, f"{tier}{way}_busy_s") for tier in ("", "disk_", "lent_") for way in ("out", "in")),
        stalled_s=raw.release_stall_s + raw.await_stall_s + raw.inline_copy_s,
        pool_peak_bytes=raw.pool_peak_bytes,
        disk_peak_bytes=raw.disk_peak_bytes,
        disk_written_bytes=raw.disk_written_bytes,
        disk_read_bytes=raw.disk_read_bytes,
        lent_out_bytes=raw.lent_out_bytes,
        lent_in_bytes=raw.lent_in_bytes,
        lent_peak_bytes=raw.lent_peak_bytes,
    )


def keep_states(owner: int) -> None:
    """Makes random ops of this owner's next plans continue the sequences of its earlier plans."""
    load().c.tfswap_keep_states(owner)


def forget_owner(owner: int) -> None:
    """Drops the counters and the states of random ops of an owner that will run no more."""
    load().c.tfswap_forget_owner(owner)
    load().c.tfswap_drop_states(owner)


def reset_stats() -> None:
    """Sets all counters to zero, and the pool's peak to what is in use now."""
    load().c.tfswap_reset_stats()


def _chosen(given, now):
    return now if given is _UNCHANGED else given


def _host_bytes(limit: int | str | None) -> int | None:
    """A limit as bytes. Unlike a step's limit it may be 0, with which the pool takes nothing."""
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
    """Bytes of the last-level cache as TensorFlow reads it. Some kernels size their buffers by it."""
    return load().c.tfswap_l3_cache_bytes()


def l1_l2_bytes() -> tuple[int, int] | None:
    """Bytes of the first two caches as TensorFlow reads them; None on a processor that is not one of x86-64."""
    first, second = (load().c.tfswap_inner_cache_bytes(level) for level in (1, 2))
    return (first, second) if first and second else None


def onednn_dtypes() -> tuple[str, ...]:
    """The types of elements that oneDNN's kernels support on this processor."""
    import tensorflow as tf

    candidates = (tf.bfloat16, tf.float16, tf.float32)
    return tuple(dtype.name for dtype in candidates if load().c.tfswap_onednn_takes(dtype.as_datatype_enum))


def new_gate() -> int:
    """A watched number for a step's gate op. Random, for a loaded function may have a gate of another process."""
    gate = gate_number()
    watch_gate(gate)
    return gate


def gate_number() -> int:
    """A number for a step's gate op that no other gate has."""
    return secrets.randbits(62)


@contextlib.contextmanager
def instantiating() -> Iterator[None]:
    """While active, calls of planned steps on this thread instantiate their kernels and constants and run nothing.

    What such a call returns is undefined.
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
    """Keeps the functions that TensorFlow instantiates behind this gate from now on, for `executed`."""
    load().c.tfswap_watch_gate(gate)


def forget_gate(gate: int) -> None:
    """Ends `watch_gate` of a step that is used no more."""
    load().c.tfswap_forget_gate(gate)


def peak_at_gate(gate: int) -> int:
    """The peak, in bytes, that the latest step behind a gate with a limit was to reach in the arena that it found; 0
    where that was not known exactly, as for arguments that are smaller than planned.
    """
    return load().c.tfswap_peak_at_gate(gate)


def new_step(token: str) -> int:
    """A random number for a step that runs inside of other functions, where it goes by the name `token`."""
    step = secrets.randbits(62)
    load().c.tfswap_set_step(step, token.encode())
    return step


def forget_step(step: int) -> None:
    """Ends `new_step` of a step that Python has dropped."""
    load().c.tfswap_set_step(step, b"")


@contextlib.contextmanager
def limits_unchecked() -> Iterator[None]:
    """While active, loaded steps in all of the process run wherever there is room, whatever their limits."""
    load().c.tfswap_check_limits(False)
    try:
        yield
    finally:
        load().c.tfswap_check_limits(True)


def executed(gate: int) -> bytes:
    """The functions that TensorFlow instantiated for the step behind this gate since the last call.

    Returns a serialized FunctionDefLibrary of the step's function on each device and of the functions that they call;
    empty where the step was not instantiated.
    """
    take = load().c.tfswap_take_executed
    room, buffer = 0, None
    while size := take(gate, buffer, room):
        if buffer is not None and size <= room:
            return buffer.raw[:size]
        room, buffer = size, ctypes.create_string_buffer(size)
    return b""


@functools.cache
def arena_reader() -> Callable[[int, bool], CArenaReading]:
    """A function that reads in one call all that a step needs of an allocator, before it runs and after it.

    It takes the allocator (`tfswap.device.arena.allocator`, 0 for none), and whether a step comes next, which then
    finds the arena in the layout that is reported. It takes about a microsecond and keeps the interpreter's lock: a
    thread that got the lock meanwhile would keep it a thousand times as long.
    """
    return ctypes.PYFUNCTYPE(CArenaReading, ctypes.c_uint64, ctypes.c_bool)(("tfswap_read_arena", load().c))
