"""Real training steps of transformers with Adam whose state is larger than the device.

    python benchmarks/state_models.py bert                          # an encoder like BERT-base; some minutes
    python benchmarks/state_models.py billion --folder FOLDER       # a decoder of 10^9 parameters; 10 minutes, 10 GiB
    python benchmarks/state_models.py small                         # a small decoder; a minute

Sequences have 512 tokens. The model is made in a `tfswap.scope`, in an arena capped at `--cap` MiB from the start, and
does `--steps` steps. Where FOLDER, on a local disk, is given, at most `--host` MiB of host memory are taken, and the
rest of the state is at home there. Another process does the same steps without limits, but for the billion parameters,
whose state and gradients take 16 GiB: losses and variables are compared, bit by bit.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import time
from contextlib import nullcontext
from typing import Any

from language_models import Shape, training_step
from state import ROOM_MIB, in_arena
from state_tiers import parts_of

MODELS = {
    "small": (Shape(4, 256, 4, 1000, 128, 4), 24),
    "bert": (Shape(12, 768, 12, 30_522, 512, 4, causal=False), 1024),
    "billion": (Shape(22, 1792, 14, 50_304, 512, 1), 1024),
}
"""By name, the shape, and the cap in MiB."""
NOT_COMPARED = ("billion",)
"""Those whose unlimited step needs more memory than most machines have."""


def train(name: str, cap_mib: int | None, limits: dict[str, Any], steps: int, compares: bool) -> dict[str, Any]:
    """The figures of some steps, under limits or without them."""
    import tensorflow as tf

    import tfswap
    import tfswap.ops

    of, began = MODELS[name][0], time.perf_counter()
    spill_bytes = limits.pop("spill_limit", None)
    with nullcontext() if cap_mib is None else tfswap.scope(**limits):
        step, variables = training_step(of)
    made_s = time.perf_counter() - began
    called: Any = step
    if cap_mib is not None:
        called = tfswap.optimize(step, memory_limit=(cap_mib - ROOM_MIB) << 20, spill_limit=spill_bytes, **limits)
    tokens = tf.random.stateless_uniform((of.batch, of.length), (1, 2), 0, of.words, tf.int32)
    labels = tf.roll(tokens, -1, 1)
    losses, peaks, seconds, planned = [], [], [], []
    for _ in range(steps):
        tf.config.experimental.reset_memory_stats("CPU:0")
        tfswap.ops.reset_stats()
        began = time.perf_counter()
        losses.append(float(called(tokens, labels)))
        seconds.append(time.perf_counter() - began)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        if cap_mib is not None:
            planned.append(called.report().planned_peak_bytes)
    found = {"parameters": of.parameters, "losses": losses, "made_s": made_s, "seconds": seconds, "peak": max(peaks)}
    found["state"] = sum(v.shape.num_elements() * v.dtype.size for v in variables)
    if cap_mib is not None:
        moved, plan = tfswap.ops.stats(), called.plan()
        found |= {"planned": max(planned), "slice": plan.slice_bytes, "floor": called.report().floor_bytes}
        found |= {"in": moved.in_bytes + moved.disk_in_bytes, "out": moved.out_bytes + moved.disk_out_bytes}
        found["on_disk"] = sum(row.nbytes for row in called.report().variables if row.home == "disk")
    digest = hashlib.sha256()
    for part in itertools.chain.from_iterable(map(parts_of, variables)) if compares else ():
        digest.update(part.tobytes())
    return {**found, "digest": digest.hexdigest()}


def measured(
    name: str, cap_mib: int | None, limits: dict[str, Any], steps: int, compares: bool, room_mib: int
) -> dict[str, Any]:
    """`train` in a process of its own."""
    return in_arena([__file__, name, "--child", json.dumps([name, cap_mib, limits, steps, compares])], room_mib)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--cap", type=int, help="MiB of the arena")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--folder", help="for variables at home on disk")
    parser.add_argument("--host", type=int, default=8192, help="MiB of host memory, where there is a folder")
    parser.add_argument("--disk", type=int, default=16_384, help="MiB of the disk")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(train(*json.loads(args.child))))
        return
    limits: dict[str, Any] = {}
    if args.folder:
        limits = {"host_memory_limit": args.host << 20, "spill_dir": args.folder, "spill_limit": args.disk << 20}
    cap_mib, compares = args.cap or MODELS[args.model][1], args.model not in NOT_COMPARED
    ours = measured(args.model, cap_mib, limits, args.steps, compares, cap_mib)
    same, time_ratio = "not compared", ""
    if compares:
        plain = measured(args.model, None, {}, args.steps, True, 3 * ours["state"] // 2**20 + 8192)
        same = "identical" if all(plain[n] == ours[n] for n in ("losses", "digest")) else "DIFFERENT"
        time_ratio = f"{ours['seconds'][-1] / plain['seconds'][-1]:.2f}"
    print(
        "| model | parameters | state, MiB | arena, MiB | planned | peak | floor | on disk, MiB | slices of, MiB ",
        end="",
    )
    print("| MiB in | MiB out | made, s | first step, s | step, s | time | losses | values |")
    print("| --- |" + " --: |" * 14 + " --- | --- |")
    sizes = f"{ours['parameters']:,} | {ours['state'] / 2**20:,.0f} | {cap_mib}"
    peaks = f"{ours['planned']:,} | {ours['peak']:,} | {ours['floor']:,}"
    moved = " | ".join(f"{ours[name] / 2**20:,.0f}" for name in ("on_disk", "slice", "in", "out"))
    times = f"{ours['made_s']:.0f} | {ours['seconds'][0]:.1f} | {ours['seconds'][-1]:.1f} | {time_ratio}"
    losses = ", ".join(f"{loss:.4f}" for loss in ours["losses"])
    print(f"| {args.model} | {sizes} | {peaks} | {moved} | {times} | {losses} | {same} |")


if __name__ == "__main__":
    main()
