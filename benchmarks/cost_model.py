"""Is the analytic cost model's shape right? Predicted against measured share of a step's time, by type of op.

    python benchmarks/cost_model.py                       # all models, some minutes
    python benchmarks/cost_model.py vgg resnet

Each distinct kernel of a step runs alone on one thread, and its own CPU time is taken, the least of some runs: that
hardly depends on what else the machine does, as wall clock does. The model's times are for one core, too, and only
shares are compared: a type of op is OFF when it takes more than 2% of the step by either account and the two shares
differ by more than two. Kernels on variables are left out: they can't run without one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

import accuracy

from tfswap.support import progress

SHARE = 0.02
FACTOR = 2.0
LEAST_CALLS, MOST_CALLS, LEAST_S = 3, 16, 0.02
SMALL_BYTES, COLD_BYTES = 64 << 10, 48 << 20
"""Arguments from the one size on are copied until they take more than the caches hold, as what is swapped does."""


def cpu_seconds(function: Any, arguments: list[Any]) -> float:
    """CPU time of one call: the least of some calls, each with arguments that the caches do not hold."""
    import tensorflow as tf

    size = sum(t.dtype.size * t.shape.num_elements() for t in arguments)
    copies = [arguments]
    if size >= SMALL_BYTES:
        copies += [[tf.raw_ops.DeepCopy(x=t) for t in arguments] for _ in range(min(MOST_CALLS, COLD_BYTES // size))]
    function(*arguments)
    taken: list[float] = []
    while len(taken) < LEAST_CALLS or (sum(taken) < LEAST_S and len(taken) < MOST_CALLS):
        chosen = copies[(len(taken) + 1) % len(copies)]
        started = time.process_time()
        function(*chosen)
        taken.append(time.process_time() - started)
    return min(taken)


def kernel_alone(node: Any, values: list[Any]) -> tuple[Any, list[Any]]:
    """A function that runs one kernel, and arguments for it: the values that are known, ones for the rest.

    Whole numbers that are not known are zeros: they may be indices.
    """
    import tensorflow as tf

    from tfswap.exporters.graph_def import export_graph_def
    from tfswap.ir.graph import Dtype, Graph

    graph, inputs, arguments = Graph(), [], []
    for i, (tensor, value) in enumerate(zip(node.inputs, values, strict=True)):
        kind = tensor.type
        feed = graph.add("Placeholder", f"input{i}", attrs={"dtype": Dtype(kind.dtype)}, outputs=(kind,))
        inputs.append(feed.out())
        usual = tf.zeros if tf.as_dtype(kind.dtype).is_integer else tf.ones
        arguments.append(usual(kind.shape, kind.dtype) if value is None else tf.constant(value, kind.dtype))
    attrs = {k: v for k, v in node.attrs.items() if not k.startswith("_")}
    graph.add(node.op, "kernel", inputs, attrs=attrs, outputs=node.outputs)
    graph_def = export_graph_def(graph)

    def run(*tensors: Any) -> Any:
        bound = {f"input{i}": t for i, t in enumerate(tensors)}
        return tf.graph_util.import_graph_def(graph_def, input_map=bound, return_elements=["kernel"])[0].outputs

    signature = [tf.TensorSpec(a.shape, a.dtype) for a in arguments]
    return tf.compat.v1.wrap_function(run, signature), arguments


def static_value(graph: Any, tensor: Any) -> Any:
    """What a tensor holds in every step, where that is known from the graph."""
    import numpy as np
    import tensorflow as tf

    if tensor.node.op == "ShapeN":  # tf.get_static_value does not look into these
        return np.array(tensor.node.inputs[tensor.index].type.shape)
    return tf.get_static_value(graph.get_tensor_by_name(tensor.name))


def child(name: str) -> dict[str, Any]:
    """Count, predicted and measured seconds per type of op, in this process."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from tfswap.analysis.cost import work_seconds
    from tfswap.compiler.compiler import Optimizer
    from tfswap.device import machine
    from tfswap.exporters.function import grappler_off
    from tfswap.importers.function import import_function
    from tfswap.kernels.hardware import default_rates
    from tfswap.kernels.profile import types_of

    step, arguments = accuracy.MODELS[name]()
    model = machine.current_device()[1]
    concrete = tf.function(step).get_concrete_function(*arguments)
    optimizer = Optimizer(import_function(concrete), model)
    nothing = tf.compat.v1.wrap_function(lambda x: x, [tf.TensorSpec([1])])
    rows: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    known: dict[object, tuple[float, float]] = {}
    with grappler_off():
        calling_s = cpu_seconds(nothing, [tf.ones([1])])
        for node, kernel in zip(optimizer.flow.nodes, optimizer.flow.is_kernel, strict=True):
            kinds = [*(t.type for t in node.inputs), *node.outputs]
            if not kernel or any(k.dtype in ("resource", "variant", "string") or k.nbytes is None for k in kinds):
                continue
            values = [static_value(concrete.graph, t) for t in node.inputs]
            given = [None if v is None or v.size > 8 else v.tolist() for v in values]
            key = (node.op, types_of(node), repr(sorted(node.attrs.items())), repr(given))
            if key not in known:
                try:
                    measured_s = cpu_seconds(*kernel_alone(node, values)) - calling_s
                except tf.errors.InvalidArgumentError as error:
                    print(f"{node.op} left out: {error.message.splitlines()[0]}", file=sys.stderr)
                    measured_s = math.nan
                known[key] = work_seconds(node, default_rates(model)), measured_s
            if math.isnan(known[key][1]):
                continue
            row = rows[node.op]
            row[0] += 1
            row[1] += known[key][0]
            row[2] += max(0.0, known[key][1])
    return rows


def spawn(name: str) -> dict[str, Any]:
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}
    done = subprocess.run([sys.executable, __file__, name, "--child"], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: a run failed\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def show(name: str, rows: dict[str, Any]) -> bool:
    """Print one model's table; whether no type of op is off."""
    predicted_s, measured_s = (sum(row[i] for row in rows.values()) for i in (1, 2))
    print(f"\n{name}: kernels take {measured_s:.3f} s on one core, predicted {predicted_s:.3f} s")
    print(f"  {'op':<40}{'count':>6}{'predicted':>11}{'measured':>10}{'off':>7}")
    good = True
    table = [(op, count, p / predicted_s, m / measured_s) for op, (count, p, m) in rows.items()]
    for op, count, predicted, measured in sorted(table, key=lambda r: -max(r[2:])):
        if max(predicted, measured) < SHARE / 4:
            continue
        off = predicted / measured if measured else float("inf")
        bad = max(predicted, measured) > SHARE and not 1 / FACTOR <= off <= FACTOR
        good &= not bad
        print(f"  {op:<40}{count:>6}{predicted:>10.1%}{measured:>10.1%}{off:>7.2f}{'  OFF' if bad else ''}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(accuracy.MODELS)}; all by default")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [name for name in args.models if name not in accuracy.MODELS]
    if unknown:
        parser.error(f"no model is named {unknown[0]!r}; there are {', '.join(accuracy.MODELS)}")
    if args.child:
        print(json.dumps(child(args.models[0])))
        return 0
    good = True
    for name in progress.over("models", args.models or accuracy.MODELS):
        good &= show(name, spawn(name))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
