"""Do steps of many small kernels use the memory that they may have? Peak over limit, time over the unoptimised step's.

    python benchmarks/room.py                                   # all, about half an hour on two cores
    python benchmarks/room.py seq2seq lstm_decoder --limit 65 --steps 20

Gradients of micro-batches accumulated in a `tf.range` loop, looped decoders with attention, recurrent nets, a 3-D
U-Net, and bottleneck ResNets of hundreds of convolutions. Each runs in a process
of its own, on TensorFlow's BFC allocator. The limit is a share of the measured unoptimised peak, the median of five
steps. The unoptimised and the optimised step take turns; ratios are of the medians: of elapsed time, of CPU time, and
of the time that each would take on an idle machine (`idle_time.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from idle_time import Took, timed
from micro_batches import micro_batches
from seq2seq import Made, seq2seq

from tfswap.support import progress

ARENA_MIB = 12_000
PEAKS = 5
"""Steps of which the unoptimised peak is the median."""


def convolutions() -> Made:
    """Four micro-batches of 16 images, six convolutions with batch norm."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = keras.layers
    h = inputs = keras.Input((64, 64, 3))
    for width in (32, 64, 128):
        for _ in range(2):
            h = layers.Conv2D(width, 3, padding="same", use_bias=False)(h)
            h = layers.ReLU()(layers.BatchNormalization()(h))
        h = layers.MaxPooling2D()(h)
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(h)))
    x = tf.random.stateless_uniform([64, 64, 64, 3], seed=(1, 2))
    y = tf.random.stateless_uniform([64], seed=(3, 4), maxval=10, dtype=tf.int32)
    return micro_batches(model, x.shape, 4), (x, y)


def transformer(layers: int = 2, width: int = 256, length: int = 128, words: int = 2000) -> Made:
    """Four micro-batches of four sentences."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    make = keras.layers
    inputs = keras.Input((length,), dtype="int32")
    h = make.Embedding(words, width)(inputs)
    for _ in range(layers):
        a = make.LayerNormalization()(h)
        h = make.Add()([h, make.MultiHeadAttention(4, width // 4)(a, a, use_causal_mask=True)])
        m = make.Dense(4 * width, activation="gelu")(make.LayerNormalization()(h))
        h = make.Add()([h, make.Dense(width)(m)])
    model = keras.Model(inputs, make.Dense(words)(h))
    x, y = (tf.random.stateless_uniform([16, length], seed=(i, 2), maxval=words, dtype=tf.int32) for i in (1, 3))
    return micro_batches(model, x.shape, 4), (x, y)


def decoder(batch: int, length: int, width: int, cell: str, *, additive: bool, words: int = 1000) -> Made:
    """A Keras encoder, and a decoder in a loop over `tf.range` with TensorArrays, teacher-forced.

    Args:
        cell: "LSTM" or "GRU".
        additive: whether attention adds query and keys, and does not multiply them.
    """
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = keras.layers
    embed, embed_target = layers.Embedding(words, width), layers.Embedding(words, width)
    encoder = getattr(layers, cell)(width, return_sequences=True, return_state=True)
    one = getattr(layers, f"{cell}Cell")(width)
    ask, answer, score, write = (layers.Dense(n) for n in (width, width, 1, words))
    combine = layers.Dense(width, activation="tanh")

    def scores(keys: Any, state: Any) -> Any:
        asked = ask(state)
        return score(tf.tanh(keys + asked[:, None]))[:, :, 0] if additive else tf.einsum("bth,bh->bt", keys, asked)

    def step(source: Any, target: Any) -> Any:
        with tf.GradientTape() as tape:
            memory, *state = encoder(embed(source), training=True)
            keys, tokens = answer(memory), tf.transpose(embed_target(target), [1, 0, 2])
            made = tf.TensorArray(tf.float32, length, element_shape=[batch, width])
            for i in tf.range(length):
                context = tf.einsum("bt,bth->bh", tf.nn.softmax(scores(keys, state[0])), memory)
                out, state = one(tf.concat([tokens[i], context], -1), state)
                made = made.write(i, combine(tf.concat([out, context], -1)))
            logits = write(tf.transpose(made.stack(), [1, 0, 2]))
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    token, wide = tf.zeros([1, 1], tf.int32), tf.zeros([1, 2 * width])
    memory, *state = encoder(embed(token))
    embed_target(token)
    for layer in (answer, score, write):
        layer(memory)
    ask(state[0])
    combine(wide)
    one(wide, state)
    parts = (embed, embed_target, encoder, one, ask, answer, write, combine, *([score] if additive else []))
    variables = [v for part in parts for v in part.trainable_variables]
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(variables)
    source, target = (
        tf.random.stateless_uniform([batch, length], seed=(i, 2), maxval=words, dtype=tf.int32) for i in (1, 3)
    )
    return step, (source, target)


def recurrent(cell: str, width: int = 256, depth: int = 2, batch: int = 64, length: int = 80) -> Made:
    """Keras' recurrent layers, one on top of the other, and a class for each word."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = keras.layers
    h = inputs = keras.Input((length, 64))
    for _ in range(depth):
        h = getattr(layers, cell)(width, return_sequences=True)(h)
    x = tf.random.stateless_normal([batch, length, 64], seed=(1, 2))
    y = tf.random.stateless_uniform([batch, length], seed=(3, 4), maxval=10, dtype=tf.int32)
    return trained(keras.Model(inputs, layers.Dense(10)(h)), x, y)


def normalised(batch: int = 64, length: int = 80, width: int = 256) -> Made:
    """A loop over `tf.range` with an LSTM cell whose state is normalised, and a loss in each iteration."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = keras.layers
    cell, norm, write = layers.LSTMCell(width), layers.LayerNormalization(), layers.Dense(10)
    zero = tf.zeros([batch, width])
    cell(tf.zeros([batch, 64]), [zero, zero])
    for layer in (norm, write):
        layer(zero)
    variables = [v for layer in (cell, norm, write) for v in layer.trainable_variables]

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            h, c, total = zero, zero, 0.0
            for i in tf.range(length):
                _, (h, c) = cell(x[i], [h, c])
                h = norm(h)
                total += tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y[i], write(h)))
        for variable, gradient in zip(variables, tape.gradient(total, variables), strict=True):
            variable.assign_sub(0.001 * tf.convert_to_tensor(gradient))
        return total

    x = tf.random.stateless_normal([length, batch, 64], seed=(1, 2))
    return step, (x, tf.random.stateless_uniform([length, batch], seed=(3, 4), maxval=10, dtype=tf.int32))


def unet_3d(batch: int = 2, size: int = 48) -> Made:
    """A U-Net of three levels of 3-D convolutions, whose skip connections are concatenated."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = keras.layers

    def block(h: Any, width: int) -> Any:
        for _ in range(2):
            h = layers.Conv3D(width, 3, padding="same", activation="relu")(h)
        return h

    h = inputs = keras.Input((size, size, size, 1))
    skips = []
    for width in (16, 32):
        h = block(h, width)
        skips.append(h)
        h = layers.MaxPooling3D()(h)
    h = block(h, 64)
    for width in (32, 16):
        h = layers.Conv3DTranspose(width, 2, strides=2)(h)
        h = block(layers.Concatenate()([h, skips.pop()]), width)
    model = keras.Model(inputs, layers.Conv3D(2, 1)(h))
    x = tf.random.stateless_normal([batch, size, size, size, 1], seed=(1, 2))
    y = tf.random.stateless_uniform([batch, size, size, size], seed=(3, 4), maxval=2, dtype=tf.int32)
    return trained(model, x, y)


def bottleneck(blocks: int, batch: int = 16, size: int = 32, width: int = 16) -> Made:
    """A ResNet of three stages of bottleneck blocks with batch normalisation, three convolutions each."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = keras.layers

    def convolved(h: Any, width: int, kernel: int, strides: int = 1) -> Any:
        h = layers.Conv2D(width, kernel, strides, padding="same", use_bias=False)(h)
        return layers.BatchNormalization()(h)

    inputs = keras.Input((size, size, 3))
    h = layers.ReLU()(convolved(inputs, 4 * width, 3))
    for stage in range(3):
        for number in range(blocks // 3):
            strides = 2 if stage and not number else 1
            made = layers.ReLU()(convolved(h, width << stage, 1, strides))
            made = layers.ReLU()(convolved(made, width << stage, 3))
            made = convolved(made, 4 * width << stage, 1)
            short = h if number else convolved(h, 4 * width << stage, 1, strides)
            h = layers.ReLU()(layers.Add()([short, made]))
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(h)))
    x = tf.random.stateless_uniform([batch, size, size, 3], seed=(1, 2))
    return trained(model, x, tf.random.stateless_uniform([batch], seed=(3, 4), maxval=10, dtype=tf.int32))


def trained(model: Any, x: Any, y: Any) -> Made:
    """A training step with momentum."""
    import keras
    import tensorflow as tf

    variables = model.trainable_variables
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    optimizer.build(variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step, (x, y)


CASES: dict[str, tuple[int, Callable[[], Made]]] = {
    "convolutions": (80, convolutions),
    "transformer": (80, transformer),
    "seq2seq": (65, lambda: seq2seq(32, 100)),
    "seq2seq_lstm": (65, lambda: seq2seq(32, 100, cell="LSTMCell")),
    "lstm_decoder": (65, lambda: decoder(32, 60, 256, "LSTM", additive=True)),
    "gru_decoder": (60, lambda: decoder(32, 60, 256, "GRU", additive=True)),
    "gru_decoder_dot": (65, lambda: decoder(64, 100, 256, "GRU", additive=False)),
    "lstm_layers": (60, lambda: recurrent("LSTM")),
    "gru_layers": (60, lambda: recurrent("GRU")),
    "lstm_normalised": (60, normalised),
    "unet_3d": (70, unet_3d),
    "resnet_200": (25, lambda: bottleneck(66)),
    "resnet_1000": (25, lambda: bottleneck(333)),
}
"""Each with its limit, per cent of the unoptimised peak."""


def child(name: str, limit: int, steps: int) -> dict[str, Any]:
    """What one case takes, in this process."""
    import tensorflow as tf

    import tfswap

    slab = tf.raw_ops.Empty(shape=[ARENA_MIB - 2, 1 << 20], dtype=tf.uint8)  # one region
    del slab
    step, arguments = CASES[name][1]()

    def run(function: Any) -> tuple[Took, int]:
        tf.config.experimental.reset_memory_stats("CPU:0")
        took = timed(lambda: function(*arguments).numpy())
        return took, tf.config.experimental.get_memory_info("CPU:0")["peak"]

    plain = tf.function(step)
    run(plain)
    unoptimised = int(statistics.median(run(plain)[1] for _ in range(PEAKS)))
    limit_bytes = unoptimised * limit // 100
    made = tfswap.optimize(tf.function(step), memory_limit=limit_bytes)
    run(made)
    turns = [(run(plain), run(made)) for _ in range(steps)]
    ratios = {
        field: statistics.median(getattr(after[0], field) for _, after in turns)
        / statistics.median(getattr(before[0], field) for before, _ in turns)
        for field in Took._fields
    }
    idle_s = statistics.median(before[0].idle_s for before, _ in turns)
    peak_bytes = max(after[1] for _, after in turns)
    return {"limit_bytes": limit_bytes, "used": peak_bytes / limit_bytes, "unoptimised_s": idle_s, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--limit", type=int, help="per cent of the unoptimised peak; by default each case's own")
    parser.add_argument("--steps", type=int, default=15, help="steps of each, in turns")
    parser.add_argument("--onednn", action="store_true", help="with oneDNN's kernels")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name = args.cases[0]
        print(json.dumps(child(name, args.limit or CASES[name][0], args.steps)))
        return
    environment = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ARENA_MIB),
        "TF_ENABLE_ONEDNN_OPTS": str(int(args.onednn)),
        "TFSWAP_PLAN_CACHE": "off",
    }
    print("| step | limit | peak / limit | idle machine | elapsed | CPU |\n|---|---|---|---|---|---|")
    for name in progress.over("cases", args.cases):
        limit = args.limit or CASES[name][0]
        command = [sys.executable, __file__, name, "--child", f"--limit={limit}", f"--steps={args.steps}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name}: a run failed\n{done.stderr[-3000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {name}, {found['unoptimised_s']:.2f} s | {limit}% | {found['used']:.2f} | {found['idle_s']:.2f} "
            f"| {found['elapsed_s']:.2f} | {found['cpu_s']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
