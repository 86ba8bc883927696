"""Of steps with more courses than are tried none takes more than is planned for and named."""

from __future__ import annotations

import re

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


def test_no_course_holds_more_than_the_run_that_covers_all():
    """At no kernel; and in arenas full of holes none takes more than is named."""
    check_on_paper(SEEDS, 8)


@pytest.mark.long
def test_no_course_of_many_random_steps_holds_more_than_the_run_that_covers_all():
    check_on_paper(MORE_SEEDS, 40)


@pytest.mark.long
@pytest.mark.parametrize("seed", [3, 5])
def test_no_course_passes_its_plan_by_more_than_is_named(seed: int):
    """Random courses, and those that were changed wherever the measured peak rose."""
    found = on_arena(f"import json, random_courses; print(json.dumps(random_courses.peaks({seed}, 1.1, 60)))")
    named = [int(n) for kernel in found["unmodelled"] for n in re.findall(r"at most (\d+) bytes more", kernel)]
    assert named, found
    assert found["peak"] <= found["planned"] + max(named)
