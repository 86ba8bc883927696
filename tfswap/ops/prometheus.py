"""Counters in the text format that Prometheus reads (prometheus.io/docs/instrumenting/exposition_formats)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

UNBOUNDED = 2**64 - 1
"""Stands for no limit in the counters."""

NAMES = {"device_peaks": "device_peak_bytes"}
"""The names of fields with a figure for each device."""


class Metrics:
    """A dataclass of figures, each a metric.

    Attributes:
        GROUP: the beginning of the metrics' names.
        GROWING: the names of fields that only grow, in the process's life.
    """

    GROUP: ClassVar[str] = "tfswap"
    GROWING: ClassVar[frozenset[str]] = frozenset()

    def prometheus(self, **labels: str) -> str:
        """The figures as Prometheus reads them, one a line. Those that there are none of are left out.

        Args:
            labels: of all metrics, as step="train_step".
        """
        return "".join(self._lines(labels))

    def _lines(self, labels: Mapping[str, str]) -> Iterator[str]:
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType] subclasses are dataclasses
            value = getattr(self, field.name)
            by_device = value if isinstance(value, Mapping) else {None: value}
            rows = {device: each for device, each in by_device.items() if each is not None and each != UNBOUNDED}
            name = f"{self.GROUP}_{NAMES.get(field.name, field.name.removesuffix('_s'))}"
            if field.name.endswith("_s"):
                name += "_seconds"
            kind = "counter" if field.name in self.GROWING else "gauge"
            if kind == "counter":
                name += "_total"
            if rows:
                yield f"# TYPE {name} {kind}\n"
            for device, each in rows.items():
                yield f"{name}{_shown(labels if device is None else {**labels, 'device': device})} {each}\n"


def _shown(labels: Mapping[str, str]) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""
