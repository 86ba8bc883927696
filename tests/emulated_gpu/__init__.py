"""GPUs for TensorFlow's CPU wheel: a plug-in whose devices have TensorFlow's GPU kernels, run by the CPU's.

    with_gpus = Gpus(memory=64 << 20, count=2).environment()     # for a process that has not used TensorFlow yet
    gpus = emulated_gpu.attach()                                 # in that process, before its first op
    ... a program on GPU:0 and GPU:1 ...
    assert not gpus.races(), gpus.report()

docs/emulated_gpu.md says what it emulates, checks, and leaves out. A process has such devices once, and none besides.
"""

from __future__ import annotations

import ctypes
import functools
import gzip
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from emulated_gpu import tables
from emulated_gpu.settings import EmulatedGpuError, Gpus, Link, mask
from tfswap.errors import OpLibraryError
from tfswap.native import build

__all__ = ["Counts", "EmulatedGpuError", "Gpus", "Link", "Plugin", "attach", "why_not"]

SOURCES = build.Sources("emulated_gpu", "emulated GPU", at=Path(__file__).with_name("csrc"))


class Counts(NamedTuple):
    """What the devices have done so far."""

    kernels: int
    copies_in: int
    bytes_in: int
    copies_out: int
    bytes_out: int
    copies_between: int
    bytes_between: int
    pinned_bytes: int


class Plugin:
    """The loaded plug-in (csrc/c_api.cc)."""

    def __init__(self, c: ctypes.CDLL):
        c.emulated_gpu_races.restype = ctypes.c_int64
        c.emulated_gpu_report.restype = ctypes.c_char_p
        c.emulated_gpu_set_links.argtypes = [ctypes.c_double] * 3
        c.emulated_gpu_set_kernel_us.argtypes = [ctypes.c_double]
        c.emulated_gpu_set_check.argtypes = [ctypes.c_bool]
        c.emulated_gpu_set_others.argtypes = [ctypes.c_uint64]
        c.emulated_gpu_set_faults.argtypes = [ctypes.c_uint, ctypes.c_uint]
        self._c = c

    def counts(self) -> Counts:
        numbers = (ctypes.c_int64 * len(Counts._fields))()
        self._c.emulated_gpu_counts(numbers)
        return Counts(*numbers)

    def races(self) -> int:
        """How often an access was not ordered with one before it."""
        return self._c.emulated_gpu_races()

    def report(self) -> str:
        """A line for each two that are not ordered; the first fifty."""
        return self._c.emulated_gpu_report().decode()

    def clear_races(self) -> None:
        self._c.emulated_gpu_clear_races()

    def set_links(self, to_device: float, to_host: float, latency_us: float = 0.0) -> None:
        """Bytes per second from now on, and what each copy takes besides."""
        self._c.emulated_gpu_set_links(to_device, to_host, latency_us)

    def set_kernel_us(self, microseconds: float) -> None:
        self._c.emulated_gpu_set_kernel_us(microseconds)

    def set_others(self, nbytes: int) -> None:
        """What another process has of each device's memory from now on."""
        self._c.emulated_gpu_set_others(nbytes)

    def set_check(self, check: bool) -> None:
        """Whether races are checked from now on."""
        self._c.emulated_gpu_set_check(check)

    def set_faults(self, ignored_waits: tuple[str, ...] = (), early_events: tuple[str, ...] = ()) -> None:
        """As in Gpus, from now on."""
        self._c.emulated_gpu_set_faults(mask(ignored_waits), mask(early_events))


def why_not() -> str:
    """Why no emulated GPU can be built here, in one line; "" where one can."""
    try:
        build.find_compiler()
    except OpLibraryError as error:
        return str(error).splitlines()[0]
    return ""


@functools.cache
def library() -> Path:
    """The plug-in for this TensorFlow, built if it is not in the cache.

    Raises:
        EmulatedGpuError: there is no table for this TensorFlow.
        OpLibraryError: it can't be built.
    """
    facts = build.tensorflow_facts()
    if not tables.table(facts.version).exists():
        raise EmulatedGpuError(
            f"No table of GPU kernels is for TensorFlow {facts.version}, only for {', '.join(tables.versions())}; "
            "tests/emulated_gpu/tables.py makes one from its GPU wheel."
        )
    return build.ensure_built(SOURCES, facts).path


@functools.cache
def attach() -> Plugin:
    """Gives this process emulated GPUs, as its environment says; later calls return the same.

    Raises:
        EmulatedGpuError: there are GPUs already, TensorFlow has its devices, or there is no table for this TensorFlow.
        OpLibraryError: the plug-in can't be built.
    """
    import tensorflow as tf
    from tensorflow.python.eager import context
    from tensorflow.python.framework import load_library

    path = library()
    if tf.config.list_physical_devices("GPU"):
        raise EmulatedGpuError(
            "This process has GPUs already, and TensorFlow has one plug-in for devices of that name."
        )
    if context.context()._initialized:  # programs would run on the CPU
        raise EmulatedGpuError("TensorFlow has made its devices, to which none is added: attach before its first op.")
    kernels = os.memfd_create("kernels")
    os.write(kernels, _kernels(tables.table(tf.version.VERSION)))
    os.environ["EMULATED_GPU_KERNELS"] = f"/proc/self/fd/{kernels}"
    try:
        load_library.load_pluggable_device_library(str(path))
    except tf.errors.OpError as error:
        raise EmulatedGpuError(f"TensorFlow takes no emulated GPU: {error.message.splitlines()[0]}") from error
    finally:
        del os.environ["EMULATED_GPU_KERNELS"]
        os.close(kernels)
    if os.environ.get("EMULATED_GPU_CUDA", "0") != "0":
        _install_cuda(path)
    return Plugin(ctypes.CDLL(str(path)))


def _install_cuda(plugin: Path) -> None:
    """CUDA's libraries are the plug-in from now on: libraries of their names that are linked with it alone are loaded,
    and the loader takes these for the names.
    """
    from tensorflow.python.platform import build_info

    compiler = build.find_compiler().command
    with tempfile.TemporaryDirectory() as folder:
        for name in ("libcuda.so.1", "libnvrtc.so.12"):
            empty = f"{folder}/{name}"
            flags = ["-shared", f"-Wl,-soname,{name}", "-Wl,--no-as-needed", "-o", empty, str(plugin)]
            subprocess.run([*compiler, *flags], check=True)
            ctypes.CDLL(empty)
    os.environ["EMULATED_GPU_COMPILER"] = shlex.join(compiler)
    build_info.build_info["is_cuda_build"] = True


def _kernels(table: Path) -> bytes:
    """A table as a serialized KernelList."""
    from tensorflow.core.framework import kernel_def_pb2
    from tensorflow.python.framework import dtypes

    made: Any = kernel_def_pb2.KernelList()
    for line in gzip.decompress(table.read_bytes()).decode().splitlines():
        op, label, priority, constraints, hosted = line.split("\t")
        kernel = made.kernel.add(op=op, label=label, priority=int(priority), device_type="GPU")
        kernel.host_memory_arg.extend(filter(None, hosted.split(",")))
        for constraint in filter(None, constraints.split(";")):
            name, values = constraint.split("=")
            allowed = kernel.constraint.add(name=name).allowed_values.list
            for value in values.split(","):
                if value.startswith('"'):
                    allowed.s.append(value.strip('"').encode())
                elif value in ("true", "false"):
                    allowed.b.append(value == "true")
                elif value.lstrip("-").isdigit():
                    allowed.i.append(int(value))
                else:
                    allowed.type.append(dtypes.as_dtype(value).as_datatype_enum)
    return made.SerializeToString()
