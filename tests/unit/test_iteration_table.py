"""Numbers by iteration of loops in loops."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tfswap.simulator.iteration_table import IterationTable


def rows_of(depth: int) -> st.SearchStrategy[object]:
    numbers = st.integers(0, 2)
    return numbers if not depth else st.lists(rows_of(depth - 1), min_size=1, max_size=4)


def table(rows: object) -> IterationTable:
    if isinstance(rows, int):
        return IterationTable.of(rows)
    assert isinstance(rows, list)
    return IterationTable.stack([table(row) for row in rows])


def entry(rows: object, iterations: tuple[int, ...]) -> object:
    for iteration in iterations:
        assert isinstance(rows, list)
        rows = rows[min(iteration, len(rows) - 1)]
    return rows


@given(rows_of(3), st.integers(0, 2))
def test_the_last_of_each_loop_holds_for_all_that_follow(rows: object, axis: int) -> None:
    made = table(rows)
    for iterations in product(range(5), repeat=3):
        found = made
        for iteration in iterations:
            found = found.fixed(0, iteration)
        assert found == IterationTable.of(found.values[0])
        assert found.values[0] == entry(rows, iterations)
        others = iterations[:axis] + iterations[axis + 1 :]
        found = made.fixed(axis, iterations[axis])
        for iteration in others:
            found = found.fixed(0, iteration)
        assert found.values == (entry(rows, iterations),)


def test_equal_iterations_take_one_row() -> None:
    assert table([[0, 2, 2], [0, 2], [0, 2]]) == IterationTable((1, 2), (0, 2))
    assert table([[0], [0, 2]]) == IterationTable((2, 2), (0, 0, 0, 2))
    assert table([[1, 1], [1]]).is_uniform and not table([[1, 2]]).is_uniform
    assert table([[0, 1, 2], [0, 1, 2], [3, 4, 5]]).middle == 1
