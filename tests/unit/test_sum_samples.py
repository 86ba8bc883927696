"""The decisions on which the order of a sum depends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product

from tfswap.simulator.decisions import Decision, Outcome, Predicate
from tfswap.simulator.iteration_table import IterationTable
from tfswap.simulator.sum_samples import FirstTerm, SumSamples

A, B, C = (Decision(Predicate((), f"{name}:0", 2, 1, (0,)), 0, False, ()) for name in "abc")
LOOP = (("loop", 1),)
INNER = Predicate(LOOP, "p:0", 2, 1, (0, 1))
NOW, PREVIOUS, LAST = Decision(INNER, 1, False, ()), Decision(INNER, 1, True, ()), Decision(INNER, 0, False, ())


def first(position: Callable[[int, int, int], int], races: bool = False) -> FirstTerm:
    """Of a sum outside of loops, where three decisions have been taken in each way four times."""
    samples = SumSamples(races)
    for branches in (*product(range(2), repeat=3),) * 4:
        outcome = Outcome()
        for decision, branch in zip((A, B, C), branches, strict=True):
            outcome.add(decision.predicate, (), branch)
        samples.add((), position(*branches), outcome)
    return samples.first(lambda _: (1, 1), lambda: [A, B, C])


def test_an_order_that_never_changes_depends_on_nothing():
    assert first(lambda a, b, c: 3) == (IterationTable.of(3), ())
    assert first(lambda a, b, c: a) == (IterationTable.of(0), ())  # a + b is b + a


def test_one_decision_of_several():
    assert first(lambda a, b, c: 2 * b) == (IterationTable((2,), (0, 2)), (B,))


def test_decisions_that_matter_together():
    """As where a conditional is in the branch of another."""
    assert first(lambda a, b, c: 2 if a and c else 3) == (IterationTable((2, 2), (3, 3, 3, 2)), (A, C))
    assert first(lambda a, b, c: 2 + 2 * a + 4 * b + 8 * c).decisions == (A, B, C)


def test_a_race_is_no_decision():
    chance = random.Random(1)
    assert first(lambda a, b, c: chance.choice((0, 2)), races=True).decisions == ()
    found = first(lambda a, b, c: 2 * b if chance.random() < 0.8 else chance.choice((0, 2)), races=True)
    assert found == (IterationTable((2,), (0, 2)), (B,))


def of_loop(position: Callable[[Sequence[int], int], int], seen: Sequence[Decision]) -> FirstTerm:
    """Of a sum in a loop of three iterations, each with a decision."""
    samples = SumSamples(races=False)
    for branches in product(range(2), repeat=3):
        outcome = Outcome()
        for i, branch in enumerate(branches):
            outcome.add(INNER, (i,), branch)
        for i in range(3):
            samples.add((i,), position(branches, i), outcome)
    return samples.first(lambda _: (3, 3), lambda: seen)


def test_the_decision_of_an_iteration_or_of_the_one_before():
    each = [NOW, PREVIOUS]
    assert of_loop(lambda taken, i: 2 * taken[i], each) == (IterationTable((1, 2), (0, 2)), (NOW,))
    found = of_loop(lambda taken, i: 2 * (i and taken[i - 1]), each)
    assert found.decisions == (PREVIOUS,)
    assert [found.table.fixed(0, i) for i in (1, 2)] == [IterationTable((2,), (0, 2))] * 2
    # Only the last iteration's order depends on it.
    found = of_loop(lambda taken, i: 2 * taken[i] if i == 2 else 0, each)
    assert [found.table.fixed(0, i).values[-1] for i in range(3)] == [0, 0, 2]


def test_outside_of_a_loop_its_last_decision_is_seen():
    assert Outcome().of(LAST, ()) == 1  # as zero decides
    outcome = Outcome()
    outcome.add(INNER, (0,), 1)
    outcome.add(INNER, (1,), 0)
    assert (outcome.of(NOW, (0,)), outcome.of(NOW, (1,))) == (1, 0)
    assert outcome.of(LAST, ()) == 0
    assert (outcome.of(PREVIOUS, (0,)), outcome.of(PREVIOUS, (2,))) == (1, 0)
