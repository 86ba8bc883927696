"""What `configure(disk_compression=True)` does to feature maps: bytes, and rates compared with a disk's.

    python benchmarks/host_codec.py                 # needs scikit-learn; half a minute on one core

Each map is cut into planes (the first bytes of all values, then the second ones, ...) in pieces of 256 KiB, as
csrc/core/byte_planes.h does, and compressed by zstd, which TensorFlow exports: with next to no search for matches and
all of its Huffman stage, which is what is built, and at level 1. Next to it each plane's entropy as single bytes, the
least that an entropy stage by itself can reach. Rates are of one core, of all of the map's bytes, with the planes
already cut.
"Disk" is the rate of the disk to which, written and read again, as many bytes as the codec saves would go in the same
time: 2 * saved / (bytes / there + bytes / back). With a faster one the codec gains nothing on a single core.

Maps are those of a convolutional net trained on scikit-learn's digits (benchmarks/precision.py), and of a transformer's
layer with weights as they are at the start of training. docs/measurements/copies.md has what it printed.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import precision
import tensorflow as tf

PIECE_BYTES, FRAME_BYTES = 256 << 10, 64 << 10
LEVEL, LITERALS, HUFFMAN = 100, 1002, 1
"""Of zstd's ZSTD_cParameter, and a value of the second."""
BUILT = {LEVEL: -1000, LITERALS: HUFFMAN}
EPOCHS = 12
ROUNDS = 3


def zstd() -> ctypes.CDLL:
    """TensorFlow's own library, for the functions of zstd that it exports."""
    (path,) = Path(tf.sysconfig.get_lib()).glob("libtensorflow_framework.so.?")
    library = ctypes.CDLL(str(path))
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, arguments, result in (
        ("ZSTD_createCCtx", [], pointer),
        ("ZSTD_createDCtx", [], pointer),
        ("ZSTD_CCtx_setParameter", [pointer, number, number], size),
        ("ZSTD_compress2", [pointer, pointer, size, pointer, size], size),
        ("ZSTD_decompressDCtx", [pointer, pointer, size, pointer, size], size),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def entropy(plane: Any) -> float:
    """Of a plane's bytes, as a share of eight bits."""
    shares = np.bincount(plane, minlength=256) / plane.size
    return float(-np.sum(shares[shares > 0] * np.log2(shares[shares > 0])) / 8)


def frames_of(values: Any) -> list[Any]:
    """The planes of each piece, cut into frames."""
    raw = values.reshape(-1).view(np.uint8)
    pieces = [raw[at : at + PIECE_BYTES] for at in range(0, raw.size, PIECE_BYTES)]
    planes = [np.ascontiguousarray(piece.reshape(-1, 4).T).reshape(-1) for piece in pieces]
    return [plane[at : at + FRAME_BYTES] for plane in planes for at in range(0, plane.size, FRAME_BYTES)]


def compressed(library: ctypes.CDLL, frames: list[Any], parameters: dict[int, int]) -> tuple[int, float, float]:
    """Bytes of all frames, and the seconds there and back, the best of some rounds."""
    there, back = library.ZSTD_createCCtx(), library.ZSTD_createDCtx()
    for parameter, value in parameters.items():
        library.ZSTD_CCtx_setParameter(there, parameter, value)
    made = [np.empty(FRAME_BYTES + 1024, np.uint8) for _ in frames]
    again = np.empty(FRAME_BYTES, np.uint8)
    there_s, back_s, sizes = [], [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        sizes = [
            library.ZSTD_compress2(there, to.ctypes.data, to.size, frame.ctypes.data, frame.size)
            for to, frame in zip(made, frames, strict=True)
        ]
        there_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        for to, size in zip(made, sizes, strict=True):
            library.ZSTD_decompressDCtx(back, again.ctypes.data, again.size, to.ctypes.data, size)
        back_s.append(time.perf_counter() - start)
    assert np.array_equal(again[: frames[-1].size], frames[-1])
    return sum(sizes), min(there_s), min(back_s)


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
    print(f"{'':<54}{'as built':^32}{'level 1':^32}")
    print(
        f"{'map':<20}{'MiB':>5}{'zeros':>7}  {'entropy of planes':<20}"
        + f"{'bytes':>6}{'there, back, disk GB/s':>26}" * 2
    )
    for name, tensor in {**trained_maps(), **transformer_maps()}.items():
        values = np.ascontiguousarray(tensor)
        planes = [np.ascontiguousarray(plane) for plane in values.view(np.uint8).reshape(-1, 4).T[::-1]]
        line = f"{name:<20}{values.nbytes / 2**20:>5.1f}{np.mean(values == 0):>7.0%}  "
        line += " ".join(f"{entropy(plane):.2f}" for plane in planes).ljust(20)
        for parameters in (BUILT, {LEVEL: 1}):
            size, there_s, back_s = compressed(library, frames_of(values), parameters)
            rates = " ".join(f"{values.nbytes / s / 1e9:>7.2f}" for s in (there_s, back_s))
            line += (
                f"{size / values.nbytes:>6.2f} {rates} {2 * (values.nbytes - size) / (there_s + back_s) / 1e9:>9.2f}"
            )
        print(line)


if __name__ == "__main__":
    main()
