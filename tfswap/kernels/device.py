"""The facts about a device that the memory of its kernels depends on. No TensorFlow here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from tfswap.ir.types import HALVES, TensorType
from tfswap.kernels.calibration import Calibration


class DeviceModel(NamedTuple):
    """The facts about a device that change the requests of its kernels.

    Attributes:
        kind: "cpu" or "gpu".
        onednn: whether oneDNN's kernels replace TensorFlow's own (TF_ENABLE_ONEDNN_OPTS; CPU only).
        intra_op_threads: threads that share one kernel's work. Some kernels request a buffer per thread.
        inter_op_threads: the number of kernels that may run concurrently.
        l3_cache_bytes: the size of the last-level cache that Eigen reports, by which some kernels size their buffers
            (CPU only). None: unknown, and the sizes of these buffers are bounds.
        l1_l2_bytes: the sizes of the first two caches that Eigen reports, by which it cuts products into blocks (CPU
            only). None: unknown, or the processor is not one of x86-64, for which other kernels are compiled.
        onednn_dtypes: element types that oneDNN's kernels support, sorted. The processor decides which 16-bit floats
            are among them.
        name: the driver's name of the device, "" where unknown (GPU only).
        workspace_bytes: the largest workspace of a convolution that TensorFlow allows cuDNN
            (TF_CUDNN_WORKSPACE_LIMIT_IN_MB). None: not configured (GPU only).
        tf32: whether contractions of float32 are computed in TF32 (GPU only).
        codecs: whether the codecs can run. On a GPU they need CUDA's runtime compiler.
        deterministic: whether `enable_op_determinism` is on. Some kernels then request temporaries (GPU only).
        capability: CUDA's compute capability, as (major, minor). None: it is not a GPU of NVIDIA (GPU only).
        calibration: how fast its kernels are, which changes times and no request. None: as by the default rates (CPU
            only).
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
    capability: tuple[int, int] | None = (8, 0)
    l1_l2_bytes: tuple[int, int] | None = None
    calibration: Calibration | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU. Outside of the tables of kernels, the properties below say what follows."""
        return self.kind == "gpu"

    @property
    def host_is_separate(self) -> bool:
        """Whether tensors in host memory take nothing of the arena, and copies move values between both."""
        return self.is_gpu

    @property
    def is_asynchronous(self) -> bool:
        """Whether kernels enqueue work that ends later, so that only a wait shows their values to the host."""
        return self.is_gpu

    @property
    def has_own_kernels(self) -> bool:
        """Whether tfswap has kernels of its own for TensorFlow's ops on the device."""
        return not self.is_gpu

    @property
    def uses_cudnn(self) -> bool:
        """Whether convolutions and recurrent layers run in cuDNN, with workspaces."""
        return self.is_gpu

    def running(self, tensors: Iterable[TensorType]) -> DeviceModel:
        """The facts for a kernel with these tensors: oneDNN's kernels do not support all 16-bit floats."""
        if self.onednn and any(t.dtype in HALVES and t.dtype not in self.onednn_dtypes for t in tensors):
            return self._replace(onednn=False)
        return self

    @property
    def in_bodies(self) -> DeviceModel:
        """The facts for the bodies of loops and conditionals, which oneDNN's graph pass does not rewrite."""
        return self._replace(onednn=False)
