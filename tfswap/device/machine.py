"""Facts about TensorFlow's machine: the device of a step, its threads, its arena."""

from __future__ import annotations

import functools
import logging
import math
import os
from dataclasses import dataclass
from typing import Any

from tfswap.device import cudnn
from tfswap.errors import INSTALL_TENSORFLOW, TfswapError
from tfswap.kernels.device import DeviceModel
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN, ArenaSnapshot

log = logging.getLogger("tfswap")


@dataclass(frozen=True)
class MemoryInfo:
    """The allocator's own figures, in bytes."""

    current_bytes: int
    peak_bytes: int


def require_tensorflow() -> Any:
    """TensorFlow, imported. Raises TfswapError with the remedy when it can't be."""
    try:
        import tensorflow as tf
    except ImportError as error:
        raise TfswapError(
            f"tfswap needs TensorFlow, which can't be imported ({error}). {INSTALL_TENSORFLOW}"
        ) from error
    return tf


def type_of(device: str) -> str:
    """ "CPU" of "/job:localhost/replica:0/task:0/device:CPU:0"; "" where it names no device."""
    return device.partition("/device:")[2].partition(":")[0].upper()


def scope_is_cpu() -> bool:
    """Whether calls here run on a CPU, by the `tf.device` around them."""
    from tensorflow.python.eager import context

    return type_of(context.context().device_name or "") == "CPU"


def current_device(live: bool = False, on_cpu: bool | None = None) -> tuple[str, DeviceModel]:
    """The device that TensorFlow places a step on, by name ("GPU:0") and as a model.

    Args:
        live: a step will run on it, in a watched arena: also find out facts that need the ops.
        on_cpu: whether it is a CPU even where there are GPUs; None to follow the `tf.device` around the call.
    """
    import tensorflow as tf

    intra = tf.config.threading.get_intra_op_parallelism_threads() or _default_threads("TF_NUM_INTRAOP_THREADS")
    inter = tf.config.threading.get_inter_op_parallelism_threads() or _default_threads("TF_NUM_INTEROP_THREADS")
    if tf.config.list_logical_devices("GPU") and not (scope_is_cpu() if on_cpu is None else on_cpu):
        return "GPU:0", _gpu(intra, inter)
    found = DeviceModel("cpu", _onednn(), intra, inter)
    if live and memory_info("CPU:0") is not None:
        import tfswap.ops

        found = found._replace(l3_cache_bytes=tfswap.ops.l3_cache_bytes(), onednn_dtypes=tfswap.ops.onednn_dtypes())
    return "CPU:0", found


@functools.cache
def _has_codecs() -> bool:
    """Whether the codecs run on this TensorFlow's GPUs: where it was built for CUDA."""
    import tensorflow as tf

    found = bool(tf.sysconfig.get_build_info().get("is_cuda_build"))
    if not found:
        log.warning("tfswap: codecs are disabled: they are for NVIDIA's GPUs. Tensors are swapped and recomputed.")
    return found


def _gpu(intra: int, inter: int) -> DeviceModel:
    import tensorflow as tf
    from tensorflow.python.framework import config

    details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
    capability = details.get("compute_capability") or (0, 0)
    return DeviceModel(
        "gpu",
        intra_op_threads=intra,
        inter_op_threads=inter,
        name=str(details.get("device_name", "")),
        workspace_bytes=cudnn.workspace_limit_bytes(),
        codecs=_has_codecs(),
        tf32=capability >= (8, 0) and tf.config.experimental.tensor_float_32_execution_enabled(),
        deterministic=config.is_op_determinism_enabled(),
    )


def _default_threads(variable: str) -> int:
    """The number of threads of a pool of TensorFlow's, which `variable` may set (process_util.cc)."""
    given = os.environ.get(variable, "")
    if given.isascii() and given.isdigit() and int(given):
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _onednn() -> bool:
    """Whether oneDNN's kernels replace TensorFlow's own. TensorFlow's default depends on the CPU."""
    from tensorflow.python.util import _pywrap_util_port

    return _pywrap_util_port.IsMklEnabled()


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
        return NOTHING_KNOWN
    rows, limit, _ = _arena_map(device)
    chunks = tuple((address, size, bool(used)) for address, size, used in sorted(rows.numpy().tolist()))
    if not chunks:
        return ArenaSnapshot(info.current_bytes)
    in_use = sum(size for _, size, used in chunks if used)
    return ArenaSnapshot(in_use, chunks, limit_bytes=int(limit), collects=_collects(device))


def allocator(device: str) -> int:
    """The device's allocator, for `tfswap.ops.looker`. It lives as long as the process."""
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


def device_limit_bytes(device: str) -> int | None:
    """The limit of the device's allocator; None where it has none."""
    if device.startswith("CPU"):
        mib = os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB")
        return int(mib) * 2**20 if mib and memory_info(device) is not None else None
    from tensorflow.python.client import device_lib

    for local in device_lib.list_local_devices():
        if local.name.endswith(device):
            return local.memory_limit
    return None
