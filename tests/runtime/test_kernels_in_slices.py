"""Kernels that run in slices have the bits of whole ones, on this CPU: each line of kernels/slice_lines.py."""

from __future__ import annotations

import pytest
from processes import last_json, run_forked
from slow import slow

from tfswap.kernels.close_lines import CLOSE_LINES
from tfswap.kernels.slice_lines import LINES

TRIES = 2


@pytest.mark.parametrize(("onednn", "threads"), [("0", 2), *slow(("0", 4)), ("0", 8), ("1", 2)])
def test_slices_have_the_bits_of_the_whole(onednn: str, threads: int) -> None:
    def program():
        from kernels_in_slices import differing

        return differing(7 + threads, TRIES, threads)

    found = last_json(run_forked(program, TF_ENABLE_ONEDNN_OPTS=onednn, TF_NUM_INTRAOP_THREADS=str(threads)))
    assert {op: wrong for op, (_, wrong) in found.items() if wrong} == {}
    assert found.keys() == {op for op, line in LINES.items() if line.onednn or onednn == "0"}
    assert {op for op, (compared, _) in found.items() if not compared} == set()


@pytest.mark.parametrize("onednn", ["0", "1"])
def test_slices_that_add_in_another_order_differ_by_no_more_than_their_bound(onednn: str) -> None:
    def program():
        from close_kernels import beyond_bounds

        return beyond_bounds(11, TRIES, 2)

    found = last_json(run_forked(program, TF_ENABLE_ONEDNN_OPTS=onednn, TF_NUM_INTRAOP_THREADS="2"))
    assert {op: wrong for op, (_, wrong) in found.items() if wrong} == {}
    assert {op for op, (compared, _) in found.items() if not compared} == set()
    assert found.keys() > {op for op in CLOSE_LINES if onednn == "1" or not op.startswith("_MklNative")}
