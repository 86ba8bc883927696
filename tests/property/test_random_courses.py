"""Steps with too many courses to simulate each: none exceeds its planned peak."""

from __future__ import annotations

import pytest
from processes import on_arena

SEEDS = (3, 4)
MORE_SEEDS = tuple(range(100, 140))


def check_on_paper(seeds: tuple[int, ...], courses: int) -> None:
    code = f"import json, random_courses as r; print(json.dumps([r.on_paper(s, {courses}) for s in {seeds}]))"
    for found in on_arena(code):
        assert not found["passed"]
        assert found["highest"] <= found["covering"]
        assert found["widest"] <= 1
        assert found["fullest"] <= 1


def test_no_course_holds_more_than_the_run_that_covers_all():
    """At no kernel; and in arenas full of holes none takes more than is named."""
    check_on_paper(SEEDS, 8)


@pytest.mark.slow
def test_no_course_of_many_random_steps_holds_more_than_the_run_that_covers_all():
    check_on_paper(MORE_SEEDS, 40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 5])
def test_no_course_passes_its_plan(seed: int):
    """Random courses, and those that were changed wherever the measured peak rose."""
    check_peaks(seed, 60)


def check_peaks(seed: int, runs: int) -> None:
    found = on_arena(f"import json, random_courses; print(json.dumps(random_courses.peaks({seed}, 1.1, {runs})))")
    assert found["exact"]
    assert found["drawn"], "the report has its curve"
    assert not any("judged" in kernel for kernel in found["unmodelled"])
    assert found["peak"] <= found["planned"]


def test_few_courses_of_a_step_that_has_many_keep_its_plan():
    check_peaks(3, 4)
