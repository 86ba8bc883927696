"""How low the planner comes: its floor, compared with what no plan can do without.

    python benchmarks/floor.py                            # all models of benchmarks/accuracy.py
    python benchmarks/floor.py mlp transformer --alive    # and what is in memory at the floor's peak
    python benchmarks/floor.py mlp transformer --alone 5  # and the five largest kinds of kernels, each alone
    python benchmarks/floor.py vgg vgg224 --slices           # with the tactic "slice"
    python benchmarks/floor.py unet --slices close           # and values="close"
    python benchmarks/floor.py words --slices --home         # and variables at home on the host
    python benchmarks/floor.py unet dcgan --tactics          # what the order alone comes to; or "recompute", ...
    python benchmarks/floor.py lstm --steps my_steps.py   # a file whose STEPS are functions that return step, arguments

No plan that keeps the order of kernels whole can take less than what is held throughout (variables, optimizer slots,
arguments, constants) and, next to it, the largest working set of a kernel: what it reads and allocates. Two such
sums: "in place" has each kernel write over inputs wherever it can, "fresh" has every output in a buffer of its own. A
loop is one kernel, with all that its iterations save and do not swap. The floor is the smallest limit that is planned;
"live" is that plan's peak if memory never fragmented, "time" its simulated time over that of the kernels alone. The
arena is one free region besides what is held throughout. Steps are traced, analysed and planned, and do not run.

With `--alone`, the kernels of the largest "fresh" working sets run, each by itself in a process with TensorFlow's BFC
allocator: what it is given is there before, and held by its caller, so that it writes over nothing; the allocator's
peak says what it allocates. Kernels that write variables or run functions are left out. "floor over it" is the floor
over what is held throughout and the largest working set so measured.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from accuracy import MIB, MODELS, images, trained, transformer, unet
from gist import NETWORKS
from papers.harness.nets import gan

from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.offline import Variable, offline_optimizer
from tfswap.compiler.options import Options
from tfswap.exporters.graph_def import encode_nodes
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import calls_functions, is_const
from tfswap.ir.permits import BITS, SLICE, TACTICS, VALUES
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.profile import types_of
from tfswap.plan.schedule import Step, build_schedule
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.memory import Memory, simulate_memory
from tfswap.support import progress


def gaussian_process(points: int = 100_000, inducing: int = 500, features: int = 8) -> Any:
    """The bound of a sparse Gaussian process (Titsias, 2009), by sums over the points, and its gradients."""
    import tensorflow as tf

    places = tf.Variable(tf.random.stateless_normal([inducing, features], seed=(0, 0)))
    scales, noise = tf.Variable(tf.ones([features])), tf.Variable(tf.constant(0.1))
    one = tf.eye(inducing)

    def covariance(x: Any, z: Any) -> Any:
        x, z = x / scales, z / scales
        apart = tf.reduce_sum(x * x, 1, keepdims=True) + tf.reduce_sum(z * z, 1) - 2 * tf.matmul(x, z, transpose_b=True)
        return tf.exp(-0.5 * apart)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            between = covariance(x, places)
            squares, read = tf.matmul(between, between, transpose_a=True), tf.matmul(between, y, transpose_a=True)
            factor = tf.linalg.cholesky(covariance(places, places) + 1e-3 * one)
            inner = tf.linalg.triangular_solve(factor, squares)
            inner = tf.linalg.triangular_solve(factor, tf.transpose(inner)) / noise
            of_sum = tf.linalg.cholesky(one + inner)
            explained = tf.linalg.triangular_solve(of_sum, tf.linalg.triangular_solve(factor, read)) / noise
            bound = tf.reduce_sum(tf.math.log(tf.linalg.diag_part(of_sum))) + 0.5 * points * tf.math.log(noise)
            bound += 0.5 * (tf.reduce_sum(y * y) / noise - tf.reduce_sum(explained * explained))
            bound += 0.5 * (points / noise - tf.linalg.trace(inner))
        return [bound, *tape.gradient(bound, [places, scales, noise])]

    return step, (tf.zeros([points, features]), tf.zeros([points, 1]))


def classic(name: str, batch: int, size: int) -> Any:
    """One of gist.py's networks, with images of another size."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    inputs = keras.Input((size, size, 3))
    model = keras.Model(inputs, NETWORKS[name][0](inputs))
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = trained(model, loss_fn, keras.optimizers.SGD(1e-3))
    return step, (tf.zeros([batch, size, size, 3]), tf.zeros([batch], tf.int32))


LARGE = {
    "alexnet": partial(classic, "alexnet", 32, 227),
    "dcgan": partial(gan, 64),
    "overfeat": partial(classic, "overfeat", 16, 231),
    "vgg16_dense": partial(classic, "vgg16", 16, 224),
    "googlenet": partial(classic, "inception", 16, 128),
    "inception": images("InceptionV3", 16, 96, 0.9),
    "vgg16": images("VGG16", 16, 128, 0.0),
    "vgg19_128": images("VGG19", 16, 128, 0.0),
    "gp": gaussian_process,
    "vgg224": images("VGG16", 16, 224, 0.0),
    "vgg19": images("VGG19", 16, 224, 0.0),
    "unet3d": partial(unet, size=96, batch=1, axes=3),
    "unet3d48": partial(unet, size=48, batch=1, axes=3),
    "words": partial(transformer, layers=2, width=512, heads=8, length=512, batch=8, words=50_000),
}
"""Steps in addition to those of accuracy.py, which run by name alone."""
ARENA_BYTES = 1 << 40
ALONE_MIB = 4096
"""The arena of kernels that run alone."""


def working_set_bytes(flow: Dataflow, kernel: int, *, in_place: bool) -> int:
    """What `kernel` reads and allocates at its worst, besides what is held throughout the step."""
    made, forwards = dict(flow.makes[kernel]), dict(flow.forwards[kernel])
    temp_forwards = flow.temp_forwards.get(kernel, {})
    reads = [v for v in flow.reads[kernel] if flow.values[v].producer != PERSISTENT]
    free = [v for v in reads if reads.count(v) == 1] if in_place else []
    held = most = sum(round_up(flow.values[v].nbytes) for v in set(reads))
    temps: list[int] = []
    for event, amount in flow.events[kernel]:
        if event == "free":
            held -= temps[amount]
            continue
        nbytes, candidates = amount, temp_forwards.get(len(temps), ())
        if event == "out":
            if amount not in made:
                continue
            nbytes, candidates = flow.values[made[amount]].nbytes, forwards.get(made[amount], ())
        taken = next((v for v in candidates if v in free), None)
        if taken is not None:
            free.remove(taken)
        bytes_ = round_up(nbytes) if taken is None else 0
        if event == "temp":
            temps.append(bytes_)
        held += bytes_
        most = max(most, held)
    return most


def runs_alone(node: Node) -> bool:
    """Whether a kernel deals in nothing but tensors."""
    kinds = (*(t.type for t in node.inputs), *node.outputs)
    return not calls_functions(node.op) and all(kind.dtype not in ("resource", "variant") for kind in kinds)


def run_alone(graph: Graph, flow: Dataflow, kernels: list[int]) -> list[int]:
    """The working sets of these kernels, bytes, as the allocator reports each."""
    encoded = {proto.name: proto for proto in encode_nodes(graph, lambda *_: {})}
    asked: list[dict[str, Any]] = []
    for kernel in kernels:
        node = flow.nodes[kernel]
        constants = dict.fromkeys(t.node.name for t in node.inputs if is_const(t.node.op))
        protos = [encoded[name] for name in (node.name, *constants)]
        for proto in protos:
            del proto.input[:]
            proto.attr.pop("_class", None)
            proto.device = ""
        given = [t for t in node.inputs if not is_const(t.node.op)]
        asked.append(
            {
                "nodes": [base64.b64encode(proto.SerializeToString()).decode() for proto in protos],
                "inputs": [t.name for t in node.inputs],
                "given": {t.name: (t.type.dtype, t.type.shape) for t in given},
                "made": sorted({number for number, _ in flow.makes[kernel]}),
            }
        )
    environment = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ALONE_MIB)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.json"
        file.write_text(json.dumps(asked))
        command = [sys.executable, __file__, "--child", str(file)]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"a kernel does not run alone\n{done.stderr[-3000:]}")
    allocated = json.loads(done.stdout.splitlines()[-1])
    read = [{v for v in flow.reads[k] if flow.values[v].producer != PERSISTENT} for k in kernels]
    return [n + sum(round_up(flow.values[v].nbytes) for v in vs) for n, vs in zip(allocated, read, strict=True)]


def child(file: Path) -> list[int]:
    """What each kernel of a file allocates, bytes, with what it is given there before."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    slab = tf.raw_ops.Empty(shape=[ALONE_MIB - 2, MIB], dtype=tf.uint8)
    del slab
    return [allocated_bytes(**one) for one in json.loads(file.read_text())]


def allocated_bytes(nodes: list[str], inputs: list[str], given: dict[str, Any], made: list[int]) -> int:
    """Of one kernel.

    Args:
        nodes: it, and the constants that it reads; each a NodeDef without inputs.
        inputs: what the kernel reads, by name.
        given: type and shape of those that are no constants.
        made: its outputs.
    """
    import tensorflow as tf
    from tensorflow.core.framework import graph_pb2, node_def_pb2

    graph_def = graph_pb2.GraphDef()
    for text in nodes:
        graph_def.node.add().CopyFrom(node_def_pb2.NodeDef.FromString(base64.b64decode(text)))
    feeds = {name: f"given{number}" for number, name in enumerate(given)}
    graph_def.node[0].input.extend(feeds.get(name, name) for name in inputs)
    for name, (dtype, shape) in given.items():
        feed = graph_def.node.add(name=feeds[name], op="Placeholder")
        feed.attr["dtype"].type = tf.dtypes.as_dtype(dtype).as_datatype_enum
        feed.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())

    @tf.function
    def run(*tensors: Any) -> Any:
        fed = {f"{name}:0": tensor for name, tensor in zip(feeds.values(), tensors, strict=True)}
        return tf.graph_util.import_graph_def(graph_def, fed, [f"{graph_def.node[0].name}:{n}" for n in made])

    tensors = [tf.zeros(shape, dtype) for dtype, shape in given.values()]
    run(*tensors)  # what is made with the function is there throughout
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    run(*tensors)
    return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before


def measure(
    name: str, make: Callable[[], Any], alive: bool, alone: int, options: Options, home: bool
) -> dict[str, Any]:
    import tensorflow as tf

    import tfswap.ops
    from tfswap.compiler.grappler import as_planned
    from tfswap.importers.function import import_function

    step, arguments = make()
    concrete = tf.function(step).get_concrete_function(*arguments)
    caches = {"l3_cache_bytes": tfswap.ops.l3_cache_bytes(), "l1_l2_bytes": tfswap.ops.l1_l2_bytes()}
    device = DeviceModel(intra_op_threads=2, inter_op_threads=2, **caches)
    graph = as_planned(import_function(concrete, arguments), concrete, device)
    if home:
        variables = [Variable(v.dtype.name, tuple(v.shape)) for v in concrete.graph.variables]
        optimizer = offline_optimizer(graph, device, options, variables)
    else:
        optimizer = Optimizer(graph, device, options)
    there = optimizer.flow.persistent_bytes
    if not home:
        chunks = ((0, there, True), (there, ARENA_BYTES, False))
        optimizer.assume_arena(ArenaSnapshot(there, chunks, instantiated=True))
    started = time.process_time()
    lowest = optimizer.search.fastest(optimizer.floor_bytes())
    took_s = time.process_time() - started
    assert lowest is not None, "at the floor there is a plan"
    flow, found = lowest.variant.flow, lowest.candidate
    kernels = [i for i in range(len(flow.nodes)) if flow.is_kernel[i]]
    bounds = {
        p: max(working_set_bytes(flow, i, in_place=p == "in place") for i in kernels) for p in ("in place", "fresh")
    }
    steps = build_schedule(*found.choice)
    snapshot = optimizer.search.planners.of(lowest.variant).snapshot
    live = simulate_memory(flow, steps, snapshot=snapshot, live=True, detail=True)
    floor = found.peak_bytes
    row = {
        "model": name,
        "persistent_bytes": there,
        "in_place_bytes": there + bounds["in place"],
        "fresh_bytes": there + bounds["fresh"],
        "floor_bytes": floor,
        "live_bytes": live.peak_bytes,
        "time": found.timing.total_s / found.timing.compute_s,
        "unoptimised_bytes": optimizer.baseline.peak_bytes,
        "took_s": took_s,
    }
    columns = ("persistent_bytes", "in_place_bytes", "fresh_bytes", "live_bytes", "floor_bytes", "unoptimised_bytes")
    print(
        f"{name:<14}{len(kernels):>8}"
        + "".join(f"{row[column] / MIB:>13.1f}" for column in columns)
        + f"{floor / row['in_place_bytes']:>10.3f}{floor / row['fresh_bytes']:>9.3f}{row['time']:>8.2f}{took_s:>8.1f}",
        flush=True,
    )
    if alone:
        row["alone"] = measure_alone(lowest.variant.graph, flow, kernels, alone, row)
    if alive:
        print_alive(flow, steps, live, floor)
    return row


def measure_alone(
    graph: Graph, flow: Dataflow, kernels: Sequence[int], alone: int, row: Mapping[str, Any]
) -> list[tuple[str, str, int, int | None]]:
    """Name, op, and modelled and measured bytes of the kernels with the largest working sets, which are run alone."""
    fresh = {i: working_set_bytes(flow, i, in_place=False) for i in kernels}
    kinds = {(flow.nodes[i].op, types_of(flow.nodes[i])): i for i in reversed(kernels)}
    largest = sorted(kinds.values(), key=lambda i: -fresh[i])[:alone]
    tried = [i for i in largest if runs_alone(flow.nodes[i])]
    measured = dict(zip(tried, run_alone(graph, flow, tried), strict=True))
    figures = [(flow.nodes[i].name, flow.nodes[i].op, fresh[i], measured.get(i)) for i in largest]
    for kernel, op, modelled, found_bytes in figures:
        reported = "does not run alone" if found_bytes is None else f"{found_bytes / MIB:.1f} alone"
        print(f"  {modelled / MIB:>10.1f} as modelled, {reported}  {op} {kernel}")
    if measured:
        bound = row["persistent_bytes"] + max(measured.values())
        print(f"  {bound / MIB:.1f} with the largest, floor over it {row['floor_bytes'] / bound:.3f}", flush=True)
    return figures


def print_alive(flow: Dataflow, steps: Sequence[Step], live: Memory, floor: int) -> None:
    """Print what is live at the live peak."""
    kind, subject = steps[live.peak_step]
    node = flow.nodes[subject if kind in ("run", "rerun") else flow.values[subject].producer]
    print(f"  at step {live.peak_step} of {len(steps)}: {kind} {node.op} {node.name}")
    for v in live.alive_at_peak:
        value = flow.values[v]
        if value.producer != PERSISTENT and value.nbytes > floor / 1000:
            print(f"  {value.nbytes / MIB:>10.2f}  {value.tensor.node.op} {value.tensor.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--steps", type=Path, help="models of one's own: a file that defines STEPS, by name")
    parser.add_argument("--alive", action="store_true", help="list what is in memory at the floor's peak")
    parser.add_argument("--alone", type=int, default=0, metavar="N", help="run the N largest kinds of kernels alone")
    help_text = "kernels may run in slices, with the same bits or with close values"
    parser.add_argument(
        "--tactics", nargs="*", choices=TACTICS, default=TACTICS, help="those allowed besides the order"
    )
    parser.add_argument("--slices", nargs="?", choices=VALUES, const=BITS, help=help_text)
    parser.add_argument("--home", action="store_true", help="variables may be at home on the host")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(child(args.child)))
        return
    models = MODELS | LARGE if args.steps is None else runpy.run_path(str(args.steps))["STEPS"]
    unknown = [name for name in args.models if name not in models]
    if unknown:
        parser.error(f"no model is named {unknown[0]!r}; there are {', '.join(models)}")
    columns = ("persistent", "in place", "fresh", "live", "floor", "unoptimised")
    print(f"{'MiB':<14}{'kernels':>8}" + "".join(f"{c:>13}" for c in columns) + "   floor over both    time  took, s")
    names = args.models or [name for name in models if name not in LARGE]
    options = Options(args.tactics if args.slices is None else (*args.tactics, SLICE), values=args.slices or BITS)
    rows = [
        measure(name, models[name], args.alive, args.alone, options, args.home)
        for name in progress.over("models", names)
    ]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
