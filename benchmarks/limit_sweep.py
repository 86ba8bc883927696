"""Is every limit kept, and does more memory never cost time? Twenty limits from the floor to 100%, on three models.

    python benchmarks/limit_sweep.py                           # about fifteen minutes on two cores
    python benchmarks/limit_sweep.py unet --limits 5
    python benchmarks/limit_sweep.py --json limits.json

Each limit is a process of its own, in which a step is planned for it and trains `accuracy.STEPS` steps on TensorFlow's
BFC allocator over the CPU's arena, one free region at the start. The limits lie evenly between the floor that a refusal
names and the predicted peak of the unoptimised step. Checked: no limit is refused, the measured peak
(`tf.config.experimental.get_memory_info`) never passes the limit, and the predicted time never rises with the limit.
Exit status 1 where that does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import accuracy
from accuracy import MIB

from tfswap.support import progress

DEFAULT = ("resnet", "transformer", "unet")


def sweep(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All limits of one model, printed as they come."""
    baseline = accuracy.spawn(name, 0, args.onednn)["baseline_bytes"]
    floor = accuracy.spawn(name, 1, args.onednn)["floor_bytes"]
    print(f"{name}: unoptimised {baseline / MIB:.1f} MiB predicted, floor {floor / MIB:.1f}")
    print(f"{'limit':>9}{'share':>7}{'planned':>9}{'measured':>10}, MiB{'time':>8}{'swapped':>9}{'again':>7}")
    points: list[dict[str, Any]] = []
    for i in progress.over(f"limits of {name}", range(args.limits)):
        limit = floor + (baseline - floor) * i // (args.limits - 1)
        ran = accuracy.spawn(name, limit, args.onednn)
        line = f"{limit / MIB:>9.1f}{100 * limit / baseline:>6.0f}%"
        if "peak_bytes" not in ran:
            broken = [f"refused: the floor is {ran['floor_bytes']} bytes, this limit {limit}"]
        else:
            before = min((p["time_ratio"] for p in points if "time_ratio" in p), default=ran["time_ratio"])
            broken = ["PASSES THE LIMIT"] * (ran["peak_bytes"] > limit)
            broken += [f"SLOWER than {before:.4f} with less"] * (ran["time_ratio"] > before)
            line += f"{ran['planned_bytes'] / MIB:>9.1f}{ran['peak_bytes'] / MIB:>10.1f}{ran['time_ratio']:>13.4f}"
            line += f"{ran['swapped']:>9}{ran['reruns']:>7}"
        points.append({"limit_bytes": limit, "broken": broken} | ran)
        print(line + "  " + "; ".join(broken), flush=True)
    return {"model": name, "baseline_bytes": baseline, "floor_bytes": floor, "points": points}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"of {', '.join(accuracy.MODELS)}; {', '.join(DEFAULT)} by default"
    )
    parser.add_argument("--limits", type=int, default=20, help="how many limits, the floor and 100%% among them")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--onednn", action="store_true", help="leave oneDNN's kernels in")
    args = parser.parse_args()
    unknown = [name for name in args.models if name not in accuracy.MODELS]
    if unknown:
        parser.error(f"no model is named {unknown[0]!r}; there are {', '.join(accuracy.MODELS)}")
    if args.limits < 2:
        parser.error("--limits: two at least, the floor and 100%")
    rows = [sweep(name, args) for name in args.models or DEFAULT]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    broken = sum(bool(point["broken"]) for row in rows for point in row["points"])
    print(f"{broken} of {len(rows) * args.limits} limits broken" if broken else "every limit kept, times monotone")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
