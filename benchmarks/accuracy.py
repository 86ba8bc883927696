"""Is the predicted peak the truth? Predicted against measured peaks, unoptimised and optimised.

    python benchmarks/accuracy.py                              # all models, about ten minutes on two cores
    python benchmarks/accuracy.py mlp vgg --runs 5 --limits 80 60
    python benchmarks/accuracy.py --json accuracy.json

Each run trains three steps in a process of its own, on TensorFlow's BFC allocator over the CPU's arena, which
starts as one free region, as a GPU's does. Measured is what the allocator says
(`tf.config.experimental.get_memory_info`), chunks and all. The unoptimised step has no fixed order, so its peak
is a range over `--runs`; the prediction is good when it lies in that range, widened by 3%. An optimised step has
one order; its plan is good when it is no more than 5% above and 2% below the measured peak.

oneDNN is off, so that the kernels are those that the memory model knows to the byte; `--onednn` switches it on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfswap.errors import InfeasibleMemoryLimit
from tfswap.support import progress

MIB = 2**20
ARENA_MIB = 8000
STEPS = 3
WIDEN = 0.03
ABOVE, BELOW = 0.05, 0.02

Made = tuple[Any, tuple[Any, ...]]


def trained(model: Any, loss_fn: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    """The step of a Keras model and its optimizer, which is built."""
    import tensorflow as tf

    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def images(name: str, batch: int, size: int, momentum: float) -> Callable[[], Made]:
    def build() -> Made:
        import keras
        import tensorflow as tf

        keras.utils.set_random_seed(0)
        body = getattr(keras.applications, name)(
            weights=None, input_shape=(size, size, 3), include_top=False, pooling="avg"
        )
        model = keras.Model(body.input, keras.layers.Dense(10, activation="softmax")(body.output))
        loss_fn = keras.losses.SparseCategoricalCrossentropy()
        step = trained(model, loss_fn, keras.optimizers.SGD(1e-3, momentum=momentum))
        return step, (tf.zeros([batch, size, size, 3]), tf.zeros([batch], tf.int32))

    return build


def mlp(layers: int = 12, width: int = 512, batch: int = 8192) -> Made:
    import tensorflow as tf

    weights = [tf.Variable(tf.random.stateless_normal([width, width], seed=(i, 7)) * 0.04) for i in range(layers)]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = tf.nn.relu(h @ w)
            loss = tf.reduce_mean(h * h)
        for w, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(1e-3 * gradient)
        return loss

    return step, (tf.random.stateless_normal([batch, width], seed=(1, 2)),)


def transformer(
    layers: int = 4,
    width: int = 192,
    heads: int = 4,
    length: int = 96,
    batch: int = 16,
    any_length: bool = False,
    words: int = 1000,
) -> Made:
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    inputs = keras.Input((None if any_length else length,), dtype="int32")
    h = keras.layers.Embedding(words, width)(inputs)
    for _ in range(layers):
        a = keras.layers.LayerNormalization()(h)
        attention = keras.layers.MultiHeadAttention(heads, width // heads, dropout=0.1)
        h = keras.layers.Add()([h, attention(a, a, use_causal_mask=True)])
        m = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(h))
        h = keras.layers.Add()([h, keras.layers.Dropout(0.1)(keras.layers.Dense(width)(m))])
    model = keras.Model(inputs, keras.layers.Dense(words)(h))
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tokens = tf.zeros([batch, length], tf.int32)
    return trained(model, loss_fn, keras.optimizers.Adam(1e-4)), (tokens, tokens)


def _gpt(layers: int = 4, width: int = 192, heads: int = 4, length: int = 128, batch: int = 16) -> Made:
    """A decoder in plain TensorFlow, with one matrix for the words that it reads and those that it predicts."""
    import keras
    import tensorflow as tf

    words, weights = 1000, []

    def weight(*shape: int) -> Any:
        weights.append(tf.Variable(tf.random.stateless_normal(shape, seed=(len(weights), 3)) * 0.02))
        return weights[-1]

    embedding, positions = weight(words, width), weight(length, width)
    shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    blocks = [[weight(*shape) for shape in shapes] for _ in range(layers)]
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(weights)

    def normalized(h: Any) -> Any:
        mean, variance = tf.nn.moments(h, [-1], keepdims=True)
        return (h - mean) * tf.math.rsqrt(variance + 1e-5)

    def attended(h: Any, inward: Any, outward: Any) -> Any:
        parts = tf.split(tf.tensordot(h, inward, 1), 3, -1)
        split = [tf.transpose(tf.reshape(p, [batch, length, heads, -1]), [0, 2, 1, 3]) for p in parts]
        past = tf.linalg.band_part(tf.ones([length, length]), -1, 0)
        scores = tf.matmul(split[0], split[1], transpose_b=True) * (width // heads) ** -0.5
        read = tf.nn.softmax(scores * past - 1e9 * (1 - past)) @ split[2]
        return tf.tensordot(tf.reshape(tf.transpose(read, [0, 2, 1, 3]), [batch, length, width]), outward, 1)

    def step(tokens: Any, following: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.gather(embedding, tokens) + positions
            for inward, outward, up, down in blocks:
                h += attended(normalized(h), inward, outward)
                h += tf.tensordot(tf.nn.gelu(tf.tensordot(normalized(h), up, 1)), down, 1)
            logits = tf.matmul(tf.reshape(normalized(h), [-1, width]), embedding, transpose_b=True)
            labels = tf.reshape(following, [-1])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        gradients: Any = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    tokens = tf.zeros([batch, length], tf.int32)
    return step, (tokens, tokens)


UNET_LAYERS = ("Conv{}D", "Conv{}DTranspose", "MaxPooling{}D")


def unet(
    size: int = 96, batch: int = 8, width: int = 16, depth: int = 3, any_size: bool = False, axes: int = 2
) -> Made:
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    conv, turned, pool = (getattr(keras.layers, name.format(axes)) for name in UNET_LAYERS)

    def twice(h: Any, filters: int) -> Any:
        for _ in range(2):
            h = conv(filters, 3, padding="same", use_bias=False)(h)
            h = keras.layers.ReLU()(keras.layers.BatchNormalization()(h))
        return h

    sides = [size] * axes
    channels = 3 if axes == 2 else 1
    inputs = keras.Input((*([None] * axes if any_size else sides), channels))
    h, skipped = inputs, []
    for level in range(depth):
        h = twice(h, width << level)
        skipped.append(h)
        h = pool()(h)
    h = twice(h, width << depth)
    for level in reversed(range(depth)):
        h = turned(width << level, 2, strides=2)(h)
        h = twice(keras.layers.Concatenate()([h, skipped[level]]), width << level)
    model = keras.Model(inputs, conv(4, 1)(h))
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    arguments = tf.zeros([batch, *sides, channels]), tf.zeros([batch, *sides], tf.int32)
    return trained(model, loss_fn, keras.optimizers.Adam(1e-3)), arguments


MODELS: dict[str, Callable[[], Made]] = {
    "mlp": mlp,
    "vgg": images("VGG16", 16, 64, 0.0),
    "resnet": images("ResNet50", 16, 64, 0.9),
    "mobilenet": images("MobileNetV2", 16, 96, 0.9),
    "efficientnet": images("EfficientNetB0", 16, 64, 0.9),
    "transformer": transformer,
    "gpt": _gpt,
    "unet": unet,
}


def child(name: str, limit_bytes: int | None) -> dict[str, Any]:
    """One run in this process: unoptimised without a limit, else under it."""
    import tensorflow as tf

    slab = tf.raw_ops.Empty(shape=[ARENA_MIB - 2, MIB], dtype=tf.uint8)
    del slab
    step, arguments = MODELS[name]()
    function = tf.function(step)
    planned: dict[str, Any] = {}
    if limit_bytes is not None:
        import tfswap

        analysed = limit_bytes == 0
        function = tfswap.optimize(
            function, memory_limit=limit_bytes or "100%", mode="analyze" if analysed else "optimize"
        )
        if analysed:
            function.get_concrete_function(*arguments)
            report = function.report()
            return {"baseline_bytes": report.baseline_peak_bytes, "floor_bytes": report.floor_bytes}
    tf.config.experimental.reset_memory_stats("CPU:0")
    try:
        for _ in range(STEPS):
            function(*arguments)
    except InfeasibleMemoryLimit as error:
        return {"floor_bytes": error.floor_bytes}
    if limit_bytes is not None:
        report = function.report()
        planned = {"baseline_bytes": report.baseline_peak_bytes, "planned_bytes": report.planned_peak_bytes}
        planned |= {"time_ratio": report.time_ratio, "swapped": len(report.swapped), "reruns": report.reruns}
    return planned | {"peak_bytes": tf.config.experimental.get_memory_info("CPU:0")["peak"]}


def spawn(name: str, limit_bytes: int | None, onednn: bool) -> dict[str, Any]:
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ARENA_MIB),
        "TF_ENABLE_ONEDNN_OPTS": str(int(onednn)),
        "TFSWAP_PLAN_CACHE": "off",
    }
    command = [sys.executable, __file__, name, "--child"]
    command += [] if limit_bytes is None else [f"--limit_bytes={limit_bytes}"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: a run failed\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All runs of one model, printed as they come."""
    analysed = spawn(name, 0, args.onednn)
    peaks = [spawn(name, None, args.onednn)["peak_bytes"] for _ in progress.over(name, range(args.runs))]
    predicted = analysed["baseline_bytes"]
    low, high = min(peaks), max(peaks)
    good = low * (1 - WIDEN) <= predicted <= high * (1 + WIDEN)
    print(
        f"{name:<14}{'unoptimised':<14}{predicted / MIB:>11.1f}{low / MIB:>11.1f} to {high / MIB:<9.1f}"
        f"{100 * (predicted / statistics.median(peaks) - 1):>+7.1f}%  {'ok' if good else 'OFF'}",
        flush=True,
    )
    row: dict[str, Any] = {"model": name, "predicted_bytes": predicted, "measured_bytes": peaks, "ok": good}
    row |= {"floor_bytes": analysed["floor_bytes"], "limits": []}
    for share in progress.over(name, args.limits):
        limit = int(statistics.median(peaks) * share / 100)
        ran = spawn(name, limit, args.onednn)
        row["limits"].append({"share": share, "limit_bytes": limit} | ran)
        if "peak_bytes" not in ran:
            print(
                f"{name:<14}{f'limit {share}%':<14}{'below the floor, ' + str(ran['floor_bytes'] >> 20) + ' MiB':>40}"
            )
            continue
        off = ran["planned_bytes"] / ran["peak_bytes"] - 1
        good = -BELOW <= off <= ABOVE and ran["peak_bytes"] <= limit
        row["limits"][-1]["ok"] = good
        verdict = "ok" if good else "OFF" if ran["peak_bytes"] <= limit else "BROKEN"
        print(
            f"{name:<14}{f'limit {share}%':<14}{ran['planned_bytes'] / MIB:>11.1f}{ran['peak_bytes'] / MIB:>11.1f}"
            f"{'':>13}{100 * off:>+7.1f}%  {verdict}",
            flush=True,
        )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--runs", type=int, default=10, help="unoptimised runs per model")
    parser.add_argument("--limits", type=int, nargs="*", default=[85, 70, 60], help="per cent of the measured peak")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--onednn", action="store_true", help="leave oneDNN's kernels in")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit_bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [name for name in args.models if name not in MODELS]
    if unknown:
        parser.error(f"no model is named {unknown[0]!r}; there are {', '.join(MODELS)}")
    if args.child:
        print(json.dumps(child(args.models[0], args.limit_bytes)))
        return 0
    print(f"{'model':<14}{'run':<14}{'predicted':>11}{'measured':>11}{', MiB':<13}{'off':>8}")
    rows = [measure(name, args) for name in progress.over("models", args.models or MODELS)]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["ok"] and all(one.get("ok", True) for one in row["limits"]) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
