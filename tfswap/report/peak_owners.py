"""What held a device's memory at its highest moment, and what a limit would cost, as text and values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tfswap.errors import TfswapError
from tfswap.report.tables import as_text, listing
from tfswap.support.files import write_whole
from tfswap.support.printable import one_line
from tfswap.support.sizes import Unit

ROWS, LEAST_SHARE = 20, 0.005
"""The most rows of a table, and the least share of the bytes that a row of its own has."""
HEADS = ("bytes", "share", "tensors", "source", "what")
NUMBERS = ("share", "tensors")


@dataclass(frozen=True)
class Owner:
    """Tensors of one name and source line.

    Attributes:
        nbytes: the bytes of their chunks.
        what: the node, the variable or the kind of memory.
        source: the user's line that created the node ("train.py:12"); "" where unknown.
        tensors: how many they are.
    """

    nbytes: int
    what: str
    source: str = ""
    tensors: int = 1


@dataclass(frozen=True)
class WatchedDevice:
    """A device's highest recorded moment.

    Attributes:
        device: "GPU:0".
        nbytes: the bytes in use at that moment.
        peak_bytes: the allocator's own peak. It is larger where that moment was not recorded.
        during: the function that ran then, "train_step"; "" where none did.
        owners: what held the bytes, the largest first; `unknown_bytes` are in no known chunk.
        unknown_bytes: bytes in use that are in no known chunk.
    """

    device: str
    nbytes: int
    peak_bytes: int
    during: str
    owners: tuple[Owner, ...]
    unknown_bytes: int


@dataclass(frozen=True)
class LimitCost:
    """What a limit would cost: the predicted time over that of the step as it is."""

    limit_bytes: int
    time_ratio: float


@dataclass(frozen=True)
class StepCosts:
    """What limits would cost a training step.

    Attributes:
        name: the step.
        peak_bytes: its predicted peak without a limit, with its variables and arguments.
        limits: from the largest limit to the smallest that can be kept.
        refusal: why it can't be planned; "" where it can.
    """

    name: str
    peak_bytes: int = 0
    limits: tuple[LimitCost, ...] = ()
    refusal: str = ""


@dataclass(frozen=True)
class Watched:
    """What `tfswap.watch` has seen.

    Attributes:
        devices: by name, those that have an arena and allocated from it.
        steps: the training steps, and what limits would cost them.
        note: why nothing was seen; "" where something was.
    """

    devices: dict[str, WatchedDevice] = field(default_factory=dict)
    steps: tuple[StepCosts, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        shown = [one_line(f"tfswap: {self.note}")] if self.note else []
        for each in self.devices.values():
            shown += [one_line(f"tfswap: {headline_of(each)}:"), as_text(listing(HEADS, rows_of(each), NUMBERS))]
        return "\n".join([*shown, *(one_line(f"tfswap: {cost_line(step)}") for step in self.steps)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was seen as a page that needs no network. Raises TfswapError where `path` does not end with
        .html, or can't be written.
        """
        from tfswap.report.watch_page import watch_page

        if not os.fspath(path).endswith(".html"):
            raise TfswapError(f"{os.fspath(path)!r} has to end with .html: a watch is saved as a page")
        write_whole(path, watch_page(self))


def merged(owners: Iterable[Owner]) -> tuple[Owner, ...]:
    """One for each name and source line, the largest first."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for each in owners:
        nbytes, tensors = sums.get((each.what, each.source), (0, 0))
        sums[each.what, each.source] = nbytes + each.nbytes, tensors + each.tensors
    found = [Owner(nbytes, what, source, tensors) for (what, source), (nbytes, tensors) in sums.items()]
    return tuple(sorted(found, key=lambda each: (-each.nbytes, each.what, each.source)))


def headline_of(seen: WatchedDevice) -> str:
    """One line: how much the device held, when, and whether that is its peak."""
    size = Unit.of(max(seen.nbytes, seen.peak_bytes)).text
    during = f" in {seen.during}" if seen.during else ""
    text = f"{seen.device} held {size(seen.nbytes)} at its highest recorded moment{during}"
    if seen.peak_bytes > seen.nbytes:
        return f"{text}; the allocator's peak is {size(seen.peak_bytes)}, and was not recorded"
    return f"{text}, the allocator's peak"


def rows_of(seen: WatchedDevice, most: int = ROWS) -> list[tuple[str, ...]]:
    """The rows of a table with the heads HEADS, in one unit: at most `most` owners, and what the others have."""
    size = Unit.of(max((each.nbytes for each in seen.owners), default=0)).text
    shown, left = divided(seen, most)
    rows = [_row(seen, size, each.nbytes, each.tensors, each.what, each.source) for each in shown]
    if left:
        rows.append(_row(seen, size, sum(o.nbytes for o in left), sum(o.tensors for o in left), "all others", ""))
    if seen.unknown_bytes:
        rows.append(_row(seen, size, seen.unknown_bytes, 0, "allocated before, and freed since", ""))
    return rows


def divided(
    seen: WatchedDevice, most: int, least_share: float = LEAST_SHARE
) -> tuple[Sequence[Owner], Sequence[Owner]]:
    """The owners that have a row of their own, and the others."""
    count = sum(each.nbytes >= least_share * seen.nbytes for each in seen.owners[:most])
    return seen.owners[:count], seen.owners[count:]


def _row(
    seen: WatchedDevice, size: Callable[[int], str], nbytes: int, tensors: int, what: str, source: str
) -> tuple[str, ...]:
    return size(nbytes), f"{100 * nbytes / seen.nbytes:.0f}%", str(tensors or "-"), source, what


def cost_line(step: StepCosts) -> str:
    """What limits would cost a step, in one line."""
    if step.refusal:
        return f"{step.name}: what a limit would cost is not known: {step.refusal}"
    size = Unit.of(step.peak_bytes).text
    fits = [f"{size(each.limit_bytes)} at {each.time_ratio:.2f} of the time" for each in step.limits]
    fits[-1] += ", its smallest limit"
    return (
        f"{step.name} takes {size(step.peak_bytes)} with its variables and arguments, and fits "
        f"{'; '.join(fits)} (predicted; tfswap run --memory_limit=)"
    )


def limits_for(peak_bytes: int, floor_bytes: int, shares: Sequence[float]) -> list[int]:
    """The limits to try: these shares of the peak that are above the floor, and the floor, the largest first."""
    return [*sorted({int(peak_bytes * s) for s in shares if peak_bytes * s > floor_bytes}, reverse=True), floor_bytes]
