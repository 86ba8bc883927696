"""Which device of a step lends memory to which: a swapped tensor may wait in another device's arena.

That is faster than the host where the link between the two devices is (`Rates.peer_bytes_per_s`). The memory is one
block of the lender's arena, allocated before the function of the plans is made. So it is persistent bytes of the
lender's plan, whose peak stays exact whatever the other device does.

Each device that moves tensors is planned again with what the plan of the device with the most room leaves of its limit.
Where the step takes less time so, as much as this plan uses is lent, and all are planned in the arenas with these
blocks. Where they then do not fit, or the step is not faster, the blocks are given back.

Not handled: several lenders of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tfswap.device.lent_block import LentBlock
from tfswap.errors import InfeasibleMemoryLimit
from tfswap.kernels.alignment import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from tfswap.plan.plan import Plan
    from tfswap.runtime.planning_loop import PartPlanning

    Choose = Callable[[PartPlanning], object]

LEAST_SHARE = 0.05
"""The least memory that is worth lending, as a share of the limit of the device that borrows it."""


class _Loan(NamedTuple):
    borrower: PartPlanning
    lender: PartPlanning
    nbytes: int


class Lending:
    """The lending of one planning of a step.

    Args:
        parts: the plannings of its parts.
    """

    def __init__(self, parts: Sequence[PartPlanning]):
        self._parts = parts
        self._is_decided = False
        self._seconds_alone = 0.0
        self._loans: list[_Loan] = []

    def changes_arenas(self, seconds: Callable[[], float], choose: Choose) -> bool:
        """Lend memory where the chosen plans take less time so, or give it back where that has not come true. Returns
        whether all have to be planned again.

        Args:
            seconds: gives the time of the step with the present plans of all parts.
            choose: chooses a plan for a part.
        """
        if not self._is_decided:
            self._is_decided = True
            return any(map(_may_borrow, self._parts)) and self._lend(seconds, choose)
        if not self._loans or (all(each.fits for each in self._parts) and seconds() < self._seconds_alone):
            return False
        return self.give_back()

    def give_back(self) -> bool:
        """Give all blocks back; returns whether there were any."""
        if not self._loans:
            return False
        for loan in self._loans:
            _plan_alone(loan.borrower, loan.borrower.plan)
        self._look_again()
        self._loans = []
        return True

    def _lend(self, seconds: Callable[[], float], choose: Choose) -> bool:
        self._seconds_alone = seconds()
        alone = [each.plan for each in self._parts]
        loans = self._planned(choose)
        if not loans or seconds() >= self._seconds_alone or not self._allocate(loans):
            for each, plan in zip(self._parts, alone, strict=True):
                _plan_alone(each, plan)
            return False
        self._loans = loans
        self._look_again()
        return True

    def _planned(self, choose: Choose) -> list[_Loan]:
        """The loans that the devices' fastest plans use."""
        room = [_room_bytes(each) for each in self._parts]
        loans: list[_Loan] = []
        for each in filter(_may_borrow, self._parts):
            others = [i for i, other in enumerate(self._parts) if other is not each]
            most = max(others, key=lambda i: room[i])
            if room[most] < LEAST_SHARE * (each.part.limit.bytes or 0) or any(loan.lender is each for loan in loans):
                continue
            alone = each.plan
            each.optimizer.search.planners.assume_lent(room[most])
            if _is_faster(each, choose):
                each.optimizer.search.planners.assume_lent(each.plan.lent_bytes)
                room[most] -= each.plan.lent_bytes
                loans.append(_Loan(each, self._parts[most], each.plan.lent_bytes))
            else:
                _plan_alone(each, alone)
        return loans

    def _allocate(self, loans: Sequence[_Loan]) -> bool:
        """Allocate the blocks; returns whether there was room for all."""
        import tensorflow as tf

        try:
            for loan in loans:
                loan.borrower.part.borrowed = LentBlock(loan.lender.part.trace.device.name, loan.nbytes)
        except tf.errors.ResourceExhaustedError:
            return False
        return True

    def _look_again(self) -> None:
        """Plan the lenders for their arenas as they are now."""
        for loan in self._loans:
            loan.lender.snapshot = loan.lender.part.arena.snapshot()
            loan.lender.optimizer.assume_arena(loan.lender.snapshot)


def _is_faster(each: PartPlanning, choose: Choose) -> bool:
    """Choose a plan for a part; returns whether it borrows memory and takes less time than the one before."""
    seconds = each.plan.seconds
    try:
        choose(each)
    except InfeasibleMemoryLimit:
        return False
    borrows, each.fits = each.fits and each.plan.lent_bytes > 0, True  # it fits alone
    return borrows and each.plan.seconds < seconds


def _plan_alone(each: PartPlanning, plan: Plan) -> None:
    """Plan a part without memory of others from now on, and with `plan` until it is planned again."""
    each.plan, each.part.borrowed = plan, None
    each.optimizer.search.planners.assume_lent(0)
    each.optimizer.assume_arena(each.snapshot)  # what it knows of floors is with that memory


def _room_bytes(each: PartPlanning) -> int:
    """What a part's plan leaves of its limit."""
    limit_bytes = each.part.limit.bytes
    if limit_bytes is None or not each.fits or not _has_own_memory(each):
        return 0
    left = limit_bytes - each.plan.planned_peak_bytes - each.part.margins.others_bytes
    return max(0, left // ALIGNMENT_BYTES * ALIGNMENT_BYTES)


def _may_borrow(each: PartPlanning) -> bool:
    """Whether a part moves tensors, and may swap them to another device."""
    options = each.optimizer.options
    may_swap = (
        options.solver == "default" and "swap" in options.tactics and not options.portable and _has_own_memory(each)
    )
    return may_swap and each.fits and each.plan.moves > 0 and each.optimizer.costs.rates.peer_bytes_per_s > 0


def _has_own_memory(each: PartPlanning) -> bool:
    """Whether a part's device has memory apart from the host's."""
    return each.part.trace.device.model.host_is_separate
