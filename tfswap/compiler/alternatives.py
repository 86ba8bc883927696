"""The rewritings of one step that a plan may use.

They do not depend on the limit, so that a higher limit never gives a slower plan, as on a ladder.

Tensors saved by loops are swapped in stages of a quarter of their bytes, the largest accumulators first. Other
rewritings recompute those that take little longer to recompute than to swap, or all that can be recomputed, each with
and without swaps of the rest. Swapped tensors that a loop would wait for are prefetched, or not. Encodings for kernels
take very little time. They are used for all kernels that free a tensor earlier or need less memory, or for none.
Encoding and decoding a whole tensor takes time, and has stages too: first the tensors that free the most bytes for
their time.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from tfswap.analysis.accumulators import find_accumulators
from tfswap.analysis.analyse import analyse_body
from tfswap.analysis.body_encodings import InnerEncoding, find_inner_encodings, is_inner
from tfswap.analysis.cost import Costs
from tfswap.analysis.encodings import find_encodings
from tfswap.analysis.integer_ranges import Ranges
from tfswap.analysis.loop_recompute import Saved, choose_recomputed, find_passages
from tfswap.analysis.lossless_forms import smaller_form
from tfswap.analysis.permits import permit_of
from tfswap.compiler.gains import LEAST_SHARE, STAGES, in_stages, measured_sparse, worth_encoding, worth_packing
from tfswap.compiler.rewriting import Rewriting, Variant
from tfswap.compiler.slice_choices import SliceChoices, rows_first
from tfswap.compiler.variants import Variants, outputs_of
from tfswap.ir import custom_ops
from tfswap.ir.graph import Node
from tfswap.ir.op_traits import READ_VARIABLE, reads_rows, writes_variable
from tfswap.ir.views import origin, passed_on
from tfswap.kernels.device import DeviceModel
from tfswap.passes.tactics.loop_swap import looped_pops
from tfswap.passes.tactics.sliced_updates import MOST_SLICES
from tfswap.passes.tactics.state_homes import movable_variables
from tfswap.planner.host_tiers import Tiers
from tfswap.planner.planner import Planner
from tfswap.planner.problem import Problem

AFFORDABLE = 4.0
"""Recomputing a tensor may take up to this multiple of the time of swapping it. Others are tried last."""
SLICES = (2, 4, 16, 64, 256)
"""Into how many slices the update of the largest variable is cut, where limits need it."""
MEMORY_SHARES = (1.0, 0.75, 0.5, 0.0)
"""The shares of host memory that variables at home take where some of them are on disk. The rest is for new values on
their way there, and for swapped tensors.
"""
ROW_SLICES = (2, 4, 8, 16, 32, 64)
"""Into how many slices kernels with the largest tensor are cut."""
CHAIN_SLICES = (2, 4, 8, 16)
"""Into how many slices whole chains of kernels are cut."""
FEWER_STAY = (8, 16, 32)
"""The shares of the variables' bytes that stay on the device where nearly all are at home: one of this many."""
APART = 0.1
"""Accesses with more than this share of the step's time between them do not read the same copy of a variable."""
MOST_VARIANTS = (
    1 + STAGES + 4 + len(ROW_SLICES) + len(CHAIN_SLICES) + (STAGES + 2) + 3 + 2 * STAGES
    + (STAGES + len(FEWER_STAY) + 5 + len(ROW_SLICES) + len(CHAIN_SLICES) + len(SLICES)) * len(MEMORY_SHARES)
)  # fmt: skip
"""The most variants of a step: unchanged; with stages of loops' tensors swapped; with some recomputed; with swapped
ones prefetched; with kernels that read encodings, alone and with the last stages; with whole tensors in a smaller form;
as sparse rows; with kernels in slices; with variables at home on the host, alone, with nearly all of them there, with
encodings, with the last stages, and with kernels in slices; and with their updates in slices; these also with some of
them on disk.
"""


class Alternatives:
    """The rewritings that are tried of one step.

    Args:
        variants: the step's variants.
        costs: the cost model.
        close: whether last bits may differ from those of the traced step.
    """

    def __init__(self, variants: Variants, device: DeviceModel, costs: Costs, *, close: bool):
        self._variants = variants
        self._device = device
        self._costs = costs
        self._close = close
        self._at_home: dict[frozenset[str], list[Rewriting]] = {}
        self._nearly_all: dict[frozenset[str], list[Rewriting]] = {}
        self._sliced: dict[Rewriting, list[Rewriting]] = {}
        self._in_tiers: dict[Rewriting, list[Rewriting]] = {}

    @property
    def base(self) -> Rewriting:
        """The rewriting that all others contain."""
        return self._variants.base

    def encoded(self, planner_of: Callable[[Variant], Planner]) -> Rewriting | None:
        """The step with every encoding that gains something; None where none does."""
        problem = planner_of(self._variants.plain).problems[0]
        least_bytes = LEAST_SHARE * problem.live_peak_bytes
        chosen = worth_encoding(problem, find_encodings(self._variants.plain.graph, self._device), least_bytes)
        chosen += self._worth_inside(problem.smallest_bytes, least_bytes)
        return self.base._replace(encoded=(*self.base.encoded, *chosen)) if chosen else None

    def _worth_inside(self, smallest_bytes: int, least_bytes: float) -> tuple[str, ...]:
        """Names of the kernels in bodies that gain by their encodings.

        Args:
            smallest_bytes: lists that keep less stay as they are.
            least_bytes: the least bytes of all lists that can be encoded together, and of all such tensors of a body.
        """
        possible = self._inner
        largest = self._largest(smallest_bytes, "encode")
        saved = [e for e in possible if e.saved and e.saved.name in largest]
        lists = {e.saved.name for e in saved if e.saved}
        chosen = (
            [e.name for e in saved] if sum(self._variants.saved_bytes[name] for name in lists) >= least_bytes else []
        )
        own = {e.name for e in possible if e.saved is None}
        for name, ordered in self._variants.ordered.named_bodies().items() if own else ():
            body = ordered.copy()
            encodings = [e for e in find_encodings(body, self._device) if f"{name}/{e.kernel.name}" in own]
            if sum({e.tensor: e.tensor.type.nbytes or 0 for e in encodings}.values()) >= least_bytes:
                problem = self._variants.problem_of(analyse_body(body, self._device))
                chosen += (f"{name}/{kernel}" for kernel in worth_encoding(problem, encodings, least_bytes))
        return tuple(chosen)

    @functools.cached_property
    def _inner(self) -> list[InnerEncoding]:
        """The possible encodings in the bodies of the unchanged step."""
        return find_inner_encodings(self._variants.unordered, self._device)

    def encoded_too(self, encoded: Rewriting, stage: Rewriting) -> Rewriting | None:
        """`stage` with the encodings of `encoded`; None where none of these is in a body.

        A list of encoded tensors is small, and is not swapped. Kernels recomputed in a backward loop may read its
        elements, as other kernels there do.
        """
        chosen = [e for e in self._inner if e.name in encoded.encoded]
        lists = {e.saved.name for e in chosen if e.saved}
        inner = [
            e
            for e in find_inner_encodings(self._variants.unordered_with(stage.recomputed), self._device)
            if (e.saved.name in lists if e.saved else e.name in encoded.encoded)
        ]
        if not inner:
            return None
        kernels = [kernel for kernel in encoded.encoded if not is_inner(kernel)]
        lists = {e.saved.name for e in inner if e.saved}
        return stage._replace(
            encoded=(*kernels, *(e.name for e in inner)),
            accumulators=tuple(name for name in stage.accumulators if name not in lists),
        )

    def packed(self, planner_of: Callable[[Variant], Planner], encoded: Rewriting) -> list[Rewriting]:
        """`encoded` with packings that gain something, from few of them to all."""
        problem = planner_of(self._variants.plain).problems[0]
        graph, device = self._variants.plain.graph, self._device
        ranges = Ranges(graph)
        stages = worth_packing(problem, graph, encoded.encoded, lambda tensor: smaller_form(tensor, ranges, device))
        return [encoded._replace(packed=packed) for packed in stages]

    def sparse(self, planner_of: Callable[[Variant], Planner], packed: Rewriting) -> list[Rewriting]:
        """`packed` with sparse rows, where they gain something by the profile, from few of them to all.

        In all of these, kernels that need only the signs of such a tensor take a mask of it, which costs nothing.
        """
        profile = self._costs.profile
        if profile is None or not profile.densities or packed.reduced:
            return []
        graph, problem = self._variants.plain.graph, planner_of(self._variants.plain).problems[0]
        masks = [e for e in find_encodings(graph, self._device) if e.codec.encode == custom_ops.ENCODE_MASK]
        stages = worth_packing(
            problem,
            graph,
            {*packed.encoded, *(e.kernel.name for e in masks)},
            lambda tensor: measured_sparse(tensor, profile.density(tensor), self._device),
        )
        rows = {p.tensor for sparse in stages for p in sparse}
        signs = (e.kernel.name for e in masks if origin(e.tensor).name in rows)
        encoded = tuple(dict.fromkeys((*packed.encoded, *signs)))
        return [packed._replace(encoded=encoded, packed=(*packed.packed, *sparse)) for sparse in stages]

    def at_home(
        self, planner_of: Callable[[Variant], Planner], known: frozenset[str], forms: Callable[[], Iterable[Rewriting]]
    ) -> list[Rewriting]:
        """Stages of keeping variables at home on the host, from few to all, and each of `forms` with all at home.

        Args:
            known: the handles of variables that can be moved now.
            forms: found only where there are any, since that takes long.
        """
        if known not in self._at_home:
            ranked, sizes = self._ranked(planner_of, known)
            found = self._homes(ranked, in_stages(sizes))
            others = [form._replace(at_home=found[-1].at_home) for form in forms()] if found else []
            self._at_home[known] = [*found, *others]
        return self._at_home[known]

    def nearly_all_at_home(self, planner_of: Callable[[Variant], Planner], known: frozenset[str]) -> list[Rewriting]:
        """With the variables at home but for a few, which are used for the longest time, from fewer to more at home.

        Each that stays saves a copy in each direction. So do the first weights of a net, for which its first kernels
        would wait, and whose last update would be copied when no kernel is left.
        """
        if known not in self._nearly_all:
            ranked, sizes = self._ranked(planner_of, known)
            sums = list(itertools.accumulate(sizes))
            counts = (bisect_left(sums, sums[-1] * (1 - 1 / n)) + 1 for n in FEWER_STAY if sums)
            self._nearly_all[known] = self._homes(ranked, (n for n in dict.fromkeys(counts) if n < len(ranked)))
        return self._nearly_all[known]

    def is_stage_at_home(self, rewriting: Rewriting) -> bool:
        """Whether a rewriting is one of `at_home`, also on disk: not one of `nearly_all_at_home`, nor in slices."""
        few = {each.at_home for found in self._nearly_all.values() for each in found}
        return bool(rewriting.at_home) and not rewriting.slice_bytes and rewriting.at_home not in few

    def in_tiers(self, at_home: Rewriting, planner_of: Callable[[Variant], Planner], tiers: Tiers) -> list[Rewriting]:
        """`at_home` with its variables in host memory, and with more and more of them on disk where that has no room
        for all. First go those of which a step moves the fewest bytes for each of their own, as slots.
        """
        if at_home not in self._in_tiers:
            problem = planner_of(self._variants.plain).problems[0]
            self._in_tiers[at_home] = self._placed_in_tiers(at_home, problem, tiers)
        return self._in_tiers[at_home]

    def _placed_in_tiers(self, at_home: Rewriting, problem: Problem, tiers: Tiers) -> list[Rewriting]:
        room_bytes, total_bytes = tiers.host_bytes, self.bytes_at_home(at_home)
        if room_bytes is None or tiers.disk_bytes == 0 or self._device.host_is_separate:
            return [at_home]
        moved = _moved_for_each(problem, self._movable)
        ranked = sorted(at_home.at_home, key=lambda name: (moved[name], -self._movable[name], name))
        found: list[Rewriting] = []
        for share in MEMORY_SHARES:
            left_bytes, disk = total_bytes, list[str]()
            for name in ranked:
                if left_bytes <= share * room_bytes:
                    break
                disk.append(name)
                left_bytes -= self._movable[name]
            if share > 0 or total_bytes > MEMORY_SHARES[-2] * room_bytes:
                found.append(at_home._replace(on_disk=tuple(sorted(disk))))
        return list(dict.fromkeys(found))

    def in_slices(self, at_home: Rewriting) -> list[Rewriting]:
        """`at_home` with updates in slices, from large slices to small ones."""
        if at_home not in self._sliced:
            largest = max(self._movable[name] for name in at_home.at_home)
            counts = self._variants.slice_counts(at_home, (largest // share for share in SLICES))
            found = [at_home._replace(slice_bytes=each) for each, count in counts.items() if 0 < count <= MOST_SLICES]
            self._sliced[at_home] = [_with_other_slices(self._variants, r) if r.sliced else r for r in found]
        return self._sliced[at_home]

    @functools.cached_property
    def in_row_slices(self) -> list[Rewriting]:
        """The step with kernels in slices of rows, from large slices to small ones. None where the backward pass reads
        rounded tensors, which are whole.
        """
        return self._in_row_slices(ROW_SLICES)

    @functools.cached_property
    def in_chains(self) -> list[Rewriting]:
        """The step with all kernels of the largest chains in slices of rows, as `in_row_slices`: micro-batches, where
        a chain is the whole forward and backward pass.
        """
        return self._in_row_slices(CHAIN_SLICES, chains=True)

    def _in_row_slices(self, shares: Iterable[int], *, chains: bool = False) -> list[Rewriting]:
        if self.base.reduced:
            return []
        groups = self._slice_choices.choose(shares, chains=chains)
        return [self.base._replace(sliced=slices) for slices in groups]

    @functools.cached_property
    def _slice_choices(self) -> SliceChoices:
        graph = rows_first(self._variants.plain.graph, self._variants.target)
        return SliceChoices(graph, self._device, close=self._close)

    def _ranked(self, planner_of: Callable[[Variant], Planner], known: Collection[str]) -> tuple[list[str], list[int]]:
        """The variables that may leave and their bytes: first those that are used for the shortest time, as slots."""
        problem = planner_of(self._variants.plain).problems[0]
        sizes = {name: nbytes for name, nbytes in self._movable.items() if name in known}
        spans = _used_for(problem, sizes)
        ranked = sorted(
            (n for n in sizes if sizes[n] >= problem.smallest_bytes), key=lambda n: (spans[n], -sizes[n], n)
        )
        return ranked, [sizes[name] for name in ranked]

    def _homes(self, ranked: Sequence[str], counts: Iterable[int]) -> list[Rewriting]:
        """With the first of these variables at home."""
        return [self.base._replace(at_home=tuple(sorted(ranked[:count]))) for count in counts]

    @functools.cached_property
    def _movable(self) -> dict[str, int]:
        """The bytes of the variables that may be at home on the host, by the names of their handles."""
        movable = movable_variables(self._variants.plain.graph)
        return {name: kind.nbytes or 0 for name, kind in movable.items()}

    def bytes_at_home(self, rewriting: Rewriting) -> int:
        """The bytes of the variables that a rewriting has at home."""
        return sum(self._movable[name] for name in rewriting.at_home)

    def stages(self, smallest_bytes: int) -> list[Rewriting]:
        """Stages of swapping tensors saved by loops, from none to all.

        Args:
            smallest_bytes: smaller accumulators are not worth a swap.
        """
        largest = self._largest(smallest_bytes, "swap")
        names = list(largest)
        stages = [tuple(sorted(names[:count])) for count in in_stages(list(largest.values()))]
        return [self.base, *(self.base._replace(accumulators=stage) for stage in stages)]

    def prefetched(self, stages: Collection[Rewriting]) -> list[Rewriting]:
        """`stages` with copies that a loop would wait for started one iteration earlier."""
        found = [stage._replace(prefetched=self._waited_for(stage)) for stage in stages if stage.accumulators]
        return [stage for stage in found if stage.prefetched]

    def _waited_for(self, stage: Rewriting) -> tuple[str, ...]:
        """The swapped accumulators whose elements a loop waits for, and could prefetch."""
        found: set[str | None] = set()
        for name, body in self._variants[stage].graph.named_bodies().items():
            for node, wait_s in self._costs.body_run(body).waits.items():
                if wait_s and node.op == custom_ops.AWAIT:
                    loaded = node.inputs[0].node
                    found.add(self._looped.get((name, loaded.inputs[0].node.name)))
        return tuple(name for name in stage.accumulators if name in found)

    @functools.cached_property
    def _looped(self) -> dict[tuple[str, str], str]:
        """By body and name of the pop: the accumulators that each iteration of a loop pops once."""
        where = {body: name for name, body in self._variants.ordered.named_bodies().items()}
        looped = looped_pops(self._variants.ordered, self._variants.accumulators.values())
        return {(where[pop.graph], pop.node.name): name for name, pops in looped.items() for pop in pops}

    def recomputed(self, smallest_bytes: int, costs: Costs, *, swap: bool) -> list[Rewriting]:
        """Rewritings whose loops recompute tensors in place of saving them.

        Args:
            smallest_bytes: as of `stages`.
            costs: what kernels and copies take.
            swap: whether tensors that they still save may be swapped.
        """
        largest, rates = self._largest(smallest_bytes, "recompute"), costs.rates
        swappable = self._largest(smallest_bytes, "swap") if swap else {}
        passages = find_passages(self._variants.unordered, find_accumulators(self._variants.unordered))
        found: list[Rewriting] = []
        for price in (AFFORDABLE, math.inf):

            def worth(saved: Saved, kernels: list[Node], price: float = price) -> bool:
                nbytes = saved.push.pushed.type.nbytes or 0
                copies_s = nbytes / rates.out_bytes_per_s + nbytes / rates.in_bytes_per_s
                affordable = sum(map(costs.seconds, kernels)) <= price * copies_s
                return saved.name in largest and affordable and _may_run_again(saved, kernels)

            names = {name for passage in passages for name in choose_recomputed(passage, worth)}
            if names:
                made = self.base._replace(recomputed=tuple(sorted(names)))
                found.append(made)
                if swap:
                    found.append(made._replace(accumulators=tuple(sorted(swappable.keys() - names))))
        return list(dict.fromkeys(found))

    def _largest(self, smallest_bytes: int, tactic: str) -> dict[str, int]:
        """The bytes of each accumulator of at least that size on which a tactic may be used, the largest first."""
        sizes = {
            name: nbytes
            for name, nbytes in self._variants.saved_bytes.items()
            if self._variants.permits[name].allows(tactic)
        }
        return {n: sizes[n] for n in sorted(sizes, key=lambda n: (-sizes[n], n)) if sizes[n] >= smallest_bytes}


def _with_other_slices(variants: Variants, rewriting: Rewriting) -> Rewriting:
    """`rewriting`, in which kernels of updates in slices are not among those in slices of rows."""
    graph = rows_first(variants[rewriting._replace(sliced=())].graph, variants.target)
    kept = ((tuple(name for name in slices.kernels if name in graph), slices) for slices in rewriting.sliced)
    return rewriting._replace(sliced=tuple(slices._replace(kernels=names) for names, slices in kept if names))


def _used_for(problem: Problem, handles: Collection[str]) -> dict[str, float]:
    """Seconds from the first use of each of these variables to the last."""
    flow = problem.flow
    found = dict.fromkeys(handles, (math.inf, 0.0))
    handle_of = {n.out(): n.inputs[0].node.name for n in flow.nodes if n.op == READ_VARIABLE}
    for position, i in enumerate(problem.order):
        for tensor in flow.nodes[i].inputs:
            name = handle_of.get(passed_on(tensor)) or tensor.node.name
            if name in found:
                start = float(problem.starts_s[position])
                first, last = found[name]
                found[name] = min(first, start), max(last, start)
    return {name: last - min(first, last) for name, (first, last) in found.items()}


def _moved_for_each(problem: Problem, sizes: Mapping[str, int]) -> dict[str, float]:
    """The bytes of each of these variables that a step moves, for each byte that it has.

    Kernels that run soon after one another share a copy. Those that gather or update rows move these alone.
    """
    flow, starts_s = problem.flow, problem.starts_s
    apart_s = APART * float(starts_s[-1])
    read: dict[str, list[tuple[float, int]]] = {name: [] for name in sizes}  # when, and how many bytes
    moved = dict.fromkeys(sizes, 0)
    handle_of = {n.out(): n.inputs[0].node.name for n in flow.nodes if n.op == READ_VARIABLE}
    for position, i in enumerate(problem.order):
        node = flow.nodes[i]
        made_bytes = sum(kind.nbytes or 0 for kind in node.outputs)
        given_bytes = max((t.type.nbytes or 0 for t in node.inputs if t.type.dtype != "resource"), default=0)
        for tensor in node.inputs:
            name = handle_of.get(passed_on(tensor))
            if name in read:
                nbytes = made_bytes if reads_rows(node.op) else sizes[name]
                read[name].append((float(starts_s[position]), min(nbytes, sizes[name])))
            elif tensor.node.name in moved and writes_variable(node.op):
                moved[tensor.node.name] += min(given_bytes, sizes[tensor.node.name])
    for name, copies in read.items():
        latest_s = -math.inf
        for start_s, nbytes in copies:
            moved[name] += nbytes if start_s - latest_s > apart_s else 0
            latest_s = start_s
    return {name: nbytes / max(1, sizes[name]) for name, nbytes in moved.items()}


def _may_run_again(saved: Saved, kernels: Iterable[Node]) -> bool:
    """Whether the user's permits allow these kernels of the saving loop to recompute."""
    return all(permit_of(saved.push.graph, tensor).allows("recompute") for tensor in outputs_of(kernels))
