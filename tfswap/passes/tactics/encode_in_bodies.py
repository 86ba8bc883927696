"""Gives kernels in bodies an encoding in place of a tensor of which they need only a part.

Within one body the pass is that of a step (passes/tactics/encode.py). A tensor that another body saves is encoded
there, before it is pushed; the list keeps encodings, and the kernels read popped ones.

Requires: bodies without an order, and kernels that `find_inner_encodings` lists for this graph, with all kernels of the
same list. Ensures: the same elements are pushed and popped in the same order; the same values. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tfswap.analysis.accumulators import Accumulator
from tfswap.analysis.body_encodings import InnerEncoding, shape_source
from tfswap.analysis.encodings import Encoding
from tfswap.ir.graph import Dims, Graph, Output
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import mark_effects
from tfswap.passes.tactics.encode import add_encoding, encode_tensors, take_encoding
from tfswap.passes.tactics.retarget_lists import make_keep, pop_instead, push_instead

BYTES = Dims((None,))
"""The shape of every encoding, for any batch."""


@graph_pass(
    requires="bodies without an order, and kernels that `find_inner_encodings` lists for this graph",
    ensures="these kernels read encodings, lists keep encodings, with the same values",
)
def encode_in_bodies(graph: Graph, target: Target, chosen: Collection[InnerEncoding]) -> int:
    """Carry out these in the bodies of `graph`, in place."""
    bodies = graph.named_bodies()
    own: dict[str, list[Encoding]] = {}
    saved: dict[str, list[InnerEncoding]] = {}
    for inner in chosen:
        if inner.saved is None:
            own.setdefault(inner.body, []).append(inner.encoding)
        else:
            saved.setdefault(inner.saved.name, []).append(inner)
    edited = {bodies[name] for name in own}
    for name, encodings in own.items():
        encode_tensors(bodies[name], target, encodings)
    for readers in saved.values():
        accumulator = readers[0].saved
        assert accumulator is not None, "grouped by it"
        edited |= {push.graph for push in accumulator.pushes}
        _save_encoded(accumulator, readers, bodies)
    mark_effects(graph, edited)
    return len(chosen)


def _save_encoded(accumulator: Accumulator, readers: Sequence[InnerEncoding], bodies: Mapping[str, Graph]) -> None:
    encoding = readers[0].encoding
    kind = encoding.encoded
    for graph, maker in accumulator.makers:
        make_keep(graph, maker, kind.dtype, BYTES)
    for push in accumulator.pushes:
        push_instead(push, add_encoding(push.graph, push.pushed, encoding, push.node.device), BYTES)
    shapes: dict[str, Output | None] = {r.name: shape_source(r.encoding) for r in readers}
    for pop in accumulator.pops:
        pop_instead(pop, kind, BYTES)
    for reader in readers:
        take_encoding(
            bodies[reader.body], reader.encoding, reader.encoding.tensor, shapes[reader.name] or reader.encoding.tensor
        )
