"""The rows of a report: for each tensor, the decision and its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tfswap.analysis.body_encodings import InnerEncoding
from tfswap.analysis.dataflow import PERSISTENT
from tfswap.analysis.encodings import Encoding
from tfswap.analysis.lossless_forms import Packing, no_codec, packed_bytes
from tfswap.analysis.reduced_precision import FORMATS, Reduction
from tfswap.ir.permits import ANYTHING, Permit
from tfswap.ir.types import TensorType
from tfswap.plan.plan import Eviction, Inside, Plan
from tfswap.planner.problem import MIN_SWAP_BYTES, Problem, starts_of
from tfswap.report.explain import why_kept, why_unused
from tfswap.report.markup import format_seconds
from tfswap.support.sizes import format_bytes

LIST = "list"
"""The op in the row of a list that loops save in."""


@dataclass(frozen=True)
class TensorRow:
    """One tensor: the decision, and its reason.

    Attributes:
        name: TensorFlow's name for it.
        op: the op that computes it; "list" for a list that loops save in; "VarHandleOp" for a variable.
        nbytes: its bytes.
        gap: positions in the order of the longest wait between two uses, or None.
        tactic: "keep", or which of "encode", "swap" and "recompute", as "encode, swap"; "state" for a variable at home
            in host memory.
        reason: why that tactic.
        cost_bytes: bytes copied for it in a step.
        cost_s: predicted seconds of recomputing it in a step.
        source: the user's line that created it, where TensorFlow knows it.
        encoded_bytes: bytes of the forms that some kernels read in its place; None where all read the tensor itself.
        precision: the format that it is rounded to while it waits; None where it is exact.
        worst_error: the format's bound of the rounding error (not measured).
        home: of a variable at home on the host, "host memory" or "disk".
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
    home: str | None = None


@dataclass(frozen=True)
class Moves:
    """Evictions and recomputed kernels of a step, or of a body each time that it runs.

    Attributes:
        evictions: by value.
        again: by kernel, the positions at which it is recomputed.
        starts_s: by position, the predicted time at which its kernel starts, copies aside; last, the end.
        within: the prefix of tensor names.
        times: number of runs in a step.
    """

    problem: Problem
    evictions: Mapping[int, Sequence[Eviction]]
    again: Mapping[int, Sequence[int]]
    starts_s: Sequence[float]
    within: str
    times: float

    @classmethod
    def of(cls, problem: Problem, plan: Plan | Inside, within: str = "", times: float = 1.0) -> Moves:
        flow = problem.flow
        evictions: dict[int, list[Eviction]] = {}
        for eviction in plan.evictions:
            evictions.setdefault(flow.value_named[eviction.tensor], []).append(eviction)
        again: dict[int, list[int]] = {}
        ran: set[int] = set()
        kernels = [flow.place[name] for name in plan.order]
        for position, kernel in enumerate(kernels):
            if kernel in ran:
                again.setdefault(kernel, []).append(position)
            ran.add(kernel)
        starts_s = starts_of(kernels, problem.cost_s, problem.arrivals).tolist()
        return cls(problem, evictions, again, starts_s, within, times)

    def duration(self, evictions: Sequence[Eviction]) -> str:
        """The time that a tensor is evicted, for people."""
        away_s = sum(self.starts_s[eviction.use] - self.starts_s[eviction.release] for eviction in evictions)
        return f"{format_seconds(away_s)}, {self._share(away_s)}"

    def moments(self, positions: Sequence[int]) -> str:
        """The times at which kernels run, for people."""
        return f"at {', '.join(self._share(self.starts_s[position]) for position in positions)}"

    def _share(self, seconds: float) -> str:
        of = self.within[:-1] or "the step"
        return f"{100 * seconds / (self.starts_s[-1] or 1.0):.0f}% of {of}"


@dataclass(frozen=True)
class Smaller:
    """The smaller forms that kernels read in place of tensors, by value.

    Attributes:
        encoded: encodings that some kernels read.
        reduced: values rounded for others.
        packed: lossless forms in which a value waits for others.
    """

    encoded: Mapping[int, Sequence[Encoding]]
    reduced: Mapping[int, Reduction]
    packed: Mapping[int, Packing]

    def __contains__(self, v: int) -> bool:
        return v in self.encoded or v in self.reduced or v in self.packed

    def reasons(self, v: int, kind: TensorType, of: str) -> tuple[int | None, list[str]]:
        """The bytes of all smaller forms of a value, None where there is none; and the report's text for each.

        Args:
            kind: the tensor's type.
            of: a suffix for the text of encodings.
        """
        total = 0
        reasons: list[str] = []
        if codings := self.encoded.get(v, ()):
            nbytes, reason = _read_as(codings)
            total += nbytes
            reasons.append(f"{reason}{of}")
        if v in self.packed:
            nbytes = packed_bytes(self.packed[v], kind)
            total += nbytes
            reasons.append(f"{format_bytes(nbytes)} as {self.packed[v].form} for {_readers(self.packed[v].readers)}")
        if v in self.reduced:
            form = FORMATS[self.reduced[v].precision]
            nbytes = form.nbytes(kind.num_elements or 0)
            total += nbytes
            name, readers = self.reduced[v].precision, _readers(self.reduced[v].readers)
            reasons.append(f"{format_bytes(nbytes)} as {name} for {readers}: {form.error}")
        return (total if reasons else None), reasons


def tensor_rows(
    moves: Moves, smaller: Smaller, unused: str, locate: Callable[[str], str | None], *, rest: bool = False
) -> list[TensorRow]:
    """One row per tensor of the step that is large, evicted, recomputed or has a smaller form.

    Args:
        rest: the rows of all other tensors instead.
        unused: the reason where a tactic could be used and is not.
    """
    problem = moves.problem
    gaps: dict[int, tuple[int, int]] = {}
    for gap in problem.gaps:
        if gap.value not in gaps or gap.end - gap.start > gaps[gap.value][1] - gaps[gap.value][0]:
            gaps[gap.value] = (gap.start, gap.end)
    rows: list[TensorRow] = []
    for v, value in enumerate(problem.flow.values):
        least = problem.smallest_bytes if moves.again.get(value.producer) else MIN_SWAP_BYTES
        matters = value.producer != PERSISTENT and value.nbytes >= least
        used = v in smaller or v in moves.evictions
        if rest != (matters or used) and (value.nbytes or v in smaller):
            rows.append(_tensor_row(moves, smaller, unused, locate, v, gaps.get(v)))
    return rows


def _tensor_row(
    moves: Moves,
    smaller: Smaller,
    unused: str,
    locate: Callable[[str], str | None],
    v: int,
    gap: tuple[int, int] | None,
) -> TensorRow:
    """The row of a value. `gap` is its longest wait between two uses."""
    problem, value = moves.problem, moves.problem.flow.values[v]
    of = f", each time that {moves.within[:-1]} runs" if moves.within else ""
    away, made = moves.evictions.get(v, ()), moves.again.get(value.producer, ())
    encoded_bytes, reasons = smaller.reasons(v, value.tensor.type, of)
    if away:
        where = "on disk" if away[0].disk else "in host memory"
        where = where if away[0].lent is None else "in another device's memory"
        reasons.append(f"{where} for {moves.duration(away)}{of}")
    if made:
        reasons.append(f"recomputed {moves.moments(made)}{of}")
    if not reasons:
        reasons.append(why_kept(problem, v, gap is not None, unused))
        may = problem.flow.permits.get(v, ANYTHING).allows("encode")
        unfit = no_codec(value.tensor.type) if gap is not None and may else None
        reasons += [unfit] if unfit else []
    tactics = ["encode"] * (encoded_bytes is not None) + ["swap"] * bool(away) + ["recompute"] * bool(made)
    precision = smaller.reduced[v].precision if v in smaller.reduced else None
    node = value.tensor.node
    return TensorRow(
        f"{moves.within}{value.tensor.name}",
        node.op,
        value.nbytes,
        gap,
        ", ".join(tactics) or "keep",
        "; ".join(reasons),
        round(moves.times * value.nbytes * (len(away) + sum(a.out is not None for a in away))),
        moves.times * len(made) * problem.cost_s[value.producer],
        locate(node.name),
        encoded_bytes,
        precision,
        None if precision is None else FORMATS[precision].error,
    )


def _readers(groups: Iterable[Iterable[str]]) -> str:
    return ", ".join(name for group in groups for name in group)


def _read_as(codings: Sequence[Encoding]) -> tuple[int, str]:
    """The bytes of all encodings of one tensor, and the text about them."""
    nbytes = sum({e.codec: e.encoded.nbytes or 0 for e in codings}.values())
    return nbytes, f"{format_bytes(nbytes)} in place of it for {', '.join(e.kernel.name for e in codings)}"


def inner_row(body: str, codings: Sequence[Encoding], locate: Callable[[str], str | None]) -> TensorRow:
    """The row of a tensor of a body with only encodings planned."""
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
    recompute_s: Mapping[str, float],
    permits: Mapping[str, Permit],
    encoded: Mapping[str, InnerEncoding],
    locate: Callable[[str], str | None],
    *,
    rest: bool = False,
) -> list[TensorRow]:
    """One row per list that loops save in and that is large or has a tactic.

    Args:
        rest: the rows of all other lists instead.
        encoded: the encoding of one reader of each list with encodings, by the list's name.
    """
    rows: list[TensorRow] = []
    unused = why_unused(plan)
    for name, nbytes in saved.items():
        matters = nbytes >= MIN_SWAP_BYTES or name in encoded or name in plan.accumulators or name in recompute_s
        if rest == matters:
            continue
        tactic, cost_bytes, cost_s = "keep", 0, 0.0
        reason = f"saved for the backward pass; {permits[name].why or unused}"
        encoded_bytes = None
        if name in encoded:
            reader = encoded[name].encoding.kernel.name
            tactic, reason = "encode", f"saved for the backward pass as what {reader} needs of it"
            encoded_bytes = round(nbytes * encoded[name].share)
        elif name in plan.accumulators:
            tactic, cost_bytes = "swap", 2 * nbytes
            reason = "saved for the backward pass, and swapped inside of the body"
            if name in plan.prefetched:
                reason += ": brought back during the previous iteration of the backward loop"
        elif name in recompute_s:
            tactic, reason = "recompute", "not saved for the backward pass: recomputed there"
            cost_s = recompute_s[name]
        rows.append(
            TensorRow(name, LIST, nbytes, None, tactic, reason, cost_bytes, cost_s, locate(name), encoded_bytes)
        )
    return rows
