"""What a user may ask for, besides the limit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tfswap.analysis.reduced_precision import PRECISIONS, Rules, speaks_of
from tfswap.compiler.policy import Policy
from tfswap.errors import TfswapError
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.profile import Profile
from tfswap.passes.memory_reservation import Reservation
from tfswap.plan.plan import Plan
from tfswap.planner.host_tiers import STAGING_BYTES, Tiers
from tfswap.planner.planner import TACTICS
from tfswap.planner.solver_table import SOLVERS


@dataclass(frozen=True)
class Spill:
    """A folder for swapped tensors.

    Attributes:
        folder: its path.
        limit_bytes: the most that they may take there; None for no limit.
    """

    folder: str
    limit_bytes: int | None = None


@dataclass(frozen=True)
class Options:
    """What a user may ask for, besides the limit.

    Attributes:
        tactics: subset of TACTICS; ordering is always on.
        host_limit_bytes: the most host memory for swapped tensors; None for no limit.
        spill: where they go that find no room there; None where they may go nowhere else.
        keep: names of tensors that must stay ("node:0").
        solver: who chooses what is swapped, of SOLVERS: the baselines are there to be compared with.
        profile: measured times to plan with.
        precision: tensors saved for the backward pass in fewer bits; nothing by default.
        limit_workspaces: limit cuDNN to take no more for a convolution than the plan leaves to each.
        portable: use TensorFlow's own ops alone.
        policy: says of each tensor what may be done to it; None where everything may.
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

    @property
    def tiers(self) -> Tiers:
        """What there is for swapped tensors."""
        if self.spill is None:
            return Tiers(self.host_limit_bytes)
        host = None if self.host_limit_bytes is None else self.host_limit_bytes - STAGING_BYTES
        return Tiers(host, self.spill.limit_bytes)

    def reservation(self, owner: int, plan: Plan) -> Reservation:
        """What a step of `owner` takes with `plan`, and may take."""
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

    def names(self, node: str) -> bool:
        """Whether something is asked of the node of this name, and not of all."""
        return speaks_of(node, self.precision) or any(tensor.partition(":")[0] == node for tensor in self.keep)

    def __post_init__(self) -> None:
        unknown = [t for t in self.tactics if t not in TACTICS]
        if unknown:
            raise TfswapError(f"tactics names {unknown[0]!r}; known are {', '.join(map(repr, TACTICS))}")
        chosen = SOLVERS.get(self.solver)
        if chosen is None:
            raise TfswapError(f"solver is {self.solver!r}; known are {', '.join(map(repr, SOLVERS))}")
        if frozenset(self.tactics) - {"encode"} not in chosen:
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
        """What of this can be done on a device: TensorFlow's own copies to the host leave a CPU's tensors in place, and
        the codecs have kernels for CPUs and for NVIDIA's GPUs.

        Raises TfswapError where `precision` asks for codecs and there are none.
        """
        if self.precision and not device.codecs:
            raise TfswapError("precision is given, and its codecs run on CPUs and on NVIDIA's GPUs only. Leave it out")
        left_out = set[str]()
        if self.portable and not device.is_gpu:
            left_out.add("swap")
        if not device.codecs:
            left_out.add("encode")
        if not left_out.intersection(self.tactics):
            return self
        return dataclasses.replace(self, tactics=tuple(tactic for tactic in self.tactics if tactic not in left_out))
