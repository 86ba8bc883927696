"""Plans, rewritten graphs and reports of many steps, as text. A change of the code's structure leaves them as they are.

    python tests/support/plan_records.py record DIR            # all cases, about twenty minutes on two cores
    python tests/support/plan_records.py record DIR lstm map_fn
    python tests/support/plan_records.py compare DIR OTHER     # exit status 1 where a file differs

Each case is a process of its own, and is planned under three limits: 85% and 60% of its predicted unoptimised peak, and
the smallest that is possible. DIR gets a file for each plan (JSON), rewritten graph (text form) and report of each.
Figures that depend on the run (seconds of real time, measured peaks) are not in them: plans are made without an arena,
where nothing is measured, but for the cases "in_arena_*", whose steps run on TensorFlow's BFC allocator.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from folders import PYTHONPATH, ROOT

SHARES = ("85%", "60%")
ARENA_MIB = 2000
ENV = {
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TFSWAP_PLAN_CACHE": "off",
    "TFSWAP_CALIBRATION": "off",
}

NUMBERED = re.compile(r"\b(_tfswap_owner|owner|gate)=\d+")
"""Attributes that are a random number in each process."""

Asked = Callable[[Any], tuple[Any, Any]]
"""Plans under a limit; gives the plan, where it is to be had, and the report."""


# --- cases ----------------------------------------------------------------------------------------------------


def _called(make: Callable[[], tuple[Any, Any, Any]], **options: Any) -> Asked:
    """A decorated step that is called."""

    def ask(limit: Any) -> tuple[Any, Any]:
        import tensorflow as tf

        import tfswap

        tf.keras.utils.set_random_seed(0)
        _, step, arguments = make()
        optimized = tfswap.optimize(tf.function(step), memory_limit=limit, **options)
        optimized(*arguments)
        return optimized.plan(), optimized.report()

    return ask


def _keras(name: str) -> Asked:
    def ask(limit: Any) -> tuple[Any, Any]:
        import keras
        from keras_programs import PROGRAMS

        import tfswap

        build, fit = PROGRAMS[name]()
        keras.utils.set_random_seed(0)
        model = tfswap.keras.optimize(build(), memory_limit=limit)
        fit(model)
        return None, tfswap.keras.report(model)

    return ask


def _file(make: Callable[[], Any], function: str, **options: Any) -> Asked:
    """A function of a SavedModel."""

    def ask(limit: Any) -> tuple[Any, Any]:
        import tensorflow as tf

        import tfswap

        model = make()
        with tempfile.TemporaryDirectory() as folder:
            signatures = {function: getattr(model, function)}
            tf.saved_model.save(model, f"{folder}/model", signatures=signatures)
            made = tfswap.optimize_graph(
                f"{folder}/model", f"{folder}/out", memory_limit=limit, batch_size=64, function=function, **options
            )
        return None, made

    return ask


def _graph_def(**options: Any) -> Asked:
    def ask(limit: Any) -> tuple[Any, Any]:
        import tensorflow as tf

        import tfswap

        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(tf.float32, [256, 128], name="x")
            h = x
            for i in range(6):
                h = tf.nn.relu(h @ tf.constant(1.0 + i, shape=[128, 128]))
            (slope,) = tf.gradients(tf.reduce_sum(h * h), [x])
            tf.identity(slope, name="slope")
        given = {"feeds": ["x"], "fetches": ["slope"], "memory_limit": limit, **options}
        made = tfswap.optimize_graph(graph.as_graph_def(), **given)
        return made.plan, made.report

    return ask


def _outside() -> Asked:
    """A forward pass whose gradients are taken outside of it."""

    def ask(limit: Any) -> tuple[Any, Any]:
        import tensorflow as tf
        from nets import Net, batch

        import tfswap

        net = Net()
        loss_of = tfswap.optimize(tf.function(net.loss), memory_limit=limit)
        with tf.GradientTape() as tape:
            loss = loss_of(batch())
        tape.gradient(loss, net.weights)
        return loss_of.plan(), loss_of.report()

    return ask


def _mirrored() -> Asked:
    """A step that is replicated over two devices of one process."""

    def ask(limit: Any) -> tuple[Any, Any]:
        import tensorflow as tf

        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        from nets import Net, averaged, batch

        import tfswap

        strategy = tf.distribute.MirroredStrategy(
            ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.HierarchicalCopyAllReduce()
        )
        with strategy.scope():
            net = Net()

        _, step = averaged(strategy, net)
        optimized = tfswap.optimize(tf.function(step), memory_limit=limit)
        optimized(batch())
        return optimized.plan(), optimized.report()

    return ask


def _simulated(device: str) -> Callable[[Path], None]:
    """The curve of a network on a described machine, in place of plans."""

    def write(folder: Path) -> None:
        import models
        import tensorflow as tf

        import tfswap

        tf.keras.utils.set_random_seed(0)
        _, step, arguments = models.MODELS["vgg"]()
        curve = tfswap.simulate(step, *arguments, limits=6, device=device)
        (folder / f"simulated_{device}.curve.txt").write_text(str(curve))

    return write


def cases() -> dict[str, Any]:
    """Every case by name: an `Asked`, or what writes into a folder itself."""
    import control_flow
    import models
    import portable_models
    import saved_models

    named: dict[str, Any] = {}
    for name, program in control_flow.PROGRAMS.items():
        named[name] = _called(program)
    for name, program in models.MODELS.items():
        named[name] = _called(program)
        named[f"in_arena_{name}"] = named[name]
    for name in ("lstm", "micro_batches", "branches"):
        named[f"in_arena_{name}"] = named[name]
    named["swap_only"] = _called(models.MODELS["vgg"], tactics=("swap",))
    named["recompute_only"] = _called(models.MODELS["vgg"], tactics=("recompute",))
    named["half_precision"] = _called(models.MODELS["vgg"], precision="fp16")
    for name in ("vae", "gan", "lstm"):
        named[f"keras_{name}"] = _keras(name)
    named["file_train_step"] = _file(saved_models.plain, "train_step")
    named["file_predict"] = _file(saved_models.plain, "predict", portable=True)
    named["portable_train"] = _file(portable_models.net, "train_step", portable=True)
    named["portable_serve"] = _file(portable_models.net, "serve", portable=True)
    named["graph_def"] = _graph_def()
    named["graph_def_portable"] = _graph_def(portable=True)
    named["outside_gradients"] = _outside()
    named["mirrored"] = _mirrored()
    for device in ("a100", "v100-pcie"):
        named[f"simulated_{device}"] = _simulated(device)
    return named


# --- recording ------------------------------------------------------------------------------------------------


def write_case(name: str, folder: Path) -> None:
    """Record one case, in this process."""
    sys.path[:0] = PYTHONPATH.split(os.pathsep)
    import tensorflow as tf

    import tfswap
    from tfswap.compiler.compiler import Optimizer
    from tfswap.ir import text
    from tfswap.ir.graph import Node

    if name.startswith("in_arena_"):
        slab = tf.raw_ops.Empty(shape=[(ARENA_MIB << 20) - (2 << 20)], dtype=tf.uint8)
        del slab
    rewritten: list[Any] = []
    rewrite = Optimizer.rewrite

    def kept(*args: Any, **kwargs: Any) -> Any:
        made = rewrite(*args, **kwargs)
        rewritten[:] = [made]
        return made

    Optimizer.rewrite = kept
    value_text = text._value
    text._value = lambda value: f"%{value.name}" if isinstance(value, Node) else value_text(value)
    ask = cases()[name]
    if name.startswith("simulated_"):
        ask(folder)
        return
    floor = None
    try:
        ask(1 << 10)
    except tfswap.InfeasibleMemoryLimit as error:
        floor = error.floor_bytes
        (folder / f"{name}.refusal.txt").write_text(_anywhere(f"{error}\n"))
    for label, limit in (("85", "85%"), ("60", "60%"), ("floor", floor)):
        rewritten.clear()
        try:
            plan, report = ask(limit)
        except tfswap.InfeasibleMemoryLimit as error:
            (folder / f"{name}.{label}.refusal.txt").write_text(_anywhere(f"{error}\n"))
            continue
        if plan is not None:
            (folder / f"{name}.{label}.plan.json").write_text(plan.to_json() + "\n")
        (folder / f"{name}.{label}.report.txt").write_text(_anywhere(f"{report}\n{report.to_json()}\n"))
        if rewritten:
            (folder / f"{name}.{label}.graph.txt").write_text(NUMBERED.sub(r"\1=0", text.format_graph(rewritten[0])))


def _anywhere(text: str) -> str:
    """A text with source lines of this checkout as they are in any."""
    return text.replace(f"{ROOT}/", "")


def record(folder: Path, names: list[str]) -> int:
    """Record cases, a process each; the number that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = PYTHONPATH.split(os.pathsep)
    failed = 0
    for name in names or cases():
        env = {**os.environ, **ENV, "PYTHONPATH": PYTHONPATH}
        if name.startswith("in_arena_"):
            env |= {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ARENA_MIB)}
        ran = subprocess.run(
            [sys.executable, __file__, "case", str(folder), name], env=env, capture_output=True, text=True
        )
        print(f"{name}: {'recorded' if ran.returncode == 0 else ran.stderr[-200:]}", flush=True)
        failed += ran.returncode != 0
    return failed


def differing(one: Path, other: Path) -> Iterator[str]:
    """The names of files that are in one folder alone, or differ."""
    for name in sorted({p.name for p in [*one.iterdir(), *other.iterdir()]}):
        a, b = one / name, other / name
        if not (a.exists() and b.exists() and filecmp.cmp(a, b, shallow=False)):
            yield name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare", "case"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    if args.action == "case":
        write_case(args.names[0], args.folder)
        return 0
    if args.action == "record":
        return int(record(args.folder, args.names) > 0)
    found = list(differing(args.folder, Path(args.names[0])))
    print("\n".join(found) or "all the same")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
