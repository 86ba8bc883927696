"""The measured times of a step's kernels: a frozen value, saved as JSON. No TensorFlow here.

A kernel is identified by its node's name, its op, and the types of its inputs and outputs, so a profile also holds for
a later trace of the step. A kernel with an unknown name (a layer was renamed, a model built twice) has the median time
of the kernels with the same op and types. Where there is no such kernel, it has no time here. An addition whose like
was not measured has the time of an update in place: that is what becomes of one where the variable is at home on the
host.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tfswap.errors import InvalidModel
from tfswap.ir.graph import Node, Output
from tfswap.ir.op_traits import UPDATE_ARITHMETIC
from tfswap.ir.types import TensorType
from tfswap.kernels.hardware import Rates
from tfswap.support.files import read_saved, write_whole
from tfswap.support.json_fields import decode_saved

FORMAT_VERSION = 1

HANDLE = TensorType("resource", ())
UPDATES = {arithmetic: update for update, arithmetic in UPDATE_ARITHMETIC.items()}
"""By op, the update in place that computes it."""

MAY_BE_ZERO = frozenset({"launch_s", "copy_latency_s", "copy_share", "peer_bytes_per_s", "convolution_time"})
"""Rates that may be below 1."""


class Timed(NamedTuple):
    """One measured kernel.

    Attributes:
        name: its node's name.
        op: its node's op type.
        types: the types of its inputs and outputs, as `types_of` writes them.
        seconds: the seconds of one run.
    """

    name: str
    op: str
    types: str
    seconds: float


class Density(NamedTuple):
    """The density of one measured tensor.

    Attributes:
        tensor: its name ("node:0").
        types: the types of its node's inputs and outputs, as `types_of` writes them.
        share: the share of its values that are not zero.
    """

    tensor: str
    types: str
    share: float


def types_of(node: Node) -> str:
    """The types of a node's inputs and outputs, as text."""
    inputs, outputs = ",".join(str(t.type) for t in node.inputs), ",".join(map(str, node.outputs))
    return f"{inputs}->{outputs}"


@dataclass(frozen=True)
class Profile:
    """Measured times of a step's kernels, and the copy rates of the machine. Times are in seconds, rates per second.

    Attributes:
        kind: the kind of the device that the step ran on, "cpu" or "gpu".
        machine: the name of that device.
        fingerprint: the fingerprint of the graph that ran, as in a Plan.
        rates: the machine's rates. Those of kernels are fitted to the measured times.
        unordered: the time of the unoptimised step, divided by that of the same kernels in order, one after another.
            None where the unoptimised step was not run because it does not fit.
        kernels: all measured kernels.
        densities: shares of nonzero values in tensors saved for the backward pass.
    """

    kind: str
    machine: str
    fingerprint: str
    rates: Rates
    unordered: float | None
    kernels: tuple[Timed, ...]
    densities: tuple[Density, ...] = ()

    @cached_property
    def _exact(self) -> dict[tuple[str, str, str], float]:
        return {(k.name, k.op, k.types): k.seconds for k in self.kernels}

    @cached_property
    def _alike(self) -> dict[tuple[str, str], float]:
        found: dict[tuple[str, str], list[float]] = {}
        for k in self.kernels:
            found.setdefault((k.op, k.types), []).append(k.seconds)
        return {key: statistics.median(seconds) for key, seconds in found.items()}

    def seconds(self, node: Node) -> float | None:
        """The seconds of the kernel of `node` once it has started; None where no such kernel was measured."""
        types = types_of(node)
        found = self._exact.get((node.name, node.op, types))
        if found is None:
            found = self._alike.get((node.op, types))
        if found is None and node.op in UPDATES:
            found = self._alike.get((UPDATES[node.op], f"{HANDLE},{node.inputs[1].type}->"))
        return found

    @cached_property
    def _shares(self) -> dict[tuple[str, str], float]:
        return {(d.tensor, d.types): d.share for d in self.densities}

    def density(self, tensor: Output) -> float | None:
        """The share of nonzero values of `tensor`; None where it was not measured."""
        return self._shares.get((tensor.name, types_of(tensor.node)))

    def coverage(self, nodes: Iterable[Node]) -> float:
        """The share of these nodes that this profile has a time for."""
        known = [self.seconds(node) is not None for node in nodes]
        return sum(known) / len(known) if known else 1.0

    def to_json(self) -> str:
        """The profile as JSON text."""
        content = dataclasses.asdict(self) | {"format": FORMAT_VERSION, "kernels": [list(k) for k in self.kernels]}
        content["densities"] = [list(d) for d in self.densities]
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that `to_json` wrote. Raises InvalidModel on anything else, naming the field."""
        return decode_saved(cls, text, "profile", FORMAT_VERSION, _check_values, remedy="measure the profile again")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to `path`, whole or not at all."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """The profile saved at `path`. Raises InvalidModel when there is none, naming the path."""
        return read_saved(path, "profile", cls.from_json)


def _check_values(profile: Profile) -> None:
    """Refuse values that no measurement can give."""
    for name, value in dataclasses.asdict(profile.rates).items():
        lowest = 0 if name in MAY_BE_ZERO else 1  # others are divided by
        if not isinstance(value, bool) and value < lowest:
            raise InvalidModel(f"profile.rates.{name} is {value}, and must be at least {lowest}")
    times = {f"the time of {k.name!r}": k.seconds for k in profile.kernels}
    shares = {f"the density of {d.tensor!r}": d.share for d in profile.densities}
    for name, value in (*times.items(), ("profile.unordered", profile.unordered), *shares.items()):
        if value is not None and value < 0:
            raise InvalidModel(f"{name} is {value}, and nothing measured is negative")
    for name, value in (*shares.items(), ("profile.rates.copy_share", profile.rates.copy_share)):
        if value > 1:
            raise InvalidModel(f"{name} is {value}, and no share is above 1")
