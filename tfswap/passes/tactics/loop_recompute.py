"""Recomputes tensors in a backward loop in place of saving them in the forward loop.

The loop no longer pushes the tensor on an accumulator. The tensor's kernels run in the backward loop, from tensors that
it has anyway (analysis/loop_recompute.py). A tensor that is the same in all iterations becomes an argument of the
backward loop.

Requires: bodies without an order. Ensures: constants of the backward loop have no control inputs; other lists between
the two loops keep the same elements in the same order; the same values. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from tfswap.analysis.accumulators import find_accumulators
from tfswap.analysis.loop_recompute import Passage, find_passages
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.node_copies import add_copy
from tfswap.ir.op_traits import is_const
from tfswap.ir.views import passed_on
from tfswap.kernels.target import Target
from tfswap.passes.body_values import add_argument, add_result
from tfswap.passes.contract import graph_pass
from tfswap.passes.prepare.defer_constants import add_defer


@graph_pass(
    requires="accumulators that loops save in",
    ensures="the backward loop recomputes their elements, and nothing is saved",
)
def recompute_in_loops(graph: Graph, _: Target, names: Collection[str]) -> int:
    """Recompute the elements of these accumulators, in place; returns how many kernels are recomputed. Raises
    InvalidModel where one of the accumulators is needed.
    """
    missing = set(names)
    count = 0
    for passage in find_passages(graph, find_accumulators(graph)):
        named = {s.name for s in passage.saved} & missing
        if named:
            count += _Rewrite(passage, named).kernels
            missing -= named
    if missing:
        raise _impossible(min(missing))
    return count


def _impossible(name: str) -> InvalidModel:
    return InvalidModel(
        f"this plan recomputes the elements of the list {name!r} that a loop saves, and this graph has no such list, "
        "or can't recompute its elements. Plan again for this graph."
    )


class _Rewrite:
    """The rewriting of one pair of loops.

    Attributes:
        kernels: how many nodes have been copied.
    """

    def __init__(self, passage: Passage, names: Collection[str]):
        self._passage = passage
        self._there: dict[Output, Output] = {}  # by tensor of the forward body, its counterpart in the backward one
        self._copied: set[Node] = set()
        self.kernels = 0
        for node in passage.backward:
            if is_const(node.op):  # the gradient's constants wait for what comes before them, lists' elements for these
                node.controls = ()
        dropped = [s for s in passage.saved if s.name in names]
        for s in passage.saved:
            if s.name not in names:
                self._there[passed_on(s.push.pushed)] = s.pop.popped
        kept = set(self._there)
        for s in dropped:
            kernels = passage.recomputed(s.push.pushed, kept)
            if kernels is None:
                raise _impossible(s.name)
            for node in kernels:
                self._copy(node)
            push, pop = s.push.node, s.pop.node
            passage.backward.replace_uses(s.pop.popped, self._in_backward(s.push.pushed))
            _bypass(passage.forward, push.out(), push.inputs[0])
            _bypass(passage.backward, pop.out(0), pop.inputs[0])
        passage.forward.prune()
        passage.backward.prune()

    def _copy(self, node: Node) -> None:
        if node in self._copied:
            return
        body = self._passage.backward
        inputs = [self._read_by_copy(t, node.device) for t in node.inputs]
        made = add_copy(body, node, f"tfswap/{node.name}/again", inputs, source=self._passage.forward)
        for i in range(len(node.outputs)):
            self._there.setdefault(node.out(i), made.out(i))
        self._copied.add(node)
        self.kernels += not is_const(node.op)

    def _read_by_copy(self, tensor: Output, device: str) -> Output:
        """What the copy of a kernel that reads `tensor` reads: a constant that is deferred is deferred there too, or
        TensorFlow folds the copy.
        """
        counterpart = self._in_backward(tensor)
        if tensor.node.op == custom_ops.DEFER:
            return add_defer(self._passage.backward, counterpart, device)
        return counterpart

    def _in_backward(self, tensor: Output) -> Output:
        tensor = passed_on(tensor)
        if tensor not in self._there:
            is_read = self._passage.reads_invariant(tensor.node)
            self._there[tensor] = self._argument(self._read(tensor.node) if is_read else self._given(tensor.node))
        return self._there[tensor]

    def _given(self, feed: Node) -> Output:
        """The loop's arguments that are the same in all iterations."""
        position = self._passage.invariant(feed)
        assert position is not None, "what is not the same in all iterations is not recomputed"
        return passed_on(self._passage.loop.inputs[position])

    def _read(self, node: Node) -> Output:
        """The value that `node` reads in all iterations, read before the loop."""
        graph, loop = self._passage.graph, self._passage.loop
        handle = self._given(passed_on(node.inputs[0]).node)
        read = add_copy(graph, node, f"tfswap/{loop.name}/{node.name}", (handle,), controls=loop.controls)
        graph.add_control(loop, read)  # so that nodes ordered after the loop come after the read
        return read.out()

    def _argument(self, given: Output) -> Output:
        """A tensor as an argument of the backward body, the same in all iterations; a new one unless it has it."""
        back, body = self._passage.back, self._passage.backward
        for value, own, result in zip(back.inputs, body.feeds, body.fetches, strict=True):
            if passed_on(value) == given and passed_on(result) == own.out():
                return own.out()
        add_argument(self._passage.graph, back, f"tfswap/{given.node.name}/same", given)
        body.fetches.append(body.feeds[-1].out())
        add_result(back, given.type, "T")
        return body.feeds[-1].out()


def _bypass(graph: Graph, old: Output, new: Output) -> None:
    """Have all readers of `old`, the caller too, read `new`."""
    graph.replace_uses(old, new)
    graph.fetches = [new if fetch == old else fetch for fetch in graph.fetches]
