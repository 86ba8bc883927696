"""A Keras callback that reports the device memory of an optimized model's training, epoch by epoch."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfswap.device import arena, machine
from tfswap.frontends.keras import Highest, training
from tfswap.support.sizes import format_bytes

log = logging.getLogger("tfswap")


@dataclass(frozen=True)
class EpochMemory:
    """The highest figures of one epoch's training steps, in bytes. Each size of batch may have a plan of its own.

    Attributes:
        epoch: counted from 0, as callbacks do.
        planned_peak_bytes: the highest planned peak; each step's is of the arena in which it ran.
        measured_peak_bytes: the allocator's peak; None where it has no statistics.
        limit_bytes: the highest limit of the steps; None where a step had none.
    """

    epoch: int
    planned_peak_bytes: int
    measured_peak_bytes: int | None
    limit_bytes: int | None


class MemoryReport(keras.callbacks.Callback):
    """Logs each epoch's planned and measured peak, and keeps them in `epochs`.

    To measure each epoch by itself, it resets the allocator's statistics when an epoch begins
    (`tf.config.experimental.reset_memory_stats`). Validation is not planned, and its memory is not counted.

    Args:
        log_dir: a folder to write them to for TensorBoard as well, as scalars "memory/planned_peak_bytes",
            "memory/measured_peak_bytes" and "memory/limit_bytes" by epoch. TensorBoard itself is not needed.

    Attributes:
        epochs: an EpochMemory for each.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None):
        super().__init__()
        self.epochs: list[EpochMemory] = []
        self._log_dir = log_dir
        self._writer: Any = None
        self._device = ""
        self._peak_bytes: int | None = None
        self._measured = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Raises TfswapError where the model is not optimized."""
        training(self.model)
        self._device = machine.current_device()[0]
        if self._log_dir is not None:
            self._writer = tf.summary.create_file_writer(os.fspath(self._log_dir))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._measured = False
        training(self.model).take_highest()
        if arena.memory_info(self._device) is not None:
            tf.config.experimental.reset_memory_stats(self._device)

    def on_test_begin(self, logs: Any = None) -> None:
        self._measure()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._measure()
        trained = training(self.model)
        highest = trained.take_highest() or Highest.of(trained.report())  # an epoch without steps
        found = EpochMemory(epoch, highest.planned_peak_bytes, self._peak_bytes, highest.limit_bytes)
        self.epochs.append(found)
        self._log(found)
        self._write(found)

    def on_train_end(self, logs: Any = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _measure(self) -> None:
        """Record the peak of the epoch's training, before validation."""
        if not self._measured:
            info = arena.memory_info(self._device)
            self._peak_bytes = None if info is None else info.peak_bytes
            self._measured = True

    def _log(self, found: EpochMemory) -> None:
        measured = found.measured_peak_bytes
        log.info(
            "tfswap: epoch %d: peak planned %s, measured %s, limit %s",
            found.epoch + 1,
            format_bytes(found.planned_peak_bytes),
            f"nothing, since {self._device} keeps no statistics" if measured is None else format_bytes(measured),
            "none" if found.limit_bytes is None else format_bytes(found.limit_bytes),
        )

    def _write(self, found: EpochMemory) -> None:
        if self._writer is None:
            return
        metadata = tf.compat.v1.SummaryMetadata()
        metadata.plugin_data.plugin_name = "scalars"
        metadata.data_class = SCALAR
        with self._writer.as_default(step=found.epoch), tf.device("CPU:0"):
            for name in ("planned_peak_bytes", "measured_peak_bytes", "limit_bytes"):
                value = getattr(found, name)
                if value is not None:
                    # Not tf.summary.scalar, which needs TensorBoard to be installed. TensorBoard shows floats.
                    tf.summary.write(f"memory/{name}", tf.constant(value, tf.float32), metadata=metadata)
        self._writer.flush()


SCALAR = 1  # DATA_CLASS_SCALAR of summary.proto
