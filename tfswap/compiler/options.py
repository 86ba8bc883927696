"""The user's options of a plan, without the limit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tfswap.analysis.reduced_precision import PRECISIONS, Rules, has_rule
from tfswap.compiler.policy import Policy
from tfswap.errors import TfswapError
from tfswap.ir.permits import BITS, CLOSE, FUSE, KNOWN_TACTICS, SLICE, STATE, TACTICS
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.profile import Profile
from tfswap.passes.memory_reservation import Reservation
from tfswap.plan.plan import Plan
from tfswap.planner.host_tiers import STAGING_BYTES, Tiers
from tfswap.planner.solver_table import MOVES, SOLVERS
from tfswap.support.sizes import format_bytes


@dataclass(frozen=True)
class Spill:
    """A folder for swapped tensors.

    Attributes:
        folder: its path.
        limit_bytes: the most bytes of swapped tensors in it; None for no limit.
    """

    folder: str
    limit_bytes: int | None = None


@dataclass(frozen=True)
class Options:
    """The user's options of a plan, without the limit.

    Attributes:
        tactics: a subset of KNOWN_TACTICS. Ordering is always on.
        host_limit_bytes: the most host memory for swapped tensors; None for no limit.
        spill: the folder for swapped tensors beyond that limit. None: they may not go to disk.
        keep: names of tensors that must stay in the arena ("node:0").
        solver: the solver that chooses evictions, of SOLVERS. Solvers other than the default are for comparisons.
        profile: measured times to plan with.
        precision: rules for tensors that are saved for the backward pass in fewer bits; empty by default.
        limit_workspaces: limit cuDNN's workspaces to the bytes that the plan leaves for each convolution.
        portable: use TensorFlow's own ops only.
        policy: gives the tactics that are allowed for each tensor. None: all are.
        values: of VALUES. With CLOSE, kernels in slices may add in another order.
    """

    tactics: tuple[str, ...] = TACTICS
    host_limit_bytes: int | None = None
    spill: Spill | None = None
    keep: frozenset[str] = frozenset()
    solver: str = "default"
    profile: Profile | None = None
    precision: Rules = ()
    limit_workspaces: bool = False
    portable: bool = False
    policy: Policy | None = None
    values: str = BITS

    @property
    def tiers(self) -> Tiers:
        """The host memory and disk space for swapped tensors."""
        if self.spill is None:
            return Tiers(self.host_limit_bytes)
        host = None if self.host_limit_bytes is None else self.host_limit_bytes - STAGING_BYTES
        return Tiers(host, self.spill.limit_bytes)

    def reservation(self, owner: int, plan: Plan) -> Reservation:
        """The host memory and disk space that a step of `owner` takes with `plan`, and may take."""
        spill = self.spill
        if spill is None:
            return Reservation(owner, plan.host_bytes, self.host_limit_bytes)
        return Reservation(
            owner,
            plan.host_bytes,
            self.host_limit_bytes,
            spill.folder,
            plan.disk_bytes,
            spill.limit_bytes,
            plan.saved_disk_bytes,
        )

    def shared(self, parts: int, passed_bytes: int) -> Options:
        """The options of each of several parts of one step, which share host memory and disk space equally.

        Args:
            passed_bytes: host memory that the parts' tensors take which go to other devices.

        Raises TfswapError where host memory has no room for these.
        """
        host, spill = self.host_limit_bytes, self.spill
        if host is not None:
            staging = 0 if spill is None else STAGING_BYTES
            least = passed_bytes + staging
            if least > host:
                raise TfswapError(
                    f"host_memory_limit is {format_bytes(host)}, and what goes from one device to another takes "
                    f"{format_bytes(least)} of host memory: allow at least {least} bytes"
                )
            host = (host - least) // parts + staging
        if spill is not None and spill.limit_bytes is not None:
            spill = dataclasses.replace(spill, limit_bytes=spill.limit_bytes // parts)
        return dataclasses.replace(self, host_limit_bytes=host, spill=spill)

    def names(self, node: str) -> bool:
        """Whether a rule other than the one for all nodes, or `keep`, names this node."""
        return has_rule(node, self.precision) or any(tensor.partition(":")[0] == node for tensor in self.keep)

    def __post_init__(self) -> None:
        unknown = [t for t in self.tactics if t not in KNOWN_TACTICS]
        if unknown:
            raise TfswapError(f"tactics names {unknown[0]!r}; known are {', '.join(map(repr, KNOWN_TACTICS))}")
        if FUSE in self.tactics and self.values != CLOSE:
            raise TfswapError(
                f'tactics has "{FUSE}" and values is "{self.values}": what XLA compiles has other last bits. Give '
                f'values="{CLOSE}", or leave "{FUSE}" out'
            )
        chosen = SOLVERS.get(self.solver)
        if chosen is None:
            raise TfswapError(f"solver is {self.solver!r}; known are {', '.join(map(repr, SOLVERS))}")
        if frozenset(self.tactics) & MOVES not in chosen:
            takes = "; or ".join(" and ".join(map(repr, sorted(moves))) for moves in chosen)
            raise TfswapError(f"solver={self.solver!r} takes tactics {takes}, and tactics is {self.tactics}")
        if self.policy is not None and self.solver != "default":
            raise TfswapError(f"solver={self.solver!r} takes no policy: it is a baseline for comparisons")
        unknown = [p for _, p in self.precision if p not in PRECISIONS]
        if unknown:
            raise TfswapError(f"precision names {unknown[0]!r}; known are {', '.join(map(repr, PRECISIONS))}")
        if self.portable and (self.precision or self.spill):
            raise TfswapError(
                f"{'precision' if self.precision else 'spill_dir'} is given and portable too: it takes tfswap's ops, "
                "and a portable model has none. Leave one of the two out."
            )

    def on(self, device: DeviceModel) -> Options:
        """The options with the tactics that a device supports. Portable plans can't swap on a CPU, where TensorFlow's
        copies to the host copy nothing, nor move variables. The codecs have kernels for CPUs and for NVIDIA's GPUs.

        Raises:
            TfswapError: `precision` needs codecs, and the device has none.
        """
        if self.precision and not device.codecs:
            raise TfswapError("precision is given, and its codecs run on CPUs and on NVIDIA's GPUs only. Leave it out")
        left_out = set[str]()
        if not device.has_own_kernels or self.portable:
            left_out |= {SLICE, FUSE}
        if self.portable:
            left_out |= {STATE} if device.host_is_separate else {STATE, "swap"}
        if not device.codecs:
            left_out.add("encode")
        if not left_out.intersection(self.tactics):
            return self
        return dataclasses.replace(self, tactics=tuple(tactic for tactic in self.tactics if tactic not in left_out))
