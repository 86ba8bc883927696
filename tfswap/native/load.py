"""Registers the ops with TensorFlow, and opens the libraries' C interfaces.

A library is registered at most once in a process. TensorFlow cannot unload an op. Environment variables slow copies
down, for tests and what-if runs: TFSWAP_COPY_BANDWIDTH (bytes per second, each direction) and TFSWAP_COPY_LATENCY_US
for copies to host memory, TFSWAP_DISK_BANDWIDTH and TFSWAP_DISK_LATENCY_US for copies to disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tfswap.errors import OpLibraryError
from tfswap.ir import custom_ops
from tfswap.native import bound, build
from tfswap.native.forks import refuse_in_late_child
from tfswap.native.parts import with_parts


class CStats(ctypes.Structure):
    """TfswapStats in core/c_api.cc, field for field."""

    _fields_ = (
        ("out_bytes", ctypes.c_uint64),
        ("out_copies", ctypes.c_uint64),
        ("out_busy_s", ctypes.c_double),
        ("in_bytes", ctypes.c_uint64),
        ("in_copies", ctypes.c_uint64),
        ("in_busy_s", ctypes.c_double),
        ("disk_out_bytes", ctypes.c_uint64),
        ("disk_out_copies", ctypes.c_uint64),
        ("disk_out_busy_s", ctypes.c_double),
        ("disk_in_bytes", ctypes.c_uint64),
        ("disk_in_copies", ctypes.c_uint64),
        ("disk_in_busy_s", ctypes.c_double),
        ("release_stall_s", ctypes.c_double),
        ("await_stall_s", ctypes.c_double),
        ("inline_copy_s", ctypes.c_double),
        ("pool_in_use_bytes", ctypes.c_uint64),
        ("pool_reserved_bytes", ctypes.c_uint64),
        ("pool_peak_bytes", ctypes.c_uint64),
        ("pool_limit_bytes", ctypes.c_uint64),
        ("home_bytes", ctypes.c_uint64),
        ("disk_in_use_bytes", ctypes.c_uint64),
        ("disk_reserved_bytes", ctypes.c_uint64),
        ("disk_peak_bytes", ctypes.c_uint64),
        ("spilled_bytes", ctypes.c_uint64),
        ("disk_written_bytes", ctypes.c_uint64),
        ("disk_read_bytes", ctypes.c_uint64),
        ("lent_out_bytes", ctypes.c_uint64),
        ("lent_out_copies", ctypes.c_uint64),
        ("lent_out_busy_s", ctypes.c_double),
        ("lent_in_bytes", ctypes.c_uint64),
        ("lent_in_copies", ctypes.c_uint64),
        ("lent_in_busy_s", ctypes.c_double),
        ("lent_peak_bytes", ctypes.c_uint64),
    )


class CArenaReading(ctypes.Structure):
    """TfswapArenaReading in core/arena_ops.cc, field for field.

    Attributes:
        layout: a number that identifies the arena's layout; 0 where there is no arena, or none was requested.
        current_bytes, peak_bytes: the allocator's statistics.
        executed: the number of records so far for `executed` of ops/runtime.py, of all gates.
    """

    _fields_ = (
        ("layout", ctypes.c_uint64),
        ("current_bytes", ctypes.c_uint64),
        ("peak_bytes", ctypes.c_uint64),
        ("executed", ctypes.c_uint64),
    )


@dataclasses.dataclass(frozen=True)
class OpLibrary:
    """A loaded library: `ops` has TensorFlow's wrappers of the ops, `c` the C interface."""

    wrappers: Any
    c: ctypes.CDLL
    path: Path

    @property
    def ops(self) -> Any:
        """The wrappers. Raises TfswapError in a process that was forked too late (tfswap/native/forks.py)."""
        refuse_in_late_child("An op of tfswap's")
        return self.wrappers


@dataclasses.dataclass(frozen=True)
class OpLibraryStatus:
    """The state of an op library, for `tfswap doctor`.

    Attributes:
        compiler: the compiler's command; None without a compiler.
        compiler_version: the first line of its version; None without one.
        cache_dir: the folder of all built libraries; None where no home folder is known.
        library: the path of the library for this TensorFlow and compiler; None where unknown.
        built: whether it is in the cache and intact.
        loaded: whether the ops are registered in this process.
        tensorflow_version: TensorFlow's version; None where it can't be imported.
        error: the reasons why the ops can't be used, with remedies; "" where they can.
    """

    compiler: str | None
    compiler_version: str | None
    cache_dir: Path | None
    library: Path | None
    built: bool
    loaded: bool
    tensorflow_version: str | None
    error: str


_lock = threading.RLock()  # loading the codecs loads the core
_loaded: dict[build.Sources, OpLibrary] = {}


def load() -> OpLibrary:
    """Build the core library if needed, register its ops, and return it. Later calls return the same.

    Raises:
        OpLibraryError: TensorFlow is missing, or the library can't be built or loaded.
    """
    with _lock:
        if build.CORE not in _loaded:
            library = _open_built(build.CORE)
            _declare_core(library.c)
            _declare_arena(library.c)
            throttle_from_environment(library.c)
            _loaded[build.CORE] = library
            bound.core = library.c
        return _loaded[build.CORE]


def load_if_built() -> None:
    """Load the core library where it is in the cache or came with the installation, since replays of schedules in C++
    take a tenth of the time of those in Python. Otherwise this does nothing, and raises no error: `load` does.

    Not handled: processes without TensorFlow, which read and plan described graphs by the Python form.
    """
    if build.CORE not in _loaded and "tensorflow" in sys.modules and status().built:
        with contextlib.suppress(OpLibraryError):
            load()


def load_codecs() -> OpLibrary:
    """Build, register and return the codecs' library, after the core library.

    Raises:
        OpLibraryError: TensorFlow is missing, or a library can't be built or loaded.
    """
    with _lock:
        if build.CODECS not in _loaded:
            load()
            library = _open_built(build.CODECS)
            _declare_codecs(library.c)
            _loaded[build.CODECS] = library
        return _loaded[build.CODECS]


def load_for(nodes: Iterable[Any]) -> None:
    """Load the libraries that graphs of these nodes need. The codecs take long to build, so they are loaded only for
    nodes that need them.

    Args:
        nodes: Nodes or NodeDefs, with those of bodies and functions.

    Raises:
        OpLibraryError: TensorFlow is missing, or a library can't be built or loaded.
    """
    load()
    if not (custom_ops.CODECS | custom_ops.FROM_ENCODED).isdisjoint(node.op for node in with_parts(nodes)):
        load_codecs()


def status(sources: build.Sources = build.CORE) -> OpLibraryStatus:
    """The state of an op library. Imports TensorFlow. Does not build or register the library."""
    errors: list[str] = []
    facts = compiler = library = None
    try:
        facts = build.tensorflow_facts()
    except OpLibraryError as error:
        errors.append(str(error))
    try:
        compiler = build.find_compiler()
    except OpLibraryError as error:
        errors.append(str(error))
    built, cache_dir = False, None
    try:
        cache_dir = build.cache_dir()
        if facts is not None:
            library = build.shipped(sources, facts)
            if library is None and compiler is not None:
                library = build.locate(sources, facts, compiler)
            elif library is None:
                library = build.locate_without_compiler(sources, facts)
            if compiler is None and library is not None:
                errors.clear()
        built = library is not None and library.is_intact()
        if library is not None and not built:
            build.require_place(library)
        for tier in ("COPY", "DISK"):
            _requested_throttle(tier)
    except OpLibraryError as error:
        errors.append(str(error))
    loaded = _loaded.get(sources)
    path = loaded.path if loaded else library.path if library else None
    return OpLibraryStatus(
        compiler=" ".join(compiler.command) if compiler else None,
        compiler_version=compiler.version.splitlines()[0] if compiler and compiler.version else None,
        cache_dir=cache_dir,
        library=path,
        built=built,
        loaded=loaded is not None,
        tensorflow_version=facts.version if facts else None,
        error="\n".join(errors),
    )


def _open_built(sources: build.Sources) -> OpLibrary:
    facts = build.tensorflow_facts()
    shipped = build.shipped(sources, facts)
    if shipped is not None:
        with contextlib.suppress(OpLibraryError):  # it may need a newer libc: then it is built here
            return _open(shipped)
    library = build.ensure_built(sources, facts)
    try:
        return _open(library)
    except OpLibraryError:
        # Intact, but not loadable: the machine has changed since it was built (another libc). Build it again, once.
        return _open(build.ensure_built(sources, facts, rebuild=True))


def _open(library: build.Library) -> OpLibrary:
    descriptor = library.opened()
    if descriptor is None:
        raise _unloadable(library, FileNotFoundError("it has been removed or damaged since"))
    # It stays open: TensorFlow and the loader identify a library by its path, which must not become another file's.
    return _load(library, _path_of(descriptor, library.path))


def _path_of(descriptor: int, path: Path) -> str:
    """A path of an open file that does not depend on its name, as text for TensorFlow. Debuggers can open it too."""
    try:
        return f"/proc/{os.readlink('/proc/self')}/fd/{descriptor}"
    except OSError:
        return str(path)


def _load(library: build.Library, path: str) -> OpLibrary:
    import tensorflow as tf

    try:
        # Before ctypes: TensorFlow generates wrappers only for ops that its own call of dlopen registers.
        ops = tf.load_op_library(path)
        c = ctypes.CDLL(path)
        c.tfswap_built_for.restype = ctypes.c_char_p
        built_for = c.tfswap_built_for().decode()
    except (tf.errors.OpError, RuntimeError, OSError, AttributeError) as error:
        raise _unloadable(library, error) from error
    if built_for != library.built_for:
        raise OpLibraryError(
            f"{library.path} was built for TensorFlow {built_for}, but this is TensorFlow "
            f"{library.built_for}. Delete {library.folder} and import tfswap.ops again."
        )
    return OpLibrary(wrappers=ops, c=c, path=library.path)


def _declare_gates(c: Any) -> None:
    for change_gate in (c.tfswap_watch_gate, c.tfswap_forget_gate):
        change_gate.argtypes = [ctypes.c_int64]
        change_gate.restype = None
    c.tfswap_peak_at_gate.argtypes = [ctypes.c_int64]
    c.tfswap_peak_at_gate.restype = ctypes.c_uint64
    c.tfswap_set_step.argtypes = [ctypes.c_int64, ctypes.c_char_p]
    c.tfswap_set_step.restype = None
    c.tfswap_take_executed.argtypes = [ctypes.c_int64, ctypes.c_char_p, ctypes.c_uint64]
    c.tfswap_take_executed.restype = ctypes.c_uint64
    c.tfswap_check_limits.argtypes = [ctypes.c_bool]
    c.tfswap_check_limits.restype = None


def _declare_core(c: ctypes.CDLL) -> None:
    """The signatures of core/c_api.cc and core/processor.cc; without them ctypes passes everything as int."""
    c.tfswap_l3_cache_bytes.restype = ctypes.c_int64
    c.tfswap_inner_cache_bytes.argtypes = [ctypes.c_int32]
    c.tfswap_inner_cache_bytes.restype = ctypes.c_int64
    c.tfswap_onednn_takes.argtypes = [ctypes.c_int32]
    c.tfswap_onednn_takes.restype = ctypes.c_bool
    c.tfswap_set_host_limit.argtypes = [ctypes.c_uint64]
    c.tfswap_set_host_limit.restype = None
    c.tfswap_host_limit.restype = ctypes.c_uint64
    text = [ctypes.c_char_p, ctypes.c_uint64]
    c.tfswap_register.argtypes = [ctypes.c_int64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64, *text]
    c.tfswap_register.restype = None
    c.tfswap_unregister.argtypes = [ctypes.c_int64]
    c.tfswap_unregister.restype = None
    c.tfswap_reserve_disk.argtypes = [ctypes.c_int64, ctypes.c_uint64, ctypes.c_char_p, *text]
    c.tfswap_reserve_disk.restype = None
    c.tfswap_staging_bytes.restype = ctypes.c_uint64
    c.tfswap_await_turn.argtypes = [ctypes.c_int64]
    c.tfswap_await_turn.restype = ctypes.c_bool
    c.tfswap_instantiate_only.argtypes = [ctypes.c_bool]
    c.tfswap_instantiate_only.restype = None
    _declare_gates(c)
    c.tfswap_drop_block.argtypes = [ctypes.c_int64]
    c.tfswap_drop_block.restype = None
    _declare_replays(c)
    c.tfswap_reserve.argtypes = [ctypes.c_uint64, ctypes.c_bool]
    c.tfswap_set_copy_threads.argtypes = [ctypes.c_int]
    c.tfswap_set_copy_threads.restype = None
    c.tfswap_set_throttle.argtypes = [ctypes.c_double, ctypes.c_double]
    c.tfswap_set_throttle.restype = None
    c.tfswap_bandwidth.restype = ctypes.c_double
    c.tfswap_latency_us.restype = ctypes.c_double
    c.tfswap_set_disk_throttle.argtypes = [ctypes.c_double, ctypes.c_double]
    c.tfswap_set_disk_throttle.restype = None
    c.tfswap_disk_bandwidth.restype = ctypes.c_double
    c.tfswap_set_disk_compression.argtypes = [ctypes.c_bool]
    c.tfswap_set_disk_compression.restype = ctypes.c_bool
    c.tfswap_disk_compression.restype = ctypes.c_bool
    c.tfswap_disk_latency_us.restype = ctypes.c_double
    c.tfswap_step_stats.argtypes = [ctypes.c_int64, ctypes.POINTER(CStats)]
    c.tfswap_step_stats.restype = None
    for of_owner in (c.tfswap_forget_owner, c.tfswap_keep_states, c.tfswap_drop_states):
        of_owner.argtypes = [ctypes.c_int64]
        of_owner.restype = None
    numbers = ctypes.POINTER(ctypes.c_uint64)
    c.tfswap_variable_places.argtypes = [ctypes.c_int64, numbers, numbers, ctypes.c_uint64]
    c.tfswap_variable_places.restype = None
    c.tfswap_forget_variables.argtypes = [ctypes.c_int64]
    c.tfswap_forget_variables.restype = None
    c.tfswap_stats.argtypes = [ctypes.POINTER(CStats)]
    c.tfswap_stats.restype = None
    c.tfswap_reset_stats.restype = None


def _declare_arena(c: ctypes.CDLL) -> None:
    """The signatures of core/chunk_split_ops.cc and core/allocator_events.cc."""
    c.tfswap_split_exactly_between_steps.argtypes = [ctypes.c_uint64]
    c.tfswap_split_exactly_between_steps.restype = None
    c.tfswap_record_allocator_events.restype = ctypes.c_bool
    c.tfswap_stop_allocator_events.argtypes = [ctypes.c_uint64]
    c.tfswap_stop_allocator_events.restype = ctypes.c_uint64
    c.tfswap_copy_allocator_events.argtypes = [ctypes.c_char_p]
    c.tfswap_copy_allocator_events.restype = None


def _declare_replays(c: ctypes.CDLL) -> None:
    """The signatures of core/limit_check.cc, core/schedule_replay.cc, core/executor_runs.cc, core/lane_times.cc,
    core/rerun_search.cc and core/order_search.cc.
    """
    rows = ctypes.POINTER(ctypes.c_int64)
    c.tfswap_replay.argtypes = [ctypes.c_char_p, ctypes.c_uint64, rows, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_bool]
    c.tfswap_replay.restype = ctypes.c_int64
    flow = arena = array = ctypes.c_void_p
    c.tfswap_fill.argtypes = [
        *(ctypes.c_bool, ctypes.c_int64, array, ctypes.c_uint64, ctypes.c_int64, ctypes.c_bool),
        *(array, ctypes.c_uint64, ctypes.c_int64, array),
    ]
    c.tfswap_fill.restype = arena
    c.tfswap_free_filled.argtypes = [arena]
    c.tfswap_free_filled.restype = None
    c.tfswap_replay_steps.argtypes = [
        *(flow, arena, array, array, array, array, ctypes.c_int64),
        *(ctypes.c_int64, ctypes.c_int32, array, array, array),
    ]
    c.tfswap_replay_steps.restype = ctypes.c_int32
    c.tfswap_unordered_peak.argtypes = [flow, arena, array, array, array, ctypes.c_uint64, ctypes.c_int64]
    c.tfswap_unordered_peak.restype = ctypes.c_int64
    c.tfswap_lane_times.argtypes = [flow, array, array, ctypes.c_int64, array, array, array]
    c.tfswap_lane_times.restype = ctypes.c_bool
    c.tfswap_replay_lives.argtypes = [
        *(flow, arena, array, array, array, array, ctypes.c_int64),
        *(array, array, array, array, ctypes.c_int64, array, array),
    ]
    c.tfswap_replay_lives.restype = ctypes.c_int64
    c.tfswap_search_reruns.argtypes = [array, array, ctypes.c_int64, ctypes.c_int64, array, array, ctypes.c_int64]
    c.tfswap_search_reruns.restype = ctypes.c_int64
    c.tfswap_take_reruns.argtypes = [array]
    c.tfswap_take_reruns.restype = None
    c.tfswap_search_order.argtypes = [flow, arena, array, array, array, array, array, array, array, ctypes.c_int64]
    c.tfswap_search_order.restype = ctypes.c_int32


def _declare_codecs(c: ctypes.CDLL) -> None:
    """The signatures of codecs/gpu_pieces.cc."""
    c.tfswap_compile_gpu_pieces.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]


def throttle_from_environment(c: ctypes.CDLL) -> None:
    """Slow the core library's copies down as the environment variables say."""
    for tier, throttle in (("COPY", c.tfswap_set_throttle), ("DISK", c.tfswap_set_disk_throttle)):
        bandwidth, latency = _requested_throttle(tier)
        if bandwidth or latency:
            throttle(bandwidth, latency)


def _requested_throttle(tier: str) -> tuple[float, float]:
    """The bandwidth in bytes per second and the latency in microseconds. Raises OpLibraryError for invalid numbers."""
    bandwidth = _number_from_environment(f"TFSWAP_{tier}_BANDWIDTH", "bytes per second, as in 12e9")
    return bandwidth, _number_from_environment(f"TFSWAP_{tier}_LATENCY_US", "microseconds, as in 10")


def _number_from_environment(name: str, meaning: str) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise OpLibraryError(f"{name}={text!r} must be a number of {meaning}; 0 or unset for no throttle.")
    return value


def _unloadable(library: build.Library, error: Exception) -> OpLibraryError:
    return OpLibraryError(
        f"tfswap's op library {library.path} can't be loaded: {error}. Delete {library.folder} and try "
        "again; if that does not help, CXX names a compiler whose libstdc++ is newer than the one that "
        "Python runs with."
    )
