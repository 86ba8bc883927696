"""The machine and the versions that figures are of, and the tests that are marked for a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu.process import EMULATED, SMALL, attach_emulated

ROOT = Path(__file__).resolve().parent.parent.parent
FIELDS = ("name", "driver_version", "memory.total", *(f"pcie.link.{of}" for of in ("gen.max", "width.current")))
LANE_GB_S = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""By generation of PCIe, what a lane carries in each direction."""


def environment() -> dict[str, Any]:
    import tensorflow as tf

    if EMULATED:
        attach_emulated()
    found: dict[str, Any] = {
        "tfswap": commit() or "no clone",
        "Python": platform.python_version(),
        "system": platform.platform(),
        "small nets": SMALL,
        "emulated": EMULATED,
    }
    for package in ("tensorflow", "tensorflow-cpu", "keras", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    found["build"] = {k: str(v) for k, v in tf.sysconfig.get_build_info().items() if "cu" in k}
    gpus = tf.config.list_physical_devices("GPU")
    found["gpus"] = len(gpus)
    if gpus:
        found["details"] = {k: str(v) for k, v in tf.config.experimental.get_device_details(gpus[0]).items()}
    found["gpu"] = {} if EMULATED else nvidia_smi()
    found["cores"] = os.cpu_count()
    found["host_memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return found


def commit() -> str:
    """The clone's; empty where there is none."""
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        return subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    return ""


def nvidia_smi() -> dict[str, str]:
    """What NVIDIA's tool says of the first GPU; nothing where it says nothing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError, ValueError):
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        values = [value.strip() for value in output.splitlines()[0].split(",")]
        return dict(zip(FIELDS, values, strict=True))
    return {}


def link_gb_s(gpu: dict[str, str]) -> float | None:
    """What the GPU's link carries in each direction; None where nvidia-smi did not say."""
    with contextlib.suppress(KeyError, ValueError):
        return LANE_GB_S[int(gpu["pcie.link.gen.max"])] * int(gpu["pcie.link.width.current"])
    return None


def tests() -> dict[str, Any]:
    """The tests that are marked `gpu`. One that was skipped shows nothing."""
    missing = [name for name in ("pytest", "pytest_timeout", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        return {"not_run": f"{', '.join(missing)} is not installed"}
    options = ["-q", "-p", "no:cacheprovider", "--tb=short"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *options, "tests/runtime/test_gpu.py"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    output = (ran.stdout + ran.stderr)[-6000:]
    if ran.returncode:
        return {"failed": f"pytest ended with {ran.returncode}", "output": output}
    return {"failed": "tests were skipped", "output": output} if "skipped" in ran.stdout else {"output": output}
