"""What the proof's processes share: a part of the device, turns on the machine, and steps that are timed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

MIB = 2**20
GB = 1e9
SMALL = bool(os.environ.get("GPU_PROOF_SMALL"))
"""Whether nets and tensors are small, to try the command itself."""
EMULATED = bool(os.environ.get("GPU_PROOF_EMULATED"))
"""Whether the GPU is an emulated one of the tests."""
EMULATED_BYTES = 2 << 30
EMULATED_WORKSPACE = 1 << 20
EMULATED_KERNEL_US, EMULATED_LINK = 100.0, 8e9
"""Times of kernels and rates of copies, so that a profile has both."""
UNTIL = "GPU_PROOF_UNTIL"
"""The variable that has the time (seconds since the epoch) at which the process is stopped."""
DEVICE = "GPU:0"


def attach_emulated(memory_bytes: int = EMULATED_BYTES) -> None:
    """Gives this process an emulated GPU; what the environment says of it already stays."""
    import emulated_gpu

    link = emulated_gpu.Link(EMULATED_LINK)
    gpus = emulated_gpu.Gpus(
        memory=memory_bytes,
        kernel_us=EMULATED_KERNEL_US,
        to_device=link,
        to_host=link,
        workspace=EMULATED_WORKSPACE,
        cuda=True,
    )
    for name, value in gpus.environment().items():
        os.environ.setdefault(name, value)
    emulated_gpu.attach()


def prepare(memory_mib: int, deterministic: bool = True) -> None:
    """Let this process have so much of the device, with the same results each time."""
    import tensorflow as tf

    if EMULATED:  # TensorFlow's own limit does not hold for such a device
        attach_emulated(min(memory_mib * MIB, EMULATED_BYTES))
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise SystemExit("TensorFlow sees no GPU")  # else all would run on the CPU
    tf.config.set_logical_device_configuration(gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=memory_mib)])
    if deterministic:
        tf.keras.utils.set_random_seed(0)
        tf.config.experimental.enable_op_determinism()


def left_s() -> float:
    """How long this process may go on."""
    return float(os.environ.get(UNTIL, "inf")) - time.time()


@contextlib.contextmanager
def machine(lock: int) -> Iterator[None]:
    """Of this command's processes either one works here that has it for itself (fcntl.LOCK_EX), or several that do not
    measure times (fcntl.LOCK_SH).
    """
    path = os.environ.get("GPU_PROOF_LOCK")
    if not path:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, lock)
        yield


class Steps:
    """Runs steps one by one, and keeps their times and peaks."""

    def __init__(self, call: Callable[[], Any]):
        self.call = call
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.digest = hashlib.sha256()

    def run(self, count: int) -> None:
        import tensorflow as tf

        for _ in range(count):
            tf.config.experimental.reset_memory_stats(DEVICE)
            began = time.perf_counter()
            loss = self.call().numpy()
            self.seconds.append(time.perf_counter() - began)
            self.peaks.append(tf.config.experimental.get_memory_info(DEVICE)["peak"])
            self.digest.update(loss.tobytes())
