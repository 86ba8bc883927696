"""The codecs that round: every code, the nearest values, the error bounds of reports.

test_codecs_alone.py runs this file without oneDNN, as test_codecs.py.
"""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

tf = pytest.importorskip("tensorflow")
if os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "0":
    pytest.skip("needs TF_ENABLE_ONEDNN_OPTS=0", allow_module_level=True)

from codec_values import FLOATS, LENGTHS, SEEDS, bits, name_of, random_tensors  # noqa: E402

import tfswap.ops.codecs as codecs  # noqa: E402
from tfswap.analysis import reduced_precision  # noqa: E402

# ---------------------------------------------------------------------------------------------------
# Lossy: smaller floats

# Exponent and mantissa bits, whether there are infinities, bytes per values.
FORMATS = {
    "float16": (5, 10, True, (2, 1)),
    "bfloat16": (8, 7, True, (2, 1)),
    "float8_e4m3fn": (4, 3, False, (1, 1)),
    "float8_e5m2": (5, 2, True, (1, 1)),
    "gist_float8": (4, 3, True, (1, 1)),
    "gist_float10": (5, 4, True, (4, 3)),
}


def finite_values(exponent: int, mantissa: int, infinities: bool) -> np.ndarray:
    """Every finite value of a format that is not negative, by its definition; index is code."""
    bias = 2 ** (exponent - 1) - 1
    codes = np.arange((2**exponent - 1) << mantissa if infinities else (1 << (exponent + mantissa)) - 1)
    exponents, fractions = codes >> mantissa, codes % (1 << mantissa) / (1 << mantissa)
    normal = (1 + fractions) * 2.0 ** (exponents - bias)
    return np.where(exponents == 0, fractions * 2.0 ** (1 - bias), normal)


def nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The nearest of sorted values to each |x|, ties to the even code, with x's sign; in float64."""
    size = np.minimum(np.abs(x), values[-1])
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    low, high = size - values[above - 1], values[above] - size
    code = np.where(low == high, above - above % 2, np.where(low < high, above - 1, above))
    return np.copysign(values[code], x)


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_of_a_small_float_comes_back(format):
    exponent, mantissa, infinities, _ = FORMATS[format]
    values = finite_values(exponent, mantissa, infinities)
    # TensorFlow's threads flush float32's denormals, which are bfloat16's too, where they compute.
    x = np.concatenate([values, -values]).astype(np.float32)
    back = codecs.decode_floats(codecs.encode_floats(x, format), x.shape, format, tf.float32)
    assert bits(back) == bits(x)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16, tf.float32], ids=name_of)
@random_tensors
@given(length=LENGTHS, seed=SEEDS, scale=st.sampled_from([1e-40, 1e-8, 1e-3, 1.0, 1e2, 1e5, 1e38]))
def test_small_floats_are_the_nearest(dtype, format, length, seed, scale):
    exponent, mantissa, infinities, (word_bytes, per_word) = FORMATS[format]
    random = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        x = (random.standard_normal(length) * scale).astype(dtype.as_numpy_dtype)
    # Half-way cases too: the format's own values and the middles between them.
    values = finite_values(exponent, mantissa, infinities)
    middles = (values[1:] + values[:-1]) / 2
    with np.errstate(over="ignore"):
        x[: length // 3] = random.choice(np.concatenate([values, middles, -middles]), length // 3)
    encoded = codecs.encode_floats(x, format)
    assert encoded.shape == [-(-length // per_word) * word_bytes]
    back = codecs.decode_floats(encoded, [length], format, tf.float32)
    exact = x.astype(np.float64)
    infinite = np.isinf(exact)
    expected = nearest(np.where(infinite, 0, exact), values).astype(np.float32)
    expected[infinite] = exact[infinite] if infinities else np.nan
    assert bits(back, any_nan=True) == bits(expected, any_nan=True)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_survives_small_floats(format):
    infinities = FORMATS[format][2]
    x = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, 3e38, -3e38], np.float32)
    back = np.asarray(codecs.decode_floats(codecs.encode_floats(x, format), x.shape, format, tf.float32))
    assert np.isnan(back[2:4]).all()
    assert back[:2].tolist() == [np.inf, -np.inf] if infinities else np.isnan(back[:2]).all()
    assert np.signbit(back[4:]).tolist() == [False, True, False, True]
    largest = finite_values(*FORMATS[format][:3])[-1]
    assert back[6] == (largest if format != "bfloat16" else nearest(x[6:7].astype(float), finite_values(8, 7, True)))
    assert back[7] == -back[6]


# ---------------------------------------------------------------------------------------------------
# Lossy: groups


def philox(key: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Philox 4x32-10 (Salmon et al. 2011), one row of four words per counter and its key."""
    word = [counters % 2**32, counters >> 32, np.zeros_like(counters), np.zeros_like(counters)]
    key0, key1 = key % 2**32, key >> 32
    for _ in range(10):
        a, b = word[0] * 0xD2511F53, word[2] * 0xCD9E8D57
        word = [(b >> 32) ^ word[1] ^ key0, b % 2**32, (a >> 32) ^ word[3] ^ key1, a % 2**32]
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return np.stack(word, axis=1)


def test_philox_is_philox():
    """The known answer for counter 0 and key 0, of the authors' own tests (Random123, kat_vectors)."""
    assert [hex(w) for w in philox(np.zeros(1, np.uint64), np.zeros(1, np.uint64))[0]] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]


@pytest.mark.parametrize("width", [4, 8])
@random_tensors
@given(
    length=LENGTHS,
    group_size=st.sampled_from([4, 12, 256, 1024]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_groups_are_levels_with_random_rounding(width, length, group_size, seed):
    x = np.random.default_rng(seed % 1000).standard_normal(length).astype(np.float32) * 10
    x[: length // 4] = 3.25  # groups without a range
    encoded = np.asarray(codecs.encode_groups(x, seed, width, group_size))
    groups = -(-length // group_size)
    assert encoded.shape == (groups * (8 + group_size * width // 8),)
    ranges = encoded[: 8 * groups].view(np.float32).reshape(groups, 2)
    codes = encoded[8 * groups :]
    if width == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=1)
    codes = codes.reshape(-1)[:length]

    padded = np.pad(x, (0, groups * group_size - length), "edge").reshape(groups, group_size)
    low, high = padded.min(axis=1), padded.max(axis=1)
    assert np.array_equal(ranges, np.stack([low, high], axis=1))
    first = low.astype(np.float64)
    step = (high - first) / (2**width - 1)
    with np.errstate(divide="ignore"):
        per_step = np.where(step > 0, 1 / step, 0)
    key = np.uint64(seed % 2**64) ^ (high.view(np.uint32).astype(np.uint64) << 32 | low.view(np.uint32))
    key = np.repeat(key, group_size // 4)
    random = philox(key, np.arange(len(key), dtype=np.uint64)).reshape(-1)
    chance = ((random >> 8)[: groups * group_size].reshape(padded.shape) + 0.5) * 2**-24
    level = (padded - first[:, None]) * per_step[:, None] + chance
    expected = np.minimum(np.floor(level), 2**width - 1).reshape(-1)[:length]
    assert np.array_equal(codes, expected)

    back = codecs.decode_groups(encoded, [length], tf.float32, width, group_size)
    first, step = (np.repeat(each, group_size)[:length] for each in (first, step))
    assert np.array_equal(back, (first + codes * step).astype(np.float32))


def spread_groups(dtype: Any, seed: int) -> np.ndarray:
    """Groups of every range that the type has, and as far from 0 as they still are more than one value."""
    random = np.random.default_rng(seed)
    info = ml_dtypes.finfo(dtype.as_numpy_dtype)
    largest, fraction = float(info.max), int(np.log2(float(info.eps)))
    ranges = np.exp2(random.uniform(np.log2(float(info.tiny)) - 4, np.log2(largest) + 1, (300, 1)))
    middles = random.choice([-1, 0, 1], ranges.shape) * ranges * np.exp2(random.uniform(-2, -fraction, ranges.shape))
    x = middles + ranges * random.uniform(-0.5, 0.5, (300, reduced_precision.GROUP))
    return np.clip(x, -largest, largest).astype(dtype.as_numpy_dtype).reshape(-1)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=name_of)
@random_tensors
@given(seed=SEEDS)
def test_no_value_of_a_group_is_further_off_than_the_report_says(dtype, width, special, seed):
    reported = (
        "within 1/{} of the range of its 256 neighbours, 1/{} next to infinities and NaNs, "
        "plus a unit in the last place of the largest and 1.3e-38"
    )
    levels = 2**width - 1, 2**width - 4
    assert reduced_precision.FORMATS[f"int{width}"].error == reported.format(*levels)
    x = spread_groups(dtype, seed)
    if special:
        random = np.random.default_rng(seed)
        places = random.integers(0, reduced_precision.GROUP, (len(x) // reduced_precision.GROUP, 3))
        values = random.choice([np.inf, -np.inf, np.nan], places.shape).astype(x.dtype)
        np.put_along_axis(x.reshape(-1, reduced_precision.GROUP), places, values, axis=1)
    back = codecs.decode_groups(codecs.encode_groups(x, seed, width), x.shape, dtype, width)
    kept, back = (np.asarray(each).astype(np.float64).reshape(-1, reduced_precision.GROUP) for each in (x, back))
    finite = np.isfinite(kept)
    assert finite.all() == (not special)
    np.testing.assert_array_equal(back[~finite], kept[~finite])
    kept, back = np.where(finite, kept, np.nan), np.where(finite, back, np.nan)
    info = ml_dtypes.finfo(dtype.as_numpy_dtype)
    largest = np.maximum(np.nanmax(np.abs(kept), axis=1), float(info.tiny))
    unit = np.exp2(np.floor(np.log2(largest))) * float(info.eps)
    bound = (np.nanmax(kept, axis=1) - np.nanmin(kept, axis=1)) / levels[special] + unit + 1.3e-38
    assert np.nanmax(np.abs(back - kept) - bound[:, None]) <= 0


def test_the_mean_of_many_roundings_is_right():
    x = np.random.default_rng(0).random(1024).astype(np.float32)
    total = np.zeros(1024)
    rounds = 400
    for seed in range(rounds):
        total += np.asarray(codecs.decode_groups(codecs.encode_groups(x, seed, 4), x.shape, tf.float32, 4))
    # A step of 1/15 has at most a standard deviation of 1/30 per rounding.
    assert np.abs(total / rounds - x).max() < 5 / 30 / rounds**0.5


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("value", [0.0, 1.0, -5.0, 1e-40, -1e-40, 2.0**-126, 3.4028235e38, -3.4028235e38, np.nan])
def test_what_is_not_finite_stays_among_values_that_are_all_the_same(width, value):
    for at in (0, 5, 255):
        for special in (np.nan, np.inf, -np.inf):
            x = np.full(600, value, np.float32)
            x[at] = special
            back = np.asarray(codecs.decode_groups(codecs.encode_groups(x, 1, width), x.shape, tf.float32, width))
            np.testing.assert_allclose(back, x, rtol=0, atol=1.3e-38)


def test_wrong_groups_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="bits must be 4 or 8"):
        codecs.encode_groups(tf.ones([8]), 0, bits=3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="multiple of 4"):
        codecs.encode_groups(tf.ones([8]), 0, group_size=6)
    with pytest.raises(tf.errors.InvalidArgumentError, match="multiple of 4, and at most"):
        codecs.encode_groups(tf.ones([8]), group_size=2**61)  # whose bytes count to none in 64 bits
