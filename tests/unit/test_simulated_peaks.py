"""Simulated peaks, chunk splits and times of small schedules, computed by hand; the margin."""

from __future__ import annotations

import pytest
from layered_steps import Layer, training_step
from planner_problems import CHAIN, CPU, UNIT, VARIABLE, costs, facts, named, optimizer_of, value

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import Rates
from tfswap.plan.plan import Split
from tfswap.plan.schedule import AWAIT, IN, OUT, RELEASE, RUN, Interval, build_schedule
from tfswap.planner import ordering
from tfswap.planner.chunk_splits import choose_splits
from tfswap.planner.promise import promised, simulated_limit
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.memory import simulate_memory
from tfswap.simulator.timing import simulate_time

# --- the margin --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [5_000, 1_048_576, 27_557_257, 10**10 + 7])
def test_what_may_be_simulated_is_the_most_that_is_promised_within_a_limit(limit: int):
    most = simulated_limit(limit)
    assert promised(most) <= limit < promised(most + 1)


# --- simulate: peaks computed by hand ---------------------------------------------------------------------


def test_peak_of_a_chain():
    flow = facts(CHAIN)
    memory = simulate_memory(flow, build_schedule(named(flow, "a b c d"), ()), detail=True)
    # x is there; while a runs: x a; b: x a b; c: x a b c; d: x a c d.
    assert [b // UNIT for b in memory.during_bytes] == [2, 3, 4, 4]
    assert memory.peak_bytes == 4 * UNIT
    assert memory.peak_step == 2
    assert (memory.host_peak_bytes, memory.out_bytes, memory.in_bytes, memory.forwarded) == (0, 0, 0, [])


def test_an_eviction_takes_its_buffer_out_of_the_gap():
    flow = facts(CHAIN)
    a = value(flow, "a")
    # out after b (position 1), gone before c (2), back before d (3).
    steps = build_schedule(named(flow, "a b c d"), [Interval(a, 1, 2, 3, 3)])
    assert [s.kind for s in steps] == [RUN, RUN, OUT, RELEASE, RUN, IN, AWAIT, RUN]
    memory = simulate_memory(flow, steps)
    assert [b // UNIT for b in memory.during_bytes] == [2, 3, 3, 3, 3, 3, 3, 4]
    assert (memory.host_peak_bytes, memory.out_bytes, memory.in_bytes) == (UNIT, UNIT, UNIT)


def test_a_buffer_is_held_until_its_release():
    flow = facts(CHAIN)
    a = value(flow, "a")
    order = named(flow, "a b c d")
    # Released only when d comes: as if nothing had left, and nothing is gained.
    late = simulate_memory(flow, build_schedule(order, [Interval(a, 1, 3, 3, 3)]))
    assert [b // UNIT for b in late.during_bytes] == [2, 3, 3, 4, 3, 3, 3, 4]
    # Back before c already: the buffer that comes back counts from IN on, before it is read.
    early = simulate_memory(flow, build_schedule(order, [Interval(a, 1, 2, 2, 3)]))
    assert [b // UNIT for b in early.during_bytes] == [2, 3, 3, 3, 3, 4, 3, 4]


RELU = """\
%x = Placeholder() {dtype=float32} -> float32[25600]
%a = MatMul(%x, %x) -> float32[25600]
%r = Relu(%a) -> float32[25600]
%s = Relu(%r) -> float32[25600]
%d = MatMul(%s, %r) -> float32[25600]
feeds %x
fetches %d
"""


def test_a_kernel_forwards_an_input_that_has_no_other_holder():
    flow = facts(RELU)
    memory = simulate_memory(flow, build_schedule(named(flow, "a r s d"), ()), detail=True)
    # r takes a's buffer over; s can't take r's, which d reads.
    assert [b // UNIT for b in memory.during_bytes] == [2, 2, 3, 4]
    assert memory.forwarded == [(value(flow, "r"), value(flow, "a"))]


def test_a_copy_under_way_keeps_a_buffer_from_being_forwarded():
    flow = facts(CHAIN.replace("%b = MatMul(%a, %a)", "%b = Relu(%a)"))
    a = value(flow, "a")
    order = named(flow, "a b c d")
    memory = simulate_memory(flow, build_schedule(order, [Interval(a, 0, 2, 3, 3)]), detail=True)
    assert memory.forwarded == []
    assert [b // UNIT for b in memory.during_bytes] == [2, 2, 3, 3, 3, 3, 3, 4]
    # Once the copy has released it, it may be: the fresh buffer is d's own.
    gone = simulate_memory(
        flow, build_schedule(order, [Interval(a, 0, 1, 1, 1), Interval(a, None, 2, 3, 3)]), detail=True
    )
    assert gone.forwarded == [(value(flow, "b"), a)]


def test_an_update_while_a_read_is_held_copies_the_variable():
    text = VARIABLE.replace("%use = Mul(%read, %x)", "%use = Mul(%read, %late)").replace("64]", "25600]")
    flow = facts(text)
    memory = simulate_memory(flow, build_schedule(named(flow, "change write late use"), ()))
    # v x; change; write: the copy comes, change goes; late; use.
    assert [b // UNIT for b in memory.during_bytes] == [3, 4, 4, 4]


def test_a_variable_that_adopts_a_value_drops_its_own_buffer():
    text = (
        "%v = Placeholder() {dtype=resource} -> resource[]\n"
        "%x = Placeholder() {dtype=float32} -> float32[25600]\n"
        "%read = ReadVariableOp(%v) {dtype=float32} -> float32[25600]\n"
        "%new = MatMul(%read, %x) -> float32[25600]\n"
        "%write = AssignVariableOp(%v, %new) {dtype=float32}\n"
        "%last = MatMul(%x, %x) ^write -> float32[25600]\n"
        "feeds %v, %x\nfetches %last\n"
    )
    flow = facts(text)
    memory = simulate_memory(flow, build_schedule(named(flow, "new write last"), ()))
    assert [b // UNIT for b in memory.during_bytes] == [3, 3, 3]


def test_what_is_resident_counts_and_its_holes_are_used():
    flow = facts(CHAIN)
    steps = build_schedule(named(flow, "a b c d"), ())
    # x lies in the first chunk; of 4 units free behind another chunk the step takes three.
    chunks = ((0, UNIT, True), (UNIT, UNIT, True), (2 * UNIT, 4 * UNIT, False))
    memory = simulate_memory(flow, steps, snapshot=ArenaSnapshot(2 * UNIT, chunks))
    assert memory.peak_bytes == 5 * UNIT
    # A hole of one and a half units is handed out whole.
    chunks = ((0, UNIT, True), (UNIT, UNIT * 3 // 2, False), (UNIT * 4, UNIT, True))
    memory = simulate_memory(flow, steps, snapshot=ArenaSnapshot(2 * UNIT, chunks))
    assert memory.peak_bytes == 5 * UNIT + UNIT // 2


def test_where_a_step_runs_later_holes_that_tensors_just_fit_into_have_something_in_them():
    flow = facts(CHAIN)
    steps = build_schedule(named(flow, "a b c d"), ())
    chunks = ((0, UNIT, True), (UNIT, UNIT, True), (2 * UNIT, 2 * UNIT, False), (4 * UNIT, UNIT, True))
    seen = ArenaSnapshot(3 * UNIT, chunks)
    unseen = seen.unseen()
    assert simulate_memory(flow, steps, snapshot=seen).peak_bytes == 6 * UNIT
    # Next to what has come into the hole one tensor fits, and gets all that is left.
    taken = unseen.total_bytes - seen.total_bytes
    assert 0 < taken <= 2 * UNIT // 50
    assert simulate_memory(flow, steps, snapshot=unseen).peak_bytes == 7 * UNIT
    assert ArenaSnapshot(UNIT).unseen() == ArenaSnapshot(UNIT)
    assert unseen.with_allocations([UNIT]).total_bytes == 5 * UNIT


def test_a_split_parts_a_chunk_for_the_next_step():
    flow = facts(CHAIN)
    order = named(flow, "a b c d")
    # a would get the hole of one and a half units whole, and hold it to the end.
    chunks = ((0, UNIT, True), (UNIT, UNIT * 3 // 2, False), (UNIT * 4, UNIT, True), (UNIT * 5, 8 * UNIT, False))
    snapshot = ArenaSnapshot(2 * UNIT, chunks)
    whole, split = (
        simulate_memory(flow, build_schedule(order, (), (), splits), snapshot=snapshot)
        for splits in ((), (Split(0, UNIT),))
    )
    assert whole.peak_bytes == 5 * UNIT + UNIT // 2
    assert split.peak_bytes == 5 * UNIT
    rest, between = UNIT // 2, 256
    assert list(split.during_bytes[:2]) == [2 * UNIT + rest, 3 * UNIT + between], "less than with the whole, throughout"


def test_splits_are_for_tensors_that_are_live_near_the_peak():
    flow = facts(CHAIN)
    steps = build_schedule(named(flow, "a b c d"), ())
    live_bytes, splits = choose_splits(flow, steps, ArenaSnapshot())
    assert live_bytes == simulate_memory(flow, steps, live=True).peak_bytes
    assert splits == tuple(Split(step, UNIT) for step in range(4)), "d is made while as much is live"
    flow = facts(
        "%x = Placeholder() {dtype=float32} -> float32[25600]\n%a = MatMul(%x, %x) -> float32[25600]\n"
        "%b = MatMul(%a, %a) -> float32[25600]\n%w = MatMul(%b, %b) -> float32[256000]\n"
        "%z = MatMul(%w, %w) -> float32[256000]\nfeeds %x\nfetches %z\n"
    )
    _, splits = choose_splits(flow, build_schedule(named(flow, "a b w z"), ()), ArenaSnapshot())
    assert splits == (Split(2, 10 * UNIT), Split(3, 10 * UNIT)), "a and b are gone when there is as much"


def test_a_request_that_is_gone_when_its_kernel_ends_is_parted_too():
    """A convolution's columns, where all that is free is one chunk of less than twice their size."""
    flow = facts(
        "%x = Placeholder() {dtype=float32} -> float32[16,32,32,16]\n%s = Const() -> int32[4]\n"
        "%f = Conv2DBackpropFilter(%x, %s, %x) -> float32[3,3,16,16]\nfeeds %x\nfetches %f\n"
    )
    steps = build_schedule(named(flow, "f"), ())
    live_bytes, splits = choose_splits(flow, steps, ArenaSnapshot())
    (split,) = splits
    free = split.nbytes * 3 // 2 // 256 * 256
    snapshot = ArenaSnapshot(1 << 20, ((0, 1 << 20, True), (1 << 20, free, False)))
    plain, parted = (
        simulate_memory(flow, build_schedule(named(flow, "f"), (), (), which), snapshot=snapshot).peak_bytes
        for which in ((), splits)
    )
    assert plain == (1 << 20) + free
    assert parted <= live_bytes + 256


def test_all_large_requests_of_a_kernel_are_parted():
    flow = facts(
        "%x = Placeholder() {dtype=float32} -> float32[25600,2]\n"
        "%y = Unpack(%x) {num=2, axis=1} -> float32[25600], float32[25600]\nfeeds %x\nfetches %y, %y:1\n"
    )
    order = named(flow, "y")
    live_bytes, splits = choose_splits(flow, build_schedule(order, ()), ArenaSnapshot())
    assert (live_bytes, splits) == (4 * UNIT, (Split(0, UNIT),) * 2)
    # What is free is parted for the first, and the second would be given the rest of it whole.
    chunks = ((0, 2 * UNIT, True), (2 * UNIT, UNIT * 9 // 4, False), (5 * UNIT, UNIT, True))
    snapshot = ArenaSnapshot(3 * UNIT, chunks)
    peaks = [
        simulate_memory(flow, build_schedule(order, (), (), which), snapshot=snapshot).peak_bytes
        for which in ((), splits[1:], splits)
    ]
    assert peaks[0] == peaks[1] == 5 * UNIT + UNIT // 4
    assert peaks[2] <= 5 * UNIT + 2 * 256


def test_a_request_is_parted_where_the_rest_of_its_chunk_would_be_the_peak():
    """Of 13 units live at most 8 are while w is made, which may be given a chunk of 13."""
    flow = facts(
        "%x = Placeholder() {dtype=float32} -> float32[25600]\n%w = MatMul(%x, %x) -> float32[25600,7]\n"
        "%a = MatMul(%w, %x) -> float32[25600]\n%b = MatMul(%a, %a) -> float32[25600,11]\n"
        "feeds %x\nfetches %b\n"
    )
    live_bytes, splits = choose_splits(flow, build_schedule(named(flow, "w a b"), ()), ArenaSnapshot())
    assert live_bytes == 13 * UNIT
    assert splits[0] == Split(0, 7 * UNIT)


@pytest.mark.tensorflow
def test_with_splits_holes_do_not_matter():
    optimizer = optimizer_of(training_step([Layer(kind) for kind in ("dense", "relu") * 8], 512, 128))
    flow = optimizer.flow
    # Three holes of one and a half times what kernels ask for, each.
    chunks, end = [(0, 256, True)], 1 << 20
    for nbytes in sorted({round_up(v.nbytes) for v in flow.values if v.nbytes >= 4096}) * 3:
        hole = nbytes * 3 // 2 // 256 * 256
        chunks += [(end, hole, False), (end + hole, 256, True)]
        end += hole + 256
    chunks.append((end, 1 << 40, False))
    snapshot = ArenaSnapshot(sum(size for _, size, used in chunks if used), tuple(chunks), instantiated=True)
    order = ordering.choose_order(flow, costs(flow))
    live_bytes, splits = choose_splits(flow, build_schedule(order, ()), snapshot)
    plain, split = (
        simulate_memory(flow, build_schedule(order, (), (), which), snapshot=snapshot).peak_bytes
        for which in ((), splits)
    )
    assert plain > 1.03 * live_bytes
    assert split < 1.001 * live_bytes
    optimizer.assume_arena(snapshot)
    assert optimizer.plan(int(1.003 * live_bytes)).splits, "no plan without fits"


def test_alive_at_peak_names_what_counts():
    flow = facts(CHAIN)
    memory = simulate_memory(flow, build_schedule(named(flow, "a b c d"), ()), detail=True)
    assert sorted(flow.values[v].tensor.node.name for v in memory.alive_at_peak) == ["a", "b", "c", "x"]
    flow = analyse_dataflow(training_step([Layer("dense"), Layer("dense")], 4, 256), CPU)  # mostly weights
    memory = simulate_memory(flow, build_schedule(ordering.choose_order(flow, costs(flow)), ()), detail=True)
    assert sum(flow.values[v].nbytes for v in memory.alive_at_peak) <= memory.peak_bytes  # the variable counts once


def test_time_on_three_lanes():
    flow = facts(CHAIN)
    a = value(flow, "a")
    steps = build_schedule(named(flow, "a b c d"), [Interval(a, 0, 2, 2, 3)])
    seconds = [1.0] * len(flow.nodes)
    rate = UNIT / 1.5  # a copy takes 1.5 s: out from 1 to 2.5; the release stalls c by half a second
    timing = simulate_time(flow, steps, seconds, Rates(1.0, 1.0, 1.0, rate, rate, 0.0))
    # a 0-1, b 1-2, release at 2.5, in 2.5-4, c 2.5-3.5, await until 4, d 4-5.
    assert (timing.total_s, timing.compute_s, timing.stall_s) == (5.0, 4.0, 1.0)
