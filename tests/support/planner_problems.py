"""Facts, problems and checks for tests of the simulator and the planner, on graphs made without TensorFlow."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import kernel_seconds
from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.ir.op_traits import is_pure
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import default_rates
from tfswap.plan.plan import Split
from tfswap.plan.schedule import Interval, build_schedule
from tfswap.planner import ordering
from tfswap.planner.problem import Choice, Problem, make_problem
from tfswap.simulator.memory import simulate_memory

CPU = DeviceModel()
TWO_CORES = DeviceModel(intra_op_threads=2, inter_op_threads=2)
KIB, MIB = 1024, 2**20

slow = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def facts(text: str) -> Dataflow:
    return analyse_dataflow(parse_graph(text), CPU)


def kernels(flow: Dataflow) -> list[int]:
    return [i for i in range(len(flow.nodes)) if flow.is_kernel[i]]


def named(flow: Dataflow, words: str) -> list[int]:
    return [flow.place[name] for name in words.split()]


def value(flow: Dataflow, name: str) -> int:
    return next(v for v, made in enumerate(flow.values) if made.tensor.node.name == name)


def postponed_order(flow: Dataflow, order: list[int]) -> list[int]:
    return ordering.postponed_order(flow, order, simulate_memory(flow, build_schedule(order, ()), live=True))[0]


def live_peak(
    flow: Dataflow,
    order: list[int],
    intervals: tuple[Interval, ...] | list[Interval] = (),
    paired: tuple[int, ...] = (),
    splits: tuple[Split, ...] = (),
    exact_chunks: bool = False,
) -> int:
    steps = build_schedule(order, intervals, paired, splits, exact_chunks)
    return simulate_memory(flow, steps, live=True).peak_bytes


def costs(flow: Dataflow) -> list[float]:
    rates = default_rates(CPU)
    return [kernel_seconds(node, rates) for node in flow.nodes]


def problem_of(flow: Dataflow) -> Problem:
    seconds = costs(flow)
    return make_problem(flow, ordering.choose_order(flow, seconds), default_rates(CPU), seconds)


VARIABLE = """\
%v = Placeholder() {dtype=resource} -> resource[]
%x = Placeholder() {dtype=float32} -> float32[64]
%read = ReadVariableOp(%v) {dtype=float32} -> float32[64]
%change = Exp(%x) -> float32[64]
%write = AssignSubVariableOp(%v, %change) {dtype=float32}
%reread = ReadVariableOp(%v) ^write {dtype=float32} -> float32[64]
%late = Mul(%reread, %x) -> float32[64]
%use = Mul(%read, %x) -> float32[64]
feeds %v, %x
fetches %use, %late
targets %write
""".replace("^write {dtype=float32}", "{dtype=float32} ^write")


CHAIN = """\
%x = Placeholder() {dtype=float32} -> float32[25600]
%a = MatMul(%x, %x) -> float32[25600]
%b = MatMul(%a, %a) -> float32[25600]
%c = MatMul(%b, %b) -> float32[25600]
%d = MatMul(%c, %a) -> float32[25600]
feeds %x
fetches %d
"""


UNIT = 25600 * 4


LONG = """\
%x = Placeholder() {dtype=float32} -> float32[25600]
%a = MatMul(%x, %x) -> float32[25600]
%b = MatMul(%a, %a) -> float32[25600]
%c = MatMul(%b, %b) -> float32[25600]
%big = Concat(%c, %c) -> float32[51200]
%s = Sum(%big) -> float32[25600]
%d = MatMul(%s, %a) -> float32[25600]
feeds %x
fetches %d
"""


def check_choice(flow: Dataflow, choice: Choice) -> None:
    """Kernels run again on what is unchanged; every eviction lies in a gap of one buffer; steps come in their order."""
    uses: dict[int, list[int]] = {}
    made: dict[int, list[int]] = {}
    ended: set[int] = set()
    seen: set[int] = set()
    for position, i in enumerate(choice.order):
        assert all(d in seen for d in flow.deps[i] if flow.is_kernel[d])
        if i in seen:
            assert is_pure(flow.nodes[i].op)
            assert not ended & set(flow.reads[i])
            assert not flow.fetched & {v for _, v in flow.makes[i]}
        seen.add(i)
        ended.update(update.old for update in flow.updates[i])
        for v in {*flow.reads[i], *(v for _, v in flow.makes[i])}:
            uses.setdefault(v, []).append(position)
        for _, v in flow.makes[i]:
            made.setdefault(v, []).append(position)
    copied: set[tuple[int, int]] = set()
    for a in sorted(choice.intervals, key=lambda a: (a.use, a.value)):
        assert flow.values[a.value].producer != PERSISTENT
        before = max(p for p in uses[a.value] if p < a.use)
        assert a.use in uses[a.value]
        assert a.release <= a.back <= a.use and before < a.back
        buffer = a.value, max(p for p in made[a.value] if p < a.release)
        if a.out is None:
            assert buffer in copied
        else:
            assert buffer[1] <= a.out < a.release
        copied.add(buffer)


def optimizer_of(graph, **options) -> Optimizer:
    return Optimizer(graph, CPU, Options(**options))
