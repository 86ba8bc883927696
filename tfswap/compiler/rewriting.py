"""The forms of one step that a plan chooses among: what is done to its graph before its kernels are ordered."""

from __future__ import annotations

from typing import NamedTuple

from tfswap.analysis.body_encodings import InnerEncoding
from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.encodings import Encoding
from tfswap.analysis.lossless_forms import Packing
from tfswap.analysis.reduced_precision import Reduction
from tfswap.ir.graph import Graph
from tfswap.kernels.alignment import round_up
from tfswap.plan.plan import Inside, Plan, Slices
from tfswap.planner.bodies import PlannedBody
from tfswap.planner.candidates import Candidate


class Rewriting(NamedTuple):
    """What is done to a step's graph before its kernels are ordered.

    Attributes:
        accumulators: names of the accumulators whose elements are swapped inside their loops.
        encoded: names of the kernels that take an encoding in place of a tensor; of one in a body, after the body's.
        reduced: tensors saved for the backward pass in fewer bits.
        recomputed: names of the accumulators whose elements are recomputed in place of being saved.
        inside: what is planned inside of bodies.
        packed: what waits in a smaller form that gives back every bit.
        prefetched: of `accumulators` those whose elements come back in the iteration before the one that reads them.
        grouped: whether the kernels of bodies run in groups, and not in pairs.
        at_home: names of the handles of variables at home on the host.
        on_disk: those of them that are on disk, and not in host memory.
        slice_bytes: updates of larger ones of these run in slices of this size; 0 for whole updates.
        sliced: kernels that run in slices of rows.
        concurrent: the bytes that kernels of the step that run in groups hold while more than one runs; 0 where all run
            in an order.
        unrolled: whether loops of small kernels are unrolled too (step_forms.py).
    """

    accumulators: tuple[str, ...] = ()
    encoded: tuple[str, ...] = ()
    reduced: tuple[Reduction, ...] = ()
    recomputed: tuple[str, ...] = ()
    inside: tuple[Inside, ...] = ()
    packed: tuple[Packing, ...] = ()
    prefetched: tuple[str, ...] = ()
    grouped: bool = False
    concurrent: int = 0
    at_home: tuple[str, ...] = ()
    on_disk: tuple[str, ...] = ()
    slice_bytes: int = 0
    sliced: tuple[Slices, ...] = ()
    unrolled: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Rewriting:
        """That of the step that `plan` is of: its fields are called the same."""
        return cls(*(getattr(plan, field) for field in cls._fields))

    @property
    def outside(self) -> Rewriting:
        """The same with nothing planned inside of bodies."""
        return self._replace(inside=())


PLAIN = Rewriting()


class Variant(NamedTuple):
    """One form of the step.

    Attributes:
        graph: the step so, with settled variables and ordered bodies.
        flow: its facts.
        encodings: those in the graph.
        inner: those in its bodies.
        bodies: of each of what is planned inside of bodies, the body as it is without that.
    """

    rewriting: Rewriting
    graph: Graph
    flow: Dataflow
    encodings: tuple[Encoding, ...] = ()
    inner: tuple[InnerEncoding, ...] = ()
    bodies: tuple[PlannedBody, ...] = ()


class Found(NamedTuple):
    """A candidate, and the variant that it is of."""

    variant: Variant
    candidate: Candidate

    @property
    def peaks_in_body(self) -> bool:
        """Whether a loop or a conditional runs when it holds most."""
        return self.variant.flow.nodes[self.candidate.largest_kernel()] in self.variant.graph.bodies

    def plan(
        self, fingerprint: str, limit_bytes: int | None, *, persistent_bytes: int, margin_bytes: int, solver: str
    ) -> Plan:
        """The candidate as a plan.

        Args:
            fingerprint: of the step's graph.
            limit_bytes: the limit that it was made under.
            persistent_bytes: bytes in the arena before the step.
            margin_bytes: added to the peak.
            solver: who made it.
        """
        choice = self.candidate.choice
        order, evictions = choice.named(self.variant.flow)
        return Plan(
            fingerprint=fingerprint,
            limit_bytes=limit_bytes,
            order=order,
            evictions=evictions,
            planned_peak_bytes=self.candidate.peak_bytes + margin_bytes,
            persistent_bytes=persistent_bytes,
            host_bytes=self.candidate.memory.host_peak_bytes,
            seconds=self.candidate.timing.total_s,
            solver=solver,
            paired=choice.paired,
            splits=choice.splits,
            exact_chunks=choice.exact_chunks,
            disk_bytes=self.candidate.memory.disk_peak_bytes,
            lent_bytes=max((round_up(a.lent + a.nbytes) for a in evictions if a.lent is not None), default=0),
            **self.variant.rewriting._asdict(),
        )
