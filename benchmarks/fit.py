"""The largest batch, image side and sequence length under a limit: `tfswap.max_batch`, each confirmed by a run.

    python benchmarks/fit.py                                # all three, 256 MiB
    python benchmarks/fit.py side --limit 512MiB --json fit.json

A transformer (4 layers of 192, Adam; accuracy.py) by its batch and by the length of its sequences, which its attention
takes memory for by the square, and a U-Net (Adam; accuracy.py) by the side of its images. Each in a process of its own
with TensorFlow's BFC allocator, whose peak over the confirming run is what is compared with the limit. Unoptimised
sizes are predicted.
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

from accuracy import MIB, Made, transformer, unet

ARENA_MIB = 8000


class Search(NamedTuple):
    """What is searched, and how."""

    title: str
    make: Callable[[], Made]
    vary: Mapping[str, Sequence[int]]
    multiple_of: int


SEARCHES = {
    "batch": Search("transformer, batch of sequences of 96", transformer, {"x": (0,), "y": (0,)}, 1),
    "length": Search(
        "transformer, length of 16 sequences", lambda: transformer(any_length=True), {"x": (1,), "y": (1,)}, 8
    ),
    "side": Search("U-Net, side of 8 images", lambda: unet(any_size=True), {"x": (1, 2), "y": (1, 2)}, 8),
}


def child(name: str, limit: str) -> dict[str, Any]:
    """One search, in this process."""
    import tensorflow as tf

    import tfswap

    slab = tf.raw_ops.Empty(shape=[ARENA_MIB - 2, MIB], dtype=tf.uint8)
    del slab
    search = SEARCHES[name]
    step, arguments = search.make()
    started = time.perf_counter()
    found = tfswap.max_batch(
        tf.function(step), *arguments, memory_limit=limit, vary=search.vary, multiple_of=search.multiple_of
    )
    return {
        "search": name,
        "limit_bytes": found.limit_bytes,
        "unoptimised": found.unoptimised_size,
        "size": found.size,
        "peak_bytes": found.peak_bytes,
        "confirmed": found.confirmed,
        "time_ratio": found.time_ratio,
        "host_bytes": found.host_bytes,
        "took_s": time.perf_counter() - started,
    }


def spawn(name: str, limit: str) -> dict[str, Any]:
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ARENA_MIB),
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TFSWAP_PLAN_CACHE": "off",
    }
    command = [sys.executable, __file__, name, "--limit", limit, "--child"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: the search failed\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("searches", nargs="*", metavar="SEARCH", help=f"of {', '.join(SEARCHES)}; all by default")
    parser.add_argument("--limit", default="256MiB")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [name for name in args.searches if name not in SEARCHES]
    if unknown:
        parser.error(f"nothing is searched by {unknown[0]!r}; there are {', '.join(SEARCHES)}")
    if args.child:
        print(json.dumps(child(args.searches[0], args.limit)))
        return 0
    print(f"{'at most ' + args.limit:<40}{'unoptimised':>12}{'tfswap':>8}{'planned MiB':>13}{'time':>7}{'took, s':>9}")
    rows: list[dict[str, Any]] = []
    for name in args.searches or SEARCHES:
        row = spawn(name, args.limit)
        rows.append(row)
        print(
            f"{SEARCHES[name].title:<40}{row['unoptimised']:>12}{row['size']:>8}{row['peak_bytes'] / MIB:>13.1f}"
            f"{row['time_ratio']:>7.2f}{row['took_s']:>9.1f}  {'confirmed' if row['confirmed'] else 'NOT CONFIRMED'}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["confirmed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
