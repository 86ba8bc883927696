"""Finds encodings for kernels in the bodies of loops and conditionals (see encodings.py).

There are two kinds of tensors. A tensor can be computed in the kernel's own body, which has a forward and a backward
pass. Or another body has saved it: a loop's for its backward loop, a branch's for its gradient. Then the saved list can
hold encodings, if all readers of its elements can read the same encoding.

Invariant: a pure function of the graph and the device. Encodings give the same bits.

Not handled: saved inputs of max pooling; elements that are read through a view.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tfswap.analysis.accumulators import Accumulator, find_accumulators
from tfswap.analysis.encodings import Encoding, find_encodings
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import passes_on, pops_list, unwraps
from tfswap.ir.types import ELEMENT_BYTES
from tfswap.ir.views import passed_on
from tfswap.kernels.device import DeviceModel


class InnerEncoding(NamedTuple):
    """One kernel in a body that can read an encoding.

    Attributes:
        body: the body's name, as of `Graph.named_bodies`.
        encoding: the kernel and its encoding.
        saved: the list in which another body has saved the tensor. None: the kernel's own body computes it.
    """

    body: str
    encoding: Encoding
    saved: Accumulator | None = None

    @property
    def name(self) -> str:
        """The kernel's name, after its body's."""
        return f"{self.body}/{self.encoding.kernel.name}"

    @property
    def share(self) -> float:
        """The bytes of the list with encodings, divided by those without."""
        assert self.saved is not None
        elements = self.encoding.kernel.outputs[0].num_elements or 1  # a mask's: as many as the gradient has
        return (self.encoding.encoded.nbytes or 0) / (elements * ELEMENT_BYTES[self.saved.dtype])


def is_inner(kernel: str) -> bool:
    """Whether a name is that of a kernel in a body. Names of nodes have no brackets."""
    return "]/" in kernel


def find_inner_encodings(graph: Graph, device: DeviceModel, *, same_bits: bool = True) -> list[InnerEncoding]:
    """Every kernel in the bodies of `graph` that can read an encoding, body by body.

    Args:
        same_bits: as of `find_encodings`.
    """
    bodies = graph.named_bodies()
    encodings = {name: find_encodings(body, device, same_bits=same_bits) for name, body in bodies.items()}
    if not any(encodings.values()):
        return []
    called = {body: name for name, body in bodies.items()}
    by_body = {body: encodings[name] for name, body in bodies.items()}
    found: list[InnerEncoding] = []
    for accumulator in find_accumulators(graph):
        takers = list(_takers(accumulator, by_body))
        if takers and all(takers):
            found += (InnerEncoding(called[body], e, accumulator) for body, e in filter(None, takers))
    for name, own in encodings.items():
        found += (InnerEncoding(name, e) for e in own if not _was_saved(e.tensor))
    return found


def _was_saved(tensor: Output) -> bool:
    return pops_list(tensor.node.op) or unwraps(tensor.node.op)


def _takers(
    accumulator: Accumulator, encodings: dict[Graph, list[Encoding]]
) -> Iterator[tuple[Graph, Encoding] | None]:
    """The readers of a list's elements. None for one that needs the whole tensor, or a different encoding."""
    sizes = {push.pushed.type.num_elements for push in accumulator.pushes}
    predicate: str | None = None
    for pop in accumulator.pops:
        of = {e.kernel: e for e in encodings.get(pop.graph, ()) if e.tensor == pop.popped}
        for reader in _readers(pop.graph, pop.popped):
            e = None if reader is None else of.get(reader)
            if e is None or e.codec.encode != custom_ops.ENCODE_MASK or sizes != {pop.popped.type.num_elements}:
                yield None
                continue
            predicate = predicate or e.codec.predicate
            same = predicate == e.codec.predicate and pop.popped not in _kept(e)
            yield (pop.graph, e) if same and (not e.codec.takes_shape or shape_source(e) is not None) else None


def _readers(graph: Graph, tensor: Output) -> Iterator[Node | None]:
    """The kernels that read a tensor of `graph`; None for its caller."""
    for node in graph:
        if not passes_on(node.op) and any(passed_on(t) == tensor for t in node.inputs):
            yield node
    if any(passed_on(t) == tensor for t in graph.fetches):
        yield None


def _kept(encoding: Encoding) -> Iterable[Output]:
    return [passed_on(encoding.kernel.inputs[position]) for position in encoding.codec.kept]


def shape_source(encoding: Encoding) -> Output | None:
    """A tensor of the encoded one's shape among the kernel's other inputs; None where there is none."""
    shape = encoding.tensor.type.shape
    kept = (encoding.kernel.inputs[position] for position in encoding.codec.kept)
    return next((t for t in kept if t.type.shape == shape), None)
