"""`tfswap.max_batch`, `tfswap fit`: the largest batch, image or sequence with which a step keeps a limit.

A size fits when the planner finds a plan for it within the limit. A larger size usually needs more memory. But kernels
choose their workspaces by size, and chunks are handed out whole, so that a larger size can fit where a smaller one does
not. So the search does not end with the first refusal, but tries some sizes above it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfswap.analysis.cost import Costs
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.offline import offline_optimizer
from tfswap.compiler.options import Options
from tfswap.compiler.policy import Policy
from tfswap.compiler.request import Precision, Request, whole
from tfswap.compiler.resident_margin import fastest, margin_of
from tfswap.device import arena, machine
from tfswap.device.placement import FIRST_GPU
from tfswap.errors import InfeasibleMemoryLimit, TfswapError
from tfswap.frontends.function import OptimizedFunction
from tfswap.frontends.optimize import undecorated
from tfswap.frontends.profile import restored
from tfswap.frontends.resizable_step import Sizes, TrainingStep, find_step, loaded_step, sized_arguments
from tfswap.frontends.simulate import target
from tfswap.ir.permits import BITS, TACTICS
from tfswap.kernels.hardware import THIS, Machine
from tfswap.kernels.profile import Profile
from tfswap.native.forks import refuse_in_late_child
from tfswap.report.max_batch import Fit
from tfswap.support import progress
from tfswap.support.sizes import format_bytes, parse_limit

log = logging.getLogger("tfswap")

MAX_SIZE = 1 << 24
PROBES = 4
"""Sizes tried above one that bisection finds the largest."""
PROBED_SHARE = 0.08
"""How far above it they reach: about as much as chunks and workspaces change a peak."""
BISECTED = 3
"""One try of this number bisects, since interpolation may not converge where needs differ little or are not linear."""
CONFIRMATIONS = 8
"""The most runs that confirm the largest size."""
RESOLUTION = 1 / 64
"""The precision of the confirmed size, as a share of it."""


def max_batch(
    step: Any,
    *args: Any,
    memory_limit: int | str | None = None,
    vary: Mapping[str, Sequence[int]] | None = None,
    multiple_of: int = 1,
    device: str | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    function: str = "train_step",
    batch_size: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    tactics: Sequence[str] = TACTICS,
    host_memory_limit: int | str | None = None,
    precision: Precision = None,
    spill_dir: str | os.PathLike[str] | None = None,
    spill_limit: int | str | None = None,
    policy: Policy | None = None,
    values: str = BITS,
    confirm: bool = True,
) -> Fit:
    """Find the largest size of a training step that keeps a limit.

        tfswap.max_batch(train_step, images, labels, memory_limit="6GiB").size
        tfswap.max_batch("saved_model_dir", device="a100", batch_size=8, vary={"images": (1, 2)}, multiple_of=32)

    Args:
        step: a `tf.function`, decorated or not, a Python function, or the folder of a SavedModel.
        args: a function's arguments, of any size; the search starts there.
        memory_limit: bytes or a size; by default the limit of the device's allocator.
        vary: by argument, the axes that are searched, which all get the same size: {"images": (0,), "labels": (0,)}. By
            default the batch: the leading axes as long as that of the first argument, or those that a SavedModel leaves
            open.
        multiple_of: only multiples of this are tried.
        device, profile, tactics, host_memory_limit, precision: as in `simulate`.
        spill_dir, spill_limit, policy, values: as there.
        function, batch_size, input_shapes: of a SavedModel, as in `simulate`; for sizes that are not searched.
        confirm: run the step once at the size found, under the limit, and try smaller sizes where that fails. The
            variables get their old values back afterwards. A SavedModel's step is loaded and run on zeros, where the
            allocator reports its peak. Not with `device`.

    Raises:
        InfeasibleMemoryLimit: not even the smallest size fits.
        TfswapError: an argument is malformed, or there is no limit.
        UnsupportedGraph, InvalidModel: as `simulate`; also where the step does not accept a size that is tried.
    """
    whole("multiple_of", multiple_of)
    _require_axes(vary)
    asked = precision, spill_dir, spill_limit, policy, values
    on, options, costs = target(device, profile, tactics, host_memory_limit, *asked)
    limit_bytes = on.memory_bytes if memory_limit is None else parse_limit(memory_limit)
    if limit_bytes is None:
        raise TfswapError(
            'memory_limit is not given and the device has no limit of its own: say what may be used, such as "6GiB", '
            "or name a device="
        )
    saved = isinstance(step, (str, os.PathLike))
    # Without the allocator's peak, the run of a SavedModel would measure nothing.
    runs = confirm and device is None and (not saved or arena.memory_info(machine.current_device()[0]) is not None)
    if runs:
        refuse_in_late_child("The run that confirms a size (confirm=True)")
    if saved and batch_size is None and vary is None:
        batch_size = multiple_of  # the batch is what is searched: from the smallest
    start = {name: dict.fromkeys(axes, multiple_of) for name, axes in (vary or {}).items()}
    found = find_step(
        step,
        args,
        function=function,
        batch_size=batch_size,
        input_shapes=input_shapes,
        start=start,
        device=on.device,
        gpus=None if on.name == THIS else [FIRST_GPU],
    )
    search = Search(found, axes_of(found, vary), multiple_of, limit_bytes, on, options, costs)
    size = search.largest(search.floor_bytes)
    planned, measured = size, None
    if runs and size > 0 and saved:
        size, measured = _confirmed_saved(step, function, found, search, size)
    elif runs and size > 0:
        traced = undecorated(step)
        size, measured = _confirmed(traced, functools.partial(sized_arguments, traced, args), search, size)
    if not size:
        raise _refusal(search, planned)
    return _fit(search, on, size, planned, measured)


def search_of(step: Any, args: Sequence[Any], limit_bytes: int, unit: int) -> Search:
    """The search for the batch of a function, for this machine's devices.

    Args:
        step, args: as of `max_batch`.
        limit_bytes: the limit.
        unit: only multiples of this are tried.
    """
    on, options, costs = target(None, None, TACTICS, None, None, None, None)
    found = find_step(step, args, device=on.device)
    return Search(found, axes_of(found, None), unit, limit_bytes, on, options, costs)


def _refusal(search: Search, planned: int) -> InfeasibleMemoryLimit:
    """No size fits. `planned` is the largest size with a plan; 0 where there is none."""
    floor, limit_bytes = search.floor_bytes(search.unit), search.limit_bytes
    limit = f"memory_limit is {limit_bytes} bytes ({format_bytes(limit_bytes)})"
    if planned:
        return InfeasibleMemoryLimit(
            f"{limit}. A size of {planned} has a plan that keeps it, but no size that was run did, with what else "
            "is in the device's memory. Free that, or try in a process of its own",
            floor_bytes=floor,
            limit_bytes=limit_bytes,
        )
    return InfeasibleMemoryLimit(
        f"{limit}, and {search.step.name} needs at least {floor} ({format_bytes(floor)}) at a size of {search.unit}, "
        "the smallest that is tried",
        floor_bytes=floor,
        limit_bytes=limit_bytes,
    )


def _fit(search: Search, on: Machine, size: int, planned: int, measured: int | None) -> Fit:
    """The result for the largest size. `measured` is the peak of its run; None where it was not run."""
    optimizer = search.optimizer(size)
    found = fastest(optimizer, search.limit_bytes)
    assert found is not None, "it fits"
    best = found.candidate
    return Fit(
        step=search.step.name,
        machine=on.title,
        limit_bytes=search.limit_bytes,
        varied=tuple((name, tuple(axes)) for name, axes in search.axes.items()),
        size=size,
        planned_size=planned,
        unoptimised_size=search.largest(search.peak_bytes),
        peak_bytes=best.peak_bytes + margin_of(optimizer, found.variant.rewriting.at_home),
        time_ratio=optimizer.baseline.time_ratio(best.timing.total_s),
        host_bytes=best.memory.host_peak_bytes,
        confirmed=measured is not None,
        measured_bytes=measured,
    )


def _require_axes(vary: Any) -> None:
    """Raise TfswapError for a `vary` that does not say by argument which axes."""
    named = vary.items() if isinstance(vary, Mapping) else [] if vary is None else [(None, None)]
    for name, axes in named:
        listed = isinstance(axes, Sequence) and not isinstance(axes, str)
        if not isinstance(name, str) or not listed or not all(isinstance(a, int) and a >= 0 for a in axes or ()):
            raise TfswapError(f'vary is {vary!r}: give the axes that are searched by argument, as {{"images": (1, 2)}}')


def axes_of(step: TrainingStep, vary: Mapping[str, Sequence[int]] | None) -> dict[str, tuple[int, ...]]:
    """The axes that are searched: those that the user gave, or the batch. Raises TfswapError for axes that the step
    does not have.
    """
    if vary is None:
        free = [name for name, axes in step.free.items() if 0 in axes]
        first = step.shapes[free[0]] if free else None
        if not first:
            raise TfswapError(f"{step.name} leaves no leading axis open: say with vary= what is searched")
        return {name: (0,) for name in free if (step.shapes[name] or (None,))[0] == first[0]}
    for name, axes in vary.items():
        if name not in step.free:
            raise TfswapError(f"vary names {name!r}; the arguments of {step.name} are {', '.join(step.shapes)}")
        fixed = [a for a in axes if a not in step.free[name]]
        if fixed or not axes:
            raise TfswapError(
                f"vary has axes {tuple(axes)} of {name!r}, whose shape is {step.shapes[name]}; those that are open "
                f"are {tuple(step.free[name])}"
            )
    return {name: tuple(axes) for name, axes in vary.items()}


class Search:
    """Sizes of one step, and whether they fit; remembers what it has planned.

    Args:
        step: whose sizes are tried.
        axes: by argument, the axes that get the size.
        unit: sizes are multiples of this.
        limit_bytes: the step's limit.
        on, options, costs: the machine that it is planned for, the options and the cost model.
    """

    def __init__(
        self,
        step: TrainingStep,
        axes: Mapping[str, tuple[int, ...]],
        unit: int,
        limit_bytes: int,
        on: Machine,
        options: Options,
        costs: Costs,
    ):
        self.step, self.axes, self.unit = step, dict(axes), unit
        self.limit_bytes = limit_bytes
        self.options = dataclasses.replace(options, profile=costs.profile)
        self._on, self._costs = on, costs
        self._peaks: dict[int, int] = {}
        self._floors: dict[int, int] = {}
        self.optimizer = functools.lru_cache(maxsize=1)(self._optimizer)  # the latest alone: they are large

    def _optimizer(self, size: int) -> Optimizer:
        graph = self.step.graph({name: dict.fromkeys(axes, size) for name, axes in self.axes.items()})
        return offline_optimizer(graph, self._on.device, self.options, self.step.variables, self._costs)

    def floor_bytes(self, size: int) -> int:
        """The smallest limit that a plan for a size keeps."""
        if size not in self._floors:
            with progress.task(f"trying a size of {size}"):
                self._floors[size] = self.optimizer(size).floor_bytes()
        return self._floors[size]

    def peak_bytes(self, size: int) -> int:
        """The unoptimised step's predicted peak."""
        if size not in self._peaks:
            with progress.task(f"trying a size of {size} unoptimised"):
                self._peaks[size] = self.optimizer(size).baseline.peak_bytes
        return self._peaks[size]

    def largest(self, needs: Callable[[int], int]) -> int:
        """The largest size found that needs no more than the limit; 0 where the smallest needs more.

        Args:
            needs: bytes, by size.
        """
        tries = _Tries(lambda count: needs(count * self.unit), self.limit_bytes)
        low, high = self._bracket(tries)
        while low:
            low, high = tries.narrowed(low, high)
            reach = [low + max(i, round(low * PROBED_SHARE * i / PROBES)) for i in range(1, PROBES + 1)]
            beyond = [count for count in reach if tries.fits(count)]
            if not beyond:
                break
            low = max(beyond)
            high = low + max(1, round(low * PROBED_SHARE))
            while tries.fits(high):
                low, high = high, 2 * high - low
        return low * self.unit

    def _bracket(self, tries: _Tries) -> tuple[int, int]:
        """A count that fits, or 0, and a larger one that does not."""
        start = next((s[a] for n, axes in self.axes.items() for a in axes if (s := self.step.shapes[n])), None) or 1
        low, high = 0, max(1, start // self.unit)
        while tries.fits(high):
            met = tries.meets_limit()
            low, high = high, 2 * high if met is None else max(high + (high - low + 1) // 2, min(met + 1, 8 * high))
            if high * self.unit > MAX_SIZE:
                raise TfswapError(
                    f"{self.step.name} fits at any size up to {MAX_SIZE}: its memory does not depend on "
                    f"{', '.join(self.axes)}. Give vary= the arguments on which it does."
                )
        if low:
            return low, high
        while high > 1:
            met = tries.meets_limit()
            count = high // 2 if met is None else max(1, min(met, high // 2))
            if tries.fits(count):
                return count, high
            high = count
        return 0, 1


class _Tries:
    """The memory needs of counts, each computed once: each size is traced and planned, which takes seconds.

    The need is nearly linear in the batch, and smooth in a side or a length, so the next count is where a line through
    two needs meets the limit.

    Args:
        needs: bytes, by count.
        limit_bytes: the most that may be needed.
    """

    def __init__(self, needs: Callable[[int], int], limit_bytes: int):
        self._needs, self._limit_bytes = needs, limit_bytes
        self._found: dict[int, int] = {}

    def fits(self, count: int) -> bool:
        if count not in self._found:
            self._found[count] = self._needs(count)
        return self._found[count] <= self._limit_bytes

    def meets_limit(self) -> int | None:
        """The count where the line through the two needs nearest to the limit meets it; None where that is not
        known.
        """
        nearest = sorted(self._found.items(), key=lambda entry: abs(entry[1] - self._limit_bytes))[:2]
        (less, low_bytes), (more, high_bytes) = sorted(nearest) if len(nearest) == 2 else ((0, 0), (0, 0))
        if high_bytes <= low_bytes:
            return None
        return less + (self._limit_bytes - low_bytes) * (more - less) // (high_bytes - low_bytes)

    def narrowed(self, low: int, high: int) -> tuple[int, int]:
        """Adjacent counts between these two, of which the first fits and the second does not."""
        for tried in itertools.count(1):
            if high - low == 1:
                break
            met = None if tried % BISECTED == 0 else self.meets_limit()
            count = (low + high) // 2 if met is None else max(low + 1, min(met, high - 1))
            low, high = (count, high) if self.fits(count) else (low, count)
        return low, high


def _confirmed_saved(
    model: str | os.PathLike[str], function: str, found: TrainingStep, search: Search, size: int
) -> tuple[int, int | None]:
    """As `_confirmed`, of a SavedModel's step on zeros. Where it can't be run, the size stays as planned."""
    import tensorflow as tf

    try:
        return _confirmed(*loaded_step(model, function, found), search, size)
    except (TfswapError, tf.errors.OpError, ValueError, TypeError) as error:
        log.warning("tfswap: the size is planned and not confirmed, since %s can't be run: %s", found.name, error)
        return size, None


def _confirmed(traced: Any, arguments: Callable[[Sizes], Any], search: Search, size: int) -> tuple[int, int | None]:
    """The largest size, from `size` down, at which the step runs and keeps the limit; 0 where none is found.

    With the peak of its run, where the allocator reports it, reset before each run.

    Args:
        traced: the step's function.
        arguments: gives the arguments for sizes.
    """
    import tensorflow as tf

    request = Request(search.limit_bytes, search.options, None, "optimize")
    device, _ = machine.current_device()
    peaks: dict[int, int] = {}

    def takes(size: int) -> float:
        planned = OptimizedFunction(traced, request, "warn")
        sized = arguments({name: dict.fromkeys(axes, size) for name, axes in search.axes.items()})
        try:
            if search.floor_bytes(size) > search.limit_bytes:
                return search.floor_bytes(size) / search.limit_bytes
            with restored(traced.get_concrete_function(*sized)):
                if arena.memory_info(device) is not None:
                    tf.config.experimental.reset_memory_stats(device)
                planned(*sized)
                after = arena.memory_info(device)
            if after is None:
                return 0.0
            peaks[size] = after.peak_bytes
            return after.peak_bytes / search.limit_bytes
        except InfeasibleMemoryLimit as error:
            return error.floor_bytes / search.limit_bytes
        except tf.errors.ResourceExhaustedError:
            return math.inf  # the device had less than the limit says

    found = largest_that_runs(size, search.unit, takes)
    return found, peaks.get(found)


def largest_that_runs(size: int, unit: int, takes: Callable[[int], float]) -> int:
    """The largest multiple of `unit`, from `size` down, whose run keeps the limit; 0 where none is found.

    A plan for any arena does not know what this process has in its arena, so that a planned size may not fit. Sizes go
    down by ever larger steps until one runs; from there the search bisects.

    Args:
        takes: the peak of a run at a size, over the limit.
    """
    low, high = 0, size + unit
    for tried in range(CONFIRMATIONS):
        over = takes(size)
        low, high = (size, high) if over <= 1 else (low, size)
        if high - low <= max(unit, round(low * RESOLUTION)):
            break
        if low:
            size = (low + high) // 2
        else:
            size -= max(int(size * RESOLUTION * 2**tried), 0 if over == math.inf else size - int(size / over))
        size = max(unit, size // unit * unit)
    return low
