"""How deep a network trains under a memory cap: TensorFlow as it is, and with tfswap, on one and the same cap.

    python benchmarks/depth.py                          # a cap of 192 MiB; 20 times the depth that fits unoptimised
    python benchmarks/depth.py --cap_mib 512 --times 20 50
    python benchmarks/depth.py --cap_mib 512 --blocks 833    # 2,500 convolutions, about 10^4 layers; half an hour
    python benchmarks/depth.py --json depth.json

Bottleneck ResNets on small images, in plain TensorFlow with momentum (`planning_time.deep_resnet`). Each try is a
process of its own, whose CPU arena is TensorFlow's BFC allocator, hard limited to the cap and settled as one region,
as a GPU's is: what does not fit ends in ResourceExhaustedError. The greatest depth that fits unoptimised is found
first, by doubling and bisection; then the same steps, decorated, are tried at multiples of it. A try trains `--steps`
steps; the losses of both are compared at the depth that both reach.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MIB = 2**20


def child(blocks: int, optimised: bool, steps: int, cap_mib: int) -> dict[str, Any]:
    """One try in this process."""
    import tensorflow as tf
    from planning_time import deep_resnet

    slab = tf.raw_ops.Empty(shape=[cap_mib - 2, MIB], dtype=tf.uint8)
    del slab
    tf.config.experimental.reset_memory_stats("CPU:0")
    step, (x,) = deep_resnet(blocks)
    x = x + tf.random.stateless_normal(x.shape, seed=(1, 2))
    found: dict[str, Any] = {"blocks": blocks, "convolutions": 3 * blocks, "optimised": optimised}
    begin = time.perf_counter()
    concrete = step.get_concrete_function(x)
    found |= {"nodes": len(concrete.graph.get_operations()), "tracing_s": time.perf_counter() - begin}
    if optimised:
        import tfswap

        step = tfswap.optimize(step)
    times, losses = [], []
    try:
        for _ in range(steps):
            begin = time.perf_counter()
            losses.append(float(step(x).numpy()))
            times.append(time.perf_counter() - begin)
    except tf.errors.ResourceExhaustedError:
        return found | {"fits": False}
    except Exception as error:
        floor = getattr(error, "floor_bytes", None)
        if floor is None:
            raise
        return found | {"fits": False, "floor_mib": floor / MIB}
    found |= {"fits": True, "first_s": times[0], "step_s": min(times[1:]), "losses": losses}
    found["peak_mib"] = tf.config.experimental.get_memory_info("CPU:0")["peak"] / MIB
    found["resident_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if optimised:
        report = step.report()
        found |= {"swapped": len(report.swapped), "reruns": report.reruns, "predicted_ratio": report.time_ratio}
        found |= {"baseline_mib": report.baseline_peak_bytes / MIB, "host_mib": report.host_bytes / MIB}
    return found


def attempt(blocks: int, optimised: bool, args: argparse.Namespace) -> dict[str, Any]:
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(args.cap_mib),
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
    command = [sys.executable, __file__, "--child", str(int(optimised)), "--blocks", str(blocks)]
    command += ["--steps", str(args.steps), "--cap_mib", str(args.cap_mib)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{blocks} blocks: a run failed\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    name = "tfswap" if optimised else "unoptimised"
    line = f"{name:<12}{blocks:>7}{3 * blocks:>8}{found['nodes']:>9}"
    if found["fits"]:
        line += f"{found['peak_mib']:>9.1f}{found['first_s']:>9.1f}{found['step_s']:>9.2f}"
        if optimised:
            line += (
                f"   of {found['baseline_mib']:.0f} MiB; {found['swapped']} swapped, {found['reruns']} kernels again"
            )
    else:
        line += "   out of memory" + (f"; floor {found['floor_mib']:.0f} MiB" if "floor_mib" in found else "")
    print(line, flush=True)
    return found


def deepest(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tries without tfswap, the deepest that fits last."""
    tries = [attempt(1, False, args)]
    while tries[-1]["fits"]:
        tries.append(attempt(2 * tries[-1]["blocks"], False, args))
    fits, fails = tries[-2]["blocks"] if len(tries) > 1 else 0, tries[-1]["blocks"]
    while fails - fits > 1:
        tries.append(attempt((fits + fails) // 2, False, args))
        if tries[-1]["fits"]:
            fits = tries[-1]["blocks"]
        else:
            fails = tries[-1]["blocks"]
    return sorted(tries, key=lambda t: (t["fits"], t["blocks"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap_mib", type=int, default=192, help="the arena's size")
    parser.add_argument("--times", type=int, nargs="*", default=[1, 20], help="multiples of the unoptimised depth")
    parser.add_argument("--blocks", type=int, help="this depth with tfswap, and no search")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(child(args.blocks, bool(args.child), args.steps, args.cap_mib)))
        return 0
    print(f"{'':<12}{'blocks':>7}{'convs':>8}{'nodes':>9}{'peak MiB':>9}{'first s':>9}{'step s':>9}", flush=True)
    rows = []
    if args.blocks:
        rows.append(attempt(args.blocks, True, args))
    else:
        rows += deepest(args)
        base = rows[-1]
        for times in args.times:
            rows.append(attempt(times * base["blocks"], True, args))
        same = [r for r in rows if r["blocks"] == base["blocks"] and r["fits"] and r["optimised"]]
        for row in same:
            print(
                f"losses at {row['blocks']} blocks {'are' if row['losses'] == base['losses'] else 'ARE NOT'} the same"
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["fits"] for row in rows if row["optimised"]) else 1


if __name__ == "__main__":
    sys.exit(main())
