"""What a device is, as far as its kernels' memory depends on it. No TensorFlow here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from tfswap.ir.types import HALVES, TensorType


class DeviceModel(NamedTuple):
    """The facts about a device that change what its kernels ask of the allocator.

    Attributes:
        kind: "cpu" or "gpu".
        onednn: whether oneDNN's kernels replace TensorFlow's own (TF_ENABLE_ONEDNN_OPTS; CPU only).
        intra_op_threads: threads that share one kernel's work; some kernels take a buffer per thread.
        inter_op_threads: kernels that may run side by side.
        l3_cache_bytes: the last-level cache as Eigen sees it, for which some kernels size their buffers (CPU only);
            None where unknown: then these buffers are bounds.
        onednn_dtypes: types of elements that oneDNN's kernels take, where they replace any, in order. Which 16-bit
            floats are among them is up to what the processor can do.
        name: what its driver calls it, "" where unknown (GPU only).
        workspace_bytes: the most that cuDNN may take for a convolution, as TensorFlow was configured
            (TF_CUDNN_WORKSPACE_LIMIT_IN_MB); None where it was not (GPU only).
        tf32: whether contractions of float32 are computed in TF32 (GPU only).
        codecs: whether the codecs run. On a GPU they are CUDA's.
        deterministic: whether kernels give the same result each time (`enable_op_determinism`), for which some take
            temporaries (GPU only).
    """

    kind: Literal["cpu", "gpu"] = "cpu"
    onednn: bool = False
    intra_op_threads: int = 1
    inter_op_threads: int = 1
    l3_cache_bytes: int | None = None
    onednn_dtypes: tuple[str, ...] = ("bfloat16", "float32")
    name: str = ""
    workspace_bytes: int | None = None
    tf32: bool = False
    codecs: bool = True
    deterministic: bool = False

    @property
    def is_gpu(self) -> bool:
        """Whether kernels are a GPU's."""
        return self.kind == "gpu"

    def running(self, tensors: Iterable[TensorType]) -> DeviceModel:
        """What it is to a kernel of these tensors: oneDNN's do not take all 16-bit floats."""
        if self.onednn and any(t.dtype in HALVES and t.dtype not in self.onednn_dtypes for t in tensors):
            return self._replace(onednn=False)
        return self

    @property
    def in_bodies(self) -> DeviceModel:
        """What it is to the bodies of loops and conditionals: oneDNN's graph pass does not see into them."""
        return self._replace(onednn=False)
