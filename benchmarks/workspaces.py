"""Convolutions' algorithms over limits on a described GPU: more limit buys faster ones (SuperNeurons, section 3.5).

    python benchmarks/workspaces.py                               # VGG16, 64 images of 224x224, a V100
    python benchmarks/workspaces.py resnet50 --device h100 --batch 32 --limits 6

The nets of gist.py as `tfswap.simulate` plans them: each convolution has the fastest of cuDNN's algorithms that its
place in the schedule has room for, by the published formulas for their workspaces and operations. Nothing is run, so
any machine will do; the floor is of a step with the algorithms that need no workspace.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import gist
from accuracy import MIB


def simulated(net: str, batch: int, device: str, limits: int) -> Any:
    """The curve of a training step."""
    import tensorflow as tf

    import tfswap

    step, arguments = gist.training_step(net)
    like = [tf.TensorSpec([batch, *given.shape[1:]], given.dtype) for given in arguments]
    return tfswap.simulate(tf.function(step), *like, device=device, limits=limits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("net", nargs="?", choices=gist.NETWORKS, default="vgg16")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="v100-pcie", help="as tfswap.simulate knows it")
    parser.add_argument("--limits", type=int, default=6)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    curve = simulated(args.net, args.batch, args.device, args.limits)
    print(f"{args.net}, batch {args.batch}, {curve.machine}: unoptimised {curve.baseline_peak_bytes / MIB:,.0f} MiB")
    print(f"{'limit, MiB':>10}{'peak, MiB':>11}{'time':>6}{'moved, MiB':>12}{'workspace, MiB':>16}  algorithms")
    for point in curve.points:
        print(
            f"{point.limit_bytes / MIB:>10,.0f}{point.peak_bytes / MIB:>11,.0f}{point.time_ratio:>6.2f}"
            f"{point.moved_bytes / MIB:>12,.0f}{point.workspace_bytes / MIB:>16,.0f}  "
            + ", ".join(f"{count} {name}" for name, count in point.algorithms)
        )
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(point) for point in curve.points], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
