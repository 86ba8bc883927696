"""`tfswap.profile`: measures the times of a step's kernels and the rates of copies on this machine.

The step runs in its planned order, its kernels one after another, so that no kernel's time includes another's.
TensorFlow's own profiler gives the start and end of each; on a GPU, of the device's kernels. The variables that the
step writes get their old values back afterwards.

Not handled: kernels inside of the bodies of loops and conditionals, whose time is that of the node that runs them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tfswap.analysis.cost import fitted
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.grappler import as_planned
from tfswap.compiler.options import Options
from tfswap.compiler.request import Request, whole
from tfswap.device import arena, machine
from tfswap.device.lent_block import LentBlock
from tfswap.device.live import devices_of, live_device
from tfswap.device.machine import local_name
from tfswap.device.variable_buffers import StepVariables, move_home
from tfswap.errors import TfswapError, UnsupportedGraph
from tfswap.frontends.densities import measure_densities
from tfswap.frontends.function import OptimizedFunction
from tfswap.frontends.optimize import undecorated
from tfswap.frontends.tracing import bind_call, stand_ins
from tfswap.ir.graph import Graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import THIS, Machine, default_rates
from tfswap.kernels.profile import Density, Profile, Timed, types_of
from tfswap.native.load import load
from tfswap.plan.plan import Plan
from tfswap.runtime.arena_view import ArenaView
from tfswap.runtime.captures import with_placeholders
from tfswap.support.files import require_place
from tfswap.support.sizes import parse_limit

STEPS = 5
ROUNDS = 7
COPY_BYTES = 32 << 20
"""A feature map's size: large enough that a copy's fixed cost does not count."""
LEAST_COPY_BYTES = 1 << 20
"""The least size where the device has room for no larger one."""
SMALL_COPY_BYTES = 4 << 10
"""So small that a copy takes little but its fixed cost."""
TENSORS = 3
"""On the device at the same time: one, its copy or a kernel's result, and the matrices of products."""
COPIES = 4
KERNEL_SIZE = 512
KERNELS = 6
"""This many products of square matrices of KERNEL_SIZE, and sums of tensors of COPY_BYTES, last longer than the
copies.
"""


def profile(
    function: Any,
    *args: Any,
    steps: int = STEPS,
    spill_dir: str | os.PathLike[str] | None = None,
    save_to: str | os.PathLike[str] | None = None,
) -> Profile:
    """Run a few steps, measure their kernels and this machine's copies, and save the times.

        measured = tfswap.profile(train_step, images, labels, save_to="train_step.profile.json")
        train_step = tfswap.optimize(train_step, memory_limit="6GiB", profile=measured)

    Args:
        function: a `tf.function`, one that `tfswap.optimize` has decorated, or a Python function. A decorated one is
            measured under its limit, for steps that do not fit otherwise.
        args: its positional arguments. Bind keyword arguments before, with `functools.partial`.
        steps: how many are measured, after one that is not.
        spill_dir: the folder of `optimize(spill_dir=)`, whose disk is then measured too.
        save_to: a file for the profile, which `optimize(profile=)` takes as well; without one nothing is written.

    Returns:
        The profile, to be given to `optimize(profile=)` or `simulate(profile=)`.

    Raises:
        TfswapError: `steps` is not positive, `save_to` can't be written, or TensorFlow's profiler is in use.
        UnsupportedGraph, InfeasibleMemoryLimit: as `optimize`.
    """
    whole("steps", steps)
    if save_to is not None:
        require_place(save_to)
    machine.require_tensorflow()
    from tfswap.importers.function import import_function

    traced = undecorated(function)
    device, model = machine.current_device()
    limit = function.memory_limit if isinstance(function, OptimizedFunction) else None
    if isinstance(limit, Mapping):
        limit = limit.get(device)
    concrete = traced.get_concrete_function(*args)
    captures = with_placeholders(concrete)
    if len(devices_of(concrete, captures)) > 1:
        raise UnsupportedGraph(
            f"{traced.__name__} runs on several devices, and a profile is of one. Profile a step on one of them, as of "
            "one replica: its rates, also those between devices, hold for all"
        )
    graph = as_planned(import_function(concrete, stand_ins(traced, concrete, args, {})), concrete, model)
    optimizer = Optimizer(graph, model, snapshot=arena.snapshot(device), keeps_results=True)
    view = ArenaView(live_device())
    own = len(concrete.inputs) - len(captures)
    view.own_buffers(optimizer, {feed.name: each for feed, each in zip(graph.feeds[own:], captures, strict=True)})
    optimizer.assume_arena(view.snapshot())
    plan = _serial_plan(optimizer, arena.device_limit_bytes(device) if limit is None else limit)
    ordered = OptimizedFunction(traced, Request(None, Options(), plan, "optimize"), "warn")
    with restored(concrete):
        ordered(*args)
        runs = _traced(lambda: [_finish(ordered(*args)) for _ in range(steps)], {n.name for n in optimizer.flow.nodes})
        densities = () if model.is_asynchronous else _densities(graph, traced, concrete, args)
        unordered = _unordered(optimizer, lambda: traced(*args), lambda: ordered(*args), steps, device)
    if not runs:
        raise TfswapError("TensorFlow's profiler reported no kernel of this step: plan without profile=")
    kernels = tuple(
        Timed(node.name, node.op, types_of(node), _least(runs[node.name], steps))
        for node in optimizer.flow.nodes
        if node.name in runs
    )
    disk = {} if spill_dir is None else {"disk_bytes_per_s": measure_disk(spill_dir)}
    copies = {**measure_copies(model), **measure_peers(model)}
    measured = replace(default_rates(model), launch_s=_between(runs), **copies, **disk)
    rates = fitted(measured, [(optimizer.settled[k.name], k.seconds) for k in kernels])
    made = Profile(model.kind, _machine_name(device), optimizer.fingerprint, rates, unordered, kernels, densities)
    if save_to is not None:
        made.save(save_to)
    return made


def _densities(graph: Graph, traced: Any, concrete: Any, args: Sequence[Any]) -> tuple[Density, ...]:
    """Densities of tensors saved for the backward pass, in a step with these arguments. GPUs have no codec of sparse
    rows.
    """
    inputs = concrete.function_type.unpack_inputs(bind_call(traced, concrete, args, {}))
    return measure_densities(graph, concrete, [*inputs, *concrete.captured_inputs])


def _serial_plan(optimizer: Optimizer, limit: int | str | None) -> Plan:
    """The step kernel by kernel in the planner's order, with evictions only where it would not fit otherwise."""
    plan = optimizer.plan(None, ordered=True)
    if limit is not None and plan.planned_peak_bytes > parse_limit(limit, lambda: optimizer.baseline.peak_bytes):
        limited = optimizer.plan(limit)
        plan = plan if limited.changes_nothing else limited
    return replace(plan, paired=())


@contextlib.contextmanager
def restored(concrete: Any) -> Iterator[None]:
    """Restore the values of a function's variables at the end, from copies in host memory, and where they are."""
    kept = {str(i): (variable, variable.numpy()) for i, variable in enumerate(concrete.variables)}
    at_home = StepVariables({name: variable.handle for name, (variable, _) in kept.items()}, ()).at_home().at_home
    try:
        yield
    finally:
        for name in at_home:  # at first: the device may have no room for the values
            move_home(kept[name][0].handle, host=True)
        for name, (variable, value) in kept.items():
            variable.assign(value)
            if name in at_home:
                move_home(variable.handle, host=True)


def least_seconds(call: Callable[[], Any], rounds: int) -> float:
    """The least seconds of one call until its results are computed: other work on the machine only adds to it."""
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        _finish(call())
        taken.append(time.perf_counter() - started)
    return min(taken)


def _finish(result: Any) -> None:
    """Wait until a call's results are computed: on a GPU a call returns before its kernels have run."""
    import tensorflow as tf

    for tensor in tf.nest.flatten(result):
        if isinstance(tensor, tf.Tensor):
            tensor.numpy()


def _unordered(
    optimizer: Optimizer, plain: Callable[[], Any], ordered: Callable[[], Any], steps: int, device: str
) -> float | None:
    """The unoptimised step's time over the ordered one's; None where it does not fit.

    The two alternate, so that other work on the machine slows both alike.
    """
    import tensorflow as tf

    limit = arena.device_limit_bytes(device)
    if limit is not None and optimizer.unoptimised.may_pass(limit):
        return None
    try:
        plain()
        turns = [(least_seconds(plain, 1), least_seconds(ordered, 1)) for _ in range(steps)]
    except tf.errors.ResourceExhaustedError:
        return None
    return statistics.median(a for a, _ in turns) / statistics.median(b for _, b in turns)


Runs = dict[str, list[tuple[float, float]]]
"""By node, when its kernels began, in seconds, and how long they took; in that order."""


def _traced(run: Callable[[], Any], nodes: Collection[str]) -> Runs:
    """The kernels of these nodes while `run` runs, by TensorFlow's profiler."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3, python_tracer_level=0)
    with tempfile.TemporaryDirectory(prefix="tfswap_profile_") as folder:
        try:
            tf.profiler.experimental.start(folder, options)
        except tf.errors.AlreadyExistsError as error:
            raise TfswapError(
                "TensorFlow's profiler is running already (a TensorBoard callback, say), and there is only one: "
                "stop it before tfswap.profile"
            ) from error
        try:
            run()
        finally:
            tf.profiler.experimental.stop()
        space = xplane_pb2.XSpace()
        for path in Path(folder).rglob("*.xplane.pb"):
            space.MergeFromString(path.read_bytes())
    return kernel_runs(space, nodes)


def kernel_runs(space: Any, nodes: Collection[str]) -> Runs:
    """The kernels of these nodes in a profile (an XSpace): those on the GPU if there are any, else those on the CPU.

    The CPU's threads have an event "node:Op" per kernel (executor.cc, TraceString); a GPU's streams have one per
    kernel launched, which names its node so in the stat "tf_op" (cupti_collector.cc).
    """
    on_gpu: Runs = {}
    on_cpu: Runs = {}
    for plane in space.planes:
        names = {i: m.name for i, m in plane.event_metadata.items()}
        stats = {i: m.name for i, m in plane.stat_metadata.items()}
        gpu = plane.name.startswith("/device:GPU")
        found = on_gpu if gpu else on_cpu
        for line in plane.lines:
            if gpu and not line.name.startswith("Stream"):
                continue  # lines derived from the streams' events
            for event in line.events:
                label = _tf_op(event, stats) if gpu else names.get(event.metadata_id, "")
                node = _planned_name(label.rpartition(":")[0], nodes)
                if node is not None:
                    started_s = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
                    found.setdefault(node, []).append((started_s, event.duration_ps * 1e-12))
    runs = on_gpu or on_cpu
    for times in runs.values():
        times.sort()
    return runs


def _planned_name(name: str, nodes: Collection[str]) -> str | None:
    """The planned node that runs under this name; None for what is not planned.

    Importing a graph renames a node whose name is another's scope, with a suffix that gives a name that no node
    has (graph_constructor.cc, FindUniqueName).
    """
    if name in nodes:
        return name
    stem, _, suffix = name.rpartition("_")
    return stem if suffix.isdigit() and stem in nodes else None


def _least(times: list[tuple[float, float]], steps: int) -> float:
    """Seconds of one node's kernels in the step in which they took least."""
    each = max(1, len(times) // steps)
    return min(sum(seconds for _, seconds in times[i : i + each]) for i in range(0, len(times), each))


def _between(runs: Runs) -> float:
    """Seconds from the end of one kernel to the start of the next: the median, since some kernels wait for other
    things.
    """
    spans = sorted(span for times in runs.values() for span in times)
    gaps = [max(0.0, after - (start + seconds)) for (start, seconds), (after, _) in pairwise(spans)]
    return statistics.median(gaps) if gaps else 0.0


def _tf_op(event: Any, stats: dict[int, str]) -> str:
    for stat in event.stats:
        if stats.get(stat.metadata_id) == "tf_op":
            return stat.str_value or stats.get(stat.ref_value, "")
    return ""


# --- the machine ------------------------------------------------------------------------------------------------


def measure_copies(device: DeviceModel) -> dict[str, float]:
    """Rates and latency of this machine's copies, and the share of their time that kernels lose: the fields of
    `Rates`.
    """
    import tensorflow as tf

    nbytes = _copy_bytes()
    while True:
        try:
            return _measured_copies(device, nbytes)
        except tf.errors.ResourceExhaustedError:
            if nbytes <= LEAST_COPY_BYTES:
                raise
            nbytes //= 2


def _copy_bytes() -> int:
    """The size of the tensors that are copied: the allocator waits ten seconds for one that has no room."""
    free_bytes, nbytes = arena.free_bytes(machine.current_device()[0]), COPY_BYTES
    while nbytes > LEAST_COPY_BYTES and TENSORS * nbytes > free_bytes:
        nbytes //= 2
    return nbytes


def _measured_copies(device: DeviceModel, nbytes: int) -> dict[str, float]:
    """As `measure_copies`, by tensors of that size."""
    import tensorflow as tf

    import tfswap.ops as ops

    ops.reserve(COPIES * nbytes)
    tensor = tf.fill([nbytes // 4], 1.0)
    out_s, in_s = _copy_seconds(tensor)
    found = {"out_bytes_per_s": nbytes / out_s, "in_bytes_per_s": nbytes / in_s}
    if not device.host_is_separate:
        return {**found, "copy_share": _copy_share(tensor)}
    # The rates are those of large copies. What a small one takes in addition to its bytes is latency.
    small_s = _copy_seconds(tf.fill([SMALL_COPY_BYTES // 4], 1.0))
    beyond = [s - SMALL_COPY_BYTES / rate for s, rate in zip(small_s, found.values(), strict=True)]
    return {**found, "copy_share": 0.0, "copy_latency_s": max(0.0, sum(beyond) / 2)}


def _copy_seconds(tensor: Any, lent_block: int = 0) -> tuple[float, float]:
    """Seconds of the shortest copy of a tensor to host memory, or to memory that another device lends, and of the
    shortest one from it.
    """
    import tfswap.ops as ops

    tier = "lent_" if lent_block else ""
    busy_s: list[tuple[float, ...]] = []
    for _ in range(ROUNDS):
        before = ops.stats()
        handle = load().ops.tfswap_swap_out(tensor=tensor, lent_block=lent_block)
        ops.release(handle)
        ops.await_copy(*ops.swap_in(handle, tensor.dtype))
        del handle  # frees the place of the copy
        after = ops.stats()
        names = (f"{tier}{direction}_busy_s" for direction in ("out", "in"))
        busy_s.append(tuple(getattr(after, name) - getattr(before, name) for name in names))
    out_s, in_s = map(min, zip(*busy_s, strict=True))
    return out_s, in_s


def measure_peers(device: DeviceModel) -> dict[str, float]:
    """The rate of copies from this process's first device to memory that its second one lends, in the slower direction:
    a field of `Rates`. Empty where there is one device, or no memory for the copies.
    """
    import tensorflow as tf

    gpus = tf.config.list_logical_devices("GPU") if device.is_gpu else []
    if len(gpus) < 2:
        return {}
    try:
        block, tensor = LentBlock(local_name(gpus[1].name), COPY_BYTES), tf.fill([COPY_BYTES // 4], 1.0)
    except tf.errors.ResourceExhaustedError:
        return {}
    return {"peer_bytes_per_s": COPY_BYTES / max(_copy_seconds(tensor, block.number))}


def measure_disk(folder: str | os.PathLike[str]) -> float:
    """Bytes per second of swapped tensors on that folder's disk, in the slower direction.

    Raises TfswapError where there can't be a file in it.
    """
    import tensorflow as tf

    import tfswap.ops as ops

    owner = 1 + secrets.randbits(62)
    try:
        ops.register(owner, None, os.fspath(folder))
    except OSError as error:
        raise TfswapError(str(error)) from error
    try:
        # Not of one value, which would be misleading where data on disk is compressed.
        tensor = tf.random.stateless_normal([COPY_BYTES // 4], (1, 2))
        rates: list[float] = []
        for _ in range(ROUNDS):
            before = ops.stats()
            handle = load().ops.tfswap_swap_out(tensor=tensor, owner=owner, disk=True)
            ops.release(handle)
            ops.await_copy(*ops.swap_in(handle, tensor.dtype))
            del handle  # frees its place in the file before the registration ends
            after = ops.stats()
            out_s, in_s = after.disk_out_busy_s - before.disk_out_busy_s, after.disk_in_busy_s - before.disk_in_busy_s
            rates.append(COPY_BYTES / max(out_s, in_s))
        return max(rates)
    finally:
        ops.unregister(owner)
        ops.forget_owner(owner)


def _copy_share(tensor: Any) -> float:
    """How much longer kernels take while copies run at the same time, as a share of the copies' time."""
    import tensorflow as tf

    import tfswap.ops as ops

    square = tf.fill([KERNEL_SIZE, KERNEL_SIZE], 1.0)

    def kernels() -> float:
        started = time.perf_counter()
        for _ in range(KERNELS):
            tf.linalg.matmul(square, square)
            tf.add(tensor, tensor)
        return time.perf_counter() - started

    alone, during, busy = [], [], []
    for _ in range(ROUNDS):
        alone.append(kernels())
        before = ops.stats()
        handles = [ops.swap_out(tensor) for _ in range(COPIES)]
        during.append(kernels())
        for handle in handles:
            ops.release(handle)
        busy.append(ops.stats().out_busy_s - before.out_busy_s)
    return min(1.0, max(0.0, (min(during) - min(alone)) / min(busy)))


def this_machine() -> Machine:
    """This machine, with its rates as measured now. Takes about a second."""
    import tensorflow as tf

    device, model = machine.current_device()
    square, stream = tf.fill([KERNEL_SIZE, KERNEL_SIZE], 1.0), tf.fill([COPY_BYTES // 4], 1.0)
    matmul_s = least_seconds(lambda: tf.linalg.matmul(square, square), ROUNDS)
    add_s = least_seconds(lambda: tf.add(stream, stream), ROUNDS)
    usual = default_rates(model)
    flops_per_s = 2 * KERNEL_SIZE**3 / matmul_s
    rates = replace(
        usual,
        flops_per_s=flops_per_s,
        steps_per_s=usual.steps_per_s * flops_per_s / usual.flops_per_s,
        memory_bytes_per_s=3 * COPY_BYTES / add_s,
        **measure_copies(model),
        **measure_peers(model),
    )
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory_bytes = arena.device_limit_bytes(device) or host_bytes
    return Machine(THIS, _machine_name(device), model, rates, memory_bytes, host_bytes)


def _machine_name(device: str) -> str:
    """The device's name for reports: the GPU's model, or the CPU's number of cores and architecture."""
    import tensorflow as tf

    if device.startswith("GPU"):
        details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
        return str(details.get("device_name", device))
    return f"{machine.current_device()[1].intra_op_threads} cores of {platform.machine()}"
