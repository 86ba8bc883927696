"""The names of tfswap's ops, for code that reads or writes graphs without TensorFlow."""

from __future__ import annotations

from typing import Final

# (tensor: T) -> (handle: variant); attr T. Starts the copy to the host.
SWAP_OUT: Final = "Tfswap>SwapOut"

# (handle: variant) -> (); no attrs. Waits for that copy and frees the device tensor. Has no output:
# only control edges keep it in a graph.
RELEASE: Final = "Tfswap>Release"

# (handle: variant) -> (tensor: T, ticket: variant); attrs T, shape (for shape inference; default
# unknown rank). Allocates the tensor and starts the copy back.
SWAP_IN: Final = "Tfswap>SwapIn"

# (tensor: T, ticket: variant) -> (output: T); attr T. Waits for that copy; the same buffer.
AWAIT: Final = "Tfswap>Await"

ALL: Final = frozenset(
    {
        SWAP_OUT,
        RELEASE,
        SWAP_IN,
        AWAIT,
    }
)

# (resource, value: T) -> (); attr T. AssignVariableOp that keeps the variable's buffer.
ASSIGN_IN_PLACE: Final = "Tfswap>AssignInPlace"

# () -> (); attr gate: int. Fails until that gate is open; every other node of the chain waits for it.
GATE: Final = "Tfswap>Gate"

# Not an op: how the names of kernels that run again begin.
AGAIN: Final = "tfswap/again/"
