"""The prepared step and its variants, which parts that are the same but for their device share (passes/alike_parts.py).

The nodes of a shared step are on the device of the part that was prepared first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.records import UnboundedLoop
from tfswap.compiler.options import Options
from tfswap.compiler.precision import in_precision
from tfswap.compiler.preconditions import bound_of_loop
from tfswap.compiler.prepare import Prepared, prepare
from tfswap.compiler.rewriting import Rewriting
from tfswap.compiler.variants import Variants
from tfswap.errors import UnsupportedGraph
from tfswap.ir.graph import Graph
from tfswap.kernels.target import Target
from tfswap.passes.alike_parts import device_names


class PreparedStep(NamedTuple):
    """A prepared step.

    Attributes:
        given: the step as it was given.
        facts: facts of preparation.
        variants: its variants.
    """

    given: Graph
    facts: Prepared
    variants: Variants

    @classmethod
    def of(
        cls,
        given: Graph,
        noted: Graph,
        target: Target,
        options: Options,
        costs: Costs,
        locate: Callable[[str], str | None],
    ) -> PreparedStep:
        """That of a step, which may be another part's.

        Raises UnsupportedGraph where a loop has no known bound.

        Args:
            noted: a copy of `given` with the user's permits; it is changed.
            locate: from the name of a node of `given` to the user's source line.
        """

        def made() -> PreparedStep:
            facts = prepare(noted, target, locate)

            def analysed(graph: Graph) -> Dataflow:
                try:
                    return analyse_dataflow(graph, target.device)
                except UnboundedLoop as error:
                    raise UnsupportedGraph(f"{error} {bound_of_loop(error.loop, facts.locate)}") from None

            variants = Variants(noted, analysed, target, costs, Rewriting(unrolled=target.unrolls))
            if options.precision:
                variants.base = in_precision(variants.plain, target.device, options, costs)
            return cls(given, facts, variants)

        return target.shared.same.get((cls, target), made)

    def move_to(self, part: Graph, made: Graph) -> None:
        """Move the nodes of a graph that was made of this step to the device of a part that shares it, in place."""
        if part is self.given:
            return
        devices = device_names(self.given, part)
        for each in (made, *made.all_bodies()):
            for node in each:
                node.device = devices.get(node.device, node.device)
