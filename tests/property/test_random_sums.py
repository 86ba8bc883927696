"""Random steps full of sums under limits between floor and peak: TensorFlow's bits."""

from __future__ import annotations

import sys

import pytest
from processes import on_arena
from slow import slow

pytest.importorskip("tensorflow")


def check(first: int, count: int, *kind: str, limits: int = 3) -> None:
    def program() -> None:
        import random_sums

        random_sums.SHARES, random_sums.RUNS = random_sums.SHARES[:limits], limits
        sys.argv[1:] = [str(first), str(count), *kind]
        random_sums.main()

    entries = on_arena(program, TF_NUM_INTEROP_THREADS="1")
    # One program in forty has readers in no order all the same: TensorFlow has several results, not all of them known.
    wrong = [e["seed"] for e in entries if e["wrong"] and e["references"] == 1]
    assert wrong == []
    assert sum(e["references"] > 1 for e in entries) <= count // 5
    assert sum(e["limits"] for e in entries) >= (limits - 1) * count
    assert kind or sum(e["swapped"] + e["reruns"] for e in entries) > 2 * count


def test_bits_of_random_sums():
    check(0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 600, 50))
def test_bits_of_many_random_sums(first: int):
    check(first, 50)


@pytest.mark.parametrize("seed", [3, *slow(6, 262)])
def test_bits_of_random_sums_in_loops(seed: int):
    """The first iteration of the one, the last of the other, and the last run of an inner loop of the third add in
    another order than the rest.
    """
    check(seed, 1, "loops", limits=2)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 300, 50))
def test_bits_of_many_random_sums_in_loops(first: int):
    check(first, 50, "loops")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 26])
def test_bits_of_random_sums_after_decisions(seed: int):
    """The second has the gradient of a conditional that nothing needs, and that TensorFlow runs all the same."""
    check(seed, 1, "decided", limits=2)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_bits_of_many_random_sums_after_decisions(first: int):
    check(first, 20, "decided")


def test_bits_of_random_sums_in_loops_whose_length_values_decide():
    """TensorFlow does not merge equal nodes of the loop's body here: equal constants come before the loop."""
    check(3, 1, "open", limits=2)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, 25))
def test_bits_of_many_random_sums_in_loops_whose_length_values_decide(first: int):
    check(first, 25, "open")
