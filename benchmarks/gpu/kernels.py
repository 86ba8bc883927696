"""What single kernels and copies do on the device: pinned variables, the swap ops, the codecs."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu.process import DEVICE, GB, MIB, SMALL, prepare

SOURCE = Path(__file__).with_name("pinned.cc")


def _pinned_ops() -> Any:
    """The op of `SOURCE`, compiled now."""
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "pinned.so")
        command = [
            os.environ.get("CXX", "g++"),
            "-shared",
            "-fPIC",
            "-O2",
            "-DNDEBUG",
            "-w",
            str(SOURCE),
        ]
        flags = [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
        subprocess.run([*command, "-o", str(library), *flags], check=True, capture_output=True, text=True)
        return tf.load_op_library(str(library))


def _updated(v: Any) -> Any:
    import tensorflow as tf

    v.assign_add(tf.ones_like(v))
    return tf.reduce_sum(v.read_value()[:1])


def _descended(v: Any) -> Any:
    import tensorflow as tf

    zeros = tf.zeros_like(v)
    tf.raw_ops.ResourceApplyGradientDescent(var=v.handle, alpha=0.5, delta=zeros + 1.0)
    return tf.reduce_sum(v.read_value()[:1])


def pinned() -> dict[str, Any]:
    """Kernels on a variable whose buffer is pinned host memory."""
    import numpy as np
    import tensorflow as tf

    prepare(16 * 1024)
    ops = _pinned_ops()
    width = 256 if SMALL else 8192
    nbytes = width * width * 4
    with tf.device(DEVICE):
        rows = tf.random.stateless_normal([256, width], seed=(3, 4))

    def variable() -> Any:
        """A variable with a buffer of its own: TensorFlow copies a shared one before it writes to it."""
        with tf.device(DEVICE):
            return tf.Variable(lambda: tf.random.stateless_normal([width, width], seed=(1, 2)))

    def moved() -> Any:
        made = variable()

        @tf.function
        def move() -> None:
            made.assign(ops.tfswap_proof_pinned(x=made.read_value() * 1.0))

        move()
        return made

    def on_device_bytes() -> int:
        return tf.config.experimental.get_memory_info(DEVICE)["current"]

    def measured(run: Callable[[Any], Any], uses: int) -> dict[str, Any]:
        """On a variable in device memory, and on one in pinned memory: whether they end alike, and both rates."""
        found: dict[str, Any] = {}
        results = []
        for name, make in (("device", variable), ("pinned", moved)):
            before = on_device_bytes()
            made = make()
            function = tf.function(run)
            result = np.asarray(function(made))
            times = []
            for _ in range(5):
                began = time.perf_counter()
                function(made).numpy()
                times.append(time.perf_counter() - began)
            results.append((result, made.numpy()))
            found[f"{name}_gb_s"] = uses * nbytes / min(times) / GB
            found[f"{name}_bytes_on_device"] = on_device_bytes() - before
            del made, function
        (one, one_after), (other, other_after) = results
        return found | {"same": bool(np.array_equal(one, other) and np.array_equal(one_after, other_after))}

    return {
        "variable_bytes": nbytes,
        "sum": measured(lambda v: tf.reduce_sum(v.read_value(), 0)[0], 1),
        "matmul": measured(lambda v: tf.reduce_sum(rows @ v.read_value(), 0)[0], 1),
        "add": measured(lambda v: tf.reduce_max(v.read_value() + 1.0), 1),
        "assign_add": measured(_updated, 2),
        "gradient descent": measured(_descended, 2),
        "gather": measured(lambda v: tf.reduce_sum(tf.gather(v, tf.range(width))), 1),
    }


def copies() -> dict[str, Any]:
    import numpy as np
    import tensorflow as tf

    import tfswap.ops as ops

    prepare(16 * 1024)
    rows = []
    for mib in (1, 4, 16, 64, 256, 1024) if not SMALL else (1, 4):
        with tf.device(DEVICE):
            tensor = tf.fill([mib * MIB // 4], 1.5)
        out, back, whole, pageable_out, pageable_in = [], [], [], [], []
        for _ in range(7):
            ops.reset_stats()
            began = time.perf_counter()
            with tf.device(DEVICE):
                handle = ops.swap_out(tensor)
                ops.release(handle)
                copied = ops.await_copy(*ops.swap_in(handle, tensor.dtype))
            whole.append(time.perf_counter() - began)
            stats = ops.stats()
            out.append(stats.out_busy_s)
            back.append(stats.in_busy_s)
            del handle, copied
            began = time.perf_counter()
            host = tensor.numpy()
            pageable_out.append(time.perf_counter() - began)
            began = time.perf_counter()
            with tf.device(DEVICE):
                float(tf.identity(tf.constant(np.ascontiguousarray(host)))[0])
            pageable_in.append(time.perf_counter() - began)
        names = ("out", "in", "ops", "pageable_out", "pageable_in")
        measured = dict(zip(names, (out, back, whole, pageable_out, pageable_in), strict=True))
        rows.append({"mib": mib} | {k: mib * MIB / min(v) / GB * (2 if k == "ops" else 1) for k, v in measured.items()})
    return {"gb_s": rows}


def codecs() -> dict[str, Any]:
    """Rates by the host's clock around calls that each have one op many times."""
    import codec_rate
    import tensorflow as tf

    prepare(24 * 1024)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # it would merge equal ops
    with tf.device(DEVICE):
        rows = codec_rate.rows((256 if not SMALL else 4) * MIB)
    found: dict[str, Any] = {}
    last = ""
    for row in rows:
        name = row.name.strip()
        with_name = name if name not in found else f"{last}: {name}"
        last = name if not row.name.startswith(" ") else last
        try:
            found[with_name] = rate_of(row)
        except Exception as error:  # an op that has no kernel there
            found[with_name] = str(error)[:300]
    return {"gb_s": found}


def rate_of(row: Any, calls: int = 20) -> float:
    """Bytes per second of one op, in GB/s: what `calls` more of it take."""
    import tensorflow as tf

    def made(count: int) -> Callable[[], Any]:
        def work(*arguments: Any) -> Any:
            last: list[Any] = []
            with tf.device(DEVICE):
                for _ in range(count):
                    with tf.control_dependencies(last):
                        last = tf.nest.flatten(row.call(*arguments))[:1]
                with tf.control_dependencies(last):
                    return tf.reduce_sum(tf.cast(tf.reshape(tf.cast(last[0], tf.float32), [-1])[:8], tf.float32))

        function = tf.function(work, autograph=False)
        function(*row.arguments)
        return lambda: function(*row.arguments).numpy()

    best = [float("inf")] * 2
    works = [made(1), made(1 + calls)]
    for _ in range(5):
        for n, work in enumerate(works):
            began = time.perf_counter()
            work()
            best[n] = min(best[n], time.perf_counter() - began)
    return row.bytes * calls / (best[1] - best[0]) / GB
