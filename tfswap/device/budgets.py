"""Budgets of devices: a limit for all that this process plans on a device, given once."""

from __future__ import annotations

import re

from tfswap.device import machine
from tfswap.errors import TfswapError
from tfswap.support.sizes import parse_limit

_budgets: dict[str, int] = {}


def budget(device: str, memory_limit: int | str | None) -> None:
    """Give all models of this process one limit on a device.

        tfswap.budget("GPU:0", "20GiB")

    It holds for each step that is planned from then on, whatever decorates or runs it: where a step has no limit of its
    own it has this one, and else the lower of the two. All tensors on the device count, those of other models too, so
    the models' variables and one step's tensors together keep it: steps run one at a time. A step whose peak passes it
    is reported, with what others have allocated.

    Args:
        device: "GPU:0" or "CPU:0".
        memory_limit: bytes or a size; None for no budget.

    Raises TfswapError: there is no such device, or the limit is malformed.
    """
    if not isinstance(device, str) or not re.fullmatch(r"(GPU|CPU):[0-9]+", device) or not machine.has_device(device):
        raise TfswapError(f'device is {device!r}, and this process has no such one: give one as "GPU:0"')
    if memory_limit is None:
        _budgets.pop(device, None)
    else:
        _budgets[device] = parse_limit(memory_limit)


def within_budget(device: str, limit_bytes: int) -> int:
    """A limit in bytes, or the device's budget where that is lower."""
    return min(limit_bytes, _budgets.get(device, limit_bytes))


def budget_of(device: str) -> int | None:
    """The device's budget in bytes; None where there is none."""
    return _budgets.get(device)
