"""Two workers that train one model, each under a memory limit of its own: as they are, and with tfswap.

    python examples/multi_worker.py
    python examples/multi_worker.py --limit 60% --workers 3

Each worker of `MultiWorkerMirroredStrategy` is a process, here on one machine over its loopback; on several, each gets
the same `TF_CONFIG` but for its own number. tfswap gets a limit for each worker's device, and nothing of the others:
all carry out one plan, and if one of them can't keep its limit, all say so.

The CPU's memory is managed as TensorFlow manages a GPU's, so that the peak is what the allocator says. Under a minute
on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

MIB = 1 << 20
ROOM_MIB = 1024
SIZE, CLASSES, BATCH, STEPS = 32, 10, 64, 4


def dataset(context: Any) -> Any:
    """A `tf.data.Dataset` of this worker's own part of the data."""
    import tensorflow as tf

    seed = context.input_pipeline_id
    x = tf.random.stateless_normal([STEPS * BATCH, SIZE, SIZE, 3], seed=(seed, 0))
    y = tf.random.stateless_uniform([STEPS * BATCH], seed=(seed, 1), maxval=CLASSES, dtype=tf.int32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)


def work(args: argparse.Namespace) -> dict[str, Any]:
    """One worker, which trains as it is and then, from the same start, with tfswap: losses (as text) and peaks."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else: it reads TF_CONFIG

    import keras

    import tfswap

    # TensorFlow's optimizers re-order sums: without them both trainings have the same bits.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    # One free region, as a GPU's memory is at the start.
    slab = tf.raw_ops.Empty(shape=[(ROOM_MIB - 2) * MIB], dtype=tf.uint8)
    del slab

    keras.utils.set_random_seed(0)
    layers = keras.layers
    with strategy.scope():
        convolutions = [layers.Conv2D(24, 3, padding="same", activation="relu") for _ in range(4)]
        pool, classify = layers.GlobalAveragePooling2D(), layers.Dense(CLASSES)
        model = keras.Sequential([keras.Input((SIZE, SIZE, 3)), *convolutions, pool, classify])
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True)) / (BATCH * strategy.num_replicas_in_sync)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def train_step(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    batches = list(strategy.distribute_datasets_from_function(dataset))
    variables = [*model.variables, *optimizer.variables]
    start = [variable.numpy() for variable in variables]

    def train(step: Any) -> dict[str, Any]:
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        tf.config.experimental.reset_memory_stats("CPU:0")
        losses, times = [], []
        for x, y in batches:
            started = time.perf_counter()
            losses.append(float(step(x, y)).hex())
            times.append(time.perf_counter() - started)
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        return {"losses": losses, "peak_bytes": peak, "step_s": min(times[1:])}

    plain = train(tf.function(train_step))
    optimized = tfswap.optimize(tf.function(train_step), memory_limit=args.limit)
    after = train(optimized)
    report = optimized.report()
    swapped = len(report.swapped), len(report.recomputed)
    return {"plain": plain, "tfswap": after, "limit_bytes": report.memory_limit_bytes, "moved": swapped}


def start(args: argparse.Namespace, addresses: list[str], rank: int) -> subprocess.Popen[str]:
    """A worker in a process of its own."""
    command = [sys.executable, __file__, "--rank", str(rank), "--limit", args.limit]
    environment = {
        "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ROOM_MIB),
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | environment, stdin=pipe, stdout=pipe, text=True)


def result_of(worker: subprocess.Popen[str]) -> str:
    """The line that a worker prints when it has trained; nothing where it failed."""
    assert worker.stdout
    return next((line for line in worker.stdout if line.startswith("{")), "")


def free_addresses(count: int) -> list[str]:
    """Ports of this machine that no process uses now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("localhost", 0))
    addresses = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="60%", help="memory_limit of tfswap.optimize, on each worker")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        print(json.dumps(work(args)), flush=True)
        sys.stdin.read()  # until all have ended: others may still be taking a sum from this one
        return 0
    print(
        f"{args.workers} workers train {STEPS} steps, as they are and with memory_limit={args.limit!r} ...", flush=True
    )
    addresses = free_addresses(args.workers)
    workers = [start(args, addresses, rank) for rank in range(args.workers)]
    outputs = [result_of(worker) for worker in workers]
    for worker in workers:
        worker.communicate()
    if any(worker.returncode for worker in workers):
        sys.exit("a worker failed, see above")
    held = same = True
    for rank, output in enumerate(outputs):
        found = json.loads(output)
        plain, after, limit = found["plain"], found["tfswap"], found["limit_bytes"]
        print(f"\nworker {rank}")
        for label, before, now in (
            ("", "as it is", "tfswap"),
            ("peak, MiB", f"{plain['peak_bytes'] / MIB:.1f}", f"{after['peak_bytes'] / MIB:.1f}"),
            ("limit, MiB", "", f"{limit / MIB:.1f}"),
            ("step, s", f"{plain['step_s']:.3f}", f"{after['step_s']:.3f}"),
            ("swapped, recomputed", "0, 0", "{}, {}".format(*found["moved"])),
        ):
            print(f"  {label:<24}{before:>12}{now:>12}")
        same = same and plain["losses"] == after["losses"]
        held = held and after["peak_bytes"] <= limit
    print(f"\nlosses {'identical to the bit' if same else 'DIFFER'}; limits {'held' if held else 'BROKEN'}")
    return 0 if same and held else 1


if __name__ == "__main__":
    sys.exit(main())
