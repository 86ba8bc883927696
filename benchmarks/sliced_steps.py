"""Steps whose kernels run in slices, under limits that no other plan keeps: peaks and times, against the step as it is.

    python benchmarks/sliced_steps.py unet=12:close unet3d=110:close gp=25:close   # model=limit in MiB:values
    python benchmarks/sliced_steps.py gpt=4.5 words=205 --home --turns 1      # with variables at home on the host

Each step runs in a process of its own with TensorFlow's BFC allocator and plain kernels, as it is (without Grappler's
memory optimizer) and under its limit, in turns. With --home, the model of the latter is made in tfswap.scope(), and its
process has an arena of the limit and CAP_MIB. The first call, which plans, and the second are left out of times.
CPU time hardly depends on what else the machine does. Models are those of floor.py. "difference" is the largest
relative one between losses of both.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from statistics import median
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from floor import LARGE, MIB, MODELS

STEPS = 6
LEFT_OUT = 2
CAP_MIB = 4
"""What the arena has more than the limit: values that the program makes and reads."""


def child(name: str, limit_mib: float | None, values: str, home: bool) -> dict[str, Any]:
    """A few steps in this process: as they are without a limit, else under it."""
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import memory_optimizer_off
    from tfswap.ir.permits import SLICE, TACTICS

    with tfswap.scope() if home and limit_mib is not None else nullcontext():
        step, arguments = (MODELS | LARGE)[name]()
    kinds, draw = [(a.shape, a.dtype) for a in arguments], np.random.default_rng(1)
    del arguments  # the arena has no room for these and others
    given = [
        tf.constant(draw.standard_normal(shape) if dtype.is_floating else np.zeros(shape), dtype)
        for shape, dtype in kinds
    ]
    function = tf.function(step)
    if limit_mib is not None:
        limit = int(limit_mib * MIB)
        function = tfswap.optimize(function, memory_limit=limit, tactics=(*TACTICS, SLICE), values=values)
    losses, seconds, cpu = list[float](), list[float](), list[float]()
    for number in range(STEPS):
        if number == LEFT_OUT:
            tf.config.experimental.reset_memory_stats("CPU:0")
        started, cpu_started = time.perf_counter(), time.process_time()
        with memory_optimizer_off() if limit_mib is None else nullcontext():
            losses.append(float(tf.nest.flatten(function(*given))[0]))
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
    found = {
        "losses": losses,
        "seconds": median(seconds[LEFT_OUT:]),
        "cpu_s": median(cpu[LEFT_OUT:]),
        "first_s": seconds[0],
        "peak_bytes": tf.config.experimental.get_memory_info("CPU:0")["peak"],
    }
    if limit_mib is not None:
        plan: Any = function.plan()
        slices = [-(-each.of // each.rows) for each in plan.sliced]
        planned_bytes = function.report().planned_peak_bytes  # in the arena that the latest step found
        found |= {"planned_bytes": planned_bytes, "slices": slices, "at_home": len(plan.at_home)}
    return found


def spawn(arena_mib: int, *asked: str) -> dict[str, Any]:
    environment = {
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(arena_mib),
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TFSWAP_PLAN_CACHE": "off",
    }
    command = [sys.executable, __file__, *asked, "--child"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{asked} does not run\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(asked: str, turns: int, arena_mib: int, home: bool) -> None:
    name, _, rest = asked.partition("=")
    limit, _, values = rest.partition(":")
    whole, sliced = [], []
    more, capped = (["--home"], math.ceil(float(limit)) + CAP_MIB) if home else ([], arena_mib)
    for _ in range(turns):
        whole.append(spawn(arena_mib, f"{name}="))
        sliced.append(spawn(capped, f"{name}={limit}:{values or 'bits'}", *more))
    pairs = zip(whole[0]["losses"], sliced[0]["losses"], strict=True)
    difference = max(abs(a - b) / abs(a) for a, b in pairs)
    ratios, cpu = (sorted(b[key] / a[key] for a, b in zip(whole, sliced, strict=True)) for key in ("seconds", "cpu_s"))
    peaks = {one["peak_bytes"] for one in sliced}
    off_bytes = max((one["peak_bytes"] - one["planned_bytes"] for one in sliced), key=abs)
    one = sliced[0]
    how = f"{one['slices']}, {one['at_home']} variables at home"
    exact = f"{off_bytes:+d} B" if off_bytes else "yes"
    print(
        f"{name:<12}{values or 'bits':<7}{max(w['peak_bytes'] for w in whole) / MIB:>12.1f}{float(limit):>9.1f}"
        f"{max(peaks) / MIB:>9.1f}{exact:>8}{whole[0]['seconds']:>10.2f}{one['seconds']:>10.2f}"
        f"{ratios[0]:>8.2f} to {ratios[-1]:.2f}{cpu[0]:>8.2f} to {cpu[-1]:.2f}{one['first_s']:>9.1f}"
        f"  {difference:.1g}  {how}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", metavar="MODEL=MIB:VALUES")
    parser.add_argument("--turns", type=int, default=3, help="processes of each kind")
    parser.add_argument("--arena", type=int, default=8192, metavar="MIB", help="of the processes")
    parser.add_argument("--home", action="store_true", help="with variables at home on the host, under a cap")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, _, rest = args.steps[0].partition("=")
        limit, _, values = rest.partition(":")
        print(json.dumps(child(name, float(limit) if limit else None, values, args.home)))
        return
    print(
        "MiB         values      as it is    limit     peak  = plan  s, as is s, sliced  times         CPU time", end=""
    )
    print("         first, s  difference  slices")
    for asked in args.steps:
        measure(asked, args.turns, args.arena, args.home)


if __name__ == "__main__":
    main()
