"""Tables of the passes that carry out a plan before the step's kernels are ordered.

`BODIES` is applied while the bodies of loops and conditionals have no order, `FORM` after they have one.

A rewriting names kernels and tensors. `ResolvedRewriting` finds them in the graph when their pass is applied, and
raises InvalidModel where one does not exist, or the user does not allow the tactic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from tfswap.analysis.analyse import analyse_body
from tfswap.analysis.body_encodings import InnerEncoding, find_inner_encodings, is_inner
from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.encodings import Encoding, find_encodings
from tfswap.analysis.permits import permit_of
from tfswap.compiler.body_orders import body_order_chooser
from tfswap.compiler.rewriting import Rewriting
from tfswap.errors import InvalidModel
from tfswap.ir.graph import Graph
from tfswap.kernels.target import Target
from tfswap.passes.contract import PlanRow
from tfswap.passes.tactics.body_plan import carry_out_in_bodies
from tfswap.passes.tactics.encode import encode_tensors
from tfswap.passes.tactics.encode_in_bodies import encode_in_bodies
from tfswap.passes.tactics.loop_recompute import recompute_in_loops
from tfswap.passes.tactics.loop_swap import swap_in_loops
from tfswap.passes.tactics.order_bodies import order_bodies
from tfswap.passes.tactics.pack import pack_tensors
from tfswap.passes.tactics.reduce_precision import reduce_precision
from tfswap.passes.tactics.rows_first import keep_rows_first
from tfswap.passes.tactics.slice_kernels import slice_kernels
from tfswap.passes.tactics.sliced_updates import slice_updates
from tfswap.passes.tactics.sliced_weights import slice_weights
from tfswap.passes.tactics.split_branches import split_branches
from tfswap.passes.tactics.state_homes import keep_at_home
from tfswap.plan.plan import Inside
from tfswap.planner.problem import Problem
from tfswap.planner.validate import require_allowed, require_fit

BodyKey = tuple[Rewriting, str, tuple[Inside, ...]]
"""A body of one form of the step: the form, the body's name, and the plans of its inner bodies."""


class ResolvedRewriting:
    """A rewriting, with its names resolved in the graph that is rewritten.

    Args:
        problem_of: gives the planner's problem of an ordered body, from its facts.
        problems: a cache of these problems.

    Attributes:
        encodings: the encodings of the step's own kernels, after their pass.
        inner: the encodings of kernels in bodies, after their pass.
        bodies: (plan, problem, body) for each plan of a body.
    """

    def __init__(
        self,
        rewriting: Rewriting,
        target: Target,
        problem_of: Callable[[Dataflow], Problem],
        problems: dict[BodyKey, Problem] | None = None,
    ):
        self.rewriting = rewriting
        self.encodings: tuple[Encoding, ...] = ()
        self.inner: tuple[InnerEncoding, ...] = ()
        self.bodies: list[tuple[Inside, Problem, Graph]] = []
        self._target = target
        self._problem_of = problem_of
        self._problems: dict[BodyKey, Problem] = {} if problems is None else problems

    @property
    def changes_unordered_bodies(self) -> bool:
        """Whether bodies are changed before they have an order, or have another one than those of the plain step."""
        made = self.rewriting
        return bool(made.recomputed or made.grouped or made.slice_bytes or any(map(is_inner, made.encoded)))

    def order_bodies(self, _: Graph) -> tuple[Any, ...]:
        """The arguments of that pass."""
        return (body_order_chooser(self._target, grouped=self.rewriting.grouped),)

    def encode(self, graph: Graph) -> tuple[Any, ...] | None:
        """The arguments of `encode_tensors`. Raises InvalidModel where a kernel can't take an encoding."""
        kernels = [name for name in self.rewriting.encoded if not is_inner(name)]
        if not kernels:
            return None
        # Who accepts rounded values accepts a gradient's other last bits.
        same_bits = not self.rewriting.reduced
        possible = {e.kernel.name: e for e in find_encodings(graph, self._target.device, same_bits=same_bits)}
        self.encodings = _named(kernels, possible)
        for e in self.encodings:
            _require_encoded(graph, e)
        return (self.encodings,)

    def encode_inside(self, graph: Graph) -> tuple[Any, ...] | None:
        """The arguments of `encode_in_bodies`. Raises InvalidModel where a kernel can't take an encoding."""
        kernels = [name for name in self.rewriting.encoded if is_inner(name)]
        if not kernels:
            return None
        same_bits = not self.rewriting.reduced
        possible = {e.name: e for e in find_inner_encodings(graph, self._target.device, same_bits=same_bits)}
        found = _named(kernels, possible)
        for e in possible.values():
            if e.name not in kernels and e.saved in {other.saved for other in found if other.saved}:
                raise _can_not_encode(e.name)
        bodies = graph.named_bodies()
        for e in found:
            if e.saved is None:
                _require_encoded(bodies[e.body], e.encoding)
            else:
                require_allowed(e.saved.permit, "encode", f"encodes what loops save in {e.saved.name!r}")
        self.inner = found
        return (found,)

    def body_facts(self, body: Graph, inside: Inside) -> Dataflow:
        """The present facts of a body. Raises InvalidModel where `inside` can't be carried out there."""
        # A body depends on the form of the step, and on the plans of its inner bodies.
        before = tuple(made for made, *_ in self.bodies if made.body.startswith(f"{inside.body}/"))
        key = self.rewriting.outside, inside.body, before
        if key not in self._problems:
            self._problems[key] = self._problem_of(analyse_body(body.copy(), self._target.device))
        problem = self._problems[key]
        require_fit(inside, problem)
        self.bodies.append((inside, problem, body))
        return problem.flow


BODIES = (
    PlanRow[ResolvedRewriting](
        recompute_in_loops,
        lambda resolved, _: (resolved.rewriting.recomputed,) if resolved.rewriting.recomputed else None,
        "lists that are not saved are neither encoded nor swapped",
    ),
    PlanRow[ResolvedRewriting](
        encode_in_bodies, ResolvedRewriting.encode_inside, "encodings have a place in the order"
    ),
    PlanRow[ResolvedRewriting](
        keep_at_home,
        lambda resolved, _: (
            (resolved.rewriting.at_home, resolved.rewriting.on_disk) if resolved.rewriting.slice_bytes else None
        ),
        "slices read and write variables at home",
    ),
    PlanRow[ResolvedRewriting](
        split_branches,
        lambda resolved, _: (resolved.rewriting.slice_bytes,) if resolved.rewriting.slice_bytes else None,
        "an update in slices needs no more than its own gradient",
    ),
    PlanRow[ResolvedRewriting](
        slice_updates,
        lambda resolved, _: (resolved.rewriting.slice_bytes,) if resolved.rewriting.slice_bytes else None,
        "slices in bodies have a place in the order",
    ),
    PlanRow[ResolvedRewriting](
        slice_weights,
        lambda resolved, _: (resolved.rewriting.slice_bytes,) if resolved.rewriting.slice_bytes else None,
        "updates in slices do not read weights whole, and products that are left do",
    ),
    PlanRow[ResolvedRewriting](order_bodies, ResolvedRewriting.order_bodies, "bodies have all kernels but copies"),
)

BEFORE_SLICES = BODIES[: [row.apply for row in BODIES].index(slice_updates)]
"""What comes before updates are cut into slices."""

FORM = (
    PlanRow[ResolvedRewriting](
        keep_rows_first,
        lambda resolved, _: (resolved.rewriting.sliced,) if resolved.rewriting.sliced else None,
        "kernels in slices are named as they are then",
    ),
    PlanRow[ResolvedRewriting](
        slice_kernels,
        lambda resolved, _: (resolved.rewriting.sliced,) if resolved.rewriting.sliced else None,
        "slices are tensors like others to all that follows",
    ),
    PlanRow[ResolvedRewriting](
        keep_at_home,
        lambda resolved, _: (
            (resolved.rewriting.at_home, resolved.rewriting.on_disk)
            if resolved.rewriting.at_home and not resolved.rewriting.slice_bytes
            else None
        ),
        "copies of variables are tensors like others to all that follows",
    ),
    PlanRow[ResolvedRewriting](
        swap_in_loops,
        lambda resolved, _: (
            (resolved.rewriting.accumulators, resolved.rewriting.prefetched)
            if resolved.rewriting.accumulators
            else None
        ),
        "copies take their places in the order of bodies",
    ),
    PlanRow[ResolvedRewriting](
        reduce_precision,
        lambda resolved, _: (resolved.rewriting.reduced,) if resolved.rewriting.reduced else None,
        "kernels take encodings of tensors, not of what is decoded from fewer bits",
    ),
    PlanRow[ResolvedRewriting](
        encode_tensors, ResolvedRewriting.encode, "what is packed is read by kernels that take no encoding of it"
    ),
    PlanRow[ResolvedRewriting](
        pack_tensors,
        lambda resolved, _: (resolved.rewriting.packed,) if resolved.rewriting.packed else None,
        "late readers are those that are left",
    ),
    PlanRow[ResolvedRewriting](
        carry_out_in_bodies,
        lambda resolved, _: (resolved.rewriting.inside, resolved.body_facts) if resolved.rewriting.inside else None,
        "bodies have all kernels that plans for them name",
    ),
)


Named = TypeVar("Named", Encoding, InnerEncoding)


def _named(kernels: Collection[str], possible: Mapping[str, Named]) -> tuple[Named, ...]:
    """The encodings of `kernels`, in the order of `possible`. Raises InvalidModel where one is missing."""
    unknown = min((name for name in kernels if name not in possible), default=None)
    if unknown is not None:
        raise _can_not_encode(unknown)
    named = set(kernels)
    return tuple(e for name, e in possible.items() if name in named)


def _can_not_encode(kernel: str) -> InvalidModel:
    return InvalidModel(
        f"this plan gives an encoding to {kernel!r}, which this graph does not have, or which can't take one "
        "here with the same bits. Plan again for this graph."
    )


def _require_encoded(graph: Graph, encoding: Encoding) -> None:
    """Raise InvalidModel where the user does not let a kernel of `graph` read an encoding."""
    for tensor in encoding.dropped:
        does = f"gives {encoding.kernel.name!r} an encoding in place of {tensor.name!r}"
        require_allowed(permit_of(graph, tensor), "encode", does)
