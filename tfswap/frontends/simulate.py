"""`tfswap.simulate`: a step's memory and time under a series of limits, without running it, on this machine or a
described one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tfswap.analysis.cost import Costs
from tfswap.compiler.calibration import calibrated
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.offline import OnDevice, offline_step
from tfswap.compiler.options import Options
from tfswap.compiler.policy import Policy
from tfswap.compiler.request import Precision, as_profile, check, whole
from tfswap.compiler.resident_margin import fastest, margin_of
from tfswap.device import arena, machine
from tfswap.errors import TfswapError
from tfswap.frontends.resizable_step import find_step
from tfswap.ir.permits import BITS, TACTICS
from tfswap.kernels.hardware import NAMES, THIS, Machine, described, described_devices
from tfswap.kernels.profile import Profile
from tfswap.planner.promise import promised
from tfswap.report.curve import Curve, Point
from tfswap.report.device_curves import DeviceCurves
from tfswap.support import progress

LIMITS = 20


def simulate(
    step: Any,
    *args: Any,
    limits: int = LIMITS,
    device: str | Sequence[str] | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    function: str = "train_step",
    batch_size: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    tactics: Sequence[str] = TACTICS,
    host_memory_limit: int | str | None = None,
    precision: Precision = None,
    spill_dir: str | os.PathLike[str] | None = None,
    spill_limit: int | str | None = None,
    policy: Policy | None = None,
    values: str = BITS,
) -> Curve | DeviceCurves:
    """Predict memory against time for a training step, from its floor to its unoptimised peak. Nothing runs.

        tfswap.simulate(train_step, images, labels)
        tfswap.simulate("saved_model_dir", batch_size=64, device="v100-nvlink").save_html("curve.html")

    Args:
        step: a `tf.function`, decorated or not, a Python function, or the folder of a SavedModel.
        args: a function's arguments, or their `tf.TensorSpec`s.
        limits: how many limits, evenly spaced.
        device: a described machine ("a100", "v100-pcie", ...; a wrong name lists them), "this" for this machine as
            measured now, or None for the usual rates of this kind of device. For a step on several GPUs a list of them,
            GPU:0 first (["a100", "a100"] or "a100,a100", which copy by way of the host), or a machine with several and
            links between them ("dgx-a100", or "dgx-a100:4" for four of them).
        profile: of this machine, by `tfswap.profile`; not together with `device`.
        function, batch_size, input_shapes: of a SavedModel, as in `optimize_graph`.
        tactics, precision, policy, values: as in `optimize`.
        host_memory_limit: the most host memory for swapped tensors, of all GPUs; by default the memory of each device's
            host.
        spill_dir, spill_limit: as in `optimize`; the folder is not written to.

    Returns:
        A Curve. For a step on several GPUs a DeviceCurves, with a Curve for each.

    Raises:
        TfswapError: an argument is malformed.
        UnsupportedGraph, InvalidModel: as `optimize` and `optimize_graph`.
    """
    whole("limits", limits, least=2)
    asked = spill_dir, spill_limit, policy, values
    targets = [target(each, profile, tactics, host_memory_limit, precision, *asked) for each in _machines(device)]
    on, _, costs = targets[0]
    machines = {f"GPU:{number}": each for number, (each, _, _) in enumerate(targets)}
    found = find_step(
        step,
        args,
        function=function,
        batch_size=batch_size,
        input_shapes=input_shapes,
        device=on.device,
        gpus=None if on.name == THIS else list(machines),
    )
    devices = {
        name: OnDevice(each.device, options, of_each, has_host=host_memory_limit is None)
        for name, (each, options, of_each) in zip(machines, targets, strict=True)
    }
    offline = offline_step(found.graph(), devices, found.variables)
    offline.assume_waits()
    curves = {
        where: sweep(optimizer, found.name, machines.get(where, on), limits)
        for where, optimizer in offline.optimizers.items()
    }
    if len(curves) == 1:
        return next(iter(curves.values()))
    return DeviceCurves(found.name, curves, costs.rates.peer_bytes_per_s)


def _machines(device: Any) -> list[Any]:
    """What `target` takes for each device that a user named."""
    if isinstance(device, Sequence) and not isinstance(device, (str, bytes)):
        if not device or not all(isinstance(each, str) for each in device):
            raise TfswapError(f"device is {device!r}: give the name of each GPU, as ['a100', 'a100']")
        device = ",".join(device)
    if not isinstance(device, str) or device.lower() == THIS:
        return [device]
    return [*described_devices(device)]


def target(
    device: str | Machine | None,
    profile: Profile | str | os.PathLike[str] | None,
    tactics: Sequence[str],
    host_memory_limit: int | str | None,
    precision: Precision,
    spill_dir: str | os.PathLike[str] | None,
    spill_limit: int | str | None = None,
    policy: Policy | None = None,
    values: str = BITS,
) -> tuple[Machine, Options, Costs]:
    """What a step is planned for: the machine, the options of the plan, and the cost model of the machine."""
    on, costs = _machine(device, as_profile(profile))
    options = check(
        None,
        tactics,
        host_memory_limit,
        None,
        "analyze",
        precision=precision,
        spill_dir=spill_dir,
        spill_limit=spill_limit,
        policy=policy,
        values=values,
    ).options
    if options.host_limit_bytes is None:
        options = replace(options, host_limit_bytes=on.host_bytes)
    return on, options, costs


def _machine(name: str | Machine | None, profile: Profile | None) -> tuple[Machine, Costs]:
    """The machine that a user named, and its cost model. Raises TfswapError for a name that is not known."""
    if isinstance(name, Machine):
        if profile is not None:
            raise TfswapError(_both_given(name.name))
        return name, Costs(name.rates)
    if name is not None and not isinstance(name, str):
        raise TfswapError(f"device is {name!r}: give the name of one, of {', '.join(NAMES)}")
    if name is not None and profile is not None:
        raise TfswapError(_both_given(name))
    if name is not None and name.lower() == THIS:
        from tfswap.frontends.profile import this_machine

        found = this_machine()
        return found, Costs(found.rates, measured=True)
    if name is not None:
        found = described(name)
        return found, Costs(found.rates)
    where, model = machine.current_device()
    model = model if profile is not None else calibrated(model)
    costs = Costs.of(model, profile)
    title = f"this {model.kind.upper()}" if profile is None else profile.machine
    return Machine(THIS, title, model, costs.rates, arena.device_limit_bytes(where), None), costs


def _both_given(name: str) -> str:
    return f"device={name!r} and profile= are both given: a profile is of the machine that was measured. Give one."


def sweep(optimizer: Optimizer, step: str, on: Machine, limits: int) -> Curve:
    """The curve of a step at `limits` limits, evenly spaced from its floor to its unoptimised peak."""
    floor, peak = optimizer.floor_bytes(), optimizer.baseline.peak_bytes
    top = max(floor, peak)
    tried = sorted({floor + (top - floor) * i // (limits - 1) for i in range(limits)})
    points = [point_of(optimizer, limit) for limit in progress.over("trying limits", tried)]
    return Curve(
        step=step,
        machine=on.title,
        costs=optimizer.planner.costs.source,
        baseline_peak_bytes=peak,
        baseline_s=optimizer.baseline.seconds,
        floor_bytes=floor,
        memory_bytes=on.memory_bytes,
        host_bytes=optimizer.options.host_limit_bytes,
        points=tuple(points),
    )


def point_of(optimizer: Optimizer, limit_bytes: int) -> Point:
    """The point of the plan that `optimize` would make under this limit."""
    found = fastest(optimizer, limit_bytes)
    assert found is not None, "the floor is what the planner reaches"
    candidate, extra = found.candidate, margin_of(optimizer, found.variant.rewriting.at_home)
    made = candidate.computed
    return Point(
        limit_bytes=limit_bytes,
        peak_bytes=max(candidate.peak_bytes, 0 if made is None else promised(made.peak_bytes)) + extra,
        time_ratio=optimizer.baseline.time_ratio(candidate.timing.total_s),
        step_s=candidate.timing.total_s,
        moved_bytes=candidate.memory.out_bytes + candidate.memory.in_bytes,
        host_bytes=candidate.memory.host_peak_bytes,
        workspace_bytes=0 if made is None else made.workspace_bytes,
        algorithms=() if made is None else tuple(sorted(made.algorithms.items())),
    )
