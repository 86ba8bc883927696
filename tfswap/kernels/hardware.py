"""Machines by name: their memory and their rates. No TensorFlow here.

Peaks are the vendors' figures, one line per machine in `_SHEETS`. The share of a peak that a training step reaches is
one constant per kind of unit, below. Machines are compared on equal terms, and a plan can be computed for a machine
that is not present. A machine that is present is better measured: `tfswap.profile`, or the name "this".

Sources of the sheets, by vendor's title. K40: "Tesla K40 GPU Accelerator", BD-06902-001. Titan X: GeForce GTX
Titan X (Maxwell, 2015), the card of vDNN's measurements. P100: "Tesla P100 PCIe", PB-08248-001, in the machine of
Meng et al. 2017 (128 GB of host memory). V100: "NVIDIA V100 Tensor Core GPU", the PCIe and the SXM2 column, the
latter in an IBM Power AC922 with four cards: three NVLink 2.0 bricks of 25 GB/s between a card and its CPU. A100:
"NVIDIA A100 Tensor Core GPU", 80 GB PCIe. H100 and H200: "NVIDIA H100/H200 Tensor Core GPU", SXM5, dense TF32
(half of the sheet's figure, which counts sparsity). RTX 4090: "NVIDIA Ada GPU Architecture", appendix A.
PCIe x16: 15.75, 31.5 and 63 GB/s each way for generations 3, 4 and 5. NVLink between two GPUs, each way: DGX-1 with
V100, two bricks of 25 GB/s ("NVIDIA DGX-1 With Tesla V100 System Architecture", WP-08437-002; pairs with one brick or
none are slower); through an NVSwitch 300 GB/s in a DGX A100 and 450 GB/s in a DGX H100 or H200, half of the sheets'
figures, which count both ways.

Host memory is one card's part of the memory of a common server of its time: 64 GB with K40c and Titan X, an eighth
of a DGX-1 (512 GB), DGX A100 (1 TB) and DGX H100 or H200 (2 TB), a quarter of an AC922 (1 TB), 64 GB in a desktop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from tfswap.errors import TfswapError
from tfswap.kernels.calibration import Calibration
from tfswap.kernels.device import DeviceModel

THIS = "this"
"""The name of the machine of this process, with measured rates."""

HOST, DISK, LENT = range(3)
"""The tiers in which copies of swapped tensors are: host memory, a disk, memory that another device lends."""

MOST_DEVICES = 64
"""The most devices in a list of them."""

DISK_BYTES_PER_S = 1e9
"""The sustained rate of a server's NVMe drive that reads and writes concurrently. A profile has the measured rate of
the machine (`tfswap.profile(spill_dir=)`)."""

L3_CACHE_BYTES = float(32 << 20)
"""The last-level cache of a machine that is not present."""


@dataclass(frozen=True)
class Rates:
    """The sustained rates of a machine, per second.

    Attributes:
        flops_per_s: floating-point operations of contractions. A multiply-add counts as two.
        steps_per_s: operations of element-wise and irregular arithmetic, which units for contractions do not speed up.
        memory_bytes_per_s: bytes that element-wise kernels read and write.
        out_bytes_per_s: bytes copied to host memory.
        in_bytes_per_s: bytes copied from host memory.
        launch_s: seconds that starting a kernel takes.
        copy_latency_s: seconds that a copy to or from host memory takes in addition to its bytes.
        cores: the number of single-core kernels that can run concurrently.
        copy_share: the share of a copy's time by which kernels are delayed. 0 where copy engines do the copies. On a
            CPU, copies use the cores of the kernels.
        disk_bytes_per_s: bytes copied to disk, or from it.
        onednn: whether oneDNN's kernels run. They use all cores where some of TensorFlow's kernels use one.
        cudnn: whether cuDNN's kernels run. The gradients of a convolution take as long as the convolution.
        channels_last: whether cuDNN reads float32 with channels last, as it does in TF32 (`ComputeInNhwcEnabled` in
            conv_ops_gpu.cc). Otherwise TensorFlow copies to channels first.
        l3_cache_bytes: the size of the last-level cache that Eigen reports. Some gradients choose their kernel by it.
        peer_bytes_per_s: bytes copied between two devices by a link of their own. 0: copies go by way of the host.
        convolution_time: the seconds of an operation of a convolution, divided by those of one of other contractions.
        packs: whether the time counts in which a product's right matrix is packed. It decides which kernels of the
            unoptimised step overlap. Plans are made without it: with it, some floors of variables at home were higher.
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
    copy_latency_s: float = 0.0
    onednn: bool = False
    cudnn: bool = False
    channels_last: bool = False
    l3_cache_bytes: float = L3_CACHE_BYTES
    peer_bytes_per_s: float = 0.0
    convolution_time: float = 1.0
    packs: bool = False

    def out_rate(self, tier: int) -> float:
        """Bytes per second of copies to a tier."""
        return (self.out_bytes_per_s, self.disk_bytes_per_s, self.peer_bytes_per_s)[tier]

    def in_rate(self, tier: int) -> float:
        """Bytes per second of copies from a tier."""
        return (self.in_bytes_per_s, self.disk_bytes_per_s, self.peer_bytes_per_s)[tier]


@dataclass(frozen=True)
class Machine:
    """A device, and the host that its tensors are swapped to.

    Attributes:
        name: its name in `tfswap.simulate(device=)` and on the command line.
        title: its description for reports.
        device: the facts that the memory of its kernels depends on.
        rates: its rates.
        memory_bytes: the bytes that TensorFlow's allocator can manage on it. None: unbounded.
        host_bytes: the bytes of host memory for swapped tensors. None: unbounded.
    """

    name: str
    title: str
    device: DeviceModel
    rates: Rates
    memory_bytes: int | None
    host_bytes: int | None


class _Sheet(NamedTuple):
    """A vendor's figures: peaks in 10^12 FLOP/s and 10^9 bytes/s, memory in MiB as the driver reports it, host memory
    in 10^9 bytes."""

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


class _System(NamedTuple):
    """A machine with several GPUs of one kind.

    Attributes:
        title: the machine's.
        sheet: that of each GPU.
        gpus: the number of GPUs.
        peer: the peak rate between two of them each way, in 10^9 bytes/s.
    """

    title: str
    sheet: _Sheet
    gpus: int
    peer: float


_SYSTEMS: dict[str, _System] = {
    "dgx-1": _System("DGX-1, 8 V100 with NVLink 2", _SHEETS["v100-nvlink"]._replace(link=15.75, host=64), 8, 50),
    "dgx-a100": _System("DGX A100, 8 A100 with NVLink 3", _SHEETS["a100"]._replace(memory_rate=2039), 8, 300),
    "dgx-h100": _System("DGX H100, 8 H100 with NVLink 4", _SHEETS["h100"], 8, 450),
    "dgx-h200": _System("DGX H200, 8 H200 with NVLink 4", _SHEETS["h200"], 8, 450),
}

NAMES = (*_SHEETS, THIS)
"""The names of one device."""
SYSTEMS = tuple(_SYSTEMS)
"""The names of machines with several devices."""

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
"""Parts of the driver's name of a GPU ("NVIDIA H200"), and the machine whose figures are used for it."""

FP32_SHARE = 0.6
"""The share of the FP32 peak that contractions sustain without tensor cores: NVIDIA's ResNet-50 on a V100, 390 images a
second at 24.6 GFLOP each, reaches 0.61 of the peak over a whole step."""
TF32_SHARE = 0.25
"""The same share in TF32, TensorFlow's default where the hardware has it: 800 images a second on an A100 are an eighth
of its peak, and element-wise kernels take about half of such a step."""
STEPS_SHARE = 0.25
"""The rate of element-wise arithmetic as a share of the FP32 peak: one operation where a fused multiply-add counts
two, at half of the rate."""
MEMORY_SHARE = 0.8
"""The share of the memory's bandwidth that a stream of large reads and writes reaches."""
LINK_SHARE = 0.8
"""The share of the link's bandwidth that copies of a few MiB from and to pinned memory reach."""
LAUNCH_S = 5e-6
"""The time of a kernel's launch by TensorFlow's executor and the driver, where the device waits for it."""
CONTEXT_BYTES = 500 << 20
"""Memory that the driver, cuDNN and cuBLAS reserve."""


def _kept_free_bytes(capability: int) -> int:
    """Bytes that TensorFlow leaves to the system, by the GPU's compute capability (gpu_device.cc, MinSystemMemory)."""
    mib = 500 if capability <= 6 else 1050 if capability == 7 else 1536 if capability == 8 else 1800
    return mib << 20


def described(name: str) -> Machine:
    """The device of this name, other than "this". Raises TfswapError with the known names for any other name."""
    sheet = _SHEETS.get(name.lower())
    if sheet is None:
        raise TfswapError(f"no device is called {name!r}: those described are {', '.join(NAMES)}")
    return _machine(name.lower(), sheet)


def described_devices(names: str) -> list[Machine]:
    """The devices of a machine, the first one first: "a100", "a100,a100" (linked by PCIe, by way of the host), or the
    name of a machine with several (SYSTEMS), with the number that is used: "dgx-a100:4".

    Raises TfswapError for other names.
    """
    name, _, number = names.lower().partition(":")
    if (system := _SYSTEMS.get(name)) is not None:
        count = int(number) if number.isascii() and number.isdecimal() and number else 0 if number else system.gpus
        if not 1 <= count <= system.gpus:
            raise TfswapError(f"device is {names!r}: {name} has {system.gpus} GPUs, so give 1 to {system.gpus}")
        made = _machine(name, system.sheet, system.peer if count > 1 else 0.0)
        return [replace(made, title=f"{system.title} (1 of {count})")] * count
    found = [part.strip() for part in names.split(",")]
    if unknown := [part for part in found if part.lower() not in _SHEETS]:
        raise TfswapError(
            f"no device is called {unknown[0]!r}: those described are {', '.join(NAMES)}; machines with several are "
            f"{', '.join(SYSTEMS)}"
        )
    if len(found) > MOST_DEVICES:
        raise TfswapError(f"device lists {len(found)} devices: give {MOST_DEVICES} at most")
    return [described(part) for part in found]


def _machine(name: str, sheet: _Sheet, peer: float = 0.0) -> Machine:
    """The machine of a sheet.

    Args:
        peer: as of _System; 0 for a link by way of the host.
    """
    flops = FP32_SHARE * sheet.fp32 if sheet.tf32 is None else max(FP32_SHARE * sheet.fp32, TF32_SHARE * sheet.tf32)
    link = LINK_SHARE * sheet.link * 1e9
    return Machine(
        name=name,
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
            peer_bytes_per_s=LINK_SHARE * peer * 1e9,
        ),
        memory_bytes=(sheet.memory_mib << 20) - CONTEXT_BYTES - _kept_free_bytes(sheet.capability),
        host_bytes=sheet.host * 10**9,
    )


# Rates of TensorFlow's kernels on one core of an AMD EPYC with AVX-512, by CPU time (benchmarks/cost_model.py). One
# thread copies for swaps, at half of the rate that it reaches alone: the kernels use the same memory.
CPU_CORE_FLOPS_PER_S = 80e9
CPU_CORE_STEPS_PER_S = 2e9
CPU_CORE_MEMORY_BYTES_PER_S = 16e9
CPU_COPY_BYTES_PER_S = 8e9
CPU_LAUNCH_S = 3e-6
MAX_MEMORY_CORES = 8
"""The number of cores that use all of a socket's memory bandwidth."""
DEFAULT_GPU = "a100"


def default_rates(device: DeviceModel) -> Rates:
    """The rates of a device without a profile. They depend on its kind, GPU name, cores and calibration only."""
    if device.is_gpu:
        known = (name for part, name in _NAMED_BY_DRIVER.items() if part in device.name)
        return described(next(known, DEFAULT_GPU)).rates
    cores = max(1, device.intra_op_threads)
    usual = Rates(
        flops_per_s=CPU_CORE_FLOPS_PER_S * cores,
        steps_per_s=CPU_CORE_STEPS_PER_S * cores,
        memory_bytes_per_s=CPU_CORE_MEMORY_BYTES_PER_S * min(cores, MAX_MEMORY_CORES),
        out_bytes_per_s=CPU_COPY_BYTES_PER_S,
        in_bytes_per_s=CPU_COPY_BYTES_PER_S,
        launch_s=CPU_LAUNCH_S,
        cores=cores,
        # While a copy runs on a core, Eigen's threads on the other cores run that core's share. oneDNN gives each
        # thread an equal part, and all wait for the delayed one. Eigen's kernels are half of a step with oneDNN
        # (tfswap.profile: 0.59 and 0.97 on two cores).
        copy_share=(1 + 1 / cores) / 2 if device.onednn else 1 / cores,
        onednn=device.onednn,
        l3_cache_bytes=float(device.l3_cache_bytes or L3_CACHE_BYTES),
    )
    return usual if device.calibration is None else _calibrated(usual, device.calibration)


def _calibrated(usual: Rates, found: Calibration) -> Rates:
    return replace(
        usual,
        flops_per_s=usual.flops_per_s * found.products,
        convolution_time=found.products / found.convolutions,
        steps_per_s=usual.steps_per_s * found.steps,
        memory_bytes_per_s=usual.memory_bytes_per_s * found.memory,
        out_bytes_per_s=usual.out_bytes_per_s * found.copies,
        in_bytes_per_s=usual.in_bytes_per_s * found.copies,
        launch_s=found.launch_s,
    )
