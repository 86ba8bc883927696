"""Random TensorFlow training steps under limits between floor and peak: bit-identical, and within the limit."""

from __future__ import annotations

import pytest
from processes import on_arena
from slow import slow

pytest.importorskip("tensorflow")


@pytest.mark.parametrize(("first", "count"), [(0, 4), *slow((4, 20))])
def test_values_and_peaks_of_random_programs(first: int, count: int) -> None:
    entries = on_arena(f"import sys, random_programs; sys.argv[1:] = ['{first}', '{count}']; random_programs.main()")
    assert [e for e in entries if "peak" not in e] == [], "refused at the floor that it named"
    assert [(e["seed"], e["share"]) for e in entries if not e["same"]] == [], "values differ"
    assert [(e["seed"], e["limit"], e["peak"]) for e in entries if e["peak"] > e["limit"]] == [], "over the limit"
    # The plan is the truth, and it did something.
    planned = [e for e in entries if not e["unchanged"]]
    figures = [(e["seed"], e["share"], e["limit"], e["peak"], e["planned"]) for e in planned]
    assert [f for f in figures if not f[3] <= f[4] <= 1.02 * f[3]] == []
    assert len(planned) > 0.7 * len(entries)
    assert sum(e["swapped"] for e in entries) > 6 * count
    assert sum(e["reruns"] for e in entries) > 6 * count
    assert sum(e["encoded"] > 0 for e in entries) >= 1  # where they let a tensor go early, and nowhere else
    assert all(e["swapped"] or e["reruns"] or e["encoded"] for e in entries if e["share"] == 0)
    assert min(e["peak"] / e["unoptimised"] for e in entries) < 0.6
