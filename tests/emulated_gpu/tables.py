"""The registrations of TensorFlow's GPU kernels, by release: those of its GPU wheel, as text.

    python -m emulated_gpu.tables tensorflow-2.21.0-....whl tensorflow_cpu-2.21.0-....whl  # kernels/2.21.txt.gz

They are the GPU's own, and those for any device that the CPU wheel has not, such as sums of int32.

A line is a registration: the op, its label, its priority, what its attributes may be (types, texts in quotes,
booleans, integers), and the arguments that are in host memory, with tabs between. Lines are sorted, so that tables of
two releases can be compared.

The wheels are not installed, and need no GPU: the two libraries of each are loaded, and asked for the kernels that they
have registered.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("kernels")
LIBRARIES = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")


def table(version: str) -> Path:
    """The table of that release; a patch release has its minor release's."""
    return FOLDER / f"{'.'.join(version.split('.')[:2])}.txt.gz"


def versions() -> list[str]:
    return sorted(path.name.removesuffix(".txt.gz") for path in FOLDER.glob("*.txt.gz"))


def lines_of(kernels: Any, device: str = "GPU") -> set[str]:
    """A KernelList's kernels for that type of device, a line each."""
    return {_line(kernel) for kernel in kernels.kernel if kernel.device_type == device}


def _line(kernel: Any) -> str:
    from tensorflow.python.framework import dtypes

    constraints = []
    for constraint in sorted(kernel.constraint, key=lambda each: each.name):
        allowed = constraint.allowed_values.list
        values = [dtypes.as_dtype(number).name for number in allowed.type]
        values += [f'"{text.decode()}"' for text in allowed.s]
        values += [str(each).lower() for each in (*allowed.b, *allowed.i)]
        assert values, f"{kernel.op}: {constraint.name} has a constraint of another kind"
        constraints.append(f"{constraint.name}={','.join(values)}")
    hosted = sorted(kernel.host_memory_arg)
    return "\t".join([kernel.op, kernel.label, str(kernel.priority), ";".join(constraints), ",".join(hosted)])


def read_wheel(wheel: Path) -> Any:
    from tensorflow.core.framework import kernel_def_pb2

    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as packed:
            libraries = [packed.extract(f"tensorflow/{name}", folder) for name in LIBRARIES]
        # Two TensorFlows do not fit into one process.
        run = subprocess.run([sys.executable, "-c", _ASK, *libraries], stdout=subprocess.PIPE, check=True)
    return kernel_def_pb2.KernelList.FromString(run.stdout)


# Writes the KernelList of the libraries that are its arguments.
_ASK = """
import ctypes, sys

class Buffer(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("length", ctypes.c_size_t))

library = [ctypes.CDLL(path, ctypes.RTLD_GLOBAL) for path in sys.argv[1:]][-1]
library.TF_NewStatus.restype = ctypes.c_void_p
library.TF_GetAllRegisteredKernels.argtypes = [ctypes.c_void_p]
library.TF_GetAllRegisteredKernels.restype = ctypes.POINTER(Buffer)
found = library.TF_GetAllRegisteredKernels(library.TF_NewStatus()).contents
sys.stdout.buffer.write(ctypes.string_at(found.data, found.length))
"""


def main(wheel: Path, cpu_wheel: Path) -> None:
    there, here = read_wheel(wheel), read_wheel(cpu_wheel)
    lines = sorted(lines_of(there) | lines_of(there, "DEFAULT") - lines_of(here, "DEFAULT"))
    path = table(wheel.name.split("-")[1])
    text = "".join(f"{line}\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{path}: {len(lines)} GPU kernels")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
