"""Does tfswap keep its promise on the GPU of this machine, and what does that cost? One command, one page.

    python benchmarks/gpu_proof.py --json proof.json     # all parts, 20 minutes on an H100; writes proof.md next to it
    python benchmarks/gpu_proof.py nets:resnet50 codecs --json proof.json   # these parts; what else the file has stays
    python benchmarks/gpu_proof.py --page                # docs/gpu_figures.md, from benchmarks/results/gpu.json

    environment   the GPU, its driver, its link, and all versions
    pinned        kernels that read and write a variable whose buffer is pinned host memory: values, and bandwidth
    tests         the tests marked "gpu"
    copies        rates of the swap ops, compared with those of TensorFlow's own copies from and to pageable memory
    codecs        rates of the codecs, compared with the device memory's
    nets          by net: peak under the limit, values, planned against measured, time against the unoptimised step,
                  the copies' time that passes concurrent with kernels; recompute_grad and XLA, and tfswap at their
                  peaks
    batch         the largest batch of ResNet-50 and of a transformer in 8 GiB, unoptimised and with tfswap

`GPU_PROOF_EMULATED=1 GPU_PROOF_SMALL=1 PYTHONPATH=tests` tries the command itself on the emulated GPUs of the tests,
with small nets. Where this clone is not installed, its folder must be on PYTHONPATH too.

Each measurement is a process of its own. A part that fails is reported with the end of its output, and the others go
on; one that `--minutes` leaves no time for is reported as not run. No network is needed.

Values are compared bit by bit, after the same number of steps, with the unoptimised step's without Grappler's memory
optimizer, or without Grappler: "digest" is of all losses and variables. All run deterministic kernels, and with the
same bound on cuDNN's workspaces, which decides which of its algorithms are tried. Peaks are the allocator's own. Times
are medians of steps that each end with the loss on the host.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu import batch, kernels, nets, page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "gpu.json"
PAGE = ROOT / "docs" / "gpu_figures.md"

WORKSPACE_MIB = 32
"""What cuDNN may take for a convolution, unoptimised and optimised."""
LONGEST_S = 400
"""What takes longer than this hangs."""


def environment() -> dict[str, Any]:
    import tensorflow as tf

    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    found: dict[str, Any] = {
        "tfswap": commit or "no clone",
        "Python": platform.python_version(),
        "system": platform.platform(),
    }
    for package in ("tensorflow", "tensorflow-cpu", "keras", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    found["build"] = {k: str(v) for k, v in tf.sysconfig.get_build_info().items() if "cu" in k}
    found["devices"] = [d.name for d in tf.config.list_physical_devices()]
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        found["details"] = {k: str(v) for k, v in tf.config.experimental.get_device_details(gpus[0]).items()}
    fields = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        output = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, check=True
        ).stdout
        found["gpu"] = dict(
            zip(fields.split(","), (part.strip() for part in output.splitlines()[0].split(",")), strict=True)
        )
    found["cores"] = os.cpu_count()
    found["host_memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return found


def tests() -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "tests/runtime/test_gpu.py",
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    ok = ran.returncode == 0 and "skipped" not in ran.stdout  # tests that were skipped show nothing
    return {"rc": ran.returncode, "output": ran.stdout[-6000:], "ok": ok}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "environment": environment,
    "pinned": kernels.pinned,
    "tests": tests,
    "copies": kernels.copies,
    "codecs": kernels.codecs,
    "nets": nets.measure,
    "batch": batch.largest,
}


def cases(part: str) -> list[tuple[str, ...]]:
    """What a part is made of: the arguments of its processes."""
    if part == "nets":
        return [(part, net, how) for net in nets.nets() for how in ("default", *nets.REFERENCES, *nets.LIMITS)] + [
            (part, "blocks", how) for how in nets.PEERS
        ]
    if part == "batch":
        return [(part, net, how) for net in batch.NETS for how in batch.HOWS]
    return [(part,)]


def at_peers_peaks(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """tfswap under the peaks that its peers were measured at."""
    peaks = (results.get(f"nets:blocks:{how}", {}).get("peak_bytes") for how in nets.PEERS)
    found = [("nets", "blocks", str(peak)) for peak in peaks if peak]
    return [case for case in found if ":".join(case) not in results]


def run_case(case: tuple[str, ...], deadline: float, env: dict[str, str]) -> dict[str, Any]:
    """What a case's process prints; with "failed" and the end of its output where it doesn't."""
    left_s = deadline - time.monotonic()
    if left_s < 20:
        return {"not_run": "no time was left"}
    began = time.monotonic()
    command = [sys.executable, __file__, "--child", *case]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=min(left_s, LONGEST_S), env={**os.environ, **env}
        )
    except subprocess.TimeoutExpired as error:
        output = (
            (error.stderr or b"").decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        )
        return {"failed": f"took more than {min(left_s, LONGEST_S):.0f} s", "output": output[-3000:]}
    try:
        found = json.loads(ran.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"failed": f"ended with {ran.returncode}", "output": (ran.stdout + ran.stderr)[-4000:]}
    return found | {"took_s": time.monotonic() - began}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART[:CASE[:HOW]]", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--json", type=Path, help="write the figures here; those that are there already stay")
    parser.add_argument("--minutes", type=float, default=20, help="parts that do not fit into this time are not run")
    parser.add_argument("--processes", type=int, default=4, help="processes that plan side by side; one runs steps")
    parser.add_argument(
        "--page",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="JSON",
        help="make the page of these figures; run nothing",
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.child:
        if os.environ.get("GPU_PROOF_EMULATED"):
            import emulated_gpu

            emulated_gpu.attach()
        part, *rest = arguments.child
        print(json.dumps(PARTS[part](*rest)), flush=True)
        return 0
    if arguments.page:
        made = PAGE if arguments.page == RESULTS else arguments.page.with_suffix(".md")
        made.write_text(page.page(json.loads(arguments.page.read_text())))
        return 0
    return 1 if run_cases(arguments) else 0


def run_cases(arguments: argparse.Namespace) -> int:
    """Run the chosen parts, and write their figures; returns how many failed."""
    chosen = [tuple(part.split(":")) for part in arguments.parts] or [(part,) for part in PARTS]
    wanted = [case for given in chosen for case in cases(given[0]) if case[: len(given)] == given]
    results: dict[str, Any] = {}
    if arguments.json and arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    deadline = time.monotonic() + 60 * arguments.minutes
    env = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CUDNN_WORKSPACE_LIMIT_IN_MB": str(WORKSPACE_MIB),
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
    if os.environ.get("GPU_PROOF_SMALL") and not os.environ.get("GPU_PROOF_EMULATED"):
        env["TF_CPU_ALLOCATOR_USE_BFC"] = "1"  # a CPU has no figures without an arena
    with tempfile.TemporaryDirectory() as folder:
        env["GPU_PROOF_LOCK"] = str(Path(folder, "lock"))
        failed, writing = 0, threading.Lock()

        def done(case: tuple[str, ...]) -> None:
            nonlocal failed
            found = run_case(case, deadline, env)
            with writing:
                failed += "failed" in found
                results[":".join(case)] = found
                print(":".join(case), json.dumps(found)[:1500], flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(results, indent=1))

        for case in wanted:
            if case[0] not in ("nets", "batch"):
                done(case)
        with ThreadPoolExecutor(arguments.processes) as pool:
            list(pool.map(done, [case for case in wanted if case[0] in ("nets", "batch")]))
            list(pool.map(done, at_peers_peaks(results)))
    if arguments.json:
        arguments.json.with_suffix(".md").write_text(page.page(results))
    return failed


if __name__ == "__main__":
    sys.exit(main())
