"""Random TensorFlow training steps under limits between floor and peak: bit-identical, and within the limit."""

from __future__ import annotations

import itertools

import pytest
from processes import on_arena
from slow import slow

pytest.importorskip("tensorflow")


@pytest.mark.parametrize(("first", "count"), [(0, 4), *slow((4, 20))])
def test_values_and_peaks_of_random_programs(first: int, count: int) -> None:
    entries = on_arena(f"import sys, random_programs; sys.argv[1:] = ['{first}', '{count}']; random_programs.main()")
    assert [e for e in entries if "peak" not in e] == [], "refused at the floor that it named"
    assert [(e["seed"], e["share"]) for e in entries if not e["same"]] == [], "values differ"
    steps = [(e["seed"], e["share"], e["limit"], *step) for e in entries for step in e["steps"]]
    ordered = [step for step in steps if step[-1] is not None]
    assert [step for step in ordered if step[3] > step[2]] == [], "over the limit"
    # The plan is the truth, and it did something.
    assert [step for step in ordered if not step[3] <= step[4] <= 1.02 * step[3]] == []
    # A step that runs as it was traced has no order, so its peak varies. It is planned once it passes the limit.
    for e in entries:
        for (measured, planned), (_, next_planned) in itertools.pairwise(e["steps"]):
            assert planned is not None or measured <= e["limit"] or next_planned is not None, e
    planned = [e for e in entries if not e["unchanged"]]
    assert len(planned) > 0.7 * len(entries)
    assert sum(e["swapped"] for e in entries) > 6 * count
    assert sum(e["reruns"] for e in entries) > 6 * count
    assert sum(e["encoded"] > 0 for e in entries) >= 1  # where they let a tensor go early, and nowhere else
    assert all(e["swapped"] or e["reruns"] or e["encoded"] for e in entries if e["share"] == 0)
    assert min(e["peak"] / e["unoptimised"] for e in entries) < 0.6
