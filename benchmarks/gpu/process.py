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


def device() -> str:
    """Where the parts run: the first GPU; a CPU's arena where there is none, to try the command itself."""
    import tensorflow as tf

    return "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"


def prepare(memory_mib: int, deterministic: bool = True) -> str:
    """Let this process have so much of the device, with the same results each time. Returns the device."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if gpus and not os.environ.get("GPU_PROOF_WHOLE_DEVICE"):
        tf.config.set_logical_device_configuration(
            gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=memory_mib)]
        )
    if deterministic:
        tf.keras.utils.set_random_seed(0)
        tf.config.experimental.enable_op_determinism()
    return device()


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

    def __init__(self, where: str, call: Callable[[], Any]):
        self.where, self.call = where, call
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.digest = hashlib.sha256()

    def run(self, count: int) -> None:
        import tensorflow as tf

        for _ in range(count):
            tf.config.experimental.reset_memory_stats(self.where)
            began = time.perf_counter()
            loss = self.call().numpy()
            self.seconds.append(time.perf_counter() - began)
            self.peaks.append(tf.config.experimental.get_memory_info(self.where)["peak"])
            self.digest.update(loss.tobytes())
