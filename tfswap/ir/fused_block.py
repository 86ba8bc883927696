"""A record of a block of kernels that XLA compiles, at the graph that has it (compiler/fused_blocks.py)."""

from __future__ import annotations

from typing import NamedTuple


class FusedBlock(NamedTuple):
    """One block.

    Attributes:
        name: of the node that calls it.
        function: of the function that is called: blocks of the same content share it.
        members: names of the nodes that it replaces, in topological order.
        recomputed: names of nodes of other blocks that it computes too.
        gain_s: the seconds of a step that it is predicted to save; negative where it stays for its bytes.
        freed_bytes: the bytes of its members' tensors that are in no memory of the step.
    """

    name: str
    function: str
    members: tuple[str, ...]
    recomputed: tuple[str, ...]
    gain_s: float
    freed_bytes: int
