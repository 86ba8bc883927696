"""What a device is, as far as its kernels' memory depends on it. No TensorFlow here."""

from __future__ import annotations

from typing import Literal, NamedTuple


class DeviceModel(NamedTuple):
    """The facts about a device that change what its kernels ask of the allocator.

    Attributes:
        kind: "cpu" or "gpu".
        onednn: whether oneDNN's kernels replace TensorFlow's own (TF_ENABLE_ONEDNN_OPTS; CPU only).
        intra_op_threads: threads that share one kernel's work; some kernels take a buffer per thread.
        inter_op_threads: kernels that may run side by side.
        l3_cache_bytes: the last-level cache as Eigen sees it, for which some kernels size their buffers (CPU only);
            None where unknown: then these buffers are bounds.
    """

    kind: Literal["cpu", "gpu"] = "cpu"
    onednn: bool = False
    intra_op_threads: int = 1
    inter_op_threads: int = 1
    l3_cache_bytes: int | None = None

    @property
    def in_bodies(self) -> DeviceModel:
        """What it is to the bodies of loops and conditionals: oneDNN's graph pass does not see into them."""
        return self._replace(onednn=False)
