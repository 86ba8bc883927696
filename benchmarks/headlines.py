"""The headlines of this field's papers, each measured here: a row for each, as JSON, and pages made from that.

    python benchmarks/headlines.py                                    # all rows; hours on two cores
    python benchmarks/headlines.py offloading batch                   # these two; the others stay
    python benchmarks/headlines.py layrub:AlexNet "layrub:ResNet-50"  # these parts of a row
    python benchmarks/headlines.py --quick                            # ratios of small nets, within bounds? seconds
    python benchmarks/headlines.py --pages                            # docs/comparisons, from benchmarks/results

    offloading     VGG19's memory against time, compared with checkpoints (CPU offloading)
    batch          the largest batch under a fixed cap (Meng et al., TFLMS)
    layrub         the memory of AlexNet, VGG, Inception and ResNets of 50 to 1,517 layers (Layrub)
    solvers        published policies under the same cap, in tfswap's own engine
    kinds          each model's peak by kind of tensor, and ResNet-50's memory over a step (Meng et al., figure 1)
    ablation       what each tactic adds, and what each part of swapping is good for
    peers          what else makes a step smaller in TensorFlow, at the same measured peaks (benchmarks/peers.py)
    together       which tool when: those, tfswap and two of them in one step, at shares of the memory (peers.py)
    pytorch        checkpoint, save_on_cpu and torch.compile on the same architectures (needs the extra "peers")
    superneurons   depth under a fixed cap, and the peak compared with the largest kernel's (benchmarks/depth.py)
    gist           encodings as the only tactic (benchmarks/gist.py)
    scale          a step's time against what is swapped in it, and against the link's rate
    margins        the share of a limit that plans use, and what others lose in holes

Each row is a module of benchmarks/papers: `measure` gives the figures of one of its parts, as one of its nets,
`present` says what they mean. A part that was measured takes the place of that part in benchmarks/results/ROW.json, and
carries its command, machine, versions, time and load. What only papers say of other systems is in
papers/harness/published.py.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROWS = (
    "offloading",
    "batch",
    "layrub",
    "solvers",
    "kinds",
    "ablation",
    "peers",
    "together",
    "pytorch",
    "superneurons",
    "gist",
    "scale",
    "margins",
)


ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "comparisons"


def figures_of(results: Path) -> dict[str, Any]:
    """By row and part, the figures of a folder."""
    return {row: json.loads(path.read_text()) for row in ROWS if (path := results / f"{row}.json").exists()}


def _commit() -> str:
    """Which state of a clone this is, where it is one: releases are few, and what is between them differs."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=9"]
    try:
        return f" at {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}"
    except (OSError, subprocess.CalledProcessError):
        return ""


def taken(command: list[str], started: float) -> dict[str, Any]:
    """Where and how a row was measured."""
    packages = ("tensorflow", "tensorflow-cpu", "keras")
    versions = {"Python": platform.python_version(), "tfswap": metadata.version("tfswap") + _commit()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": shlex.join(command),
        "machine": machine(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "when": time.strftime("%Y-%m-%d", time.gmtime(started)),
        "took_s": time.time() - started,
        "load": os.getloadavg()[2],
        "cores": os.cpu_count(),
    }


def machine() -> str:
    """The processor, as Linux names it, its vector instructions, and the memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    named = facts.get("model name") or platform.processor() or platform.machine()
    flags = set(facts.get("flags", "").split())
    best = next((name for flag, name in INSTRUCTIONS.items() if flag in flags), "")
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ", ".join(filter(None, [named, best, f"{memory_bytes / 2**30:.0f} GiB"]))


INSTRUCTIONS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
"""By flag; the first that a processor has is reported."""


def _quick() -> int:
    from papers.harness import quick, turns

    found = turns.reported_by({"module": "harness.quick"}, 512)
    for name, ratio in found.items():
        print(f"{name:<36}{ratio:>7.3f}, at most {quick.BOUNDS[name]}")
    return 0 if all(found[name] <= most for name, most in quick.BOUNDS.items()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "rows", nargs="*", metavar="ROW[:PART]", help=f"of {', '.join(ROWS)}; all by default, with all of their parts"
    )
    parser.add_argument(
        "--quick", action="store_true", help="no rows, but ratios of small nets, and whether they are within bounds"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the folder of figures, a file for each row; other parts stay"
    )
    parser.add_argument(
        "--pages", type=Path, nargs="?", const=PAGES, metavar="FOLDER", help="make the pages from the figures"
    )
    parser.add_argument("--python", default=sys.executable, help="an interpreter with PyTorch, for the row pytorch")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        spec = json.loads(args.child)
        importlib.import_module(f"papers.{spec.get('module', 'harness.turns')}").child(spec)
        return 0
    from papers.harness import page

    from tfswap.support import progress

    asked: list[tuple[str, str]] = []
    for one in args.rows or ROWS:
        row, _, part = one.partition(":")
        if row not in ROWS:
            parser.error(f"no row is named {row!r}; there are {', '.join(ROWS)}")
        parts = page.module_of(row).PARTS
        if part and part not in parts:
            parser.error(f"{row} has no part {part!r}; there are {', '.join(parts)}")
        asked += [(row, one) for one in ([part] if part else parts)]

    if args.quick:
        return _quick()
    if args.pages:
        page.make_pages(figures_of(args.results), args.pages, ROWS)
        return 0
    for row, part in progress.over("measuring rows", asked):
        started = time.time()
        with progress.task(f"{row}: {part}"):
            found = page.module_of(row).measure(part, **({"python": args.python} if row == "pytorch" else {}))
        command = ["python", "benchmarks/headlines.py", f"{row}:{part}"]
        command += ["--python", "PYTHON"] * (row == "pytorch")
        figures = figures_of(args.results).get(row, {}) | {part: {"taken": taken(command, started), "found": found}}
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / f"{row}.json").write_text(json.dumps(figures, indent=1) + "\n")
        section = page.module_of(row).present({part: found})
        print(f"{section.title}\n  published: {section.published}\n  here: {section.ours}", flush=True)
        for table in (*section.tables, *section.details):
            print(page.as_text(table), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
