"""Places for small tensors in an arena that may grow no further."""

from __future__ import annotations

from test_planner import facts, named

from tfswap.analysis.dataflow import Dataflow
from tfswap.planner.niches import choose_niches
from tfswap.planner.schedule import Step, build_schedule
from tfswap.planner.simulate import Resident, simulate_memory

KIB = 1024
MAP, LARGE, SPARE = 256 * KIB, 512 * KIB, 64 * KIB

# Two small tensors stay until the end; the large one needs the places of both maps, which have gone by then.
TEXT = """
%x = Placeholder() {dtype=float32} -> float32[65536]
%axis = Const() -> int32[] = (0,)
%a = Exp(%x) {T=float32} -> float32[65536]
%first = Sum(%a, %axis) {T=float32} -> float32[64]
%b = Exp(%a) {T=float32} -> float32[65536]
%second = Sum(%b, %axis) {T=float32} -> float32[64]
%c = Sum(%b, %axis) {T=float32} -> float32[1024]
%large = MatMul(%c, %c) {T=float32} -> float32[131072]
%d = MatMul(%first, %second) {T=float32} -> float32[64]
%end = MatMul(%d, %large) {T=float32} -> float32[64]
feeds %x
fetches %end
"""


def schedule() -> tuple[Dataflow, list[Step]]:
    flow = facts(TEXT)
    return flow, build_schedule(named(flow, "a first b second c large d end"), ())


def arena(niches: list[int]) -> Resident:
    """One region with room for a map, the large tensor, and little more."""
    limit = MAP + LARGE + SPARE
    chunks, end = [], 0
    for size in niches:
        chunks += [(end, size, False), (end + size, 256, True)]
        end += size + 256
    chunks += [(end, MAP, True), (end + MAP, limit - end - MAP, False)]
    used = sum(size for _, size, in_use in chunks if in_use)
    return Resident(used, tuple(chunks), instantiated=True, limit_bytes=limit)


def test_there_are_as_many_as_there_are_small_tensors_at_once():
    flow, steps = schedule()
    # first and second, then d and end beside them; c; and one constant.
    assert choose_niches(flow, steps, Resident()) == [256] * 5 + [4096]


def test_small_tensors_in_niches_do_not_part_large_ones():
    flow, steps = schedule()
    parted, whole = (
        simulate_memory(flow, steps, resident=arena(niches)) for niches in ([], choose_niches(flow, steps, Resident()))
    )
    limit = MAP + LARGE + SPARE
    assert parted.peak_bytes > limit, "a request was not met"
    assert whole.peak_bytes <= limit
