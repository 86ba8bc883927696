"""Does tfswap keep its promise on the GPU of this machine, and what does that cost? One command, one page.

    python benchmarks/gpu_proof.py --json proof.json                # all parts, 20 minutes on an H100
    python benchmarks/gpu_proof.py nets:resnet50 codecs --json proof.json   # these parts; what else the file has stays
    python benchmarks/gpu_proof.py --page proof.json                # tables for a page, from the figures

    environment   the GPU, its driver, its link, and all versions
    pinned        kernels that read and write a variable whose buffer is pinned host memory: values, and bandwidth
    tests         the tests marked "gpu"
    copies        rates of the swap ops, beside those of TensorFlow's own copies from and to pageable memory
    codecs        rates of the codecs, beside the device memory's
    nets          by net: peak under the limit, values, planned against measured, time against the unoptimised step,
                  the copies' time that passes beside kernels; recompute_grad and XLA, and tfswap at their peaks

Each measurement is a process of its own. A part that fails is reported with the end of its output, and the others go
on; one that `--minutes` leaves no time for is reported as not run. No network is needed.

Values are compared bit by bit, after the same number of steps, with the unoptimised step's without Grappler's memory
optimizer, or without Grappler: "digest" is of all losses and variables. All run deterministic kernels, and with the
same bound on cuDNN's workspaces, which decides which of its algorithms are tried. Peaks are the allocator's own. Times
are medians of steps that each end with the loss on the host.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(ROOT))

from tfswap.exporters.function import grappler_off, memory_optimizer_off  # noqa: E402 - of this clone

MIB = 2**20
GB = 1e9
CHECKED_STEPS = 3
"""After these, values are compared."""
SETTLED_STEPS = 2
"""Steps more, in which a plan may be made anew for what cuDNN was seen to take."""
TIMED_STEPS = 10
WORKSPACE_MIB = 32
"""What cuDNN may take for a convolution, unoptimised and optimised."""
LIMITS = ("60%", "40%", "floor")
PEERS = ("recompute_grad", "xla")
LONGEST_S = 400
"""What takes longer than this hangs."""


class Net(NamedTuple):
    """A training step. `build` has a function for the GPU, and one that is small, for machines without."""

    build: Callable[[], Any]
    small: Callable[[], Any]


def _nets() -> dict[str, Net]:
    import accuracy
    import peers
    import seq2seq
    from papers.harness import nets

    of = functools.partial

    def blocks(wrap: Callable[[Any], Any] = lambda block: block, **sizes: int) -> Any:
        model = peers.transformer(**sizes)
        return peers.make_step(model, wrap), model.arguments

    def pair(build: Callable[..., Any], large: dict[str, Any], small: dict[str, Any]) -> Net:
        return Net(of(build, **large), of(build, **small))

    def application(name: str, batch: int, size: int = 224) -> Net:
        return pair(
            nets.application, {"name": name, "batch": batch, "size": size}, {"name": name, "batch": 4, "size": 64}
        )

    return {
        "resnet50": application("ResNet50", 64),
        "vgg19": pair(nets.vgg19, {"batch": 64, "size": 224}, {"batch": 4, "size": 64}),
        "mobilenet_v2": application("MobileNetV2", 128),
        "transformer": pair(
            accuracy.transformer, {"layers": 12, "width": 768, "heads": 12, "length": 512, "batch": 8}, {"layers": 2}
        ),
        "unet": pair(accuracy.unet, {"size": 256, "batch": 16, "width": 64, "depth": 4}, {"size": 32, "batch": 4}),
        "lstm": pair(
            nets.lstm_lm,
            {"layers": 2, "batch": 256, "length": 100, "width": 1024, "words": 10000},
            {"layers": 1, "batch": 16},
        ),
        "seq2seq": pair(seq2seq.seq2seq, {"batch": 128, "length": 100, "width": 512}, {"batch": 16, "length": 10}),
        "blocks": pair(
            blocks, {"layers": 12, "width": 768, "heads": 12, "length": 512, "batch": 16}, {"layers": 2, "width": 64}
        ),
        "gpt": pair(
            accuracy._gpt, {"layers": 24, "width": 1024, "heads": 16, "length": 512, "batch": 4}, {"layers": 2}
        ),
    }


# --- a process for each measurement -----------------------------------------------------------------------------------


def device() -> str:
    """Where the parts run: the first GPU; a CPU's arena where there is none, to try the command itself."""
    import tensorflow as tf

    return "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"


def prepare(memory_mib: int, deterministic: bool = True) -> str:
    """Let this process have so much of the device, with the same results each time. Returns the device."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if gpus and not os.environ.get("GPU_PROOF_WHOLE_DEVICE"):
        tf.config.set_logical_device_configuration(
            gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=memory_mib)]
        )
    if deterministic:
        tf.keras.utils.set_random_seed(0)
        tf.config.experimental.enable_op_determinism()
    return device()


@contextlib.contextmanager
def machine(lock: int) -> Iterator[None]:
    """Of this command's processes either one works here that has it for itself (fcntl.LOCK_EX), or several that do not
    measure times (fcntl.LOCK_SH).
    """
    path = os.environ.get("GPU_PROOF_LOCK")
    if not path:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, lock)
        yield


@contextlib.contextmanager
def variables_made() -> Iterator[list[Any]]:
    """The variables that are made here, in order."""
    import tensorflow as tf

    made: list[Any] = []

    def creator(following: Callable[..., Any], **keywords: Any) -> Any:
        made.append(following(**keywords))
        return made[-1]

    with tf.variable_creator_scope(creator):
        yield made


def build_net(name: str, **wrap: Any) -> tuple[Any, tuple[Any, ...], list[Any]]:
    """The net's step, its arguments and its variables."""
    net = _nets()[name]
    with variables_made() as variables:
        step, arguments = (net.build if device() == "GPU:0" and not SMALL else net.small)(**wrap)
    return step, arguments, variables


SMALL = bool(os.environ.get("GPU_PROOF_SMALL"))


class Steps:
    """Runs steps one by one, and keeps their times and peaks."""

    def __init__(self, where: str, call: Callable[[], Any]):
        self.where, self.call = where, call
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.digest = hashlib.sha256()

    def run(self, count: int) -> None:
        import tensorflow as tf

        for _ in range(count):
            tf.config.experimental.reset_memory_stats(self.where)
            began = time.perf_counter()
            loss = self.call().numpy()
            self.seconds.append(time.perf_counter() - began)
            self.peaks.append(tf.config.experimental.get_memory_info(self.where)["peak"])
            self.digest.update(loss.tobytes())


def net_child(name: str, how: str) -> dict[str, Any]:
    """One net: as one of PLAIN says, or under a limit: a share, a number of bytes, or "floor"."""
    import tensorflow as tf

    with REFERENCES[how]() if how in REFERENCES else contextlib.nullcontext():
        with machine(fcntl.LOCK_SH):
            where = prepare(18 * 1024)
            wrap = {"recompute_grad": tf.recompute_grad}.get(how)
            step, arguments, variables = build_net(name, **({"wrap": wrap} if wrap else {}))
            function = tf.function(step, jit_compile=True if how == "xla" else None)
            told: dict[str, Any] = {"variables_bytes": sum(v.dtype.size * int(tf.size(v)) for v in variables)}
            began = time.perf_counter()
            if how in PLAIN:
                steps = Steps(where, lambda: function(*arguments))
                steps.run(1)
            else:
                function, steps = first_step(function, where, how, arguments, told)
            told["first_s"] = time.perf_counter() - began
            steps.run(CHECKED_STEPS - 1)
            digest = steps.digest.copy()
            for variable in variables:
                digest.update(variable.numpy().tobytes())
        with machine(fcntl.LOCK_EX):
            steps.run(SETTLED_STEPS + TIMED_STEPS)
            told["streams"] = streams(steps)
    if how not in PLAIN:
        plan, report = function.plan(), function.report()
        told |= {
            "limit_bytes": plan.limit_bytes,
            "planned_bytes": report.planned_peak_bytes,
            "predicted_ratio": report.time_ratio,
            "predicted_unoptimised_bytes": report.baseline_peak_bytes,
            "swapped": len(report.swapped),
            "swapped_bytes": sum(row.nbytes for row in report.swapped),
            "reruns": report.reruns,
            "encoded": len(report.encoded),
            "host_bytes": report.host_bytes,
            "unmodelled": list(report.unmodelled)[:5],
            "stalled_s": function.stats().stalled_s,
            "copying_s": function.stats().copying_s,
        }
    timed = steps.seconds[CHECKED_STEPS + SETTLED_STEPS :][:TIMED_STEPS]
    return told | {
        "digest": digest.hexdigest(),
        "first_peaks": steps.peaks[:CHECKED_STEPS],
        "peak_bytes": max(steps.peaks[CHECKED_STEPS:]),
        "median_s": statistics.median(timed),
        "least_s": min(timed),
        "most_s": max(timed),
        "loss": float(function(*arguments).numpy()),
    }


REFERENCES = {"no_memory_optimizer": memory_optimizer_off, "no_grappler": grappler_off}
"""Whose values an optimised step has: TensorFlow without Grappler's memory optimizer, or, where a step is planned as it
was traced, without Grappler.
"""
PLAIN = ("default", *REFERENCES, "recompute_grad", "xla")
"""TensorFlow as it is; the references; every block in tf.recompute_grad; compiled by XLA."""


def streams(steps: Steps) -> dict[str, Any]:
    """What TensorFlow's profiler says of the GPU's streams in one step."""
    import tensorflow as tf
    from gpu_traces import overlap_s, read_profile, total_s

    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        steps.run(1)
        tf.profiler.experimental.stop()
        found = read_profile(folder)
    copies = [*found.out, *found.back]
    return {
        "kernels": len(found.kernels),
        "kernels_s": total_s(found.kernels),
        "out": len(found.out),
        "in": len(found.back),
        "out_s": total_s(found.out),
        "in_s": total_s(found.back),
        "copies_s": total_s(copies),
        "beside_kernels_s": overlap_s(copies, found.kernels),
    }


def first_step(
    function: Any, where: str, limit: str, arguments: tuple[Any, ...], told: dict[str, Any]
) -> tuple[Any, Steps]:
    """`function` under the limit, and its first step; under the smallest that there is where that is larger, or "floor"
    is asked for.
    """
    import tfswap

    asked: int | str = 1 if limit == "floor" else int(limit) if limit.isdigit() else limit
    made = tfswap.optimize(function, memory_limit=asked)
    steps = Steps(where, lambda: made(*arguments))
    try:
        steps.run(1)
    except tfswap.InfeasibleMemoryLimit as error:
        told["floor_bytes"] = error.floor_bytes
        made = tfswap.optimize(function, memory_limit=error.floor_bytes)
        steps.run(1)
    return made, steps


# --- the parts --------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    import tensorflow as tf

    found: dict[str, Any] = {"Python": platform.python_version(), "system": platform.platform()}
    for package in ("tensorflow", "tensorflow-cpu", "keras", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    found["build"] = {k: str(v) for k, v in tf.sysconfig.get_build_info().items() if "cu" in k}
    found["devices"] = [d.name for d in tf.config.list_physical_devices()]
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        found["details"] = {k: str(v) for k, v in tf.config.experimental.get_device_details(gpus[0]).items()}
    fields = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        output = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, check=True
        ).stdout
        found["gpu"] = dict(
            zip(fields.split(","), (part.strip() for part in output.splitlines()[0].split(",")), strict=True)
        )
    found["cores"] = os.cpu_count()
    found["host_memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return found


def pinned() -> dict[str, Any]:
    """Kernels on a variable whose buffer is pinned host memory."""
    import numpy as np
    import tensorflow as tf

    if prepare(16 * 1024) != "GPU:0":
        return {"not_run": "there is no GPU"}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "pinned.so")
        command = [
            os.environ.get("CXX", "g++"),
            "-shared",
            "-fPIC",
            "-O2",
            "-DNDEBUG",
            "-w",
            str(HERE / "gpu/pinned.cc"),
        ]
        flags = [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
        subprocess.run([*command, "-o", str(library), *flags], check=True, capture_output=True, text=True)
        ops = tf.load_op_library(str(library))
    width = 256 if SMALL else 8192
    nbytes = width * width * 4
    with tf.device("GPU:0"):
        rows = tf.random.stateless_normal([256, width], seed=(3, 4))

    def variable() -> Any:
        """Nobody else refers to its buffer: TensorFlow copies one that is shared before it writes to it."""
        with tf.device("GPU:0"):
            return tf.Variable(lambda: tf.random.stateless_normal([width, width], seed=(1, 2)))

    def moved() -> Any:
        made = variable()

        @tf.function
        def move() -> None:
            made.assign(ops.tfswap_proof_pinned(x=made.read_value() * 1.0))

        move()
        return made

    def on_device_bytes() -> int:
        return tf.config.experimental.get_memory_info("GPU:0")["current"]

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

    def updated(v: Any) -> Any:
        v.assign_add(tf.ones_like(v))
        return tf.reduce_sum(v.read_value()[:1])

    def descended(v: Any) -> Any:
        zeros = tf.zeros_like(v)
        tf.raw_ops.ResourceApplyGradientDescent(var=v.handle, alpha=0.5, delta=zeros + 1.0)
        return tf.reduce_sum(v.read_value()[:1])

    return {
        "variable_bytes": nbytes,
        "sum": measured(lambda v: tf.reduce_sum(v.read_value(), 0)[0], 1),
        "matmul": measured(lambda v: tf.reduce_sum(rows @ v.read_value(), 0)[0], 1),
        "add": measured(lambda v: tf.reduce_max(v.read_value() + 1.0), 1),
        "assign_add": measured(updated, 2),
        "gradient descent": measured(descended, 2),
        "gather": measured(lambda v: tf.reduce_sum(tf.gather(v, tf.range(width))), 1),
    }


def tests() -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "tests/test_gpu.py",
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return {"rc": ran.returncode, "output": ran.stdout[-6000:], "ok": ran.returncode == 0}


def copies() -> dict[str, Any]:
    import numpy as np
    import tensorflow as tf

    import tfswap.ops as ops

    where = prepare(16 * 1024)
    rows = []
    for mib in (1, 4, 16, 64, 256, 1024) if not SMALL else (1, 4):
        with tf.device(where):
            tensor = tf.fill([mib * MIB // 4], 1.5)
        out, back, whole, pageable_out, pageable_in = [], [], [], [], []
        for _ in range(7):
            ops.reset_stats()
            began = time.perf_counter()
            with tf.device(where):
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
            with tf.device(where):
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

    where = prepare(60 * 1024)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # it would merge equal ops
    with tf.device(where):
        rows = codec_rate.rows((256 if not SMALL else 4) * MIB)
    found: dict[str, Any] = {}
    last = ""
    for row in rows:
        name = row.name.strip()
        with_name = name if name not in found else f"{last}: {name}"
        last = name if not row.name.startswith(" ") else last
        try:
            found[with_name] = rate_of(row, where)
        except Exception as error:  # an op that has no kernel there
            found[with_name] = str(error)[:300]
    return {"gb_s": found}


def rate_of(row: Any, where: str, calls: int = 20) -> float:
    """Bytes per second of one op, in GB/s: what `calls` more of it take."""
    import tensorflow as tf

    def made(count: int) -> Callable[[], Any]:
        def work(*arguments: Any) -> Any:
            last: list[Any] = []
            with tf.device(where):
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


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "environment": environment,
    "pinned": pinned,
    "tests": tests,
    "copies": copies,
    "codecs": codecs,
    "nets": net_child,
}


def cases(part: str) -> list[tuple[str, ...]]:
    """What a part is made of: the arguments of its processes."""
    if part == "nets":
        return [(part, net, how) for net in _nets() for how in ("default", *REFERENCES, *LIMITS)] + [
            (part, "blocks", how) for how in PEERS
        ]
    return [(part,)]


def at_peers_peaks(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """tfswap under the peaks that its peers were measured at."""
    peaks = (results.get(f"nets:blocks:{how}", {}).get("peak_bytes") for how in PEERS)
    found = [("nets", "blocks", str(peak)) for peak in peaks if peak]
    return [case for case in found if ":".join(case) not in results]


def run_case(case: tuple[str, ...], deadline: float, env: dict[str, str]) -> dict[str, Any]:
    """What a case's process prints; with "failed" and the end of its output where it doesn't."""
    left_s = deadline - time.monotonic()
    if left_s < 20:
        return {"not_run": "no time was left"}
    began = time.monotonic()
    command = [sys.executable, __file__, "--child", *case]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=min(left_s, LONGEST_S), env={**os.environ, **env}
        )
    except subprocess.TimeoutExpired as error:
        output = (
            (error.stderr or b"").decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        )
        return {"failed": f"took more than {min(left_s, LONGEST_S):.0f} s", "output": output[-3000:]}
    try:
        found = json.loads(ran.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"failed": f"ended with {ran.returncode}", "output": (ran.stdout + ran.stderr)[-4000:]}
    return found | {"took_s": time.monotonic() - began}


def page(results: dict[str, Any]) -> str:
    """The figures as tables, in Markdown."""
    lines = ["| net | limit | planned | measured peak | first step | unoptimised | time | values |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|---|")
    nets = {key.split(":")[1]: None for key in results if key.startswith("nets:")}
    for net in nets:
        references = {results.get(f"nets:{net}:{how}", {}).get("digest") for how in REFERENCES} - {None}
        default = results.get(f"nets:{net}:default", {})
        for key, row in results.items():
            if not key.startswith(f"nets:{net}:") or "limit_bytes" not in row or "peak_bytes" not in default:
                continue
            values = "identical" if row["digest"] in references else "differ" if len(references) > 1 else "not compared"
            sizes = [row[name] for name in ("limit_bytes", "planned_bytes", "peak_bytes")]
            sizes += [max(row["first_peaks"]), default["peak_bytes"]]
            shown = " | ".join(f"{size / 1e6:,.0f}" for size in sizes)
            ratio = row["median_s"] / default["median_s"]
            lines.append(f"| {net}, {key.split(':')[2]} | {shown} | {ratio:.2f} | {values} |")
    lines += ["", "Sizes in MB (10^6 bytes).", "", "| net | step, ms | kernels, ms | copies, ms | beside kernels |"]
    lines.append("|---|--:|--:|--:|--:|")
    for key, row in results.items():
        if key.startswith("nets:") and row.get("streams", {}).get("copies_s", 0) > 1e-3 and "limit_bytes" in row:
            of = row["streams"]
            times = (row["median_s"], of["kernels_s"], of["copies_s"])
            shown = " | ".join(f"{1e3 * each:.1f}" for each in times)
            lines.append(f"| {key[5:].replace(':', ', ')} | {shown} | {of['beside_kernels_s'] / of['copies_s']:.0%} |")
    for part, name in (("codecs", "GB/s of the tensor"), ("copies", "GB/s")):
        found = results.get(part, {}).get("gb_s")
        if isinstance(found, dict):
            lines += ["", f"| {part} | {name} |", "|---|--:|"]
            lines += [f"| {op} | {rate:,.0f} |" for op, rate in found.items() if not isinstance(rate, str)]
        elif found:
            lines += ["", "| " + " | ".join(found[0]) + " |", "|" + "--:|" * len(found[0])]
            lines += ["| " + " | ".join(f"{value:,.1f}" for value in row.values()) + " |" for row in found]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART[:CASE[:HOW]]", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--json", type=Path, help="write the figures here; those that are there already stay")
    parser.add_argument("--minutes", type=float, default=20, help="what does not fit into so many is not run")
    parser.add_argument("--processes", type=int, default=4, help="so many plan side by side; one at a time runs steps")
    parser.add_argument("--page", type=Path, metavar="JSON", help="print tables of these figures, and run nothing")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        part, *rest = arguments.child
        print(json.dumps(PARTS[part](*rest)), flush=True)
        return 0
    if arguments.page:
        print(page(json.loads(arguments.page.read_text())))
        return 0
    chosen = [tuple(part.split(":")) for part in arguments.parts] or [(part,) for part in PARTS]
    wanted = [case for given in chosen for case in cases(given[0]) if case[: len(given)] == given]
    results: dict[str, Any] = {}
    if arguments.json and arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    deadline = time.monotonic() + 60 * arguments.minutes
    env = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CUDNN_WORKSPACE_LIMIT_IN_MB": str(WORKSPACE_MIB),
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        env["GPU_PROOF_LOCK"] = str(Path(folder, "lock"))
        failed, writing = 0, threading.Lock()

        def done(case: tuple[str, ...]) -> None:
            nonlocal failed
            found = run_case(case, deadline, env)
            with writing:
                failed += "failed" in found
                results[":".join(case)] = found
                print(":".join(case), json.dumps(found)[:1500], flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(results, indent=1))

        for case in wanted:
            if case[0] != "nets":
                done(case)
        with ThreadPoolExecutor(arguments.processes) as pool:
            list(pool.map(done, [case for case in wanted if case[0] == "nets"]))
            list(pool.map(done, at_peers_peaks(results)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
