"""By net: its step as TensorFlow runs it, under limits, and as its peers run it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gpu.process import EMULATED, SMALL, Steps, machine, prepare

CHECKED_STEPS = 3
"""After these, values are compared."""
SETTLED_STEPS = 2
"""Steps more, in which a plan may be made anew for what cuDNN was seen to take."""
TIMED_STEPS = 10
DEFAULT = "default"
REFERENCES = ("no_memory_optimizer", "no_grappler")
"""How values are made that an optimised step has, where it hasn't the unoptimised step's: without Grappler's memory
optimizer, or, where a step is planned as it was traced, without Grappler.
"""
LIMITS = ("60%", "40%", "floor")
PEERS = ("recompute_grad", "xla")
PEERS_NET = "blocks"
NETS = ("resnet50", "vgg19", "transformer", "unet", "lstm", "seq2seq", "mobilenet_v2", "gpt", PEERS_NET)
MEMORY_MIB = 18 * 1024
"""Of the device, for each process: four fit into 80 GB."""


class Net(NamedTuple):
    """A training step, and a small one. Where `below` is given, their arguments are zeros, and draws take their place,
    of integers below that: values of zeros prove little.
    """

    build: Callable[[], Any]
    small: Callable[[], Any]
    below: int = 0


def blocks(wrap: Callable[[Any], Any] = lambda block: block, **sizes: int) -> Any:
    """A step of transformer blocks, each behind `wrap`, and its arguments."""
    from papers.harness import peer_nets

    model = peer_nets.transformer(**sizes)
    return peer_nets.make_step(model, wrap), model.arguments


def nets() -> dict[str, Net]:
    import accuracy
    import seq2seq
    from papers.harness import nets as published

    of = functools.partial

    def pair(build: Callable[..., Any], large: dict[str, Any], small: dict[str, Any], below: int = 0) -> Net:
        return Net(of(build, **large), of(build, **small), below)

    def application(name: str, batch: int, size: int = 224) -> Net:
        return pair(
            published.application, {"name": name, "batch": batch, "size": size}, {"name": name, "batch": 4, "size": 64}
        )

    return {
        "resnet50": application("ResNet50", 64),
        "vgg19": pair(published.vgg19, {"batch": 64, "size": 224}, {"batch": 4, "size": 64}),
        "mobilenet_v2": application("MobileNetV2", 128),
        "transformer": pair(
            accuracy.transformer,
            {"layers": 12, "width": 768, "heads": 12, "length": 512, "batch": 8},
            {"layers": 2},
            1000,
        ),
        "unet": pair(accuracy.unet, {"size": 256, "batch": 16, "width": 64, "depth": 4}, {"size": 32, "batch": 4}, 4),
        "lstm": pair(
            published.lstm_lm,
            {"layers": 2, "batch": 256, "length": 100, "width": 1024, "words": 10000},
            {"layers": 1, "batch": 16, "use_cudnn": False if EMULATED else "auto"},
        ),
        "seq2seq": pair(seq2seq.seq2seq, {"batch": 128, "length": 100, "width": 512}, {"batch": 16, "length": 10}),
        "blocks": pair(
            blocks, {"layers": 12, "width": 768, "heads": 12, "length": 512, "batch": 16}, {"layers": 2, "width": 64}
        ),
        "gpt": pair(
            accuracy._gpt, {"layers": 24, "width": 1024, "heads": 16, "length": 512, "batch": 4}, {"layers": 2}, 1000
        ),
    }


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
    net = nets()[name]
    with variables_made() as variables:
        step, arguments = (net.small if SMALL else net.build)(**wrap)
    return step, drawn(arguments, net.below) if net.below else arguments, variables


def drawn(arguments: tuple[Any, ...], below: int) -> tuple[Any, ...]:
    import tensorflow as tf

    def draw(number: int, like: Any) -> Any:
        high = {"maxval": below} if like.dtype.is_integer else {}
        return tf.random.stateless_uniform(like.shape, (number, 5), minval=0, dtype=like.dtype, **high)

    return tuple(draw(number, like) for number, like in enumerate(arguments))


def measure(name: str, how: str) -> dict[str, Any]:
    """One net: DEFAULT, as TensorFlow runs it; one of REFERENCES or PEERS; or under a limit: a share, a number of
    bytes, or "floor".
    """
    if how == "xla" and EMULATED:
        return {"not_run": "XLA does not compile for emulated GPUs"}
    with _without_optimizers(how):
        return _measured(name, how)


def _without_optimizers(how: str) -> contextlib.AbstractContextManager[None]:
    if how not in REFERENCES:
        return contextlib.nullcontext()
    from tfswap.exporters.function import grappler_off, memory_optimizer_off

    return {"no_memory_optimizer": memory_optimizer_off, "no_grappler": grappler_off}[how]()


def _measured(name: str, how: str) -> dict[str, Any]:
    import tensorflow as tf

    import tfswap

    with machine(fcntl.LOCK_SH):
        prepare(MEMORY_MIB)
        limited = how not in (DEFAULT, *REFERENCES, *PEERS)
        # Without a scope, a first step begins with all variables on the device: no limit is lower.
        with tfswap.scope() if limited else contextlib.nullcontext():
            step, arguments, variables = build_net(
                name, **({"wrap": tf.recompute_grad} if how == "recompute_grad" else {})
            )
        function = tf.function(step, jit_compile=True if how == "xla" else None)
        reported: dict[str, Any] = {"variables_bytes": sum(v.dtype.size * int(tf.size(v)) for v in variables)}
        began = time.perf_counter()
        if limited:
            function, steps = first_step(function, how, arguments, reported)
        else:
            steps = Steps(lambda: function(*arguments))
            steps.run(1)
        reported["first_s"] = time.perf_counter() - began
        steps.run(CHECKED_STEPS - 1)
        digest = steps.digest.copy()
        for variable in variables:
            digest.update(variable.numpy().tobytes())
        reported["digest"] = digest.hexdigest()
    if how in REFERENCES:
        return reported
    with machine(fcntl.LOCK_EX):
        steps.run(SETTLED_STEPS + TIMED_STEPS)
        reported["streams"] = streams(steps)
    timed = steps.seconds[CHECKED_STEPS + SETTLED_STEPS :][:TIMED_STEPS]
    return (
        reported
        | (planned(function) if limited else {})
        | {
            "first_peaks": steps.peaks[:CHECKED_STEPS],
            "peak_bytes": max(steps.peaks[CHECKED_STEPS:]),
            "median_s": statistics.median(timed),
            "least_s": min(timed),
            "most_s": max(timed),
            "loss": float(function(*arguments).numpy()),
        }
    )


def planned(function: Any) -> dict[str, Any]:
    """What tfswap says of its step."""
    plan, report, stats = function.plan(), function.report(), function.stats()
    return {
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
        "stalled_s": stats.stalled_s,
        "copying_s": stats.copying_s,
    }


def streams(steps: Steps) -> dict[str, Any]:
    """What TensorFlow's profiler says of the GPU's streams in one step."""
    import tensorflow as tf
    from gpu.traces import overlap_s, read_profile, total_s

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
        "concurrent_s": overlap_s(copies, found.kernels),
    }


def first_step(function: Any, limit: str, arguments: tuple[Any, ...], reported: dict[str, Any]) -> tuple[Any, Steps]:
    """`function` under the limit, and its first step; under the smallest that there is where that is larger, or "floor"
    is asked for.
    """
    import tfswap

    asked: int | str = 1 if limit == "floor" else int(limit) if limit.isdigit() else limit
    made = tfswap.optimize(function, memory_limit=asked)
    steps = Steps(lambda: made(*arguments))
    try:
        steps.run(1)
    except tfswap.InfeasibleMemoryLimit as error:
        reported["floor_bytes"] = error.floor_bytes
        made = tfswap.optimize(function, memory_limit=error.floor_bytes)
        steps.run(1)
    return made, steps
