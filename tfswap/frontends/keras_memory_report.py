"""A Keras callback that reports the device memory of an optimized model's training, epoch by epoch."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

import tfswap.ops
from tfswap.device import arena, machine
from tfswap.device.placement import devices_like
from tfswap.frontends.keras import Highest, training
from tfswap.support.sizes import format_bytes

log = logging.getLogger("tfswap")


@dataclass(frozen=True)
class EpochMemory:
    """The highest figures of one epoch's training steps, in bytes. Each size of batch may have a plan of its own. Of
    several devices they are the first one's.

    Attributes:
        epoch: counted from 0, as callbacks do.
        planned_peak_bytes: the highest planned peak; each step's is of the arena in which it ran.
        measured_peak_bytes: the allocator's peak; None where it has no statistics.
        limit_bytes: the highest limit of the steps; None where a step had none.
        device: the device that the figures are of ("GPU:0").
    """

    epoch: int
    planned_peak_bytes: int
    measured_peak_bytes: int | None
    limit_bytes: int | None
    device: str = ""
    _others: tuple[EpochMemory, ...] = field(repr=False, compare=False, default=())

    @property
    def devices(self) -> Mapping[str, EpochMemory]:
        """The figures of each device that the model trains on, by its name."""
        return {each.device: each for each in (self, *self._others)}


class MemoryReport(keras.callbacks.Callback):
    """Logs each epoch's planned and measured peak, and keeps them in `epochs`.

    They are among the epoch's ordinary Keras logs too, for `History` and for callbacks after this one (CSVLogger,
    TensorBoard, and those of MLflow and Weights & Biases): "memory_peak_bytes" and "memory_limit_bytes", of several
    devices those of each ("memory_peak_bytes_GPU:1"), and "memory_stall_s", how long the epoch's steps waited for
    copies.

    To measure each epoch by itself, it resets the allocator's statistics when an epoch begins
    (`tf.config.experimental.reset_memory_stats`). Validation is not planned, and its memory is not counted.

    Args:
        log_dir: a folder to write them to for TensorBoard as well, as scalars "memory/planned_peak_bytes",
            "memory/measured_peak_bytes" and "memory/limit_bytes" by epoch; of several devices those of each
            ("memory/GPU:1/planned_peak_bytes"). TensorBoard itself is not needed.

    Attributes:
        epochs: an EpochMemory for each.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None):
        super().__init__()
        self.epochs: list[EpochMemory] = []
        self._log_dir = log_dir
        self._writer: Any = None
        self._names: Sequence[str] = ()  # of devices that the model may train on
        self._peaks: dict[str, int | None] = {}
        self._measured = False
        self._stalled_s = 0.0  # of the process, when the epoch began

    def on_train_begin(self, logs: Any = None) -> None:
        """Raises TfswapError where the model is not optimized."""
        training(self.model)
        first = machine.current_device()[0]
        self._names = devices_like(first)
        if self._log_dir is not None:
            self._writer = tf.summary.create_file_writer(os.fspath(self._log_dir))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._measured = False
        self._stalled_s = _stalled_s()
        training(self.model).take_highest()
        for name in self._names:
            if arena.memory_info(name) is not None:
                tf.config.experimental.reset_memory_stats(name)

    def on_test_begin(self, logs: Any = None) -> None:
        self._measure()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._measure()
        trained = training(self.model)
        reports = trained.report().devices
        highest = trained.take_highest() or {name: Highest.of(each) for name, each in reports.items()}  # without steps
        first, *others = (
            EpochMemory(epoch, each.planned_peak_bytes, self._peaks.get(name), each.limit_bytes, name)
            for name, each in highest.items()
        )
        found = dataclasses.replace(first, _others=tuple(others))
        self.epochs.append(found)
        self._log(found)
        self._write(found)
        if logs is not None:
            logs.update(_as_logs(found), memory_stall_s=_stalled_s() - self._stalled_s)

    def on_train_end(self, logs: Any = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _measure(self) -> None:
        """Record the peak of the epoch's training, before validation."""
        if not self._measured:
            found = {name: arena.memory_info(name) for name in self._names}
            self._peaks = {name: None if info is None else info.peak_bytes for name, info in found.items()}
            self._measured = True

    def _log(self, found: EpochMemory) -> None:
        several = len(found.devices) > 1
        for name, each in found.devices.items():
            measured = each.measured_peak_bytes
            log.info(
                "tfswap: epoch %d%s: peak planned %s, measured %s, limit %s",
                found.epoch + 1,
                f" on {name}" if several else "",
                format_bytes(each.planned_peak_bytes),
                f"nothing, since {name} keeps no statistics" if measured is None else format_bytes(measured),
                "none" if each.limit_bytes is None else format_bytes(each.limit_bytes),
            )

    def _write(self, found: EpochMemory) -> None:
        if self._writer is None:
            return
        metadata = tf.compat.v1.SummaryMetadata()
        metadata.plugin_data.plugin_name = "scalars"
        metadata.data_class = SCALAR
        with self._writer.as_default(step=found.epoch), tf.device("CPU:0"):
            for device, each in found.devices.items():
                at = f"memory/{device}" if len(found.devices) > 1 else "memory"
                for name in ("planned_peak_bytes", "measured_peak_bytes", "limit_bytes"):
                    value = getattr(each, name)
                    if value is not None:
                        # Not tf.summary.scalar, which needs TensorBoard to be installed. TensorBoard shows floats.
                        tf.summary.write(f"{at}/{name}", tf.constant(value, tf.float32), metadata=metadata)
        self._writer.flush()


def _as_logs(found: EpochMemory) -> dict[str, float]:
    """An epoch's figures by their names in Keras' logs, which are floats."""
    several = len(found.devices) > 1
    figures = {
        f"memory_{name}_bytes{f'_{device}' if several else ''}": value
        for device, each in found.devices.items()
        for name, value in (("peak", each.measured_peak_bytes), ("limit", each.limit_bytes))
    }
    return {name: float(value) for name, value in figures.items() if value is not None}


def _stalled_s() -> float:
    """How long steps of this process have waited for copies."""
    counted = tfswap.ops.stats()
    return counted.release_stall_s + counted.await_stall_s + counted.inline_copy_s


SCALAR = 1  # DATA_CLASS_SCALAR of summary.proto
