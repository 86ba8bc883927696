"""TensorFlow's process-wide settings that bound cuDNN's memory.

Workspaces are bounded at the user's request. Once a step has a limit, autotuning allocates no buffers of its own.
"""

from __future__ import annotations

import os

WORKSPACE_LIMIT = "TF_CUDNN_WORKSPACE_LIMIT_IN_MB"
"""Read once by each kind of convolution, when the first of it in the process runs on a GPU (`GetDnnWorkspaceLimit` in
conv_ops_gpu.h, from statics of functions); 4096 where it is not set. No algorithm with a larger workspace is tried."""


REDZONES_OFF = "TF_DISABLE_RZ_CHECK"
"""Read whenever a convolution runs for the first time, which is when TensorFlow tries cuDNN's algorithms for it
(`RedzoneCheckDisabled` in gpu_utils.cc). Unless it is 1, each try writes to another buffer as large as the result, and
16 MiB larger, to see whether the algorithm writes past its end: of a U-Net, a step's largest tensor more.
"""


def without_redzones() -> None:
    """Have the first run of each convolution use no more memory than later ones. A user's own setting stays."""
    os.environ.setdefault(REDZONES_OFF, "1")


def workspace_limit_bytes() -> int | None:
    """The most bytes of each convolution's workspace; None where it is not set."""
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
