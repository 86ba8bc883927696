"""The rows of a report on blocks that XLA compiles: the tactic "fuse"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.graph import Graph
from tfswap.kernels.fused import BLOCK_SUFFIX, most_block_difference
from tfswap.support.sizes import format_bytes, format_count

HEADS = ("saves, us", "block", "kernels", "does not hold", "line")


@dataclass(frozen=True)
class BlockRow:
    """One block.

    Attributes:
        name: of its node.
        function: the function that XLA compiles, which blocks of the same content share.
        members: names of the nodes that it replaces.
        recomputed: names of nodes of other blocks that it computes too.
        gain_s: the seconds of a step that it is predicted to save.
        freed_bytes: the bytes of its members' tensors that are in no memory of the step.
        kernel: the kernel whose result may differ the most from TensorFlow's.
        most_difference: by how much, for the same inputs, as a share of the magnitudes of its terms.
        source: the user's line that created its last node, where TensorFlow knows it.
    """

    name: str
    function: str
    members: tuple[str, ...]
    recomputed: tuple[str, ...]
    gain_s: float
    freed_bytes: int
    kernel: str
    most_difference: float
    source: str | None


def block_rows(graph: Graph, flow: Dataflow, locate: Callable[[str], str | None]) -> tuple[BlockRow, ...]:
    """A row for each block of a step, those that save the most first.

    Args:
        locate: gives the user's source line of a node, by its name.
    """
    unfused = graph.unfused
    if unfused is None:
        return ()
    found: list[BlockRow] = []
    for block in graph.blocks:
        if block.name not in flow.place:
            continue
        computed = (unfused[name] for name in (*block.members, *block.recomputed))
        differences = {node.name: most_block_difference(node) for node in computed}
        kernel = max(differences, key=differences.__getitem__)
        lines = (locate(name) for name in reversed(block.members))
        source = next((line for line in lines if line is not None), None)
        found.append(BlockRow(*block, kernel=kernel, most_difference=differences[kernel], source=source))
    return tuple(sorted(found, key=lambda row: (-row.gain_s, row.name)))


def texts_of(rows: Sequence[BlockRow]) -> list[tuple[str, ...]]:
    """Rows of a table under HEADS."""
    return [
        (
            f"{1e6 * row.gain_s:.0f}",
            row.name,
            f"{len(row.members)}, and {len(row.recomputed)} again" if row.recomputed else f"{len(row.members)}",
            format_bytes(row.freed_bytes),
            row.source or "",
        )
        for row in rows
    ]


def figure_of(rows: Sequence[BlockRow]) -> str:
    """What the blocks do together."""
    members = {name for row in rows for name in row.members}
    saved_ms, freed = 1e3 * sum(row.gain_s for row in rows), format_bytes(sum(row.freed_bytes for row in rows))
    nodes, blocks = format_count(len(members), "node"), format_count(len(rows), "block")
    return f"{nodes} in {blocks} of XLA's, which save {saved_ms:.1f} ms and {freed} of tensors"


def note_of(rows: Sequence[BlockRow]) -> list[str]:
    """A note on the values of blocks."""
    if not rows:
        return []
    functions, worst = len({row.function for row in rows}), max(rows, key=lambda row: row.most_difference)
    return [
        f"XLA compiles {format_count(len(rows), 'block')} of kernels, of {format_count(functions, 'function')}; their "
        f"last bits are XLA's. For the same inputs a kernel's result differs by at most {worst.most_difference:.1g} of "
        f"its terms' magnitudes ({worst.kernel} by the most). Each block has the name of the last node that it "
        f'replaces, and "{BLOCK_SUFFIX}"'
    ]
