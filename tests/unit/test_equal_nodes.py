"""Which equal nodes of a lowered step are one where TensorFlow runs it."""

from __future__ import annotations

import pytest

from tfswap.ir.text import parse_graph
from tfswap.passes.prepare.common_subexpressions import merge_as_executed

pytestmark = pytest.mark.fast

STEP = """\
{before}%x = Placeholder() {{dtype=float32}} -> float32[8]
%n = Const() {{dtype=int32, value=tensor<03000000>}} -> int32[]
%sum = Cumsum(%x, {axes}) {{T=float32}} -> float32[8]
%loop = While(%n, %sum) -> int32[], float32[8]
body %loop
  %i = Placeholder() {{dtype=int32}} -> int32[]
  %a = Placeholder() {{dtype=float32}} -> float32[8]
  %zero = Const() {{dtype=int32, value=tensor<00000000>}} -> int32[]
  %more = Greater(%i, %zero) {{T=int32}} -> bool[]
  feeds %i, %a
  fetches %more
body %loop
  %i = Placeholder() {{dtype=int32}} -> int32[]
  %a = Placeholder() {{dtype=float32}} -> float32[8]
  %one = Const() {{dtype=int32, value=tensor<00000000>}} -> int32[1]
  %two = Const() {{dtype=int32, value=tensor<00000000>}} -> int32[1]
  %b = Cumsum(%a, %one) {{T=float32}} -> float32[8]
  %c = Cumsum(%a, %two) {{T=float32}} -> float32[8]
  %d = Mul(%b, %c) {{T=float32}} -> float32[8]
  %j = Neg(%i) {{T=int32}} -> int32[]
  feeds %i, %a
  fetches %j, %d
{after}feeds %x
fetches {result}
"""
AXES = "%axes = Const() {dtype=int32, value=tensor<00000000>} -> int32[1]\n"
LATER = AXES + "%after = Cumsum(%loop:1, %axes) {T=float32} -> float32[8]\n"


CASES = [("", "", True), (AXES, "", False), ("", LATER, True)]


@pytest.mark.parametrize(("before", "after", "are_one"), CASES, ids=["none", "before", "after"])
def test_an_equal_constant_before_a_loop_keeps_those_in_it_apart(before: str, after: str, are_one: bool) -> None:
    """TensorFlow compares each node with the first that has the same inputs, whose control inputs may differ.

    TensorFlow 2.21's executor has shown each of these cases.
    """
    axes, result = "%axes" if before else "%n", "%after" if after else "%loop:1"
    step = parse_graph(STEP.format(before=before, after=after, axes=axes, result=result))
    twins = merge_as_executed(step)
    expected = {("loop[1]", "two"): ("loop[1]", "one"), ("loop[1]", "c"): ("loop[1]", "b")}
    assert twins == (expected if are_one else {})
