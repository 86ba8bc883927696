"""Trains state that is many times larger than the arena for 100 steps, and compares it piece by piece.

    python benchmarks/state_pieces.py FOLDER                        # 12 GiB of state in 96 MiB, 4 pieces; an hour
    python benchmarks/state_pieces.py FOLDER --pieces 2 --layers 2 --width 512 --cap 8 --steps 6          # a minute

Each piece is a net of dense layers with an Adam and a loss of its own. One step trains all pieces under the cap, in
which they are made, in a `tfswap.scope`. A process does half of the steps and writes a checkpoint; a fresh one restores
it, evaluates all pieces, and does the others. FOLDER has room for the checkpoint, which has the state's size.

To compare with, each piece is trained alone, without limits, in a process of its own: the state of all pieces with all
gradients need not fit in memory. Values are all losses, the evaluation and the variables after the last step, bit by
bit. The time is the median of a step, over the sum of the pieces' ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from state import ROOM_MIB, in_arena, model_of
from state_tiers import parts_of


def step_of(models: Sequence[Any], optimizers: Sequence[Any]) -> Any:
    """A training step of all pieces, with a loss for each."""
    import tensorflow as tf

    @tf.function
    def step(x: Any, y: Any) -> Any:
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            losses.append(loss)
        return losses

    return step


def made(pieces: Sequence[int], net: Sequence[int]) -> tuple[list[Any], list[Any], Any]:
    """The models and optimizers of these pieces, and a batch."""
    import tensorflow as tf

    layers, width, batch = net
    models, optimizers, x = [], [], None
    for piece in pieces:
        tf.keras.utils.set_random_seed(1 + piece)
        model, x = model_of(layers, 0, width, batch)
        optimizer = tf.keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        models.append(model)
        optimizers.append(optimizer)
    return models, optimizers, x


def train(
    pieces: Sequence[int], net: Sequence[int], cap_mib: int | None, steps: Sequence[int], saved: str
) -> dict[str, Any]:
    """Figures, and values by piece, of some steps.

    Args:
        pieces: numbers, which are their seeds too.
        net: layers, width, batch.
        steps: the first, the one before which the pieces are evaluated, and the end.
        saved: a checkpoint, which is restored before the evaluation, or else written after the last step; "" for none.
    """
    import tensorflow as tf

    import tfswap

    with nullcontext() if cap_mib is None else tfswap.scope():
        models, optimizers, x = made(pieces, net)
        checkpoint = tf.train.Checkpoint(models=models, optimizers=optimizers)
        if saved and steps[0] == steps[1]:
            checkpoint.restore(saved)

    called: Any = step_of(models, optimizers)
    if cap_mib is not None:
        called = tfswap.optimize(called, memory_limit=(cap_mib - ROOM_MIB) << 20)
    values: list[list[str]] = [[] for _ in pieces]
    peaks, planned, seconds = [], [], []
    y = tf.zeros((net[-1],), tf.int32)

    def note(found: Sequence[Any]) -> None:
        for of_piece, value in zip(values, found, strict=True):
            of_piece.append(value.numpy().tobytes().hex())

    for number in range(steps[0], steps[2]):
        if number == steps[1]:
            for of_piece, model in zip(values, models, strict=True):
                of_piece.append(model(x).numpy().tobytes().hex())
        tf.config.experimental.reset_memory_stats("CPU:0")
        began = time.perf_counter()
        losses = called(x, y)
        seconds.append(time.perf_counter() - began)
        note(losses)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        if cap_mib is not None:
            planned.append(called.report().planned_peak_bytes)
    tf.config.experimental.reset_memory_stats("CPU:0")
    if saved and steps[0] < steps[1]:
        checkpoint.write(saved)
    outside = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    nbytes = 0
    for of_piece, model, optimizer in zip(values, models, optimizers, strict=True):
        digest = hashlib.sha256()
        for variable in (*model.variables, *optimizer.variables):
            for part in parts_of(variable):
                digest.update(part.tobytes())
                nbytes += part.nbytes
        of_piece.append(digest.hexdigest())
    found = {"values": values, "peak": max(peaks), "s": statistics.median(seconds[1:]), "first_s": seconds[0]}
    if cap_mib is not None:
        moved = called.stats()
        found |= {"planned": max(planned), "in": moved.in_bytes, "out": moved.out_bytes}
        found |= {"slice": called.plan().slice_bytes}
    return {**found, "outside": outside, "state": nbytes}


def measured(
    pieces: Sequence[int], net: Sequence[int], cap_mib: int | None, steps: Sequence[int], saved: str = ""
) -> dict[str, Any]:
    """`train` in a process of its own."""
    layers, width, _ = net
    room_mib = cap_mib or len(pieces) * (layers + 2) * width**2 * 4 * 5 // 2**20 + 256
    return in_arena([__file__, "", "--child", json.dumps([pieces, net, cap_mib, steps, saved])], room_mib)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="for the checkpoint")
    parser.add_argument("--pieces", type=int, default=4)
    parser.add_argument("--layers", type=int, default=64, help="of each piece")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--cap", type=int, default=96, help="MiB of the arena")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(train(*json.loads(args.child))))
        return
    half, net, pieces = args.steps // 2, (args.layers, args.width, args.batch), range(args.pieces)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        first = measured([*pieces], net, args.cap, (0, args.steps, half), f"{folder}/saved")
        then = measured([*pieces], net, args.cap, (half, half, args.steps), f"{folder}/saved")
    plain = [measured([piece], net, None, (0, half, args.steps)) for piece in pieces]
    values = [a[:-1] + b for a, b in zip(first["values"], then["values"], strict=True)]  # a digest is the last
    same = all(alone["values"] == [mine] for alone, mine in zip(plain, values, strict=True))
    print("| pieces | layers | width | state, MiB | arena, MiB | steps | planned | peak | saving | MiB in ", end="")
    print("| MiB out | first step, s | step, s | time | values |")
    print("| --: " * 14 + "| --- |")
    peaks = f"{then['planned']:,} | {max(first['peak'], then['peak']):,} | {first['outside']:,}"
    moved = f"{then['in'] / 2**20:,.0f} | {then['out'] / 2**20:,.0f}"
    times = f"{then['first_s']:.1f} | {then['s']:.1f} | {then['s'] / sum(alone['s'] for alone in plain):.2f}"
    sizes = f"{args.pieces} | {args.layers} | {args.width} | {then['state'] / 2**20:,.0f} | {args.cap} | {args.steps}"
    print(f"| {sizes} | {peaks} | {moved} | {times} | {'identical' if same else 'DIFFERENT'} |")


if __name__ == "__main__":
    main()
