"""NumPy arrays that TensorFlow wraps on a CPU: those that are not aligned it copies into the device's arena."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT_BYTES = 64
"""EIGEN_MAX_ALIGN_BYTES (tf_tensor.cc)."""


def aligned_zeros(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """As np.zeros."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(nbytes + ALIGNMENT_BYTES, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT_BYTES
    return room[begin : begin + nbytes].view(dtype).reshape(shape)


def is_aligned(value: np.ndarray[Any, Any]) -> bool:
    """Whether TensorFlow wraps an array."""
    return bool(value.ctypes.data % ALIGNMENT_BYTES == 0 and value.flags.c_contiguous)
