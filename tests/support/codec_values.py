"""Values for tests of the codecs.

Random values favour what goes wrong: NaN and infinities, zeros of both signs, denormals, equal neighbours,
lengths around whole bytes. TensorFlow's kernels run in the same `tf.function`, on the same threads, since
those flush denormals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

FLOATS = [tf.bfloat16, tf.float16, tf.float32, tf.float64]

# Each example traces nothing new: the functions of tests are made once and take any shape.
random_tensors = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

LENGTHS = st.one_of(st.integers(0, 40), st.integers(1000, 1100), st.just(50_003))  # the last is for several threads
SEEDS = st.integers(0, 2**32 - 1)


def name_of(dtype: Any) -> str:
    """A test's name for an element type."""
    return dtype.name


def special_values(dtype: Any, seed: int, shape: Any) -> np.ndarray:
    """Normal numbers, a third of them replaced by special ones."""
    random = np.random.default_rng(seed)
    kind = dtype.as_numpy_dtype
    x = random.standard_normal(shape) * 4
    tiny = 1e-310 if dtype == tf.float64 else 1e-40 if dtype != tf.float16 else 1e-7
    specials = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, tiny, -tiny, 6.0, 1.0, -1.0, 5.999]
    chosen = random.choice(specials, shape)
    with np.errstate(over="ignore"):
        return np.where(random.random(shape) < 1 / 3, chosen, x).astype(kind)


def bits(x: Any, any_nan: bool = False) -> bytes:
    """All bits; where `any_nan`, of a NaN only that it is one."""
    array = np.array(x.numpy() if tf.is_tensor(x) else x)
    if any_nan:
        array[np.isnan(array)] = np.nan
    return array.tobytes()


def as_function(function: Any) -> Any:
    """Run by the executor on its own threads, with shapes open, so that it is traced once per type."""
    return tf.function(function, reduce_retracing=True)
