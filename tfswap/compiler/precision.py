"""The smaller floats that `precision=` names."""

from __future__ import annotations

import logging

from tfswap.analysis.cost import Costs
from tfswap.analysis.encodings import find_encodings
from tfswap.analysis.permits import permit_of
from tfswap.analysis.reduced_precision import find_reductions, requested_precisions, saved_tensors
from tfswap.compiler.options import Options
from tfswap.compiler.rewriting import Rewriting, Variant
from tfswap.ir.views import origin
from tfswap.kernels.device import DeviceModel
from tfswap.plan.schedule import build_schedule
from tfswap.planner.ordering import choose_order
from tfswap.planner.problem import smallest_bytes
from tfswap.simulator.memory import simulate_memory

log = logging.getLogger("tfswap")


def in_precision(plain: Variant, device: DeviceModel, options: Options, costs: Costs) -> Rewriting:
    """The rewriting with the reductions of the options. It does not depend on the limit or the arena, since it changes
    the step's values.

    Kernels that need only a predicate of a reduced tensor, or the positions of its maxima, read an exact encoding.
    """
    graph, flow = plain.graph, plain.flow
    cost_s = costs.of_step(flow)
    order = choose_order(flow, cost_s)
    live = simulate_memory(flow, build_schedule(order, ()), live=True)
    saved = {name: s for name, s in saved_tensors(graph).items() if permit_of(graph, s.tensor).allows("encode")}
    requested = requested_precisions(saved, options.precision, smallest_bytes(live.peak_bytes))
    exact = tuple(
        e.kernel.name
        for e in find_encodings(graph, device, same_bits=False)
        if any(origin(t).name in requested for t in e.dropped)
        and all(permit_of(graph, t).allows("encode") for t in e.dropped)
    )
    reductions = find_reductions(flow, order, cost_s, costs.rates, saved, requested, exact)
    if not reductions:
        log.warning(
            "tfswap: precision=%s reduces nothing: no large floats that it makes smaller wait long here.",
            dict(options.precision),
        )
        return plain.rewriting
    return plain.rewriting._replace(encoded=exact, reduced=tuple(reductions))
