"""Names of devices."""

from __future__ import annotations


def within_worker(device: str) -> str:
    """A device's name without job and task, "GPU:0"; "" where there is none.

    Nodes name one device in both forms, "/device:GPU:0" and "/job:localhost/replica:0/task:0/device:GPU:0".
    """
    return device.partition("/device:")[2]
