"""Machines by name: what they hold, and what they do in a second. No TensorFlow here.

Peaks are the vendors' own figures, one line per machine in `_SHEETS`; what of a peak a training step gets is one
fraction per kind of unit, below. So two machines are compared on equal terms, and a plan can be made for one that
is not at hand. A machine that is at hand is better measured: `tfswap.profile`, or the name "this".

Sources of the sheets, by vendor's title. K40: "Tesla K40 GPU Accelerator", BD-06902-001. Titan X: GeForce GTX
Titan X (Maxwell, 2015), the card of vDNN's measurements. P100: "Tesla P100 PCIe", PB-08248-001, in the machine of
Meng et al. 2017 (128 GB of host memory). V100: "NVIDIA V100 Tensor Core GPU", the PCIe and the SXM2 column, the
latter in an IBM Power AC922 with four cards: three NVLink 2.0 bricks of 25 GB/s between a card and its CPU. A100:
"NVIDIA A100 Tensor Core GPU", 80 GB PCIe. H100 and H200: "NVIDIA H100/H200 Tensor Core GPU", SXM5, dense TF32
(half of the sheet's figure, which counts sparsity). RTX 4090: "NVIDIA Ada GPU Architecture", appendix A.
PCIe x16: 15.75, 31.5 and 63 GB/s each way for generations 3, 4 and 5.

Host memory is what one card of a common server of its day has for itself: 64 GB with K40c and Titan X, an eighth
of a DGX-1 (512 GB), DGX A100 (1 TB) and DGX H100 or H200 (2 TB), a quarter of an AC922 (1 TB), 64 GB in a desktop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tfswap.errors import TfswapError
from tfswap.kernels.device import DeviceModel

THIS = "this"
"""The name that stands for the machine at hand, measured."""


DISK_BYTES_PER_S = 1e9
"""What an NVMe drive of a server keeps up, both ways concurrently; a profile has the machine's own
(`tfswap.profile(spill_dir=)`)."""


L3_CACHE_BYTES = float(32 << 20)
"""Of a machine that is not at hand."""


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second.

    Attributes:
        flops_per_s: contractions, sustained; a multiply-add counts as two.
        steps_per_s: element-wise and irregular arithmetic, which no contraction's units speed up.
        memory_bytes_per_s: what element-wise kernels read and write.
        out_bytes_per_s: copies to host memory.
        in_bytes_per_s: copies from host memory.
        launch_s: what starting a kernel adds to it.
        cores: kernels too small to be spread over more than one core can run side by side on so many.
        copy_share: share of a copy's time that the kernels lose to it. 0 where copies have engines of their own; on
            a CPU they run on the cores that the kernels run on.
        disk_bytes_per_s: copies to disk, and from it.
        onednn: whether oneDNN's kernels run, which share among cores what TensorFlow's own leave to one.
        cudnn: whether cuDNN's run, which take as long for the gradients of a convolution as for the convolution.
        channels_last: whether they take float32 with channels last: those of TF32 do (`ComputeInNhwcEnabled` in
            conv_ops_gpu.cc). Others are given copies.
        l3_cache_bytes: the last-level cache as Eigen sees it: some gradients choose their kernel by it.
    """

    flops_per_s: float
    steps_per_s: float
    memory_bytes_per_s: float
    out_bytes_per_s: float
    in_bytes_per_s: float
    launch_s: float
    cores: int = 1
    copy_share: float = 0.0
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    onednn: bool = False
    cudnn: bool = False
    channels_last: bool = False
    l3_cache_bytes: float = L3_CACHE_BYTES


@dataclass(frozen=True)
class Machine:
    """A device, and the host that its tensors are swapped to.

    Attributes:
        name: what a user calls it.
        title: what it is.
        device: facts that its kernels' memory depends on.
        rates: what it does in a second.
        memory_bytes: what TensorFlow's allocator can have on it; None where nothing bounds it.
        host_bytes: host memory for swapped tensors; None where nothing bounds it.
    """

    name: str
    title: str
    device: DeviceModel
    rates: Rates
    memory_bytes: int | None
    host_bytes: int | None


class _Sheet(NamedTuple):
    """What a vendor says: peaks in 10^12 FLOP/s and 10^9 bytes/s; memory in MiB, as the driver reports it, and the
    host's in 10^9 bytes."""

    title: str
    fp32: float
    tf32: float | None
    memory_rate: float
    memory_mib: int
    link: float
    host: int
    capability: int


_SHEETS: dict[str, _Sheet] = {
    "k40c": _Sheet("Tesla K40c, PCIe 3", 4.29, None, 288, 11441, 15.75, 64, 3),
    "titan-x": _Sheet("GTX Titan X (Maxwell), PCIe 3", 6.14, None, 336.5, 12212, 15.75, 64, 5),
    "p100": _Sheet("Tesla P100, PCIe 3, 128 GB of host memory", 9.3, None, 732, 16280, 15.75, 128, 6),
    "v100-pcie": _Sheet("V100 16 GB, PCIe 3", 14.0, None, 900, 16160, 15.75, 64, 7),
    "v100-nvlink": _Sheet("V100 16 GB, NVLink 2 to the CPU (Power AC922)", 15.7, None, 900, 16160, 75, 256, 7),
    "a100": _Sheet("A100 80 GB, PCIe 4", 19.5, 156, 1935, 81920, 31.5, 128, 8),
    "h100": _Sheet("H100 80 GB SXM, PCIe 5", 67, 494.7, 3350, 81559, 63, 256, 9),
    "h200": _Sheet("H200 141 GB SXM, PCIe 5", 67, 494.7, 4800, 143771, 63, 256, 9),
    "rtx-4090": _Sheet("GeForce RTX 4090, PCIe 4", 82.6, 82.6, 1008, 24564, 31.5, 64, 8),
}

NAMES = (*_SHEETS, THIS)

_NAMED_BY_DRIVER = {
    "H200": "h200",
    "H100": "h100",
    "A100": "a100",
    "V100": "v100-pcie",
    "P100": "p100",
    "K40": "k40c",
    "RTX 4090": "rtx-4090",
    "TITAN X": "titan-x",
}
"""By what is in the driver's name of a GPU ("NVIDIA H200"), whose sheet is nearest."""

FP32_SHARE = 0.6
"""Of the peak that contractions sustain without tensor cores: NVIDIA's ResNet-50 in FP32 on a V100, 390 images a
second at 24.6 GFLOP each, is 0.61 of its peak over a whole step."""
TF32_SHARE = 0.25
"""The same in TF32, TensorFlow's default where there is any: 800 images a second on an A100 are an eighth of its
peak, and element-wise kernels take about half of such a step."""
STEPS_SHARE = 0.25
"""Element-wise arithmetic: half of what fused multiply-adds count, at half of the rate."""
MEMORY_SHARE = 0.8
"""Of the memory's bandwidth, that a stream of large reads and writes gets."""
LINK_SHARE = 0.8
"""Of the link's, that copies of a few MiB from and to pinned memory get."""
LAUNCH_S = 5e-6
"""A kernel's way through TensorFlow's executor and the driver, where the device does not run behind."""
CONTEXT_BYTES = 500 << 20
"""What the driver, cuDNN and cuBLAS keep for themselves."""


def _kept_free_bytes(capability: int) -> int:
    """What TensorFlow leaves to the system on a GPU of this generation (gpu_device.cc, MinSystemMemory)."""
    mib = 500 if capability <= 6 else 1050 if capability == 7 else 1536 if capability == 8 else 1800
    return mib << 20


def described(name: str) -> Machine:
    """The machine of this name, other than "this". Raises TfswapError, naming those that are known."""
    sheet = _SHEETS.get(name.lower())
    if sheet is None:
        raise TfswapError(f"no device is called {name!r}: those described are {', '.join(NAMES)}")
    flops = FP32_SHARE * sheet.fp32 if sheet.tf32 is None else max(FP32_SHARE * sheet.fp32, TF32_SHARE * sheet.tf32)
    link = LINK_SHARE * sheet.link * 1e9
    return Machine(
        name=name.lower(),
        title=sheet.title,
        device=DeviceModel("gpu"),
        rates=Rates(
            flops_per_s=flops * 1e12,
            steps_per_s=STEPS_SHARE * sheet.fp32 * 1e12,
            memory_bytes_per_s=MEMORY_SHARE * sheet.memory_rate * 1e9,
            out_bytes_per_s=link,
            in_bytes_per_s=link,
            launch_s=LAUNCH_S,
            cudnn=True,
            channels_last=sheet.tf32 is not None,
        ),
        memory_bytes=(sheet.memory_mib << 20) - CONTEXT_BYTES - _kept_free_bytes(sheet.capability),
        host_bytes=sheet.host * 10**9,
    )


# What TensorFlow's kernels get of one core of an AMD EPYC with AVX-512, by CPU time (benchmarks/cost_model.py). A
# copy lane is one thread's memcpy, at half of what it reaches alone: the kernels use the same memory.
CPU_CORE_FLOPS_PER_S = 80e9
CPU_CORE_STEPS_PER_S = 2e9
CPU_CORE_MEMORY_BYTES_PER_S = 16e9
CPU_COPY_BYTES_PER_S = 8e9
CPU_LAUNCH_S = 3e-6
MAX_MEMORY_CORES = 8
"""So many cores use all of a socket's memory bandwidth."""
DEFAULT_GPU = "a100"


def default_rates(device: DeviceModel) -> Rates:
    """What a machine of this kind does, where no better is known: the same on every machine with the same GPU."""
    if device.is_gpu:
        known = (name for part, name in _NAMED_BY_DRIVER.items() if part in device.name)
        return described(next(known, DEFAULT_GPU)).rates
    cores = max(1, device.intra_op_threads)
    return Rates(
        flops_per_s=CPU_CORE_FLOPS_PER_S * cores,
        steps_per_s=CPU_CORE_STEPS_PER_S * cores,
        memory_bytes_per_s=CPU_CORE_MEMORY_BYTES_PER_S * min(cores, MAX_MEMORY_CORES),
        out_bytes_per_s=CPU_COPY_BYTES_PER_S,
        in_bytes_per_s=CPU_COPY_BYTES_PER_S,
        launch_s=CPU_LAUNCH_S,
        cores=cores,
        # While a copy runs on a thread's core, Eigen's other threads run its share. oneDNN gives each an equal
        # part, and all wait for that one; of its steps half is Eigen's (tfswap.profile: 0.59 and 0.97 on two cores).
        copy_share=(1 + 1 / cores) / 2 if device.onednn else 1 / cores,
        onednn=device.onednn,
        l3_cache_bytes=float(device.l3_cache_bytes or L3_CACHE_BYTES),
    )
