"""Does a network still learn where what is saved for its backward pass is rounded? Scikit-learn's digits, several
seeds.

    python benchmarks/precision.py                      # needs scikit-learn; some minutes on two cores
    python benchmarks/precision.py --png docs/precision.png --json precision.json

A small convolutional network trains on four fifths of the 1,797 images, unoptimised and with each precision, from the
same start and with the same batches for each seed; what is printed is its share of right answers on the rest, as the
mean over seeds and the seeds' own. "Within the spread" says that the mean lies no further below the unoptimised
one than that one's seeds lie apart (their standard deviation). Steps run under a limit, on TensorFlow's BFC allocator,
and the peaks are its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ["TFSWAP_PLAN_CACHE"] = "off"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
os.environ.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", "1024")

PRECISIONS = ("fp16", "bf16", "fp10", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
LIMIT = "85%"
BATCH = 128
CHANNELS = (32, 32, 64)


class Net:
    """Three convolutions, a pool and a dense layer, trained by momentum.

    Attributes:
        step: trains on a batch and returns its loss.
        right: the share of images whose digit is found.
    """

    def __init__(self) -> None:
        import tensorflow as tf

        shapes = [(3, 3, a, b) for a, b in zip((1, *CHANNELS[:-1]), CHANNELS, strict=True)]
        self.weights = [tf.Variable(tf.zeros(shape)) for shape in (*shapes, (4 * 4 * CHANNELS[-1], 10))]
        self.slots = [tf.Variable(tf.zeros_like(w)) for w in self.weights]

    def start(self, seed: int) -> None:
        import tensorflow as tf

        for number, (weight, slot) in enumerate(zip(self.weights, self.slots, strict=True)):
            inputs = 1
            for size in weight.shape[:-1]:
                inputs *= size
            weight.assign((2 / inputs) ** 0.5 * tf.random.stateless_normal(weight.shape, seed=(seed, number)))
            slot.assign(tf.zeros_like(slot))

    def _scores(self, x: Any) -> Any:
        import tensorflow as tf

        first, second, third, dense = self.weights
        h = tf.nn.relu(tf.nn.conv2d(x, first, 1, "SAME"))
        h = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(h, second, 1, "SAME")), 2, 2, "VALID")
        h = tf.nn.relu(tf.nn.conv2d(h, third, 1, "SAME"))
        return tf.reshape(h, [-1, dense.shape[0]]) @ dense

    def step(self, x: Any, y: Any) -> Any:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, self._scores(x)))
        gradients = tape.gradient(loss, self.weights)
        for weight, slot, gradient in zip(self.weights, self.slots, gradients, strict=True):
            slot.assign(0.9 * slot + gradient)
            weight.assign_sub(0.02 * slot)
        return loss

    def right(self, x: Any, y: Any) -> float:
        import numpy as np

        return float(np.mean(np.argmax(self._scores(x), axis=1) == y))


def trained(
    net: Net, step: Callable[..., Any], data: tuple[Any, Any, Any, Any], seed: int, epochs: int
) -> tuple[list[float], float]:
    """The loss after each epoch, and the share of right answers in the end."""
    import numpy as np
    import tensorflow as tf

    x, y, x_test, y_test = data
    random = np.random.default_rng(seed)
    net.start(seed)
    curve = []
    for _ in range(epochs):
        order = random.permutation(len(x))
        losses = [step(*map(tf.constant, (x[b], y[b]))) for b in np.split(order, range(BATCH, len(x), BATCH))]
        curve.append(float(np.mean([float(loss) for loss in losses[:-1]])))
    return curve, net.right(x_test, y_test)


def digits() -> tuple[Any, Any, Any, Any]:
    """Images and digits to train on, and to test with."""
    import numpy as np
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = np.split(order, [len(x) * 4 // 5])
    return x[train], y[train].astype(np.int32), x[test], y[test].astype(np.int32)


def measure(seeds: int, epochs: int) -> dict[str, dict[str, Any]]:
    """By precision ("none" for the unoptimised step): right answers and curves of each seed, and the peak in bytes."""
    import tensorflow as tf

    import tfswap

    slab = tf.raw_ops.Empty(shape=[1000 << 20], dtype=tf.uint8)  # one region of it all, as on a GPU
    del slab
    data = digits()
    rows: dict[str, dict[str, Any]] = {}
    for precision in (None, *PRECISIONS):
        net = Net()
        signature = [tf.TensorSpec([None, 8, 8, 1]), tf.TensorSpec([None], tf.int32)]
        step = tf.function(net.step, input_signature=signature)
        if precision:
            step = tfswap.optimize(step, memory_limit=LIMIT, tactics=("encode",), precision=precision)
        step(*map(tf.constant, (data[0][:BATCH], data[1][:BATCH])))
        tf.config.experimental.reset_memory_stats("CPU:0")
        started = time.perf_counter()
        runs = [trained(net, step, data, seed, epochs) for seed in range(seeds)]
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        if precision:
            assert step.plan().reduced, "the limit is one that something has to be done for"
        name = precision or "none"
        rows[name] = {"right": [r for _, r in runs], "curves": [c for c, _ in runs], "peak_bytes": peak}
        rows[name]["seconds"] = time.perf_counter() - started
        print(_line(name, rows[name], rows["none"]), flush=True)
    return rows


def _line(name: str, row: dict[str, Any], plain: dict[str, Any]) -> str:
    mean, reference = statistics.mean(row["right"]), statistics.mean(plain["right"])
    spread = statistics.stdev(plain["right"]) if len(plain["right"]) > 1 else 0.0
    within = "within the spread" if mean >= reference - spread else "below the spread"
    seeds = " ".join(f"{100 * r:.1f}" for r in row["right"])
    return (
        f"{name:<10}{100 * mean:6.2f}% right (seeds {seeds}), {within} of {100 * spread:.2f}; "
        f"peak {row['peak_bytes'] / 2**20:.1f} MiB"
    )


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """The right answers of each seed, and the mean loss after each epoch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    for place, (name, row) in enumerate(rows.items()):
        colour = "black" if name == "none" else f"C{place}"
        left.plot([place] * len(row["right"]), [100 * r for r in row["right"]], "o", color=colour, alpha=0.6)
        left.plot(place, 100 * statistics.mean(row["right"]), "_", color=colour, markersize=22)
        curve = [statistics.mean(losses) for losses in zip(*row["curves"], strict=True)]
        right.plot(range(1, len(curve) + 1), curve, color=colour, label=name, linewidth=2 if name == "none" else 1)
    left.set_xticks(range(len(rows)), list(rows), rotation=45)
    left.set_ylabel("right answers on the test set, %")
    right.set_yscale("log")
    right.set_xlabel("epoch")
    right.set_ylabel("training loss, mean over seeds")
    right.legend(fontsize=7)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--png", type=Path, help="draw a plot to this file (needs matplotlib)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    rows = measure(args.seeds, args.epochs)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.png:
        draw(rows, args.png)


if __name__ == "__main__":
    main()
