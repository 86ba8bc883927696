"""How full an arena may get: the smallest in which a step runs that may have all of it, compared with the step's floor.

    python benchmarks/full_arena.py                      # all nets; ten minutes on two cores
    python benchmarks/full_arena.py LSTMs ResNet --steps 20
    python benchmarks/full_arena.py --onednn --json full.json

The floor is that of a roomy arena, which starts as one free region. Then the step gets arenas of whole MiB from there
on, each in a process of its own and without a limit: the limit is the arena. There holes between chunks count, of which
a limit in a roomy arena takes no notice. A step is refused before anything of it runs, or it runs; exit status 1 where
one was planned and then ran out of memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from papers.harness.turns import MIB, Form, attempt, was_refused

from tfswap.support import progress

ROOMY_MIB = 3000
WIDER = 1.02
"""The next arena over the one before, or a MiB more where that is less."""
TRIES = 8
NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "MLP": ("mlp", {"layers": 12, "width": 512, "batch": 2048}),
    "ResNet": ("peer", {"name": "resnet"}),
    "transformer": ("peer", {"name": "transformer"}),
    "MobileNetV2": ("application", {"name": "MobileNetV2", "batch": 8, "size": 64}),
    "EfficientNetB0": ("application", {"name": "EfficientNetB0", "batch": 8, "size": 64}),
    "DenseNet121": ("application", {"name": "DenseNet121", "batch": 8, "size": 64}),
    "Xception": ("application", {"name": "Xception", "batch": 4, "size": 96}),
    "Inception (GoogLeNet)": ("classic", {"name": "inception", "batch": 8, "size": 96}),
    "DCGAN": ("gan", {"batch": 64}),
    "LSTM": ("lstm_lm", {"layers": 1, "batch": 200}),
    "LSTMs": ("lstm_lm", {"layers": 16, "batch": 64}),
    "NMT": ("nmt", {"batch": 16, "length": 50}),
    "ResNet of 62 layers": ("deep_resnet", {"layers": 62}),
}
LINE = "{:<24}{:>12}{:>12}{:>12}{:>12}  {}"


def measure(net: str, size: dict[str, Any], steps: int, onednn: bool) -> dict[str, Any]:
    """The floor, each arena that was tried and its outcome, and the peak in the last of them."""
    floor = attempt(net, size, Form("floor", limit=1), ROOMY_MIB, 0, onednn=onednn)["floor_bytes"]
    tried: list[tuple[int, str]] = []
    arena_mib, peak = floor // MIB + 1, None
    while len(tried) < TRIES and peak is None:
        reported = attempt(net, size, Form("all of it", limit=None), arena_mib, steps, onednn=onednn)
        if reported["fits"]:
            tried.append((arena_mib, "runs"))
            peak = reported["peak_bytes"]
        else:
            tried.append((arena_mib, "refused" if was_refused(reported) else "fails"))
        arena_mib = max(arena_mib + 1, int(arena_mib * WIDER))
    return {"floor_bytes": floor, "tried": tried, "peak_bytes": peak}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"of {', '.join(NETS)}; all by default")
    parser.add_argument("--steps", type=int, default=5, help="number of steps after the first")
    parser.add_argument("--onednn", action="store_true", help="with TensorFlow's default kernels on x86")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if unknown := set(args.nets) - set(NETS):
        parser.error(f"no net is named {sorted(unknown)[0]!r}; there are {', '.join(NETS)}")
    found: dict[str, Any] = {}
    print(LINE.format("net", "floor, MiB", "arena, MiB", "over it", "peak, MiB", "smaller ones"))
    for name in progress.over("nets", args.nets or NETS):
        one = found[name] = measure(*NETS[name], args.steps, args.onednn)
        (arena_mib, _), floor = one["tried"][-1], one["floor_bytes"] / MIB
        peak = "none runs" if one["peak_bytes"] is None else f"{one['peak_bytes'] / MIB:.1f}"
        smaller = [what for _, what in one["tried"] if what != "runs"]
        reported = ", ".join(f"{smaller.count(what)} {what}" for what in ("refused", "fails") if what in smaller)
        print(LINE.format(name, f"{floor:.1f}", arena_mib, f"{arena_mib / floor:.3f}", peak, reported), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(what == "fails" for one in found.values() for _, what in one["tried"]))


if __name__ == "__main__":
    sys.exit(main())
