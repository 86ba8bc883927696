"""What a rewritten step is for: the one place that says what the planner and the passes may use."""

from __future__ import annotations

from dataclasses import dataclass

from tfswap.kernels.device import DeviceModel


@dataclass(frozen=True)
class Target:
    """What the rewritten step runs on, and what its graph may have.

    Attributes:
        device: the device.
        portable: whether TensorFlow's own ops alone may be in the graph.
        keeps_results: whether the caller gets tensors that it may keep, as from a function; a session copies them out.
        held: names of tensors that the unoptimised step holds until its end.
    """

    device: DeviceModel
    portable: bool = False
    keeps_results: bool = False
    held: tuple[str, ...] = ()

    @property
    def own_ops(self) -> bool:
        """Whether tfswap's own ops and kernels may be in the graph."""
        return not self.portable

    @property
    def on_cpu(self) -> bool:
        return not self.device.is_gpu

    @property
    def runs_concurrently(self) -> bool:
        """Whether nodes of several kernels can run: there are threads for two, and oneDNN's graph pass, which does not
        see into such a node, replaces no kernel.
        """
        return self.own_ops and self.device.inter_op_threads > 1 and not self.device.onednn

    @property
    def onednn(self) -> bool:
        """Whether oneDNN's graph pass rewrites the step when TensorFlow makes it."""
        return self.device.onednn
