"""Random steps full of sums under limits between floor and peak: TensorFlow's bits."""

from __future__ import annotations

import pytest
from processes import on_arena

pytest.importorskip("tensorflow")


def check(first: int, count: int) -> None:
    program = f"import sys, random_sums; sys.argv[1:] = ['{first}', '{count}']; random_sums.main()"
    entries = on_arena(program, TF_NUM_INTEROP_THREADS="1")
    # Two of forty programs have readers in no order all the same: found is then one of TensorFlow's own results.
    assert [e["seed"] for e in entries if e["wrong"]] == []
    assert sum(e["limits"] for e in entries) > 2 * count
    assert sum(e["swapped"] + e["reruns"] for e in entries) > 2 * count


def test_bits_of_random_sums():
    check(0, 2)


@pytest.mark.long
def test_bits_of_many_random_sums():
    for first in range(100, 600, 50):
        check(first, 50)
