"""An encoder and decoder with additive attention, in loops: as it is, and with tfswap under a share of what that takes.

    python examples/seq2seq.py
    python examples/seq2seq.py --limit 15% --length 200

The decoder adds its state to the keys of all letters for each letter that it writes: most of what the step keeps for
its gradients. tfswap finds that this can be made again in the loop that goes back, and swaps what else the loops keep.
Under a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from side_by_side import compare, run, settle, trained

LETTERS, WIDTH, BATCH = 32, 64, 32


def make_step(length: int) -> tuple[Any, tuple[Any, ...]]:
    """A training step that learns to write words backwards, and a batch of words."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = keras.layers
    embed = layers.Embedding(LETTERS, WIDTH)
    encode = layers.GRU(WIDTH, return_sequences=True)
    cell, ask, answer = layers.GRUCell(WIDTH), layers.Dense(WIDTH), layers.Dense(WIDTH)
    score, write = layers.Dense(1), layers.Dense(LETTERS)

    def decode(memory: Any, letters: Any) -> Any:
        keys = answer(memory)
        table = tf.TensorArray(tf.float32, length, element_shape=[BATCH, WIDTH])
        table = table.unstack(tf.transpose(letters, [1, 0, 2]))
        made = tf.TensorArray(tf.float32, length, element_shape=[BATCH, WIDTH])

        def body(i: Any, state: Any, made: Any) -> tuple[Any, ...]:
            weights = tf.nn.softmax(score(tf.tanh(keys + ask(state)[:, None])), axis=1)
            context = tf.reduce_sum(weights * memory, axis=1)
            _, (state,) = cell(tf.concat([table.read(i), context], -1), [state])
            return i + 1, state, made.write(i, state)

        first = 0, tf.zeros([BATCH, WIDTH]), made
        made = tf.while_loop(lambda i, *_: i < length, body, first, maximum_iterations=length)[-1]
        return write(tf.transpose(made.stack(), [1, 0, 2]))

    words = tf.random.stateless_uniform([BATCH, length], seed=(1, 2), maxval=LETTERS, dtype=tf.int32)
    state = tf.zeros([1, WIDTH])
    for layer in (encode, ask, answer, score, write):
        layer(state[None])
    embed(words[:1, :1])
    cell(tf.concat([state, state], -1), [state])
    parts = (embed, encode, cell, ask, answer, score, write)
    variables = [v for part in parts for v in part.trainable_variables]
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(variables)

    @tf.function
    def step(words: Any) -> Any:
        target = tf.reverse(words, [1])
        with tf.GradientTape() as tape:
            letters = embed(tf.pad(target[:, :-1], [[0, 0], [1, 0]]))
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(target, decode(encode(embed(words)), letters))
            )
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step, (words,)


def child(args: argparse.Namespace) -> dict[str, Any]:
    settle()
    step, arguments = make_step(args.length)
    if args.limit_bytes is None:
        return trained(step, arguments, args.steps)
    import tfswap

    step = tfswap.optimize(step, memory_limit=args.limit_bytes)
    found = trained(step, arguments, args.steps)
    report = step.report()
    lists = {
        tactic: sum(row.op == "list" for row in rows)
        for tactic, rows in (("made again", report.recomputed), ("swapped", report.swapped))
    }
    return found | {"lists": lists}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="20%", help="share of the peak of the step as it is")
    parser.add_argument("--length", type=int, default=100, help="letters of a word")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit_bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return 0
    how = ("--child", "--length", args.length, "--steps", args.steps)
    plain = run(*how)
    limit_bytes = int(plain["peak_bytes"] * float(args.limit.rstrip("%")) / 100)
    planned = run(*how, "--limit_bytes", limit_bytes)
    for tactic, count in planned["lists"].items():
        print(f"of what the loops keep, {tactic}: {count} lists")
    return compare(plain, planned, limit_bytes)


if __name__ == "__main__":
    raise SystemExit(main())
