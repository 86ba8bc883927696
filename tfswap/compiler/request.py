"""The user's request, checked before anything is traced, read or planned, in the same way by every front end."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypedDict

from tfswap.analysis.reduced_precision import EVERYTHING, PRECISIONS, Rules
from tfswap.compiler.options import Options, Spill
from tfswap.compiler.policy import Policy
from tfswap.device import arena, machine
from tfswap.device.budgets import budget_of
from tfswap.errors import InfeasibleMemoryLimit, TfswapError
from tfswap.ir.permits import BITS, KNOWN_TACTICS, VALUES
from tfswap.kernels.profile import Profile
from tfswap.passes.device_carriers import FIRST
from tfswap.plan.plan import Plan
from tfswap.planner.host_tiers import STAGING_BYTES
from tfswap.support.limit_file import LimitFile, watched
from tfswap.support.sizes import Limit, check_limits, format_bytes, is_share, parse_limit

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer

MODES = ("optimize", "analyze")

Precision = str | Mapping[str, str] | Iterable[tuple[str, str]] | None
"""One for all tensors, or by pattern of the names of nodes: the first pattern that fits holds."""


class PlanOptions(TypedDict, total=False):
    """The keyword arguments of steps and files besides the limit, for type checkers."""

    tactics: Sequence[str]
    host_memory_limit: int | str | None
    plan: Plan | str | os.PathLike[str] | None
    mode: str
    profile: Profile | str | os.PathLike[str] | None
    precision: Precision
    spill_dir: str | os.PathLike[str] | None
    spill_limit: int | str | None
    policy: Policy | None
    max_slowdown: float | None
    values: str


@dataclass(frozen=True)
class Request:
    """A request for one step.

    Attributes:
        memory_limit: bytes, a size, a share, or None for the device's own limit; or such a one for each device.
        options: the other options.
        plan: an earlier plan to apply; None to make one.
        mode: one of MODES.
        limit_file: where the limit is read before each call; None where it changes by assignment only.
        max_slowdown: of all plans whose predicted time is at most this multiple of the unoptimised step's, take that
            with the lowest peak; None for the fastest plan that keeps the limit.
    """

    memory_limit: Limit
    options: Options
    plan: Plan | None
    mode: str
    limit_file: LimitFile | None = None
    max_slowdown: float | None = None

    @property
    def changes_nothing(self) -> bool:
        return self.mode == "analyze"

    @property
    def limits_host(self) -> bool:
        """Whether a part of a GPU's step that runs on the CPU has a limit of its own."""
        return isinstance(self.memory_limit, Mapping) and FIRST in self.memory_limit

    @property
    def single_limit(self) -> int | str | None:
        """The limit of a step on one device. Raises TfswapError where there is one for each device."""
        if isinstance(self.memory_limit, Mapping):
            given = dict(self.memory_limit)
            raise TfswapError(f"memory_limit is {given}, and here a step has one device: give one limit")
        return self.memory_limit

    def choose(self, optimizer: Optimizer, device: str, *, ordered: bool = False) -> Plan:
        """The requested plan: the given one, or a new one for the limit.

        Args:
            ordered: order the step also where the limit is well above the unoptimised peak.

        Raises:
            InfeasibleMemoryLimit: no plan keeps the limit. (In "analyze" mode, the result is a plan that changes
                nothing.)
            InvalidModel: the given plan is of another graph, or damaged.
            TfswapError: there is no limit.
        """
        if self.plan is not None:
            return optimizer.adopt(self.plan, self.limit(device))
        limit = self.limit(device)
        if self.max_slowdown is not None:
            from tfswap.compiler.slowdown import smallest_limit  # requests are checked before anything is planned

            limit_bytes = None if limit is None else parse_limit(limit, lambda: optimizer.baseline.peak_bytes)
            try:
                limit = smallest_limit(optimizer, self.max_slowdown, limit_bytes)
            except InfeasibleMemoryLimit:
                if not self.changes_nothing:
                    raise
                return optimizer.unchanged(limit_bytes)
        return optimizer.analysis(limit, ordered) if self.changes_nothing else optimizer.plan(limit, ordered=ordered)

    def share(self, device: str) -> str:
        """The requested limit where it is a share of the unoptimised peak; otherwise ""."""
        limit = self.memory_limit.get(device) if isinstance(self.memory_limit, Mapping) else self.memory_limit
        return limit if isinstance(limit, str) and is_share(limit) else ""

    def limit(self, device: str) -> int | str | None:
        """The requested limit, or the device's budget, or its own limit. None: there is none, and none is needed.

        Raises:
            TfswapError: there is neither, and one is needed.
        """
        if isinstance(self.memory_limit, Mapping):
            if unknown := next((name for name in self.memory_limit if not machine.has_device(name)), None):
                raise TfswapError(
                    f"memory_limit has {unknown}, and this process has no such device: see "
                    "tf.config.list_logical_devices()"
                )
            if device not in self.memory_limit:
                raise TfswapError(
                    f"memory_limit has {', '.join(self.memory_limit)}, and the step also runs on {device}: give a "
                    "limit for each of its devices"
                )
            return self.memory_limit[device]
        if self.memory_limit is not None:
            return self.memory_limit
        limit = None if self.plan is not None else budget_of(device) or arena.device_limit_bytes(device)
        if limit is None and self.plan is None and self.max_slowdown is None and not self.changes_nothing:
            raise TfswapError(
                f"memory_limit is not given and {device}'s allocator has no limit of its own: "
                'say how much the step may take, such as memory_limit="6GiB", or max_slowdown=1.1'
            )
        return limit

    def with_limit(self, limit: Limit) -> Request:
        """The same request with another limit. Raises TfswapError where it is no limit, or a plan was given."""
        limit, file = watched(limit)
        limit = check_limits(limit)
        if self.plan is not None:
            raise TfswapError("memory_limit can't change where a plan was given (plan=): it was made for one limit")
        return dataclasses.replace(self, memory_limit=limit, limit_file=file)

    def complaint(self, step: str, plan: Plan) -> str | None:
        """The error message for a given plan that exceeds its limit here; None where it keeps it."""
        if self.plan is None or self.changes_nothing or plan.keeps_limit:
            return None
        return (
            f"{step}: the given plan peaks at {format_bytes(plan.planned_peak_bytes)} here, and the limit is "
            f"{format_bytes(plan.limit_bytes or 0)} ({plan.limit_bytes} bytes). Plan again for that limit (without "
            "plan=), or give a higher memory_limit."
        )


def check(
    memory_limit: Any,
    tactics: Any,
    host_memory_limit: Any,
    plan: Plan | str | os.PathLike[str] | None,
    mode: Any,
    profile: Profile | str | os.PathLike[str] | None = None,
    precision: Any = None,
    spill_dir: Any = None,
    spill_limit: Any = None,
    limit_workspaces: Any = False,
    portable: Any = False,
    policy: Any = None,
    max_slowdown: Any = None,
    values: Any = BITS,
) -> Request:
    """The request. Raises TfswapError naming the argument that is malformed, InvalidModel for a bad plan file."""
    memory_limit, file = watched(memory_limit)
    memory_limit = check_limits(memory_limit)
    one_of("mode", mode, MODES)
    one_of("values", values, VALUES)
    host = None if host_memory_limit is None else parse_limit(host_memory_limit, name="host_memory_limit")
    if isinstance(plan, (str, os.PathLike)):
        plan = Plan.load(plan)
    if plan is not None and not isinstance(plan, Plan):
        raise TfswapError(
            f"plan is {plan!r}, of type {type(plan).__name__}: give a tfswap.Plan, or the path of a saved one"
        )
    options = Options(
        names("tactics", tactics, KNOWN_TACTICS),
        host,
        as_spill(spill_dir, spill_limit, host),
        profile=as_profile(profile),
        precision=as_rules(precision),
        limit_workspaces=as_bool("limit_workspaces", limit_workspaces),
        portable=as_bool("portable", portable),
        policy=as_policy(policy),
        values=values,
    )
    if file is not None and plan is not None:
        raise TfswapError(
            f"memory_limit is the file {file.path}, and a plan (plan=) is for one limit: give one of them"
        )
    return Request(memory_limit, options, plan, mode, file, as_slowdown(max_slowdown, plan))


def as_slowdown(given: Any, plan: Plan | None) -> float | None:
    """A slowdown of 1 or more, or None. Raises TfswapError for other values, and next to a plan."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, Real) or not 1 <= float(given) < math.inf:
        raise TfswapError(f"max_slowdown is {given!r}: give a number of 1 or more, such as 1.1 for 10% more time")
    if plan is not None:
        raise TfswapError("max_slowdown and plan= are both given, and a plan has its time already: give one of them")
    return float(given)


def as_spill(folder: Any, limit: Any, host_limit_bytes: int | None) -> Spill | None:
    """The folder and limit for a disk. Raises TfswapError for invalid values. A folder that can't be written is refused
    on use.
    """
    if folder is None:
        if limit is not None:
            raise TfswapError(f"spill_limit is {limit!r} and spill_dir is not given: say which folder it is of")
        return None
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder) or "\0" in os.fsdecode(folder):
        raise TfswapError(f"spill_dir is {folder!r}: give the path of a folder on a local disk")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise TfswapError(
            f"spill_dir is {os.fspath(folder)!r}, which is no folder: give the path of one, on a local disk"
        )
    if host_limit_bytes is not None and host_limit_bytes < STAGING_BYTES:
        raise TfswapError(
            f"host_memory_limit is {host_limit_bytes} bytes, and tensors go to spill_dir by way of buffers that take "
            f"{STAGING_BYTES}: allow at least that"
        )
    most = None if limit is None else parse_limit(limit, name="spill_limit")
    return Spill(os.path.abspath(os.fsdecode(folder)), most)


def as_profile(given: Profile | str | os.PathLike[str] | None) -> Profile | None:
    """A profile from a profile, the path of a saved one, or None. Raises TfswapError for other values."""
    if isinstance(given, (str, os.PathLike)):
        given = Profile.load(given)
    if given is not None and not isinstance(given, Profile):
        raise TfswapError(
            f"profile is {given!r}, of type {type(given).__name__}: give what tfswap.profile returned, or its path"
        )
    return given


def as_policy(given: Any) -> Any:
    """A policy from a callable, or None. Raises TfswapError for other values."""
    if given is not None and not callable(given):
        raise TfswapError(
            f"policy is {given!r}, of type {type(given).__name__}: give a function from a tensor's facts "
            "(tfswap.TensorFacts) to the tactics that may be used on it"
        )
    return given


def as_rules(given: Any) -> Rules:
    """Rules from one precision for all, or precisions by patterns of nodes' names; None for no rules. Raises
    TfswapError for other values.
    """
    if given is None:
        return ()
    if isinstance(given, str):
        given = {EVERYTHING: given}
    pairs: Any = given.items() if isinstance(given, Mapping) else given
    try:
        rules = tuple((pattern, precision) for pattern, precision in pairs)
    except (TypeError, ValueError):
        rules = ((None, None),)
    if not all(isinstance(text, str) for rule in rules for text in rule):
        raise TfswapError(
            f"precision is {given!r}, of type {type(given).__name__}: give one of {', '.join(map(repr, PRECISIONS))}, "
            'or a dict of them by pattern of the names of nodes, such as {"block1/*": "fp8", "*": "fp16"}'
        )
    return rules


def names(what: str, given: Any, example: Iterable[str]) -> tuple[str, ...]:
    """Names from an iterable. Raises TfswapError for a single text, whose letters would be the names."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TfswapError(
            f"{what} is {given!r}, of type {type(given).__name__}: give a list of names, such as {[*example]}"
        )
    found = tuple(given)
    unknown = next((n for n in found if not isinstance(n, str)), None)
    if unknown is not None:
        raise TfswapError(f"{what} has {unknown!r}, of type {type(unknown).__name__}: give names, such as {[*example]}")
    return found


def as_bool(what: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TfswapError(f"{what} is {value!r}: give True or False")
    return value


def whole(what: str, value: Any, least: int = 1) -> None:
    """Refuse what is no int, or a smaller one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TfswapError(f"{what} is {value!r}: give an int of {least} or more")


def one_of(what: str, value: Any, allowed: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise TfswapError(f"{what} is {value!r}; it can be {' or '.join(map(repr, allowed))}")
