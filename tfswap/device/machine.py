"""Facts about TensorFlow's machine: the device of a step and its threads. arena.py reads its arena."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from typing import Any

from tfswap.device import arena, cudnn
from tfswap.errors import INSTALL_TENSORFLOW, TfswapError
from tfswap.ir.devices import within_worker
from tfswap.ir.types import REFERENCES
from tfswap.kernels.device import DeviceModel

log = logging.getLogger("tfswap")


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
    return within_worker(device).partition(":")[0].upper()


_IN_HOST_MEMORY = ("int32", *REFERENCES)
"""Types of arguments that functions on a GPU take in host memory, and handles."""


def is_value_on_cpu(tensor: Any) -> bool:
    """Whether a tensor is on a CPU, and functions on a GPU take values of its type in device memory."""
    return type_of(device_of_value(tensor)) == "CPU"


def device_of_value(tensor: Any) -> str:
    """The device of a tensor, "/device:GPU:1", where functions on a GPU take values of its type in device memory; empty
    of others, and where it is not known.
    """
    kind, _, number = within_worker(getattr(tensor, "device", "") or "").partition(":")
    return f"/device:{kind.upper()}:{number}" if number and tensor.dtype.name not in _IN_HOST_MEMORY else ""


def local_name(device: str) -> str:
    """ "GPU:1" of "/job:localhost/replica:0/task:0/device:GPU:1"."""
    return f"{type_of(device)}:{device.rpartition(':')[2]}"


def has_device(name: str) -> bool:
    """Whether this process has a device of this name, "GPU:0"."""
    import tensorflow as tf

    return any(device.name.endswith(f"/device:{name}") for device in tf.config.list_logical_devices())


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

    gpus = tf.config.list_logical_devices("GPU")  # makes the devices and their threads, if nothing has yet
    intra = tf.config.threading.get_intra_op_parallelism_threads() or _default_threads("TF_NUM_INTRAOP_THREADS")
    inter = tf.config.threading.get_inter_op_parallelism_threads() or _default_threads("TF_NUM_INTEROP_THREADS")
    if gpus and not (scope_is_cpu() if on_cpu is None else on_cpu):
        return "GPU:0", _gpu(intra, inter)
    found = DeviceModel("cpu", _onednn(), intra, inter)
    if live and arena.memory_info("CPU:0") is not None:
        import tfswap.ops

        found = found._replace(
            l3_cache_bytes=tfswap.ops.l3_cache_bytes(),
            onednn_dtypes=tfswap.ops.onednn_dtypes(),
            l1_l2_bytes=tfswap.ops.l1_l2_bytes(),
        )
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

    details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
    capability = details.get("compute_capability")
    return DeviceModel(
        "gpu",
        intra_op_threads=intra,
        inter_op_threads=inter,
        name=str(details.get("device_name", "")),
        workspace_bytes=cudnn.workspace_limit_bytes(),
        codecs=_has_codecs(),
        tf32=(capability or (0, 0)) >= (8, 0) and tf.config.experimental.tensor_float_32_execution_enabled(),
        deterministic=config.is_op_determinism_enabled(),
        capability=capability,
    )


@functools.cache
def _default_threads(variable: str) -> int:
    """The number of threads of a pool of TensorFlow's, which `variable` may set (process_util.cc).

    TensorFlow makes its pools once. A variable or an affinity that changes between then and the first call here is
    mistaken for what they were made with.
    """
    given = os.environ.get(variable, "")
    if given.isascii() and given.isdigit() and int(given):
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _onednn() -> bool:
    """Whether oneDNN's kernels replace TensorFlow's own. TensorFlow's default depends on the CPU.

    The library that the kernels and graph passes ask has decided it when TensorFlow was imported. Python's module has a
    copy of that function in TensorFlow 2.18, which reads the environment at its own first call.
    """
    import tensorflow as tf

    library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2"))
    enabled = library._ZN10tensorflow12IsMKLEnabledEv  # tensorflow::IsMKLEnabled(), util/port.h
    enabled.restype = ctypes.c_bool
    return enabled()
