"""The promise, measured: peaks under the limit, losses identical to the bit, and how much slower the step is.

    python benchmarks/promise.py                       # all nets; most of an hour on two quiet cores
    python benchmarks/promise.py vgg19 --rounds 21 --json promise.json
    python benchmarks/promise.py resnet50 --onednn     # with TensorFlow's default kernels on x86

Each net trains unoptimised, with TensorFlow's memory optimizer off (whose sums, in any order, differ from run to run),
and under tfswap with two limits: a share of the unoptimised peak, in an arena that is hard limited to 1.25 of that, and
the smallest that is planned. Each is a process of its own on TensorFlow's BFC allocator over the CPU's arena; they take
a step each in turns (papers/harness/turns.py). Times are medians of ratios of two steps of the same round, with their
quartiles; losses are compared step by step, which covers all weights but the last step's. Exit status 1 where a limit
is passed, a planned peak is more than 5% off or 2% too low, or losses are not those of either.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from papers.harness.turns import MIB, REFERENCE, UNOPTIMISED, Form, compare

from tfswap.support import progress

CAP = 1.25
TOO_HIGH, TOO_LOW = 0.05, 0.02


class Case(NamedTuple):
    """A net of papers/harness/nets.py, what it is called with, and a share of its peak."""

    net: str
    size: dict[str, Any]
    share: float


CASES = {
    "mlp": Case("mlp", {"layers": 24, "width": 1024, "batch": 8192}, 0.25),
    "vgg16": Case("application", {"name": "VGG16", "batch": 16, "size": 128, "momentum": 0.0}, 0.67),
    "vgg19": Case("application", {"name": "VGG19", "batch": 16, "size": 128, "momentum": 0.0}, 0.7),
    "resnet50": Case("application", {"name": "ResNet50", "batch": 32, "size": 96}, 0.5),
    "mobilenet_v2": Case("application", {"name": "MobileNetV2", "batch": 32, "size": 96}, 0.5),
    "transformer": Case("transformer", {"layers": 6, "width": 256, "length": 128}, 0.5),
}


def measure(name: str, rounds: int, onednn: bool) -> list[dict[str, Any]]:
    """A line for each form, reported as they come."""
    net, size, share = CASES[name]
    forms = [UNOPTIMISED, REFERENCE, Form(f"{share:.0%}", limit=share, cap=CAP), Form("its floor")]
    lines = compare(net, size, forms, rounds=rounds, onednn=onednn)
    print(f"{name}: unoptimised {lines[0]['peak_bytes'] / MIB:.1f} MiB, {lines[0]['clock_s']:.2f} s a step")
    for line in lines[1:]:
        line["broken"] = broken(line) if line["how"] == "tfswap" else []
        text = f"  {line['label']:<22}"
        if line["how"] == "tfswap" and line["fits"]:
            text += f"limit {line['limit_bytes'] / MIB:>7.1f}, planned {line['planned_bytes'] / MIB:>7.1f}, "
        text += f"measured {line['peak_bytes'] / MIB:>7.1f}"
        if "clock_ratio" in line:
            low, high = line["clock_spread"]
            text += f", time x{line['clock_ratio']:.3f} ({low:.3f} to {high:.3f}), CPU x{line['cpu_ratio']:.3f}, "
            text += f"losses of: {', '.join(line['same_losses_as']) or 'none'}"
        print(text + "".join(f"; BROKEN: {what}" for what in line["broken"]), flush=True)
    return lines


def broken(line: dict[str, Any]) -> list[str]:
    """What of the promise was not kept."""
    if not line["fits"]:
        return ["it did not fit"]
    off = line["planned_bytes"] / line["peak_bytes"] - 1
    found = ["the limit is passed"] * (not line["kept"])
    found += [f"the planned peak is {off:+.1%} off"] * (off > TOO_HIGH or off < -TOO_LOW)
    references = {UNOPTIMISED.label, REFERENCE.label}
    return found + ["other losses"] * references.isdisjoint(line["same_losses_as"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--onednn", action="store_true", help="with oneDNN's kernels")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    unknown = [name for name in args.nets if name not in CASES]
    if unknown:
        parser.error(f"no net is named {unknown[0]!r}; there are {', '.join(CASES)}")
    found = {name: measure(name, args.rounds, args.onednn) for name in progress.over("nets", args.nets or CASES)}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(line.get("broken") for lines in found.values() for line in lines))


if __name__ == "__main__":
    sys.exit(main())
