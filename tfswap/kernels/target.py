"""The target of a rewritten step: its device, and which ops and kernels the planner and the passes may use."""

from __future__ import annotations

from dataclasses import dataclass, field

from tfswap.kernels.device import DeviceModel
from tfswap.support.once import Shared


@dataclass(frozen=True)
class Target:
    """The device of a rewritten step, and what its graph may have.

    Attributes:
        device: the device.
        own_ops: whether tfswap's own ops and kernels may be in the graph, as in all but portable models.
        keeps_results: whether the results stay in the arena for the caller, as a function's do. A session copies them
            to host memory.
        held: names of tensors that the unoptimised step holds until its end.
        shares_arena: whether others allocate in its arena while the step runs, at moments that are not known, as a data
            pipeline does.
        shared: results of the parts of a step that compute alike.
        unrolls: whether loops of small kernels are unrolled too.
    """

    device: DeviceModel
    own_ops: bool = True
    keeps_results: bool = False
    held: tuple[str, ...] = ()
    shares_arena: bool = False
    shared: Shared = field(default_factory=Shared.of_one, compare=False, repr=False)
    unrolls: bool = False

    @property
    def runs_concurrently(self) -> bool:
        """Whether one node may run several kernels concurrently.

        It needs two threads. It is excluded with oneDNN, whose graph pass cannot replace kernels within such a node,
        and whose kernels leave little of a core idle (benchmarks/thread_shares.py).
        """
        return self.own_ops and self.device.inter_op_threads > 1 and not self.device.onednn

    @property
    def onednn(self) -> bool:
        """Whether oneDNN's graph pass rewrites the step when TensorFlow instantiates it."""
        return self.device.onednn
