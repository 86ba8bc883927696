"""The records of a step's loops, conditionals and ops of lists, with the known integers and contents of lists.

Invariant: a node's record depends on the nodes before it, and on the requested course.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tfswap.analysis.buffers import Contents, Element
from tfswap.analysis.control_flow import record, record_list
from tfswap.analysis.function_runs import Bodies, Course, Seconds, deciding
from tfswap.analysis.integer_values import AtMost, Values, known_results
from tfswap.analysis.records import Findings, Record
from tfswap.analysis.tensor_lists import uses_lists
from tfswap.ir.custom_ops import STORE_HOME
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import control_flow
from tfswap.kernels.device import DeviceModel


class NodeRecords:
    """The records of one course of a step.

    Attributes:
        integers: the known values of small integer tensors.
        contents: the known contents of lists.
        found: the findings of all nodes together.
        choices: conditionals whose branch the step decides.
    """

    def __init__(
        self,
        graph: Graph,
        device: DeviceModel,
        *,
        strict: bool,
        lowered: Seconds | None,
        course: Course | None,
        before: NodeRecords | None,
        covering: bool,
    ):
        """Arguments as of `Builder`.

        Args:
            before: the records of another course.
        """
        self.integers: dict[tuple[Node, int], Values] = {(n, 0): v for n, v in graph.small_constants.items()}
        self.contents: dict[tuple[Node, int], Contents] = {}
        self.found = Findings()
        self.choices: set[Node] = set()
        self._graph = graph
        self._device = device
        self._strict = strict
        self._lowered = lowered
        self._course = course
        self._before = before
        self._covering = covering
        self._prepared: Bodies = {} if before is None else before._prepared
        self._made: dict[Node, tuple[list[Contents | None], list[Values | None], Record]] = {}

    def small_constants(self, node: Node) -> dict[int, tuple[int, ...]]:
        """The known integers of a node's inputs, by position."""
        known = ((p, self.integers.get(t)) for p, t in enumerate(node.inputs))
        return {p: values for p, values in known if not isinstance(values, AtMost | None)}

    def record(
        self, node: Node, value_of: Mapping[tuple[Node, int], int], held_bytes: Callable[[Output], int]
    ) -> Record | None:
        """The record of a loop, a conditional or an op of lists; None for other nodes. Also propagates integers.

        Args:
            value_of: the values of tensors.
            held_bytes: gives the bytes held with a tensor.
        """
        bodies = self._graph.bodies.get(node)
        if bodies is None and (not uses_lists(node) or node.op == STORE_HOME):  # the latter by home_changes
            results = known_results(node, [self.integers.get(t) for t in node.inputs])
            self.integers.update({(node, o): values for o, values in results.items()})
            return None
        if self._course is not None and self._before is not None and node in self._before.choices:
            # The decision is known from here on, since the gradient's conditional reads it too.
            assert bodies is not None
            if isinstance(self.integers.get(node.inputs[0]), AtMost | None):
                self.integers[node.inputs[0]] = deciding(node, self._course.branch(0, len(bodies)))
        known = [self.integers.get(t) for t in node.inputs]
        contents = [self.contents.get(t) for t in node.inputs]
        if bodies is None:
            made = record_list(node, self._device, contents, known, covering=self._covering)
        elif self._before is not None and (kept := self._before._made.get(node)) and kept[:2] == (contents, known):
            made = kept[2]
        else:
            made = record(
                node,
                bodies,
                self._device,
                contents,
                known,
                strict=self._strict,
                given_up=() if self._lowered is None else [value_of.get(t) for t in node.inputs],
                lowered=self._lowered,
                course=self._course,
                covering=[held_bytes(t) for t in node.inputs] if self._covering else None,
                prepared=self._prepared,
            )
            if made.found.decided:
                self._made[node] = contents, known, made
            self._note(node, made)
        self.integers.update({(node, o): v for o, v in made.integers.items()})
        return made

    def _note(self, node: Node, made: Record) -> None:
        self.found.add(made.found)
        kind = control_flow(node.op)
        if made.found.undecided and kind is not None and not kind.is_loop:
            self.choices.add(node)

    def note_contents(self, node: Node, made: Record, number: Mapping[int, int]) -> None:
        """Record the contents of the node's lists. `number`: the values of its outputs."""
        for o, contents in made.contents.items():
            self.contents[node, o] = _numbered(contents, number)


def _numbered(contents: Contents, number: Mapping[int, int]) -> Contents:
    """Contents of a list with values in place of a node's outputs, by `number`."""
    numbered: list[Element | None] = []
    for element in contents:
        if element is not None and element.parts:
            element = element._replace(parts=_numbered(element.parts, number))
        if element is not None and element.output is not None:
            element = element._replace(value=number.get(element.output), output=None)
        numbered.append(element)
    return tuple(numbered)
