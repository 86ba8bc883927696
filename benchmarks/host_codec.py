"""Would a lossless float codec pay for what travels to the host? Bytes and rates on feature maps, beside a disk's.

    python benchmarks/host_codec.py                 # needs scikit-learn; half a minute on one core

Each map is cut into planes (the first bytes of all values, then the second ones, ...) and compressed by zstd, which
TensorFlow 2.21 exports: all planes, or the first alone, which has the sign and most of the exponent. Beside it each
plane's entropy as single bytes, the least that an entropy stage by itself can reach. Rates are of one core, of all of
the map's bytes, with the planes already cut. "Disk" is the rate of the disk to which, written and read again, as many
bytes as the codec saves would go in the same time: 2 * saved / (bytes / there + bytes / back). With a faster one the
codec is of no use.

Maps are those of a convolutional net trained on scikit-learn's digits (benchmarks/precision.py), and of a transformer's
layer with weights as they are at the start of training. docs/measurements.md has what it printed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import precision
import tensorflow as tf

LEVEL = 1
"""Zstd's lowest with a full entropy stage."""
EPOCHS = 12
ROUNDS = 3


def zstd() -> ctypes.CDLL:
    """TensorFlow's own library, for the functions of zstd that it exports."""
    (path,) = Path(tf.sysconfig.get_lib()).glob("libtensorflow_framework.so.?")
    library = ctypes.CDLL(str(path))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, arguments in {
        "ZSTD_compressBound": [size],
        "ZSTD_compress": [pointer, size, pointer, size, ctypes.c_int],
        "ZSTD_decompress": [pointer, size, pointer, size],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, size
    return library


def entropy(plane: Any) -> float:
    """Of a plane's bytes, as a share of eight bits."""
    shares = np.bincount(plane, minlength=256) / plane.size
    return float(-np.sum(shares[shares > 0] * np.log2(shares[shares > 0])) / 8)


def compressed(library: ctypes.CDLL, plane: Any) -> tuple[int, float, float]:
    """Bytes of a plane, and the seconds there and back, the best of some rounds."""
    room = np.empty(library.ZSTD_compressBound(plane.size), np.uint8)
    back = np.empty_like(plane)
    there_s, back_s, size = [], [], 0
    for _ in range(ROUNDS):
        start = time.perf_counter()
        size = library.ZSTD_compress(room.ctypes.data, room.size, plane.ctypes.data, plane.size, LEVEL)
        there_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        assert library.ZSTD_decompress(back.ctypes.data, back.size, room.ctypes.data, size) == plane.size
        back_s.append(time.perf_counter() - start)
    assert np.array_equal(back, plane)
    return size, min(there_s), min(back_s)


def trained_maps() -> dict[str, Any]:
    net, data = precision.Net(), precision.digits()
    precision.trained(net, tf.function(net.step), data, seed=0, epochs=EPOCHS)
    first, second, third, _ = net.weights
    h = tf.nn.conv2d(data[0], first, 1, "SAME")
    maps = {"convolution": h, "its ReLU": tf.nn.relu(h)}
    h = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(maps["its ReLU"], second, 1, "SAME")), 2, 2, "VALID")
    return {**maps, "pooled ReLU": h, "ReLU of the last": tf.nn.relu(tf.nn.conv2d(h, third, 1, "SAME"))}


def transformer_maps(rows: int = 2048, width: int = 512, heads: int = 8) -> dict[str, Any]:
    x = tf.random.stateless_normal([rows // 256, 256, width], (1, 2))
    q, k, up = (tf.random.stateless_normal([width, n], (3, n)) * width**-0.5 for n in (width, width, 4 * width))
    scores = tf.einsum("bqhd,bkhd->bhqk", *(tf.reshape(x @ w, [-1, 256, heads, width // heads]) for w in (q, k)))
    return {
        "attention weights": tf.nn.softmax(scores * (width // heads) ** -0.5),
        "before GELU": x @ up,
        "GELU": tf.nn.gelu(x @ up),
    }


def main() -> None:
    library = zstd()
    print(f"{'':<54}{'all planes':^32}{'the first plane':^32}")
    print(
        f"{'map':<20}{'MiB':>5}{'zeros':>7}  {'entropy of planes':<20}"
        + f"{'bytes':>6}{'there, back, disk GB/s':>26}" * 2
    )
    for name, tensor in {**trained_maps(), **transformer_maps()}.items():
        values = np.ascontiguousarray(tensor)
        planes = [np.ascontiguousarray(plane) for plane in values.view(np.uint8).reshape(-1, 4).T[::-1]]
        line = f"{name:<20}{values.nbytes / 2**20:>5.1f}{np.mean(values == 0):>7.0%}  "
        line += " ".join(f"{entropy(plane):.2f}" for plane in planes).ljust(20)
        for chosen in (planes, planes[:1]):
            sizes, there, back = zip(*(compressed(library, plane) for plane in chosen), strict=True)
            saved = sum(plane.size for plane in chosen) - sum(sizes)
            rates = " ".join(f"{values.nbytes / sum(s) / 1e9:>7.2f}" for s in (there, back))
            line += f"{1 - saved / values.nbytes:>6.2f} {rates} {2 * saved / (sum(there) + sum(back)) / 1e9:>9.2f}"
        print(line)


if __name__ == "__main__":
    main()
