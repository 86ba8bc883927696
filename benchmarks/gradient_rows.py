"""Whether a dense weight's gradient can be computed in blocks of its rows, with the same bits.

    python benchmarks/gradient_rows.py                            # with oneDNN's kernels, where TensorFlow has these
    TF_ENABLE_ONEDNN_OPTS=0 python benchmarks/gradient_rows.py    # with Eigen's

The gradient of a weight is x^T·dy, and rows of it are the product of some columns of x with dy. Each product is
compared with the same rows of the whole one, bit by bit.
"""

from __future__ import annotations

import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
BATCHES, ROWS, COLUMNS = (1, 3, 16, 64, 100, 384), (64, 128, 403, 701, 1024), (1, 3, 10, 64, 403, 1024)
BLOCKS = (64, 128, 256)
"""Rows of a block."""


def main() -> None:
    import numpy as np
    import tensorflow as tf

    draws = np.random.default_rng(0)

    def product(x: object, dy: object) -> np.ndarray:
        return tf.linalg.matmul(x, dy, transpose_a=True).numpy()

    print("| batch | compared | different | elements that differ, at most |")
    print("| --: | --: | --: | --: |")
    for batch in BATCHES:
        shares: list[float] = []
        for rows, columns in itertools.product(ROWS, COLUMNS):
            x = tf.constant(draws.standard_normal((batch, rows)), tf.float32)
            dy = tf.constant(draws.standard_normal((batch, columns)), tf.float32)
            whole = product(x, dy)
            for block in (size for size in BLOCKS if size < rows):
                made = np.concatenate([product(x[:, i : i + block], dy) for i in range(0, rows, block)])
                shares.append(float(np.mean(made != whole)))
        different = sum(share > 0 for share in shares)
        print(f"| {batch} | {len(shares)} | {different} | {max(shares):.0%} |")


if __name__ == "__main__":
    main()
