"""What would lower a step's smallest limit, with bytes: half the batch, smaller floats, kernels in slices, variables at
home on the host.

The figures of a lever come from the plan for the smallest limit: it is replayed, and some of its tensors take fewer
bytes. The peak that is left is a bound, which `Lever.known` describes. Workspaces of kernels stay as large as they are,
and so do tensors inside loops and conditionals.

Not handled: what two levers do together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.ir.op_traits import takes_from_pipeline
from tfswap.ir.types import Shape
from tfswap.kernels.alignment import round_up
from tfswap.simulator.record import NO_ID, Record

AT_MOST, AT_LEAST, PLANNED = "at most", "at least", "planned"
HALF_BATCH, SMALLER_FLOATS, IN_SLICES, AT_HOME = "half the batch", "bfloat16", "kernels in slices", "variables at home"
HOW = {
    HALF_BATCH: "batches of {} rows instead of {}",
    SMALLER_FLOATS: 'tf.keras.mixed_precision.set_global_policy("mixed_bfloat16"); copies of weights come on top',
    IN_SLICES: 'tactics with "slice" added',
    AT_HOME: 'tactics with "state" added: weights and slots in host memory',
}


@dataclass(frozen=True)
class Lever:
    """A change of the program or of its options, and the smallest limit with it.

    Attributes:
        what: the change, in two or three words.
        floor_bytes: the smallest limit with it, as `known` says.
        known: "at most", "at least" (of a bound) or "planned".
        how: what to write.
    """

    what: str
    floor_bytes: int
    known: str
    how: str


@dataclass(frozen=True)
class Floor:
    """The smallest limit, and what would lower it.

    Attributes:
        nbytes: that limit.
        levers: those that lower it, the most effective first.
        note: why one has no figure; "" where all have one.
    """

    nbytes: int
    levers: tuple[Lever, ...]
    note: str = ""

    @classmethod
    def of(cls, nbytes: int, levers: Iterable[Lever | None], note: str = "") -> Floor:
        """With those of the levers that lower it."""
        lower = [lever for lever in levers if lever is not None and lever.floor_bytes < nbytes]
        return cls(nbytes, tuple(sorted(lower, key=lambda lever: lever.floor_bytes)), note)


def half_batch(record: Record, floor_bytes: int, fixed: Iterable[Shape]) -> Lever | None:
    """Half the batch: an upper bound, since the same plan has this peak with it. None where no batch is known.

    Args:
        record: the run of the plan for the smallest limit.
        floor_bytes: that limit.
        fixed: the shapes of variables. Tensors that have one, in any order of dimensions, are as large as before.
    """
    flow = record.flow
    rows = batch_rows(flow)
    if rows is None:
        return None
    fed = _fed(flow)
    shapes = {tuple(sorted(d for d in shape if d is not None)) for shape in fixed if shape is not None}

    def halves(v: int) -> bool:
        shape = flow.values[v].tensor.type.shape
        if v not in fed or not shape or tuple(sorted(d or 0 for d in shape)) in shapes:
            return False
        return shape[0] is not None and shape[0] % rows == 0

    how = HOW[HALF_BATCH].format(rows // 2, rows)
    return Lever(HALF_BATCH, floor_bytes - _freed_bytes(record, halves), AT_MOST, how)


def smaller_floats(record: Record, floor_bytes: int) -> Lever:
    """Floats of 16 bits for all tensors of 32 that the step makes: what the same plan holds, without copies of
    weights in 16 bits.
    """
    values = record.flow.values

    def halves(v: int) -> bool:
        return values[v].producer != PERSISTENT and values[v].tensor.type.dtype == "float32"

    return Lever(SMALLER_FLOATS, floor_bytes - _freed_bytes(record, halves), AT_LEAST, HOW[SMALLER_FLOATS])


def at_home(movable_bytes: Sequence[int], floor_bytes: int) -> Lever | None:
    """Variables in host memory: a lower bound, since each is on the device while it is used.

    Args:
        movable_bytes: the bytes of each variable that may be there.
    """
    if len(movable_bytes) < 2:
        return None
    return Lever(AT_HOME, floor_bytes - sum(movable_bytes) + max(movable_bytes), AT_LEAST, HOW[AT_HOME])


def in_slices(planned_floor_bytes: int) -> Lever:
    """Kernels in slices of rows, as planned."""
    return Lever(IN_SLICES, planned_floor_bytes, PLANNED, HOW[IN_SLICES])


def batch_rows(flow: Dataflow) -> int | None:
    """The number of rows of the step's batch: the first dimension that its arguments have the most bytes of, if it can
    be halved.
    """
    sizes: Counter[int] = Counter()
    for i, node in enumerate(flow.nodes):
        if not _feeds(flow, i):
            continue
        for output in node.outputs:
            if output.shape and (output.shape[0] or 0) > 1:
                sizes[output.shape[0] or 0] += output.nbytes or 0
    rows = max(sizes, key=lambda n: (sizes[n], n), default=0)
    return rows if rows and rows % 2 == 0 else None


def _feeds(flow: Dataflow, i: int) -> bool:
    node = flow.nodes[i]
    is_argument = not node.inputs and any(flow.values[v].producer == PERSISTENT for v in _values(flow, i))
    return takes_from_pipeline(node.op) or (is_argument and node.op not in ("Const", "VarHandleOp"))


def _values(flow: Dataflow, i: int) -> list[int]:
    node = flow.nodes[i]
    return [v for n in range(len(node.outputs)) if (v := flow.value_of.get((node, n))) is not None]


def _fed(flow: Dataflow) -> set[int]:
    """The values that depend on the step's arguments."""
    fed: set[int] = set()
    nodes: set[int] = set()
    place = {node: i for i, node in enumerate(flow.nodes)}
    for i, node in enumerate(flow.nodes):
        if _feeds(flow, i) or any(place.get(tensor.node) in nodes for tensor in node.inputs):
            nodes.add(i)
            fed.update(_values(flow, i))
    return fed


def _freed_bytes(record: Record, halves: Callable[[int], bool]) -> int:
    """The bytes by which a run's peak falls where the values for which `halves` is true are half as large."""
    change = [0] * (len(record.in_use_bytes) + 1)
    values = record.flow.values
    for hold in record.holds:
        if hold.value == NO_ID or not halves(hold.value):
            continue
        nbytes = values[hold.value].nbytes
        less = round_up(nbytes) - round_up(-(-nbytes // 2))
        change[hold.first] -= less
        change[hold.last] += less
    most = total = 0
    for used, by in zip(record.in_use_bytes, change, strict=False):
        total += by
        most = max(most, used + total)
    return record.peak_bytes - most
