"""What portable models save that only predict: the arena's measured peak and the time, before and after.

    python benchmarks/portable.py                    # each net at the smallest limit that portable means reach
    python benchmarks/portable.py --nets residual --batch 16 --json portable.json

A net is saved, rewritten with TensorFlow's own ops alone, and run by processes in which tfswap can't be imported:
loaded as a Python program does, and in a session as a server does, with Grappler as it is by default. Peaks are of the
third call, times the best of ten.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ["TFSWAP_PLAN_CACHE"] = "off"

SIZE, ARENA_MIB, CALLS = 128, 2048, 10
ROADS = ("loaded", "session")


def variable(seed: int, *shape: int) -> Any:
    import tensorflow as tf

    return tf.Variable(tf.random.stateless_normal(shape, (seed, 7)) * 0.05)


def convolved(x: Any, kernel: Any) -> Any:
    import tensorflow as tf

    return tf.nn.conv2d(x, kernel, 1, "SAME")


def residual(channels: int = 32, blocks: int = 8) -> tuple[list[Any], Any]:
    """A residual net with one long skip connection, as nets for super-resolution and denoising have it (EDSR)."""
    import tensorflow as tf

    head, tail = variable(0, 3, 3, 3, channels), variable(1, 3, 3, channels, 3)
    body = [variable(2 + i, 3, 3, channels, channels) for i in range(2 * blocks)]

    def net(x: Any) -> Any:
        h = tf.nn.relu(convolved(x, head))
        y = h
        for first, second in zip(body[::2], body[1::2], strict=True):
            y = y + convolved(tf.nn.relu(convolved(y, first)), second)
        return convolved(y + h, tail)

    return [head, tail, *body], net


def unet(channels: int = 16, depth: int = 4) -> tuple[list[Any], Any]:
    """A U-Net: skip connections that are concatenated."""
    import tensorflow as tf

    widths = [channels * 2**level for level in range(depth)]
    before = [3, *widths[:-1]]
    down = [
        (variable(i, 3, 3, a, b), variable(i, 3, 3, b, b)) for i, (a, b) in enumerate(zip(before, widths, strict=True))
    ]
    up = [
        (variable(9 + i, 3, 3, a + b, b), variable(19 + i, 3, 3, b, b))
        for i, (b, a) in reversed(list(enumerate(pairwise(widths))))
    ]
    last = variable(99, 1, 1, channels, 2)

    def net(x: Any) -> Any:
        skips: list[Any] = []
        for level, kernels in enumerate(down):
            for kernel in kernels:
                x = tf.nn.relu(convolved(x, kernel))
            if level < depth - 1:
                skips.append(x)
                x = tf.nn.max_pool2d(x, 2, 2, "SAME")
        for kernels in up:
            skip = skips.pop()
            x = tf.concat([tf.image.resize(x, tf.shape(skip)[1:3], method="nearest"), skip], -1)
            for kernel in kernels:
                x = tf.nn.relu(convolved(x, kernel))
        return convolved(x, last)

    variables = [kernel for kernels in (*down, *up) for kernel in kernels]
    return [*variables, last], net


NETS = {"residual": residual, "unet": unet}


def save(name: str, folder: str) -> None:
    import tensorflow as tf

    module = tf.Module()
    module.kept, net = NETS[name]()  # type: ignore[attr-defined]
    serve = tf.function(net, input_signature=[tf.TensorSpec([None, SIZE, SIZE, 3], name="x")])
    module.serve = serve  # type: ignore[attr-defined]
    tf.saved_model.save(module, folder, signatures=serve)


def child(folder: str, road: str, batch: int) -> dict[str, float]:
    """One process without tfswap: the peak and the time of a call."""
    sys.modules["tfswap"] = None  # type: ignore[assignment]
    import tensorflow as tf

    slab = tf.raw_ops.Empty(shape=[ARENA_MIB - 64, 2**20], dtype=tf.uint8)
    del slab
    images = tf.random.stateless_uniform([batch, SIZE, SIZE, 3], (1, 2))
    if road == "loaded":
        model = tf.saved_model.load(folder)
        return measured(lambda: model.serve(images).numpy())
    fed = images.numpy()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        signature = tf.compat.v1.saved_model.load(session, ["serve"], folder).signature_def["serving_default"]
        (given,), (result,) = signature.inputs.values(), signature.outputs.values()
        return measured(lambda: session.run(result.name, {given.name: fed}))


def measured(call: Any) -> dict[str, float]:
    import tensorflow as tf

    call(), call()
    tf.config.experimental.reset_memory_stats("CPU:0")
    call()
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return {"peak_bytes": peak, "seconds": min(times)}


def run(folder: str, road: str, batch: int) -> dict[str, float]:
    arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ARENA_MIB)}
    command = [sys.executable, __file__, "--child", folder, road, "--batch", str(batch)]
    done = subprocess.run(command, env=os.environ | arena, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, batch: int) -> dict[str, Any]:
    import tfswap

    with tempfile.TemporaryDirectory() as folder:
        plain, made = f"{folder}/plain", f"{folder}/portable"
        save(name, plain)
        asked: dict[str, Any] = {"function": "serve", "batch_size": batch, "portable": True}
        floor = tfswap.optimize_graph(plain, mode="analyze", **asked).floor_bytes
        report = tfswap.optimize_graph(plain, made, memory_limit=floor, **asked)
        found = {road: {"before": run(plain, road, batch), "after": run(made, road, batch)} for road in ROADS}
    return {"limit_bytes": floor, "planned_bytes": report.planned_peak_bytes, "reruns": report.reruns, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=[*NETS])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child, options.batch)))
        return 0
    results: dict[str, Any] = {}
    print(f"{'net':<10}{'road':<9}{'limit':>10}{'before':>10}{'after':>10}{'of it':>7}{'time':>7}{'again':>7}")
    for name in options.nets:
        found = results[name] = compare(name, options.batch)
        for road in ROADS:
            before, after = found[road]["before"], found[road]["after"]
            peaks = (n / 2**20 for n in (found["limit_bytes"], before["peak_bytes"], after["peak_bytes"]))
            print(
                f"{name:<10}{road:<9}{''.join(f'{peak:>6.1f} MiB' for peak in peaks)}"
                f"{after['peak_bytes'] / before['peak_bytes']:>7.2f}{after['seconds'] / before['seconds']:>7.2f}"
                f"{found['reruns']:>7}"
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
