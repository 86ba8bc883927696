"""The rows of a report: of each tensor what was decided, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tfswap.analysis.body_encodings import InnerEncoding
from tfswap.analysis.dataflow import PERSISTENT
from tfswap.analysis.encodings import Encoding
from tfswap.analysis.lossless_forms import Packing, no_codec, packed_bytes
from tfswap.analysis.reduced_precision import FORMATS, Reduction
from tfswap.ir.permits import ANYTHING, Permit
from tfswap.plan.plan import Absence, Inside, Plan
from tfswap.planner.problem import MIN_SWAP_BYTES, Problem
from tfswap.report.explain import why_kept, why_unused
from tfswap.report.markup import format_seconds
from tfswap.support.sizes import format_bytes

LIST = "list"
"""What stands for the op in the row of a list that loops save in."""


@dataclass(frozen=True)
class TensorRow:
    """One tensor: what was decided, and why.

    Attributes:
        name: TensorFlow's name of it.
        op: the op that makes it; "list" for a list that loops save in.
        nbytes: its bytes.
        gap: positions in the order between which it waits, or None.
        tactic: "keep", or which of "encode", "swap" and "recompute", as "encode, swap".
        reason: why that tactic.
        cost_bytes: bytes that travel for it in a step.
        cost_s: predicted seconds of the kernels that run again to make it, in a step.
        source: the user's own line that made it, where TensorFlow knows it.
        encoded_bytes: of what some kernels read in place of it; None where all read the tensor itself.
        precision: what it is rounded to while it waits; None where nothing of it is lost.
        worst_error: the most that a value then differs by, as the format bounds it (nothing is measured).
    """

    name: str
    op: str
    nbytes: int
    gap: tuple[int, int] | None
    tactic: str
    reason: str
    cost_bytes: int
    cost_s: float
    source: str | None
    encoded_bytes: int | None = None
    precision: str | None = None
    worst_error: str | None = None


@dataclass(frozen=True)
class Moves:
    """What is done in a step, or in a body each time that it runs.

    Attributes:
        absences: by value.
        again: by kernel, the positions at which it runs again.
        starts_s: by position, the predicted time at which its kernel starts, copies aside; last, the end.
        within: what comes before the names of tensors.
        times: how often it is done in a step.
    """

    problem: Problem
    absences: Mapping[int, Sequence[Absence]]
    again: Mapping[int, Sequence[int]]
    starts_s: Sequence[float]
    within: str
    times: float

    @classmethod
    def of(cls, problem: Problem, plan: Plan | Inside, within: str = "", times: float = 1.0) -> Moves:
        flow = problem.flow
        absences: dict[int, list[Absence]] = {}
        for absence in plan.absences:
            absences.setdefault(flow.value_named[absence.tensor], []).append(absence)
        again: dict[int, list[int]] = {}
        ran: set[int] = set()
        kernels = [flow.place[name] for name in plan.order]
        for position, kernel in enumerate(kernels):
            if kernel in ran:
                again.setdefault(kernel, []).append(position)
            ran.add(kernel)
        starts_s = list(accumulate((problem.cost_s[kernel] for kernel in kernels), initial=0.0))
        return cls(problem, absences, again, starts_s, within, times)

    def duration(self, absences: Sequence[Absence]) -> str:
        """How long a tensor is away, for people."""
        away_s = sum(self.starts_s[absence.use] - self.starts_s[absence.release] for absence in absences)
        return f"{format_seconds(away_s)}, {self._share(away_s)}"

    def moments(self, positions: Sequence[int]) -> str:
        """When kernels run, for people."""
        return f"at {', '.join(self._share(self.starts_s[position]) for position in positions)}"

    def _share(self, seconds: float) -> str:
        of = self.within[:-1] or "the step"
        return f"{100 * seconds / (self.starts_s[-1] or 1.0):.0f}% of {of}"


def tensor_rows(
    moves: Moves,
    encoded: Mapping[int, Sequence[Encoding]],
    reduced: Mapping[int, Reduction],
    packed: Mapping[int, Packing],
    unused: str,
    locate: Callable[[str], str | None],
    *,
    rest: bool = False,
) -> list[TensorRow]:
    """One row per tensor that is made in the step and of a size that matters, or that something is done about.

    Args:
        rest: of all others instead.
        unused: why nothing is done where something could be.
        encoded: by value, what some kernels read in place of it.
        reduced: by value, what it is rounded to for others.
        packed: by value, in which smaller form it waits for others.
    """
    problem = moves.problem
    flow = problem.flow
    of = f", each time that {moves.within[:-1]} runs" if moves.within else ""
    gaps: dict[int, tuple[int, int]] = {}
    for gap in problem.gaps:
        if gap.value not in gaps or gap.end - gap.start > gaps[gap.value][1] - gaps[gap.value][0]:
            gaps[gap.value] = (gap.start, gap.end)
    rows = []
    for v, value in enumerate(flow.values):
        away = moves.absences.get(v, ())
        made = moves.again.get(value.producer, ())
        smaller = v in encoded or v in reduced or v in packed
        least = problem.smallest_bytes if made else MIN_SWAP_BYTES
        matters = value.producer != PERSISTENT and value.nbytes >= least
        if rest == bool(matters or smaller or away) or not (value.nbytes or smaller):
            continue
        codings = encoded.get(v, ())
        reasons = []
        encoded_bytes = None
        if codings:
            encoded_bytes, reason = _read_as(codings)
            reasons.append(f"{reason}{of}")
        if v in packed:
            nbytes = packed_bytes(packed[v], value.tensor.type)
            encoded_bytes = nbytes + (encoded_bytes or 0)
            readers = ", ".join(name for group in packed[v].readers for name in group)
            reasons.append(f"{format_bytes(nbytes)} as {packed[v].form} for {readers}")
        precision = worst_error = None
        if v in reduced:
            precision = reduced[v].precision
            worst_error = FORMATS[precision].error
            nbytes = FORMATS[precision].nbytes(value.tensor.type.num_elements or 0)
            encoded_bytes = nbytes + (encoded_bytes or 0)
            readers = ", ".join(name for group in reduced[v].readers for name in group)
            reasons.append(f"{format_bytes(nbytes)} as {precision} for {readers}: {worst_error}")
        if away:
            where = "on disk" if away[0].disk else "in host memory"
            reasons.append(f"{where} for {moves.duration(away)}{of}")
        if made:
            reasons.append(f"recomputed {moves.moments(made)}{of}")
        if not reasons:
            reasons.append(why_kept(problem, v, v in gaps, unused))
            may = flow.permits.get(v, ANYTHING).allows("encode")
            unfit = no_codec(value.tensor.type) if v in gaps and may else None
            reasons += [unfit] if unfit else []
        tactics = ["encode"] * (encoded_bytes is not None) + ["swap"] * bool(away) + ["recompute"] * bool(made)
        node = value.tensor.node
        rows.append(
            TensorRow(
                f"{moves.within}{value.tensor.name}",
                node.op,
                value.nbytes,
                gaps.get(v),
                ", ".join(tactics) or "keep",
                "; ".join(reasons),
                round(moves.times * value.nbytes * (len(away) + sum(a.out is not None for a in away))),
                moves.times * len(made) * problem.cost_s[value.producer],
                locate(node.name),
                encoded_bytes,
                precision,
                worst_error,
            )
        )
    return rows


def _read_as(codings: Sequence[Encoding]) -> tuple[int, str]:
    """The bytes of all encodings of one tensor, and what is said of them."""
    nbytes = sum({e.codec: e.encoded.nbytes or 0 for e in codings}.values())
    return nbytes, f"{format_bytes(nbytes)} in place of it for {', '.join(e.kernel.name for e in codings)}"


def inner_row(body: str, codings: Sequence[Encoding], locate: Callable[[str], str | None]) -> TensorRow:
    """The row of a tensor of a body in which nothing but encodings is planned."""
    tensor = codings[0].tensor
    nbytes, reason = _read_as(codings)
    return TensorRow(
        f"{body}/{tensor.name}",
        tensor.node.op,
        tensor.type.nbytes or 0,
        None,
        "encode",
        f"{reason}, each time that {body} runs",
        0,
        0.0,
        locate(tensor.node.name),
        nbytes,
    )


def saved_rows(
    saved: Mapping[str, int],
    plan: Plan,
    remade_s: Mapping[str, float],
    permits: Mapping[str, Permit],
    encoded: Mapping[str, InnerEncoding],
    locate: Callable[[str], str | None],
    *,
    rest: bool = False,
) -> list[TensorRow]:
    """One row per list that loops save in, of a size that matters, or that something is done about.

    Args:
        rest: of all others instead.
        encoded: by name of those that keep encodings, what one of the kernels that read them takes.
    """
    rows: list[TensorRow] = []
    unused = why_unused(plan)
    for name, nbytes in saved.items():
        matters = nbytes >= MIN_SWAP_BYTES or name in encoded or name in plan.accumulators or name in remade_s
        if rest == matters:
            continue
        tactic, reason, cost_bytes, cost_s = "keep", f"saved by a loop; {permits[name].why or unused}", 0, 0.0
        encoded_bytes = None
        if name in encoded:
            tactic, reason = "encode", f"saved by a loop as what {encoded[name].encoding.kernel.name} needs of it"
            encoded_bytes = round(nbytes * encoded[name].share)
        elif name in plan.accumulators:
            tactic, reason, cost_bytes = "swap", "saved by a loop, and swapped inside of it", 2 * nbytes
            if name in plan.prefetched:
                reason += ": brought back during the previous iteration of the backward loop"
        elif name in remade_s:
            tactic, reason, cost_s = (
                "recompute",
                "not saved by a loop: recomputed in the backward loop",
                remade_s[name],
            )
        rows.append(
            TensorRow(name, LIST, nbytes, None, tactic, reason, cost_bytes, cost_s, locate(name), encoded_bytes)
        )
    return rows
