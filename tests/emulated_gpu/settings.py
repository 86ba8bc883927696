"""The properties of the emulated devices, which the plug-in reads from the environment (csrc/settings.h)."""

from __future__ import annotations

import dataclasses
from typing import Any

LEAST_BYTES = 1 << 20
"""Of a device: TensorFlow's allocator and its first tensors need that much."""

ROLES = {"compute": 1, "in": 2, "out": 4, "between": 8}
"""Of streams: what computes, and what copies to the device, to the host, and to other devices. Masks of the plug-in."""


class EmulatedGpuError(Exception):
    """What keeps an emulated GPU from being used, in one line."""


@dataclasses.dataclass(frozen=True)
class Link:
    """How copies of one direction travel.

    Attributes:
        bandwidth: bytes per second; 0 for no time.
        latency_us: what each copy takes besides, in microseconds.
    """

    bandwidth: float = 0.0
    latency_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Gpus:
    """The devices of a process, all of one kind.

    Attributes:
        memory: bytes that TensorFlow's allocator may have on each.
        count: how many; TensorFlow calls them GPU:0, GPU:1, ...
        kernel_us: how long a kernel takes on the device.
        to_device, to_host, between: copies of pinned memory, and of one device's to another's.
        pageable: copies of host memory that is not pinned, either way; by default they are as fast as the others.
        jitter: a seed by which times are drawn, from nothing to twice as long; 0 for times as they are given.
        protect: host code that touches device memory while no kernel runs is killed by SIGSEGV.
        poison: what is freed is overwritten with what is no number.
        check: whether races are checked.
        ends_late: work ends only when no thread of the process has anything else to do, so that no thread sees an
            end that it did not wait for.
        ignored_waits, early_events: faults on purpose, by ROLES of streams: these wait for no others; events on these
            seem to have ended immediately.
        temporaries: kernels take of the device's memory what TensorFlow's GPU kernels take besides their results.
        workspace: bytes that cuDNN's fastest algorithm for any convolution takes, of what TensorFlow lets it have. Of
            several, the fastest first: TensorFlow tries these algorithms at a convolution's first run.
        product_workspace: bytes that cuBLAS takes for a product of matrices, where they are left.
        others: bytes of each device that another process has.
        copied_callbacks: callbacks of copies by ops whose types begin so are copied, as TensorFlow may do, and the
            copies outlive them: what a callback owns must not live as long.
        cuda: stand-ins for CUDA's driver and NVRTC are there, and TensorFlow says that it was built for CUDA.
    """

    memory: int = 256 << 20
    count: int = 1
    kernel_us: float = 0.0
    to_device: Link = Link()
    to_host: Link = Link()
    between: Link = Link()
    pageable: Link = Link()
    jitter: int = 0
    protect: bool = True
    poison: bool = True
    check: bool = True
    ends_late: bool = False
    ignored_waits: tuple[str, ...] = ()
    early_events: tuple[str, ...] = ()
    temporaries: bool = True
    workspace: int | tuple[int, ...] = 0
    product_workspace: int = 0
    others: int = 0
    copied_callbacks: str = ""
    cuda: bool = False

    def environment(self) -> dict[str, str]:
        """Raises EmulatedGpuError where no such device can be."""
        self._check()
        links = {"IN": self.to_device, "OUT": self.to_host, "BETWEEN": self.between, "PAGEABLE": self.pageable}
        values: dict[str, Any] = {
            "MEMORY": self.memory,
            "COUNT": self.count,
            "KERNEL_US": self.kernel_us,
            **{f"{name}_BANDWIDTH": link.bandwidth for name, link in links.items()},
            **{f"{name}_LATENCY_US": link.latency_us for name, link in links.items()},
            "JITTER": self.jitter,
            "PROTECT": int(self.protect),
            "POISON": int(self.poison),
            "CHECK": int(self.check),
            "LATE": int(self.ends_late),
            "IGNORED_WAITS": mask(self.ignored_waits),
            "EARLY_EVENTS": mask(self.early_events),
            "TEMPORARIES": int(self.temporaries),
            "WORKSPACE": ",".join(map(str, self.workspace if isinstance(self.workspace, tuple) else (self.workspace,))),
            "PRODUCT_WORKSPACE": self.product_workspace,
            "OTHERS": self.others,
            "COPIED_CALLBACKS": self.copied_callbacks,
            "CUDA": int(self.cuda),
        }
        return {f"EMULATED_GPU_{name}": str(value) for name, value in values.items()}

    def _check(self) -> None:
        if self.memory < LEAST_BYTES:
            raise EmulatedGpuError(
                f"An emulated GPU with {self.memory} bytes: TensorFlow's own needs are {LEAST_BYTES}, so give it more."
            )
        if not 0 <= self.others <= self.memory - LEAST_BYTES:
            raise EmulatedGpuError(
                f"An emulated GPU with {self.memory} bytes of which another process has {self.others}: "
                f"TensorFlow needs {LEAST_BYTES} of them."
            )
        if not 1 <= self.count <= 64:
            raise EmulatedGpuError(f"{self.count} emulated GPUs: there can be 1 to 64.")
        links = (self.to_device, self.to_host, self.between, self.pageable)
        times = (self.kernel_us, *(number for link in links for number in dataclasses.astuple(link)))
        if not all(0 <= each < float("inf") for each in times):
            raise EmulatedGpuError(
                f"An emulated GPU's times and rates are numbers from 0 on, and one of {times} is not."
            )


def mask(roles: tuple[str, ...]) -> int:
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise EmulatedGpuError(f"No stream has the role {unknown[0]!r}: roles are {', '.join(ROLES)}.")
    return sum(ROLES[role] for role in set(roles))
