"""The largest side, length and volume under a fixed cap: as TensorFlow runs the step, and with tfswap, without slices
and with them.

    python benchmarks/largest_size.py                     # all four
    python benchmarks/largest_size.py unet --cap 96

Each size is searched by predictions: of the unoptimised peak, of the floor with the default tactics, and of that with
"slice" too, with the same bits. Then a step of each largest size runs in a process of its own, with the model made in
tfswap.scope(), and its peak is within the cap; where it does not run there, the next smaller size does. The
unoptimised step's arena has the cap. tfswap's has the cap in one region, and TensorFlow's first region of 2 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from accuracy import MIB, images, transformer, unet

FORMS = "unoptimised", "default", "slices"
STEPS = 3
FIRST_REGION_MIB = 2
TRIES = 3
"""How many sizes are run, from the largest downwards, until one fits."""


class Net(NamedTuple):
    """What is searched.

    Attributes:
        make: from a size, the step and its arguments.
        unit: sizes are multiples of it.
        first: the size that the search begins with.
        power: about how bytes grow with the size.
        cap: MiB.
    """

    title: str
    make: Callable[[int], Any]
    unit: int
    first: int
    power: float
    cap: int


NETS = {
    "vgg19": Net("VGG19, side of 8 images", lambda size: images("VGG19", 8, size, 0.0)(), 32, 96, 2, 192),
    "unet": Net("U-Net, side of 8 images", lambda size: unet(size=size), 16, 96, 2, 64),
    "unet3d": Net("3-D U-Net, side of a volume", lambda size: unet(size=size, batch=1, axes=3), 16, 32, 3, 192),
    "transformer": Net(
        "transformer, length of 16 sequences", lambda size: transformer(length=size, batch=16), 16, 64, 1.5, 128
    ),
}


def predicted_bytes(net: Net, size: int, form: str) -> int:
    """The peak of the unoptimised step, or the floor."""
    import tensorflow as tf

    import tfswap.ops
    from tfswap.compiler.grappler import as_planned
    from tfswap.compiler.offline import Variable, offline_optimizer
    from tfswap.compiler.options import Options
    from tfswap.importers.function import import_function
    from tfswap.ir.permits import SLICE, TACTICS
    from tfswap.kernels.device import DeviceModel

    step, arguments = net.make(size)
    concrete = tf.function(step).get_concrete_function(*arguments)
    caches = {"l3_cache_bytes": tfswap.ops.l3_cache_bytes(), "l1_l2_bytes": tfswap.ops.l1_l2_bytes()}
    device = DeviceModel(intra_op_threads=2, inter_op_threads=2, **caches)
    graph = as_planned(import_function(concrete, arguments), concrete, device)
    options = Options((*TACTICS, SLICE) if form == "slices" else TACTICS)
    variables = [Variable(v.dtype.name, tuple(v.shape)) for v in concrete.graph.variables]
    optimizer = offline_optimizer(graph, device, options, variables)
    return optimizer.baseline.peak_bytes if form == "unoptimised" else optimizer.floor_bytes()


def largest(net: Net, form: str, first: int) -> int:
    """The largest size whose prediction is within the cap: guessed from the last one, and then by halves."""
    cap, fits, above = net.cap * MIB, 0, 0
    size, known = first, dict[int, int]()  # bytes by size
    while True:
        known[size] = nbytes = predicted_bytes(net, size, form)
        print(f"  {form} {size}: {nbytes / MIB:.1f} MiB", file=sys.stderr, flush=True)
        fits, above = (max(fits, size), above) if nbytes <= cap else (fits, min(above or size, size))
        if above and above - fits <= net.unit:
            return fits
        guess = _guess(net, known) // net.unit * net.unit
        low, high = fits + net.unit, above - net.unit if above else max(fits + net.unit, min(guess, 3 * size))
        size = min(max(guess, low), high)


def _guess(net: Net, known: Mapping[int, int]) -> int:
    """The size of the cap, if bytes are a constant and a share of a power of the size."""
    (one, less), *others = sorted(known.items())[-2:]
    if not others or others[0][1] <= less:
        return round(max(known) * (net.cap * MIB / known[max(known)]) ** (1 / net.power))
    ((two, more),) = others
    slope = (more - less) / (two**net.power - one**net.power)
    return round(max(1.0, one**net.power + (net.cap * MIB - less) / slope) ** (1 / net.power))


def child(name: str, form: str, size: int, cap: int) -> dict[str, Any]:
    """A few steps in this process."""
    import tensorflow as tf

    import tfswap
    from tfswap.ir.permits import SLICE, TACTICS

    if form == "unoptimised":
        step, arguments = NETS[name].make(size)
        function = tf.function(step)
    else:
        tf.raw_ops.Empty(shape=[cap, MIB], dtype=tf.uint8)  # its shape is in the first region
        with tfswap.scope():
            step, arguments = NETS[name].make(size)
        tactics = (*TACTICS, SLICE) if form == "slices" else TACTICS
        function = tfswap.optimize(tf.function(step), memory_limit=cap * MIB, tactics=tactics)
    seconds = []
    for number in range(STEPS):
        if number == 1:
            tf.config.experimental.reset_memory_stats("CPU:0")
        started = time.perf_counter()
        loss = float(tf.nest.flatten(function(*arguments))[0])
        seconds.append(time.perf_counter() - started)
    found = {"loss": loss, "seconds": min(seconds[1:]), "first_s": seconds[0]}
    found["peak_bytes"] = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    if form != "unoptimised":
        found["planned_bytes"] = function.report().planned_peak_bytes
        found["slices"] = [(each.rows, each.of) for each in function.plan().sliced]
    return found


def run(name: str, form: str, size: int, cap: int) -> dict[str, Any] | None:
    """What a step of this size takes under the cap; None where it does not fit."""
    environment = {
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(cap if form == "unoptimised" else cap + FIRST_REGION_MIB),
        "TFSWAP_PLAN_CACHE": "off",
    }
    command = [sys.executable, __file__, name, "--child", form, str(size), str(cap)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if "Error" in line or "Limit" in line), "")
        print(f"  {form} {size} does not run: {reason[:200]}", file=sys.stderr, flush=True)
        return None
    found = json.loads(done.stdout.splitlines()[-1])
    return found if found["peak_bytes"] <= cap * MIB else None


def search(name: str, net: Net, forms: Sequence[str]) -> list[dict[str, Any]]:
    rows, size = [], net.first
    for form in forms:
        size = largest(net, form, max(size, net.unit))
        for tried in range(size, max(0, size - TRIES * net.unit), -net.unit):
            if (row := run(name, form, tried, net.cap)) is not None:
                rows.append({"net": name, "form": form, "predicted_size": size, "size": tried, "cap": net.cap} | row)
                break
        else:
            continue
        one = rows[-1]
        planned = f"{one['planned_bytes'] / MIB:>9.1f}" if "planned_bytes" in one else f"{'':>9}"
        print(
            f"{net.title:<38}{net.cap:>6}{form:>13}{one['predicted_size']:>7}{one['size']:>7}"
            f"{one['peak_bytes'] / MIB:>9.1f}{planned}{one['seconds']:>9.2f}{one['first_s']:>9.1f}  "
            f"{one.get('slices', '')}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"of {', '.join(NETS)}; all by default")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--cap", type=int, help="MiB; by default each net's own")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        form, size, cap = args.child
        print(json.dumps(child(args.nets[0], form, int(size), int(cap))))
        return
    print(f"{'':<38}{'cap':>6}{'':>13}{'size':>7}{'ran':>7}{'peak':>9}{'planned':>9}{'step, s':>9}{'first':>9}")
    rows = []
    for name in args.nets or NETS:
        net = NETS[name] if args.cap is None else NETS[name]._replace(cap=args.cap)
        rows += search(name, net, args.forms)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
