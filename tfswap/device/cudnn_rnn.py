"""The memory that cuDNN needs for a recurrent net, by the library's own query, which allocates no GPU memory.

TensorFlow calls `cudnnGetRNNTempSpaceSizes` too (cuda_dnn.cc, CudnnRnnDescriptor): its kernel's workspace, and its
third output, which the gradient's kernel reads. On an H200 with cuDNN 9.19 the answers were the bytes that TensorFlow's
kernels allocated.

Not handled: projections of LSTMs (Keras has none).
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
"""cudnnRNNMode_t and cudnnDataType_t."""
_DOUBLE_BIAS = 2
_PADDED = 1  # CUDNN_RNN_PADDED_IO_ENABLED: sequences of any lengths
_NAMES = ("libcudnn.so.9", "libcudnn.so.8")


class RecurrentNet(NamedTuple):
    """The properties that the sizes depend on.

    Attributes:
        mode: one of MODES.
        dtype: one of DTYPES.
        steps, batch, inputs, units, layers: its sizes; `units` is of one direction.
        bidirectional: whether it reads both ways.
        skips_input: whether the first layer uses the input without a product.
        training: whether a gradient follows.
        dropout: between layers.
    """

    mode: str
    dtype: str
    steps: int
    batch: int
    inputs: int
    units: int
    layers: int
    bidirectional: bool = False
    skips_input: bool = False
    training: bool = True
    dropout: float = 0.0


class Spaces(NamedTuple):
    """Bytes of a kernel's workspace, and of its output for the gradient."""

    workspace_bytes: int
    reserve_bytes: int


@functools.cache
def spaces(net: RecurrentNet) -> Spaces | None:
    """cuDNN's bytes for this net on the current GPU; None where it can't be queried."""
    library = _library()
    return None if library is None else query(library, net)


@functools.cache
def _library() -> ctypes.CDLL | None:
    for name in _NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def query(library: ctypes.CDLL, net: RecurrentNet) -> Spaces | None:
    """As `spaces`, of this library."""
    made: list[tuple[str, ctypes.c_void_p]] = []

    def make(kind: str) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        call(f"cudnnCreate{kind}", ctypes.byref(pointer))
        made.append((f"cudnnDestroy{kind}", pointer))
        return pointer

    def call(function: str, *arguments: object) -> None:
        code = getattr(library, function)(*arguments)
        if code != 0:
            raise OSError(f"{function} failed with {code}")

    workspace, reserve = ctypes.c_size_t(), ctypes.c_size_t()
    try:
        handle, dropout = make(""), make("DropoutDescriptor")
        rnn, data = make("RNNDescriptor"), make("RNNDataDescriptor")
        none, seed = ctypes.c_size_t(0), ctypes.c_ulonglong(0)
        call("cudnnSetDropoutDescriptor", dropout, handle, ctypes.c_float(net.dropout), None, none, seed)
        dtype = DTYPES[net.dtype]
        kinds = 0, MODES[net.mode], _DOUBLE_BIAS, int(net.bidirectional), int(net.skips_input)
        precision = dtype if net.dtype == "float64" else DTYPES["float32"]
        sizes = net.inputs, net.units, net.units, net.layers
        call("cudnnSetRNNDescriptor_v8", rnn, *kinds, dtype, precision, 0, *sizes, dropout, _PADDED)
        lengths = (ctypes.c_int * net.batch)(*[net.steps] * net.batch)
        shape = net.steps, net.batch, net.inputs
        call("cudnnSetRNNDataDescriptor", data, dtype, 0, *shape, lengths, ctypes.byref(ctypes.c_double()))
        call(
            "cudnnGetRNNTempSpaceSizes",
            handle,
            rnn,
            int(net.training),
            data,
            ctypes.byref(workspace),
            ctypes.byref(reserve),
        )
    except (AttributeError, OSError):  # another cuDNN, or no GPU
        return None
    finally:
        for function, pointer in reversed(made):
            getattr(library, function)(pointer)
    return Spaces(workspace.value, reserve.value)
