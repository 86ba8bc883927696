"""The order in which TensorFlow compares the nodes of a lowered step, to merge equal ones: reverse postorder.

Follows GetReversePostOrder of tensorflow/core/graph/algorithm.cc: a depth-first search from the nodes without inputs,
which visits the nodes with the largest numbers first.
"""

from __future__ import annotations

from tfswap.simulator.lowered_graph import Lowered


def visited_in_order(lowered: Lowered) -> list[tuple[str, str]]:
    """The part and name of each of the graph's nodes among the items."""
    items = lowered.items
    stack = [(i, False) for i, item in enumerate(items) if not item.inputs and not item.controls]
    visited = [False] * len(items)
    left: list[int] = []
    while stack:
        number, ends = stack.pop()
        if ends:
            left.append(number)
        elif not visited[number]:
            visited[number] = True
            stack.append((number, True))
            readers = {reader for reader, _, _ in lowered.data[number]}.union(lowered.control[number])
            stack += [(reader, False) for reader in sorted(readers) if not visited[reader]]
    found = [items[number] for number in reversed(left)]
    return [(item.scope.name, item.node.name) for item in found if item.node is not None]
