"""Reads the arena of a device of this process: what is in use, its chunks, its limit."""

from __future__ import annotations

import functools
import logging
import math
import os
from dataclasses import dataclass
from typing import Any

from tfswap.simulator.arena_snapshot import NOTHING_KNOWN, ArenaSnapshot

log = logging.getLogger("tfswap")


@dataclass(frozen=True)
class MemoryInfo:
    """The allocator's own figures, in bytes."""

    current_bytes: int
    peak_bytes: int


def memory_info(device: str) -> MemoryInfo | None:
    """The allocator's figures; None where it keeps none (a CPU without TF_CPU_ALLOCATOR_USE_BFC=1)."""
    if device.startswith("CPU") and not cpu_uses_bfc():
        return None  # malloc's bytes are counted in part only
    import tensorflow as tf

    try:
        info: Any = tf.config.experimental.get_memory_info(device)
    except ValueError:
        return None
    return MemoryInfo(info["current"], info["peak"])


@functools.cache
def cpu_uses_bfc() -> bool:
    """Whether the CPU has an arena. As TensorFlow reads it (process_state.cc, ReadBoolFromEnvVar), once."""
    return os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").strip().lower() in ("1", "true")


def snapshot(device: str) -> ArenaSnapshot:
    """The snapshot of the device's arena, chunk by chunk; only its bytes where its allocator is no BFC allocator."""
    info = memory_info(device)
    if info is None:
        _say_once(
            device, "keeps no statistics: steps run as planned, and whether they keep their limit is not measured."
        )
        return NOTHING_KNOWN
    rows, limit, _ = _arena_map(device)
    if not int(limit):
        _say_once(
            device,
            "has no chunks (TF_GPU_ALLOCATOR=cuda_malloc_async?): limits are kept in the bytes that tensors take; "
            "what the driver's pool takes for them is not bounded.",
        )
    chunks = tuple((address, size, bool(used)) for address, size, used in sorted(rows.numpy().tolist()))
    if not chunks:
        return ArenaSnapshot(info.current_bytes)
    in_use = sum(size for _, size, used in chunks if used)
    return ArenaSnapshot(in_use, chunks, limit_bytes=int(limit), collects=_collects(device))


@functools.cache
def _say_once(device: str, what: str) -> None:
    if device.startswith("GPU"):  # a CPU without an arena is usual
        log.warning("tfswap: the allocator of %s %s", device, what)


def allocator(device: str) -> int:
    """The device's allocator, for `tfswap.ops.arena_reader`. It lives as long as the process."""
    return int(_arena_map(device).allocator)


def _arena_map(device: str) -> Any:
    import tensorflow as tf

    from tfswap.native.load import load

    with tf.init_scope(), tf.device(device):
        return load().ops.tfswap_arena_map()


def _collects(device: str) -> bool:
    """Whether the device's allocator frees unused regions. Follows GPUBFCAllocator::GetGarbageCollectionValue."""
    return device.startswith("GPU") and os.environ.get("TF_ENABLE_GPU_GARBAGE_COLLECTION", "true") != "false"


def free_bytes(device: str) -> float:
    """The bytes that the device's allocator may still allocate; unbounded where it has no limit."""
    limit, info = device_limit_bytes(device), memory_info(device)
    return math.inf if limit is None or info is None else limit - info.current_bytes


@functools.cache
def device_limit_bytes(device: str) -> int | None:
    """The limit of the device's allocator; None where it has none."""
    if device.startswith("CPU"):
        mib = os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB")
        return int(mib) * 2**20 if mib and memory_info(device) is not None else None
    from tensorflow.python.client import device_lib
    from tensorflow.python.eager import context

    # With the process' own settings, which may hide some GPUs or make several of one: TensorFlow numbers them by these.
    for local in device_lib.list_local_devices(context.context().config):
        if local.name.endswith(device):
            return local.memory_limit
    return None
