"""The plan: a frozen value with all changes of one step. Planning is deterministic. Saved as JSON.

A plan names nodes and tensors of one graph and has that graph's structural fingerprint. It can be applied later, on
another machine or in another process, and is refused for any other graph.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from tfswap.analysis.lossless_forms import Packing
from tfswap.analysis.reduced_precision import Reduction
from tfswap.errors import InvalidModel
from tfswap.ir.devices import within_worker
from tfswap.ir.graph import Graph, Opaque
from tfswap.ir.op_traits import control_flow
from tfswap.ir.python_calls import TOKEN
from tfswap.kernels.alignment import round_up
from tfswap.support.files import read_saved, write_whole
from tfswap.support.json_fields import decode_saved
from tfswap.support.sizes import MAX_BYTES

FORMAT_VERSION = 3


@dataclass(frozen=True)
class Eviction:
    """One eviction of a tensor from the arena by a swap. Positions count kernels in `Plan.order`.

    Attributes:
        tensor: the tensor's name ("node:0").
        nbytes: its bytes.
        out: kernel after which the copy out starts; None when the host copy exists already.
        release: kernel before which the device buffer is freed: one after the last reader, or the last reader itself,
            to which the buffer is then forwarded.
        back: kernel before which a buffer is allocated again and the copy in starts.
        use: kernel before which that copy must have ended: the first that reads the tensor again.
        disk: whether the copy is on disk instead of in host memory.
        lent: where the copy is in the memory that another device lends, in bytes from its start. None: it is not there.
    """

    tensor: str
    nbytes: int
    out: int | None
    release: int
    back: int
    use: int
    disk: bool = False
    lent: int | None = None


class Slices(NamedTuple):
    """Kernels that run in slices of rows (passes/tactics/slice_kernels.py).

    Attributes:
        kernels: their names.
        rows: the rows of a slice, of each `of` rows. Where they are all, the kernels run once, with less memory.
        of: all rows of a slice's tensors are a multiple of it. Slices begin at the same shares of all of them.
        close: whether last bits may differ from those of whole kernels.
    """

    kernels: tuple[str, ...]
    rows: int
    of: int
    close: bool = False


@dataclass(frozen=True)
class Split:
    """A chunk split: a request that gets a chunk of its own size where the allocator would give it a larger one.

    Attributes:
        step: the position of the request in the schedule of the plan's order, evictions and pairs.
        nbytes: the bytes that it requests.
        at_end: whether the chunk is the end of the largest free one. No other request of the step then has a split.
    """

    step: int
    nbytes: int
    at_end: bool = False


@dataclass(frozen=True)
class Inside:
    """The plan of a body of a loop or a conditional, which holds for each of its runs.

    Attributes:
        body: the body's name, as of `Graph.named_bodies`.
        order, evictions, splits: as of `Plan`, for the body's own kernels.
    """

    body: str
    order: tuple[str, ...]
    evictions: tuple[Eviction, ...] = ()
    splits: tuple[Split, ...] = ()

    @property
    def paired(self) -> tuple[int, ...]:
        """Empty: a loop runs on one thread."""
        return ()

    @property
    def exact_chunks(self) -> bool:
        """False: the step's plan decides about exact chunks for its bodies too."""
        return False

    @property
    def changes_nothing(self) -> bool:
        """Whether the body stays as it was traced."""
        return not self.order

    @property
    def moves(self) -> int:
        """The number of evictions and recomputed kernels."""
        return len(self.evictions) + len(self.order) - len(set(self.order))


@dataclass(frozen=True)
class Plan:
    """All changes of one step by which it keeps a limit. Bytes are ints, times are seconds.

    Attributes:
        fingerprint: the fingerprint of the graph that the plan is for.
        limit_bytes: the limit that it was made for; None for a plan without a limit.
        order: names of the kernels in order, recomputed ones named again; empty when nothing is changed.
        evictions: the swapped tensors, and when each is copied and freed.
        paired: positions in the order whose kernels run concurrently with the one before them.
        planned_peak_bytes: predicted peak under this plan, in the arena that it was made for. What is kept in the arena
            since, such as the constants of steps for other signatures, is in the report's.
        persistent_bytes: bytes in the arena before the step: variables, arguments, constants, other tensors.
        host_bytes: the peak of host memory of swapped tensors.
        seconds: predicted time of a step.
        solver: the name of the solver that made it.
        accumulators: names of the lists saved by loops whose elements are swapped inside of the loops.
        encoded: names of the kernels that read an encoding in place of a tensor, in a body with the body's name as a
            prefix. The order and the evictions are those of the graph with all smaller forms in it.
        reduced: tensors that are kept for the backward pass in fewer bits.
        packed: tensors that are kept in a lossless smaller form.
        disk_bytes: the peak of swapped tensors on disk.
        splits: requests that are served from exactly sized chunks.
        recomputed: names of the lists of loops whose elements are recomputed in place of being saved.
        prefetched: the names in `accumulators` whose elements are copied back one iteration before they are read.
        grouped: whether the kernels of bodies run in groups (planner/groups.py), and not in pairs.
        concurrent: the bytes that the step's groups of kernels (planner/concurrent.py) hold while more than one kernel
            runs; 0 without groups.
        at_home: names of the handles of variables at home on the host.
        on_disk: those of them that are on disk, and not in host memory.
        slice_bytes: updates of larger ones of these run in slices of this size; 0 for whole updates.
        sliced: kernels that run in slices of rows. The order and the evictions are those of the graph with slices.
        unrolled: whether loops of small kernels are unrolled too.
        lent_bytes: the memory of another device that swapped tensors take.
        inside: the plans of bodies, inner bodies first. Each is for the body after all other changes of this plan.
        exact_chunks: whether each request gets a chunk of its own size, in bodies too. Such a plan has no splits.
    """

    fingerprint: str
    limit_bytes: int | None
    order: tuple[str, ...]
    evictions: tuple[Eviction, ...]
    planned_peak_bytes: int
    persistent_bytes: int
    host_bytes: int
    seconds: float
    solver: str
    paired: tuple[int, ...] = ()
    accumulators: tuple[str, ...] = ()
    encoded: tuple[str, ...] = ()
    reduced: tuple[Reduction, ...] = ()
    disk_bytes: int = 0
    splits: tuple[Split, ...] = ()
    recomputed: tuple[str, ...] = ()
    inside: tuple[Inside, ...] = ()
    packed: tuple[Packing, ...] = ()
    prefetched: tuple[str, ...] = ()
    grouped: bool = False
    concurrent: int = 0
    exact_chunks: bool = False
    at_home: tuple[str, ...] = ()
    on_disk: tuple[str, ...] = ()
    slice_bytes: int = 0
    sliced: tuple[Slices, ...] = ()
    lent_bytes: int = 0
    unrolled: bool = False

    @classmethod
    def unchanged(
        cls, fingerprint: str, limit_bytes: int | None, peak_bytes: int, persistent_bytes: int, seconds: float
    ) -> Plan:
        """The plan that leaves the step as it was traced."""
        return cls(fingerprint, limit_bytes, (), (), peak_bytes, persistent_bytes, 0, seconds, "none")

    @property
    def changes_nothing(self) -> bool:
        """Whether the step stays as it was traced."""
        return not self.order

    @property
    def moves(self) -> int:
        """The number of evictions and recomputed kernels, to compare plans by."""
        inner = len(self.accumulators) + len(self.recomputed) + sum(inside.moves for inside in self.inside)
        return len(self.evictions) + inner + len(self.order) - len(set(self.order))

    @property
    def actions(self) -> tuple[object, ...]:
        """Its actions on the graph: plans with the same actions make the same function."""
        lists = self.accumulators, self.prefetched, self.recomputed
        smaller = self.encoded, self.reduced, self.packed
        return (
            self.order,
            self.evictions,
            self.paired,
            self.grouped,
            self.concurrent,
            self.splits,
            self.exact_chunks,
            *lists,
            *smaller,
            self.at_home,
            self.on_disk,
            self.slice_bytes,
            self.sliced,
            self.unrolled,
            self.inside,
        )

    @property
    def saved_disk_bytes(self) -> int:
        """The bytes of tensors saved by loops that are on disk, for lack of host memory."""
        if not self.accumulators:
            return 0
        stays: dict[str, tuple[int, int, int]] = {}  # by tensor: first position, last position, bytes
        for eviction in self.evictions:
            if eviction.disk:
                first = eviction.release if eviction.out is None else eviction.out
                begin, end, nbytes = stays.get(eviction.tensor, (first, eviction.use, round_up(eviction.nbytes)))
                stays[eviction.tensor] = min(begin, first), max(end, eviction.use), nbytes
        held = (sum(n for begin, end, n in stays.values() if begin <= at < end) for at, _, _ in stays.values())
        return max(0, self.disk_bytes - max(held, default=0))

    @property
    def needs(self) -> str:
        """The module that a process must import before it loads the rewritten graph."""
        return "tfswap.ops.codecs" if self.encoded or self.reduced or self.packed else "tfswap.ops"

    @property
    def keeps_limit(self) -> bool:
        """Whether the planned peak is within the limit."""
        return self.limit_bytes is None or self.planned_peak_bytes <= self.limit_bytes

    def to_json(self) -> str:
        """The plan as JSON text, the same for the same plan, byte for byte."""
        content = {"format": FORMAT_VERSION, **dataclasses.asdict(self)}
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. Raises InvalidModel on anything else, naming the field."""
        return decode_saved(cls, text, "plan", FORMAT_VERSION, _check_form, remedy="make the plan again")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path`, whole or not at all."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan saved at `path`. Raises InvalidModel when there is none, naming the path."""
        return read_saved(path, "plan", cls.from_json)


def _check_form(plan: Plan) -> None:
    """Raise InvalidModel for values that no plan of any graph has."""
    sizes = ("planned_peak_bytes", "persistent_bytes", "host_bytes", "disk_bytes", "lent_bytes", "limit_bytes")
    for name in (*sizes, "slice_bytes"):
        value = getattr(plan, name)
        if value is not None and not 0 <= value <= MAX_BYTES:
            raise InvalidModel(f"plan.{name} is {value}, and no size is")
    if plan.seconds < 0:
        raise InvalidModel(f"plan.seconds is {plan.seconds}, and no time is")
    _check_moves(plan, "plan")
    if plan.exact_chunks and (plan.splits or not plan.order):
        raise InvalidModel("plan.exact_chunks is true, and such a plan names kernels, and splits no chunks")
    for i, inside in enumerate(plan.inside):
        if inside.changes_nothing:
            raise InvalidModel(f"plan.inside[{i}] names no kernels")
        _check_moves(inside, f"plan.inside[{i}]")
    if (plan.accumulators or plan.recomputed or plan.inside or plan.grouped) and not plan.order:
        raise InvalidModel("plan.order names no kernels, and a plan that changes loops fixes an order")
    if (plan.encoded or plan.reduced or plan.packed) and not plan.order:
        raise InvalidModel("plan.order names no kernels, and a plan that encodes fixes an order")
    if plan.unrolled and not plan.order:
        raise InvalidModel("plan.order names no kernels, and a plan that unrolls loops fixes an order")
    if plan.at_home and not plan.order:
        raise InvalidModel("plan.order names no kernels, and a plan with variables in host memory fixes an order")
    if (stray := next((name for name in plan.on_disk if name not in plan.at_home), None)) is not None:
        raise InvalidModel(f"plan.on_disk names {stray!r}, which is not among plan.at_home")
    if plan.slice_bytes and not plan.at_home:
        raise InvalidModel("plan.at_home names no variables, and plan.slice_bytes is of those in host memory")
    if plan.sliced and not plan.order:
        raise InvalidModel("plan.order names no kernels, and a plan with kernels in slices fixes an order")
    for i, slices in enumerate(plan.sliced):
        if not slices.kernels or not 0 < slices.rows <= slices.of:
            raise InvalidModel(
                f"plan.sliced[{i}] has {slices.rows} of {slices.of} rows of {len(slices.kernels)} kernels in a slice: "
                "there are some kernels, and no more rows than all"
            )
    for before, position in pairwise((-1, *plan.paired)):
        if not max(1, before + 2) <= position < len(plan.order):
            raise InvalidModel(
                f"plan.paired names the position {position} after {before}: positions must rise, by 2 at least, and "
                f"lie among the {len(plan.order)} kernels of plan.order, past the first"
            )


def _check_moves(plan: Plan | Inside, where: str) -> None:
    """Raise InvalidModel for evictions and splits that do not fit the plan's order.

    Args:
        where: the plan's name in messages.
    """
    for i, a in enumerate(plan.evictions):
        out = a.release - 1 if a.out is None else a.out
        if not 0 <= out < a.release <= a.back <= a.use < len(plan.order):
            raise InvalidModel(
                f"{where}.evictions[{i}] of {a.tensor!r} has out {a.out}, release {a.release}, back {a.back}, use "
                f"{a.use}: they must rise in this order, and lie among the {len(plan.order)} kernels of {where}.order"
            )
        lent_bytes = plan.lent_bytes if isinstance(plan, Plan) else 0
        if a.lent is not None and (a.disk or not 0 <= a.lent <= lent_bytes - a.nbytes):
            raise InvalidModel(
                f"{where}.evictions[{i}] of {a.tensor!r} has lent {a.lent}, and its {a.nbytes} bytes are in one place, "
                f"which is among the {lent_bytes} bytes that another device lends"
            )
    for before, after in pairwise((Split(0, 1), *plan.splits)):
        if not before.step <= after.step or not 0 < after.nbytes <= MAX_BYTES:
            raise InvalidModel(
                f"{where}.splits has step {after.step} with {after.nbytes} bytes after step {before.step}: steps must "
                "not fall, and ask for something"
            )
        if before.step == after.step and (before.at_end or after.at_end):
            raise InvalidModel(
                f"{where}.splits has several for step {after.step}, where one at a chunk's end has to be the only one"
            )


def fingerprint(graph: Graph, functions: Mapping[bytes, bytes] = MappingProxyType({})) -> str:
    """The structural fingerprint of a graph: a hash of ops, edges, types, attributes and devices.

    It does not depend on the names of nodes, on the tokens of Python functions, or on the worker.

    Args:
        functions: a hash of the content of each function that is called and is not in the graph, by its name.
    """
    name = re.compile(b"|".join(map(re.escape, sorted(functions, reverse=True)))) if functions else None

    def content(attribute: Opaque) -> bytes:
        return name.sub(lambda found: functions[found[0]], attribute.data) if name else attribute.data

    number: dict[object, int] = {}
    tokens: dict[object, int] = {}
    digest = hashlib.sha256()
    for i, node in enumerate(graph.topological()):
        number[node] = i
        runs = kind.functions if (kind := control_flow(node.op)) else ()
        attrs = ";".join(
            f"{k}={v.kind}:{hashlib.sha256(content(v)).hexdigest()}" if isinstance(v, Opaque) else f"{k}={v!r}"
            for k, v in sorted(node.attrs.items())
            if not k.startswith("_") and k != TOKEN and not (node in graph.bodies and k in runs)
        )
        if TOKEN in node.attrs:
            attrs += f";{TOKEN}={tokens.setdefault(node.attrs[TOKEN], len(tokens))}"
        inputs = ",".join(f"{number[t.node]}.{t.index}" for t in node.inputs)
        controls = ",".join(map(str, sorted(number[c] for c in node.controls)))
        types = ",".join(map(str, node.outputs))
        digest.update(f"{node.op}({inputs}|{controls}){{{attrs}}}:{types}@{within_worker(node.device)}\n".encode())
        for body in graph.bodies.get(node, ()):
            digest.update(fingerprint(body, functions).encode())
    digest.update(",".join(str(number[n]) for n in graph.feeds).encode())
    digest.update(",".join(f"{number[f.node]}.{f.index}" for f in graph.fetches).encode())
    return digest.hexdigest()
