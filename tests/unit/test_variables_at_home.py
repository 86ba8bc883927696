"""The simulated arena after variables have moved to their homes on the host, or back."""

from __future__ import annotations

from tfswap.simulator.arena_snapshot import ArenaSnapshot, Variable

KIB = 1024
CHUNKS = ((0, 4 * KIB, True), (4 * KIB, 8 * KIB, True), (12 * KIB, 2 * KIB, True), (14 * KIB, 50 * KIB, False))


def snapshot(*variables: Variable) -> ArenaSnapshot:
    return ArenaSnapshot(14 * KIB, CHUNKS, limit_bytes=64 * KIB, variables=variables)


FIRST, SECOND = Variable("first", 4 * KIB, 8 * KIB), Variable("second", 12 * KIB, 2 * KIB)


def test_a_variable_at_home_leaves_a_free_chunk() -> None:
    moved = snapshot(FIRST, SECOND).with_at_home(["first"])
    assert moved.total_bytes == 6 * KIB
    assert (4 * KIB, 8 * KIB, False) in moved.chunks
    assert moved.variables == (FIRST._replace(address=0), SECOND)


def test_a_variable_that_comes_back_takes_a_chunk() -> None:
    before = snapshot(FIRST._replace(address=0))
    assert before.with_at_home(["first"]) is before
    assert before.with_at_home([]).total_bytes == 22 * KIB


def test_a_shared_chunk_is_free_once_all_its_variables_are_at_home() -> None:
    twin = FIRST._replace(feed="twin")
    assert snapshot(FIRST, twin).with_at_home(["first"]).total_bytes == 14 * KIB
    assert snapshot(FIRST, twin).with_at_home(["first", "twin"]).total_bytes == 6 * KIB


def test_memory_that_is_not_the_arenas_frees_nothing() -> None:
    foreign = Variable("array", 1 << 40, 8 * KIB)
    assert snapshot(foreign).with_at_home(["array"]).total_bytes == 14 * KIB
