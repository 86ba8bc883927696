"""What the plan cache saves of a first call: Keras' ResNet-50 in processes of their own.

    python benchmarks/plan_cache.py                        # at 60% of the unoptimised peak
    python benchmarks/plan_cache.py --limit 512MiB --json cache.json

Three processes train the same step in the same cache: one with the cache turned off, one that finds it empty, one that
finds what that has left. Times are wall clock, of the first call after tracing and of the one after it. Plan and loss
of the last two must be the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUNS = ("off", "empty", "filled")


def child(limit: str) -> dict[str, Any]:
    """One process: what its calls take, and what it got."""
    from planning_time import resnet50

    import tfswap

    step, arguments = resnet50()
    step.get_concrete_function(*arguments)
    optimized = tfswap.optimize(step, memory_limit=limit, on_exceeded="raise")
    times = []
    for _ in range(2):
        start = time.perf_counter()
        loss = float(optimized(*arguments))
        times.append(time.perf_counter() - start)
    return {"first_s": times[0], "second_s": times[1], "loss": loss.hex(), "plan": hash_of(optimized.plan().to_json())}


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run(limit: str, cache: str) -> dict[str, Any]:
    arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "4096", "TF_ENABLE_ONEDNN_OPTS": "0"}
    environment = os.environ | arena | {"TF_CPP_MIN_LOG_LEVEL": "2", "TFSWAP_PLAN_CACHE": cache}
    command = [sys.executable, __file__, "--child", "--limit", limit]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="60%", help="as memory_limit takes it")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.limit)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = {name: run(options.limit, "off" if name == "off" else folder) for name in RUNS}
    print(f"{'plan cache':<12}{'first call':>12}{'second call':>13}  plan")
    for name, figures in found.items():
        print(f"{name:<12}{figures['first_s']:>10.1f} s{figures['second_s']:>11.1f} s  {figures['plan']}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    same = all(found["empty"][key] == found["filled"][key] for key in ("plan", "loss"))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
