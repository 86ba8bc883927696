"""The report of a planned step, for people and for programs."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tfswap.errors import TfswapError
from tfswap.ir.graph import Graph
from tfswap.ir.op_traits import VARIABLE
from tfswap.plan.plan import Slices
from tfswap.planner.certificate import Bounds
from tfswap.report.block_rows import BlockRow
from tfswap.report.explain import Explanation
from tfswap.report.graph_file import dot, graphml
from tfswap.report.levers import Floor, Lever
from tfswap.report.page import cell, page
from tfswap.report.picture import picture
from tfswap.report.printed import ROWS_SHOWN, printed
from tfswap.report.rows import TensorRow
from tfswap.report.summary import answer_of, headline_of, reason_of, summary_of
from tfswap.report.tables import as_text
from tfswap.report.timeline import Timeline
from tfswap.report.trace import trace
from tfswap.simulator.unordered import Baseline
from tfswap.simulator.working_set import Reuse
from tfswap.support.files import require_place, write_whole
from tfswap.support.gc_pause import without_collector

if TYPE_CHECKING:
    from rich.console import RenderableType

BY_HAND = "this report was constructed by hand and has no step: use a report that tfswap made"
HTML, PNG, TRACE, JSON, GRAPHML, DOT = ".html", ".png", ".trace.json", ".json", ".graphml", ".dot"
KINDS = {
    HTML: "a page",
    PNG: "a picture",
    TRACE: "a trace",
    JSON: "the figures",
    GRAPHML: "the graph",
    DOT: "the graph for Graphviz",
}
"""The kinds of files that a report can be saved as, by the ending of the name. The first match counts."""
COMPUTED = (
    "baseline_peak_bytes",
    "time_ratio",
    "floor_bytes",
    "least_seconds",
    "least_peak_bytes",
    "keeps_limit",
    "largest_kernel",
    "working_set_bytes",
    "workspace_bytes",
)
"""Properties of a report that `to_json` adds to its fields."""


@dataclass(frozen=True)
class ConvolutionRow:
    """One convolution, or gradient of one.

    Attributes:
        name, op: the name and op type of its node.
        free_bytes: bytes of the arena that the plan leaves free for a workspace while it runs; the least of all runs.
    """

    name: str
    op: str
    free_bytes: int


@dataclass(frozen=True, repr=False)
class Report:
    """The figures of one planned step, in bytes unless stated otherwise.

    Attributes:
        planned_peak_bytes: predicted peak of the planned step. After a measured run, the one for that run's arena.
        memory_limit_bytes: the user's limit, or the smallest one for `max_slowdown`; None for none.
        persistent_bytes: allocated throughout the step: variables, slots, arguments, constants, tensors of others.
        seconds: predicted time of a step.
        host_bytes: peak of host memory for tensors.
        at_home_bytes: bytes of variables that are at home on the host.
        disk_bytes: peak of disk space for swapped tensors beyond the limit of host memory.
        kernels: number of kernel runs in the order, recomputed ones included.
        reruns: number of recomputed ones.
        rows: one for each tensor that was considered, the largest first.
        alive_at_peak: names and bytes of the tensors in device memory at the planned peak, the largest first.
        unmodelled: kernels whose memory is not known exactly, but for an upper bound where there is one. In portable
            plans also loops with too many courses to try each, and kernels whose sizes depend on values, with the most
            bytes that untried courses add to the planned peak. Calls of Python functions have no bound.
        trains: whether the step has a backward pass, or updates variables.
        costs: the source of the times: "analytic", "analytic, at measured rates" or "profiled".
        measured_peak_bytes: the allocator's peak of a step under this plan; None before one, and after a higher peak.
        step: the name of the function or graph that the figures are of.
        notes: what the figures assume, and what could not be planned.
        device: the device that the figures are of ("GPU:0"); "" where the report is of a file.
        sliced: the kernels that run in slices of rows, for each size of slices.
        requested_share: the requested limit, where it is a share of the unoptimised peak ("60%").
        blocks: the blocks that XLA compiles, those that save the most first.
    """

    planned_peak_bytes: int
    memory_limit_bytes: int | None
    persistent_bytes: int
    seconds: float
    host_bytes: int
    disk_bytes: int
    kernels: int
    reruns: int
    rows: tuple[TensorRow, ...]
    alive_at_peak: tuple[tuple[str, int], ...]
    unmodelled: tuple[str, ...]
    trains: bool
    costs: str
    measured_peak_bytes: int | None = None
    at_home_bytes: int = 0
    step: str = ""
    notes: tuple[str, ...] = ()
    device: str = ""
    sliced: tuple[Slices, ...] = ()
    requested_share: str = ""
    blocks: tuple[BlockRow, ...] = ()
    _devices: Mapping[str, Report] = field(repr=False, compare=False, default_factory=dict)
    _floor: Callable[[], int] = field(repr=False, compare=False, default=lambda: 0)
    _levers: Callable[[], Floor] = field(repr=False, compare=False, default=lambda: Floor(0, ()))
    _timeline: Callable[[], Timeline] | None = field(repr=False, compare=False, default=None)
    _baseline: Callable[[], Baseline] = field(repr=False, compare=False, default=lambda: Baseline(0, 0.0))
    _bounds: Callable[[], Bounds | None] = field(repr=False, compare=False, default=lambda: None)
    _graph: Callable[[], Graph] | None = field(repr=False, compare=False, default=None)
    _explain: Callable[[str], Explanation] | None = field(repr=False, compare=False, default=None)
    _largest: Callable[[], tuple[str, int]] = field(repr=False, compare=False, default=lambda: ("", 0))
    _others: Callable[[], tuple[TensorRow, ...]] = field(repr=False, compare=False, default=lambda: ())
    _reuse: Callable[[], Reuse] = field(repr=False, compare=False, default=lambda: Reuse(0, 0, 0))
    _rooms: Callable[[], tuple[ConvolutionRow, ...]] = field(repr=False, compare=False, default=lambda: ())

    @property
    def devices(self) -> Mapping[str, Report]:
        """The report on each device of the step, by its name. The figures of a step on several are the first one's."""
        return self._devices or {self.device: self}

    @cached_property
    def baseline_peak_bytes(self) -> int:
        """Predicted peak of the unoptimised step: the median of simulated runs, which a share is of.

        It leaves out the bytes that concurrent iterations of a loop hold: `print(report)` gives their bound.
        """
        return self.baseline.peak_bytes

    @property
    def baseline(self) -> Baseline:
        """The prediction of the unoptimised step, with the range of its runs' peaks; computed on first access."""
        return self._baseline()

    @cached_property
    def time_ratio(self) -> float:
        """Predicted step time over the unoptimised one's."""
        return self.baseline.time_ratio(self.seconds)

    @cached_property
    def bounds(self) -> Bounds | None:
        """What no plan of this step passes, computed on first access: the least time under the limit, and the lowest
        peak of a plan that is as fast (`planner/certificate.py`). Seconds are those of the cost model.

        None for steps with loops or conditionals, with the tactic "slice", and where nothing is changed.
        """
        return self._bounds()

    @property
    def least_seconds(self) -> float | None:
        """No plan for the limit is predicted to take less; None where no bound is known."""
        return None if self.bounds is None else self.bounds.seconds

    @property
    def least_peak_bytes(self) -> int | None:
        """No plan that is predicted to be as fast has a lower peak; None where no bound is known."""
        return None if self.bounds is None else self.bounds.peak_bytes

    @cached_property
    def floor_bytes(self) -> int:
        """The smallest possible limit. With a smaller one, the step is refused before it runs.

        The planned peak may be below it: plans leave a margin, and room for tensors that others allocate during the
        step.
        """
        return self._floor()

    @cached_property
    def floor(self) -> Floor:
        """The smallest limit with what would lower it, computed on first access."""
        return self._levers()

    @property
    def levers(self) -> tuple[Lever, ...]:
        """What would lower the smallest limit, each with the limit then: half the batch, bfloat16, kernels in slices,
        variables at home. The most effective first. Bounds and plans, as `Lever.known` says.
        """
        return self.floor.levers

    @property
    def largest_kernel(self) -> str:
        """The kernel with the largest working set, in the step as planned for the smallest limit."""
        return self._largest_kernel[0]

    @property
    def working_set_bytes(self) -> int:
        """The working set of that kernel. No limit is smaller than its sum with the persistent bytes."""
        return self._largest_kernel[1]

    @cached_property
    def _largest_kernel(self) -> tuple[str, int]:
        return self._largest()

    @cached_property
    def others(self) -> tuple[TensorRow, ...]:
        """The tensors that were not considered: those allocated before the step, and small ones. Largest first."""
        return self._others()

    @cached_property
    def reuse(self) -> Reuse:
        """Bytes that the plan saves by buffer forwarding and by eviction."""
        return self._reuse()

    @cached_property
    def convolutions(self) -> tuple[ConvolutionRow, ...]:
        """Bytes that the plan leaves for each convolution's workspace, the least first; none without a limit."""
        return self._rooms()

    @property
    def workspace_bytes(self) -> int | None:
        """Bytes that every convolution can have as workspace within the limit; None without these."""
        return self.convolutions[0].free_bytes if self.convolutions else None

    @property
    def keeps_limit(self) -> bool:
        """Whether the planned peak is within the limit. False only in an analysis of a limit that can't be met."""
        return self.memory_limit_bytes is None or self.planned_peak_bytes <= self.memory_limit_bytes

    @property
    def title(self) -> str:
        """The heading of its page and picture."""
        return f"tfswap: {self.step}" if self.step else "tfswap: a training step"

    @property
    def swapped(self) -> tuple[TensorRow, ...]:
        """The rows of swapped tensors."""
        return tuple(row for row in self.rows if "swap" in row.tactic)

    @property
    def encoded(self) -> tuple[TensorRow, ...]:
        """The rows of encoded tensors."""
        return tuple(row for row in self.rows if "encode" in row.tactic)

    @property
    def reduced(self) -> tuple[TensorRow, ...]:
        """The rows of tensors that are rounded for the backward pass."""
        return tuple(row for row in self.rows if row.precision)

    @property
    def variables(self) -> tuple[TensorRow, ...]:
        """The rows of variables: those at home in host memory have the tactic "state", those on the device "keep"."""
        return tuple(row for row in (*self.rows, *self.others) if row.op == VARIABLE)

    @property
    def recomputed(self) -> tuple[TensorRow, ...]:
        """The rows of recomputed tensors."""
        return tuple(row for row in self.rows if "recompute" in row.tactic)

    def to_json(self) -> str:
        """All figures as JSON text; of several devices each one's, by its name in "devices"."""
        content = _content(self)
        if self._devices:
            content["devices"] = {name: _content(each) for name, each in self._devices.items()}
        return json.dumps(content, indent=1, sort_keys=True)

    @without_collector
    def summary(self) -> list[tuple[str, str]]:
        """The main figures, as (label, text)."""
        return summary_of(self)

    @without_collector
    def answer(self) -> str:
        """One sentence: whether the step fits its limit, by how much, and at what cost."""
        return answer_of(self)

    @without_collector
    def reason(self) -> str:
        """One sentence: why no limit is smaller than the smallest one."""
        return reason_of(self)

    def headline(self) -> str:
        """One line: the peak, and the tactics and time that it needs."""
        return headline_of(self)

    def __rich__(self) -> RenderableType:
        return printed(self)

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return cell(self, self._all_drawn(), ROWS_SHOWN)

    def explain(self, tensor: str) -> Explanation:
        """Explain why a tensor is kept, swapped or recomputed: its uses, and the cost of each tactic.

        Args:
            tensor: its name ("node:0"), or that of the node whose first output it is.

        Raises:
            TfswapError: the step has no such tensor. The message has similar names.
        """
        if self._explain is None:
            raise TfswapError(BY_HAND)
        return self._explain(tensor)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file. The ending of its name decides the kind.

        - `.html`: a page that needs no network: memory over the step, kernels and copies, every tensor and its reason.
        - `.png`: memory over the step. Needs matplotlib (the extra "plot").
        - `.trace.json`: a trace for https://ui.perfetto.dev and Chrome: kernels, copies, and memory by kind.
        - `.json`: all figures, as `to_json` gives them.
        - `.graphml`, `.dot`: the planned graph, of several devices the first one's, with the tactic of each tensor.
          `.dot` needs pydot.

        Times and memory over the step are simulated.

        Raises:
            TfswapError: another ending; matplotlib or pydot is missing; there is nothing to draw; the file can't be
                written.
        """
        ending = require_kind(path)
        writers = {HTML: self._page, PNG: self._picture, TRACE: self._trace, JSON: self.to_json}
        writers |= {GRAPHML: self._graphml, DOT: self._dot}
        write_whole(path, writers[ending]())

    def _page(self) -> str:
        return page(self, self._all_drawn())

    def _picture(self) -> bytes:
        return picture(self, [each._required() for each in self.devices.values()])

    def _trace(self) -> str:
        return json.dumps(trace([(each, each._required()) for each in self.devices.values()]), separators=(",", ":"))

    def _graphml(self) -> bytes:
        return graphml(self, self._required_graph())

    def _dot(self) -> str:
        return dot(self, self._required_graph())

    def _required_graph(self) -> Graph:
        if self._graph is None:
            raise TfswapError(BY_HAND)
        return self._graph()

    def _drawn(self) -> Timeline | None:
        """The timeline with this report's planned peak, which is the one for the arena of the latest step."""
        if self._timeline is None:
            return None
        return dataclasses.replace(self._timeline(), planned_peak_bytes=self.planned_peak_bytes)

    def _all_drawn(self) -> list[tuple[Report, Timeline | None]]:
        return [(each, each._drawn()) for each in self.devices.values()]

    def _required(self) -> Timeline:
        found = self._drawn()
        if found is None:
            raise TfswapError(BY_HAND)
        return found


def _content(report: Report) -> dict[str, Any]:
    content = {f.name: getattr(report, f.name) for f in dataclasses.fields(report) if not f.name.startswith("_")}
    content["rows"] = [dataclasses.asdict(row) for row in report.rows]
    content["blocks"] = [dataclasses.asdict(row) for row in report.blocks]
    content |= {name: getattr(report, name) for name in COMPUTED}
    content["baseline_range_bytes"] = report.baseline.lowest_bytes, report.baseline.highest_bytes
    content["reuse"] = dataclasses.asdict(report.reuse)
    content["convolutions"] = [dataclasses.asdict(row) for row in report.convolutions]
    return content


def report_of_devices(step: str, reports: Mapping[str, Report]) -> Report:
    """The report of a step on several devices.

    Args:
        step: the step's name.
        reports: the report on each device, by its name.
    """
    first = next(iter(reports.values()))
    if len(reports) == 1:
        return first
    return dataclasses.replace(first, step=step, _devices=reports, _explain=functools.partial(_explain_on, reports))


def _explain_on(reports: Mapping[str, Report], tensor: str) -> Explanation:
    """The explanation of a tensor on the first device that has it. Raises TfswapError, as the first device does."""
    refused: list[TfswapError] = []
    for each in reports.values():
        try:
            return each.explain(tensor)
        except TfswapError as error:
            refused.append(error)
    raise refused[0]


def require_kind(path: str | os.PathLike[str], kinds: Collection[str] = tuple(KINDS)) -> str:
    """The ending of a file's name, one of `kinds`. Raises TfswapError for others, and where `path` can't be a file."""
    name = os.fspath(path).lower()
    ending = next((ending for ending in KINDS if name.endswith(ending)), None)
    if ending is None or ending not in kinds:
        raise TfswapError(
            f"{os.fspath(path)!r} does not say what to write: end the name with "
            f"{' or '.join(f'{kind} for {KINDS[kind]}' for kind in kinds)}"
        )
    require_place(path)
    return ending
