"""The options of an unmodified program: passed on by the environment, checked before they are used."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfswap.compiler.request import Request, check, one_of
from tfswap.ir.permits import BITS, TACTICS
from tfswap.support.limit_file import from_environment
from tfswap.support.sizes import is_share, parse_limit

RUN, LIMIT, WATCH = "TFSWAP_RUN", "TFSWAP_MEMORY_LIMIT", "watch"
"""As in startup/sitecustomize.py, which imports nothing of tfswap."""
STARTUP = Path(__file__).parent / "startup" / "sitecustomize.py"
"""What runs at the start of a process."""
DEFAULTS: dict[str, Any] = {
    "memory_limit": None,
    "max_slowdown": None,
    "tactics": TACTICS,
    "host_memory_limit": None,
    "spill_dir": None,
    "spill_limit": None,
    "profile": None,
    "precision": None,
    "values": BITS,
    "on_exceeded": "warn",
    "training_only": False,
}
"""The options, which are those of `tfswap.optimize`, and whether functions without gradients run as they are."""


@dataclass(frozen=True)
class Settings:
    """Checked options.

    Attributes:
        request: what to do to each step.
        on_exceeded: "warn" or "raise".
        training_only: whether functions without gradients run as they are.
        options: the others by name, for `tfswap.optimize`.
    """

    request: Request
    on_exceeded: str
    training_only: bool
    options: Mapping[str, Any]

    @property
    def rescues(self) -> bool:
        """Whether steps are planned only when they run out of memory: no limit is given."""
        return self.request.memory_limit is None and self.request.max_slowdown is None

    def limit_bytes(self, device: str) -> int | None:
        """The limit of a device in bytes; None where there is none, or it is a share of each step's own."""
        limit = self.request.memory_limit
        if isinstance(limit, Mapping):
            limit = limit.get(device)
        return None if limit is None or self.request.max_slowdown is not None or is_share(limit) else parse_limit(limit)

    @staticmethod
    def of(given: Mapping[str, Any]) -> Settings:
        """Raises TfswapError naming the option that is malformed."""
        options = {**DEFAULTS, **given}
        training_only = options.pop("training_only")
        planning = {name: value for name, value in options.items() if name not in ("memory_limit", "on_exceeded")}
        one_of("on_exceeded", options["on_exceeded"], ("warn", "raise"))
        request = check(from_environment(options["memory_limit"]), plan=None, mode="optimize", **planning)
        return Settings(request, options["on_exceeded"], training_only, options)


@functools.cache
def _settings(given: str) -> Settings:
    return Settings.of(json.loads(given))


def settings(given: Mapping[str, Any]) -> Settings:
    """The settings of the process, from the options that its environment had at its start."""
    return _settings(json.dumps(given, sort_keys=True))


def environment(given: Mapping[str, Any]) -> dict[str, str]:
    """The environment of a process with these options, and with the number of this process, which becomes that one."""
    folders = [str(STARTUP.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = json.dumps({**given, "process": os.getpid()})
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), RUN: run}
