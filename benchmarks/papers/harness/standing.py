"""Which of two forms of a step is faster, and whether that is more than the rounds differ by.

Forms take turns, so that each round has a ratio of its own: the two are level where the quartiles of these lie on both
sides of 1. Of figures whose rounds were not kept there are only the quartiles of each form over the unoptimised step:
the two are level where these overlap.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from papers.harness.page import BETTER, LEVEL, WORSE, Comparison
from papers.harness.turns import quartiles

CLOCKS = "clock", "cpu"
FASTER, EVEN, SLOWER, UNREACHED = "faster", "level", "slower", "below its floor"
RULE = "level: the quartiles of the rounds' ratios lie on both sides of 1"
OVERLAP = f"{RULE}, or, where only each form's own quartiles were kept, these overlap"


class Over(NamedTuple):
    """A form's time over another's.

    Attributes:
        ratio: the median over the rounds; of figures whose rounds were not kept, the ratio of the medians.
        spread: the quartiles over the rounds; None where they were not kept.
        level: whether the two differ by no more than the rounds do.
    """

    ratio: float
    spread: tuple[float, float] | None
    level: bool

    @property
    def standing(self) -> str:
        """What the form is compared with the other."""
        return EVEN if self.level else FASTER if self.ratio < 1 else SLOWER

    @property
    def reported(self) -> str:
        """As tables have it."""
        return f"{self.ratio:.2f}" + (f" ({self.spread[0]:.2f} to {self.spread[1]:.2f})" if self.spread else "")


STANDINGS = {FASTER: BETTER, EVEN: LEVEL, SLOWER: WORSE}


def as_comparison(label: str, over: Over | None, *, reached: bool) -> Comparison:
    """For the pages' overview. A memory that tfswap does not reach counts as WORSE."""
    gain = 1.0 if over is None else 1 / over.ratio
    return Comparison(label, gain, STANDINGS[over.standing] if over is not None and reached else WORSE)


def of_rounds(ours: Sequence[float], theirs: Sequence[float]) -> Over:
    """Of times, or of ratios, of the same rounds."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, high = quartiles(ratios)
    return Over(statistics.median(ratios), (low, high), low <= 1 <= high)


def of_lines(ours: dict[str, Any], theirs: dict[str, Any], clock: str) -> Over:
    """Of lines as `turns.compare` gives them, by one of CLOCKS."""
    if "took_s" in ours and "took_s" in theirs:
        n = CLOCKS.index(clock)
        return of_rounds(*([took[n] for took in line["took_s"]] for line in (ours, theirs)))
    return of_spreads(ours, theirs, clock)


def of_spreads(ours: dict[str, Any], theirs: dict[str, Any], clock: str) -> Over:
    """Of medians and quartiles, each over an unoptimised step."""
    (low, high), (least, most) = (line[f"{clock}_spread"] for line in (ours, theirs))
    return Over(ours[f"{clock}_ratio"] / theirs[f"{clock}_ratio"], None, low <= most and least <= high)


def counted(standings: Sequence[str]) -> str:
    """How often it is each."""
    kinds = (FASTER, EVEN, SLOWER, UNREACHED)
    return ", ".join(f"{kind} {standings.count(kind)}" for kind in kinds if kind in standings)
