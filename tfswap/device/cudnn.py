"""What TensorFlow's use of cuDNN is told: one thing, for the whole process, and only when a user asks for it."""

from __future__ import annotations

import os

WORKSPACE_LIMIT = "TF_CUDNN_WORKSPACE_LIMIT_IN_MB"
"""Read once by each kind of convolution, when the first of it in the process runs on a GPU (`GetDnnWorkspaceLimit` in
conv_ops_gpu.h, from statics of functions); 4096 where it is not set. No algorithm with a larger workspace is tried."""


def workspace_limit_bytes() -> int | None:
    """What each convolution may have as workspace; None where nobody has said."""
    mib = os.environ.get(WORKSPACE_LIMIT, "")
    return int(mib) << 20 if mib.isascii() and mib.isdigit() else None


def limit_workspaces(nbytes: int | None) -> None:
    """Allow each convolution of the process a workspace of `nbytes`, in whole MiB, or less where less is allowed
    already: by another function, or by the user's own setting. None, for a plan without convolutions or limit, changes
    nothing.
    """
    if nbytes is None:
        return
    before = workspace_limit_bytes()
    os.environ[WORKSPACE_LIMIT] = str((nbytes if before is None else min(nbytes, before)) >> 20)
