"""The time of a kernel, from its operations and bytes, or from a measurement.

The analytic model is a roofline: the longest of the times of contractions, of element-wise arithmetic and of memory
traffic, and the launch time in addition. Rates are those of a kind of machine, times the calibration of the CPU that
the step runs on: the same graph, limit and calibration give the same plan everywhere. Planners use `Costs`, in which a
`Profile` has precedence.

The time of a loop or a conditional is the time of its bodies, with copies inside of them. What goes from one device to
another is copied to host memory and from there, at the rates of these links.

Checked against measured kernels by `benchmarks/cost_model.py`. Not handled: tensors in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from tfswap.analysis.device_waits import waits_for_others
from tfswap.analysis.home_changes import home_tier
from tfswap.errors import TfswapError
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node
from tfswap.ir.homes import is_at_home, is_on_disk
from tfswap.ir.op_traits import (
    READ_VARIABLE,
    is_const,
    is_feed,
    is_view,
    pops_list,
    reads_metadata_only,
    reads_rows,
    writes_variable,
)
from tfswap.ir.views import passed_on
from tfswap.kernels.cudnn_algorithms import copied_bytes
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import DISK, HOST, Rates, default_rates
from tfswap.kernels.profile import Profile
from tfswap.support.reach import reach

if TYPE_CHECKING:
    from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.work import elements, work_of


@dataclass(frozen=True)
class Costs:
    """Gives the seconds of a step's kernels and copies.

    Attributes:
        rates: the rates of copies, and of kernels without a measurement.
        profile: measured kernels, which have precedence.
        measured: whether the rates were measured on this machine, without a profile.
        arrivals: by name of a node that waits for another device (passes/device_parts.py), the seconds from the step's
            start until that device has done what it waits for.
    """

    rates: Rates
    profile: Profile | None = None
    measured: bool = False
    arrivals: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, device: DeviceModel, profile: Profile | None = None) -> Costs:
        """The costs of a device: by the profile, or by default rates.

        Raises:
            TfswapError: the profile is of another kind of device.
        """
        if profile is None:
            return cls(default_rates(device), measured=device.calibration is not None)
        if profile.kind != device.kind:
            raise TfswapError(
                f"the profile was taken on a {profile.kind} ({profile.machine}), and this step runs on a "
                f"{device.kind}: call tfswap.profile where the step runs, or leave profile= out"
            )
        return cls(profile.rates, profile)

    @property
    def source(self) -> str:
        """The source of the times, for reports."""
        if self.profile is not None:
            return "profiled"
        return "analytic, at measured rates" if self.measured else "analytic"

    def seconds(self, node: Node) -> float:
        """The seconds of one run of `node`."""
        measured = None if self.profile is None else self.profile.seconds(node)
        return kernel_seconds(node, self.rates) if measured is None else self.rates.launch_s + measured

    def arrivals_in(self, flow: Dataflow) -> dict[int, float]:
        """The earliest start of each kernel that waits for other devices."""
        waits = waits_for_others(flow, self.arrivals)
        return {i: max(map(self.arrivals.__getitem__, names)) for i, names in waits.items()}

    def of_step(self, flow: Dataflow) -> list[float]:
        """Seconds of one run of each node of a step."""
        return [
            self._looped(node, flow.runs[i]) if flow.runs.get(i) else self.seconds(node)
            for i, node in enumerate(flow.nodes)
        ]

    def _looped(self, node: Node, runs: Mapping[Graph, float]) -> float:
        """The seconds of a loop or a conditional, by the numbers of its bodies' runs."""
        if self.profile is not None and self.profile.seconds(node) is not None:
            return self.seconds(node)
        return self.rates.launch_s + sum(times * self.body_seconds(body) for body, times in runs.items())

    def body_seconds(self, body: Graph) -> float:
        """The seconds of one run of an ordered body, without the bodies of its own loops and conditionals.

        For a body that starts copies for its next run, the seconds of a run after others.
        """
        return self.body_run(body).seconds

    def body_run(self, body: Graph) -> BodyRun:
        """As `body_seconds`, with the times that it waits for copies."""
        loads = _prefetched(body)
        carried = BodyRun(0.0, {}, {})
        for _ in range(FIRST_RUNS if loads else 0):
            carried = self._run(body, loads, carried.under_way)
        return self._run(body, loads, carried.under_way)

    def group_seconds(self, group: Sequence[Node]) -> float:
        """The seconds of a body's group of kernels. Each runs as soon as its inputs are ready."""
        place = {node: n for n, node in enumerate(group)}
        waits_for = [sorted({place[k] for k in makers(node, place)}) for node in group]
        cost_s = [self.seconds(node) for node in group]
        cores = [group_cores(node, seconds, self.rates) for node, seconds in zip(group, cost_s, strict=True)]
        return unordered_seconds(cost_s, cores, waits_for, self.rates)

    def _run(self, body: Graph, loads: Mapping[Node, Node], under_way: Mapping[Node, float]) -> BodyRun:
        """One run of a body.

        Args:
            loads: for each Prefetch, the SwapIn of the next run whose copy it starts.
            under_way: for each SwapIn whose copy the previous run has started, the time at which it ends.
        """
        rates = self.rates
        now = out_free = lost = 0.0
        in_free = max(under_way.values(), default=0.0)
        ends: dict[Node, float] = {}  # of copies, by the node that started them
        ahead: dict[Node, float] = {}
        waits: dict[Node, float] = {}
        groups = {group[-1]: group for group in body.groups()}
        grouped = {node for group in groups.values() for node in group}
        for node in body.topological():
            copy_s = 0.0
            if node.op == custom_ops.SWAP_OUT:
                copy_s = (node.inputs[0].type.nbytes or 0) / rates.out_bytes_per_s
                ends[node] = out_free = max(out_free, now) + copy_s
            elif node in under_way:
                ends[node] = under_way[node]
            elif node.op == custom_ops.SWAP_IN or node in loads:
                load = loads.get(node, node)
                copy_s = (load.outputs[0].nbytes or 0) / rates.in_bytes_per_s
                in_free = max(in_free, now) + copy_s
                (ends if load is node else ahead)[load] = in_free
            lost += copy_s * rates.copy_share
            if node.op in (custom_ops.RELEASE, custom_ops.AWAIT):
                waits[node] = max(0.0, ends[node.inputs[0].node] - now)
            if node.op in custom_ops.ALL:
                now += waits.get(node, 0.0) + rates.launch_s
            elif node in body.bodies:
                now += rates.launch_s
            elif node in groups:
                now += self.group_seconds(groups[node])
            elif not (node in grouped or is_view(node.op) or is_const(node.op) or is_feed(node.op)):
                now += self.seconds(node)
        return BodyRun(now + lost, waits, {load: end - now for load, end in ahead.items()})


FIRST_RUNS = 2
"""The number of runs after which each run of a body takes as long as the one before, with copies for the next one."""


class BodyRun(NamedTuple):
    """One run of a body.

    Attributes:
        seconds: its time.
        waits: the seconds that each node waits for a copy.
        under_way: for each SwapIn of the next run whose copy has started, the seconds from this run's end to its end.
    """

    seconds: float
    waits: dict[Node, float]
    under_way: dict[Node, float]


def _prefetched(body: Graph) -> dict[Node, Node]:
    """For each Prefetch of a loop's body, the SwapIn of the next run whose copy it starts."""
    ahead = {feed.out(): fetch.node for feed, fetch in zip(body.feeds, body.fetches, strict=False)}
    found: dict[Node, Node] = {}
    for node in body:
        if node.op == custom_ops.SWAP_IN and pops_list((pop := node.inputs[0].node).op):
            source = ahead.get(passed_on(pop.inputs[0]))
            if source is not None and source.op == custom_ops.PREFETCH:
                found[source] = node
    return found


def home_seconds(node: Node, rates: Rates) -> float | None:
    """Seconds of the copy of a variable from its home on the host, or to it; None for other nodes."""
    if node.op == custom_ops.READ_HOME:
        return (node.outputs[0].nbytes or 0) / rates.in_rate(home_tier(node))
    if node.op == custom_ops.STORE_HOME:
        return (node.inputs[0].type.nbytes or 0) / rates.out_rate(home_tier(node))
    return None


def at_home_seconds(node: Node, rates: Rates) -> float:
    """The additional seconds of a kernel that works on variables at home on the host, by a link that copies use too."""
    is_update = writes_variable(node.op)
    largest_bytes = max((tensor.type.nbytes or 0 for tensor in node.inputs), default=0)
    made_bytes = sum(kind.nbytes or 0 for kind in node.outputs)
    seconds = 0.0
    for tensor in node.inputs:
        source = tensor.node
        if source.op == READ_VARIABLE and is_at_home(source.inputs[0].node):
            tier = DISK if is_on_disk(source.inputs[0].node) else HOST
            seconds += (made_bytes if reads_rows(node.op) else tensor.type.nbytes or 0) / rates.in_rate(tier)
        elif is_at_home(source) and not is_view(node.op):
            tier = DISK if is_on_disk(source) else HOST
            seconds += (largest_bytes if is_update else made_bytes) / rates.in_rate(tier)
            seconds += largest_bytes / rates.out_rate(tier) if is_update else 0.0
    return seconds


GRAIN_S = 34e-6
"""Eigen uses one more core for each 100,000 cycles of a kernel's work (TensorCostModel). Smaller kernels run on one
core."""


def work_seconds(node: Node, rates: Rates) -> float:
    """Seconds of the work of one run of `node`, on the cores that it is spread over."""
    alone = (max(_parts(node, rates)) + copying_seconds(node, rates)) * rates.cores
    return min(alone, max(alone / spread_over(node, rates), GRAIN_S))


def copying_seconds(node: Node, rates: Rates) -> float:
    """The seconds of TensorFlow's copies before and after cuDNN's kernel. Each is read and written once."""
    if not rates.cudnn or rates.channels_last:
        return 0.0
    return 2 * copied_bytes(node) / rates.memory_bytes_per_s


def _parts(node: Node, rates: Rates) -> tuple[float, float, float]:
    """Seconds of a node's contraction, its element-wise operations and its memory traffic, on all cores."""
    work = work_of(node, rates)
    read = [t.type for t in node.inputs]
    kinds = [*node.outputs, *read[1:], *node.outputs] if work.gathers else [*read, *node.outputs]
    flops = work.flops(node) / work.efficiency if work.flops else 0.0
    flops *= rates.convolution_time if work.convolves else 1.0
    steps = work.steps * max(map(elements, kinds), default=0)
    moved = work.passes * sum(kind.nbytes or 0 for kind in kinds)
    return flops / rates.flops_per_s, steps / rates.steps_per_s, moved / rates.memory_bytes_per_s


def cores_used(node: Node, rates: Rates) -> float:
    """The number of cores that a run of `node` uses."""
    return 1.0 if work_seconds(node, rates) <= GRAIN_S else spread_over(node, rates)


def spread_over(node: Node, rates: Rates) -> float:
    """The number of cores that a large kernel of this op uses efficiently."""
    return max(1.0, work_of(node, rates).spread * rates.cores)


def concurrent_seconds(kernels: Sequence[tuple[Node, float]], rates: Rates) -> float:
    """The seconds of concurrent kernels: the time of their work on all cores, at least that of the longest alone.

    Args:
        kernels: each with its seconds.
    """
    work_s = sum(seconds * spread_over(node, rates) for node, seconds in kernels)
    return max(work_s / rates.cores, *(seconds for _, seconds in kernels))


ONE_CORE_WORK = 0.8
"""The core seconds of a kernel on one core, as a share of those on all cores. The kernels of a transformer's step take
0.24 core seconds on one core, and 0.32 on two, without waits."""


def one_core_seconds(node: Node, seconds: float, rates: Rates) -> float:
    """Seconds of a kernel that stays on one core, concurrently with others.

    Args:
        seconds: its time with all cores.
    """
    shared = 1.0 if seconds <= GRAIN_S else spread_over(node, rates)
    return seconds * work_of(node, rates).alone * max(1.0, ONE_CORE_WORK * shared)


def kernel_seconds(node: Node, rates: Rates) -> float:
    """Seconds that one run of `node` takes on a machine with these rates."""
    if node.op in PASSED_ON:
        return 0.0
    if (copied := crossing_seconds(node, rates)) is not None:
        return copied
    if (copy_s := home_seconds(node, rates)) is not None:
        return rates.launch_s + copy_s
    work_s = work_seconds(node, rates) if node.measured.seconds is None else node.measured.seconds
    return rates.launch_s + work_s + at_home_seconds(node, rates)


PASSED_ON = frozenset(
    {custom_ops.SEND, custom_ops.RECEIVE, custom_ops.SIGNAL, custom_ops.AWAIT_STORE, custom_ops.COMMIT_HOME}
)
"""Ops that pass on something in host memory, and take no time of the device."""


def crossing_seconds(node: Node, rates: Rates) -> float | None:
    """Seconds of a copy between a GPU and the host which is a kernel of the step; None for other kernels."""
    if node.op not in (custom_ops.TO_HOST, custom_ops.TO_DEVICE):
        return None
    bytes_per_s = rates.out_bytes_per_s if node.op == custom_ops.TO_HOST else rates.in_bytes_per_s
    return rates.copy_latency_s + (node.outputs[0].nbytes or 0) / bytes_per_s


def fitted(rates: Rates, measured: Sequence[tuple[Node, float]]) -> Rates:
    """`rates`, with the rates of kernels fitted so that the predicted total time of each kind of work is the measured
    one.

    Args:
        measured: kernels, and the seconds of one run of each without the launch.
    """
    terms = ("flops_per_s", "steps_per_s", "memory_bytes_per_s")
    predicted, found = dict.fromkeys(terms, 0.0), dict.fromkeys(terms, 0.0)
    for node, seconds in measured:
        parts = _parts(node, rates)
        if max(parts) * rates.cores <= GRAIN_S:
            continue  # its time is mostly the launch
        longest = terms[parts.index(max(parts))]
        predicted[longest] += work_seconds(node, rates)
        found[longest] += seconds
    scales = {t: predicted[t] / found[t] for t in terms if predicted[t] and found[t]}
    return replace(rates, **{t: getattr(rates, t) * scale for t, scale in scales.items()})


LOOPED_S = 150e-6
"""In a loop, kernels up to this time gain little from several threads, which wait for each other at the kernel's end.
The large kernels of a decoder's iteration, 50 to 150 us each, take as long on one thread as on two."""


def group_cores(node: Node, seconds: float, rates: Rates) -> float:
    """The number of cores that a kernel of a group with this time uses."""
    return 1.0 if seconds <= LOOPED_S else spread_over(node, rates)


def makers(node: Node, wanted: Collection[Node]) -> Iterator[Node]:
    """The nodes of `wanted` that a node reads, also through views. Kernels of a group are ordered by these only."""

    def sources(of: Node) -> list[Node]:
        through = of is node or (of not in wanted and (is_view(of.op) or reads_metadata_only(of.op)))
        return [t.node for t in of.inputs] if through else []

    yield from (source for source in reach(sources(node), sources) if source in wanted)


def unordered_seconds(
    cost_s: Sequence[float], cores: Sequence[float], waits_for: Sequence[Sequence[int]], rates: Rates
) -> float:
    """The seconds of a step whose kernels run as soon as they are ready: the longer of the critical path and of the
    total work divided by the cores.

    Args:
        cost_s: the seconds of each node, in topological order; 0 for nodes that are no kernels.
        cores: the number of cores that each uses.
        waits_for: the nodes that each waits for.
    """
    ends: list[float] = []
    for seconds, before in zip(cost_s, waits_for, strict=True):
        ends.append(seconds + max((ends[b] for b in before), default=0.0))
    busy = sum(seconds * used for seconds, used in zip(cost_s, cores, strict=True))
    return max(busy / rates.cores, max(ends, default=0.0))
