"""Runs of sessions without gradients, as an evaluation is: planned where there may be no room for them as they are.

Not handled: runs that only assign values, as those that initialise or restore variables, and runs with other effects.
These run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfswap.compiler.tf1_variables import REFERENCE_VARIABLES, writes_reference
from tfswap.device import arena, machine
from tfswap.errors import TfswapError
from tfswap.frontends.unmodified.session_runs import Run, bound, graph_step, has_other_effects, needed
from tfswap.frontends.unmodified.session_steps import BATCHES, SessionStep, Taken
from tfswap.frontends.unmodified.settings import Settings
from tfswap.ir import op_traits
from tfswap.ir.custom_ops import DRAWS
from tfswap.kernels.alignment import round_up
from tfswap.runtime.shapes import Shapes

COMPUTES_NOTHING = (
    op_traits.is_const,
    op_traits.is_feed,
    op_traits.is_view,
    op_traits.makes_handle,
    op_traits.only_waits,
    op_traits.reads_metadata_only,
    op_traits.reads_variable,
    op_traits.writes_variable,
    writes_reference,
    REFERENCE_VARIABLES.__contains__,
)
"""Of an op's type: it gives constants, arguments or variables, or passes them on."""


def may_be_planned(run: Run, ops: Sequence[Any]) -> bool:
    """Whether a run without gradients computes something, and changes nothing but variables and random state.

    Args:
        ops: the operations that it needs.
    """
    if not run.fetches and not run.feeds:  # it initialises
        return False
    batches = [output.ref() for op in ops if op.type in BATCHES for output in op.outputs]
    others = needed(run._replace(feeds={**dict.fromkeys(batches), **run.feeds}))
    computes = any(not any(is_none(op.type) for is_none in COMPUTES_NOTHING) for op in others)
    return computes and not has_other_effects(others)


class ForwardRun(SessionStep):
    """A run without gradients. It runs as it is where there is room for all tensors that it computes, twice: for a
    kernel's own memory, and chunks that are larger than requested. Runs that draw random numbers have a plan, since
    they share their generators with the training step's.

    Args:
        plain, given, run, ops, place: as of SessionStep.
    """

    def __init__(self, plain: Callable[..., list[Any]], given: Settings, run: Run, ops: Sequence[Any], place: str):
        super().__init__(plain, given, run, ops, place)
        self._draws = any(op.type in DRAWS for op in ops)
        self._computed: dict[Shapes, int | None] = {}

    def fits_as_it_is(self, run: Run) -> bool:
        """As SessionStep's."""
        return not self._batches and self._has_room_for(run.by_name())

    def note_as_it_is(self, run: Run) -> None:
        """As SessionStep's: the summary has what runs under a limit."""

    def _found(self, taken: Taken, options: Any, run_metadata: Any) -> list[Any]:
        if self._has_room_for(taken.run):
            return self.plain(taken.run, options, run_metadata)
        return super()._found(taken, options, run_metadata)

    def _has_room_for(self, run: Run) -> bool:
        device, _ = machine.current_device()
        limit_bytes, info = self._given.limit_bytes(device), arena.memory_info(device)
        if limit_bytes is None or info is None:
            return True  # there is no limit, or it is a share of a step's own peak
        shapes = run.shapes
        if shapes not in self._computed:
            self._computed[shapes] = None if self._draws else _computed_bytes(run)
        computed = self._computed[shapes]
        return computed is not None and info.current_bytes + 2 * computed <= limit_bytes


def _computed_bytes(run: Run) -> int | None:
    """The bytes of all tensors that a run computes together; None where sizes are open, or it calls functions."""
    step, feeds = graph_step(run)
    try:
        graph = step.read(bound(feeds, run.shapes))
    except TfswapError:
        return None  # planning says why
    sizes = [tensor.nbytes for node in graph if node not in graph.feeds for tensor in node.outputs]
    if any(nbytes is None for nbytes in sizes) or any(True for _ in graph.all_bodies()):
        return None
    return sum(round_up(nbytes or 0) for nbytes in sizes)
