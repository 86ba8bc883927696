"""Keeps the calibration of this machine's CPU: it is measured once, by the first process that plans a step there.

An entry's name depends on the processor, the number of threads, oneDNN, TensorFlow and the sources that a calibration
depends on, so another processor has another one. All processes of a machine read one entry, and have the same plans.

Invariants: a calibration is measured in a process of its own, which leaves this one's arena and threads alone. Of
several processes one measures, and the others wait. Where it can't be kept (no folder, or a read-only one), or can't be
measured, the default rates hold; the latter is kept too, so that not each process tries. So they do while tfswap's ops,
whose copies are measured, are not built. A damaged entry is measured anew. A process keeps what it has read.

Not handled: a machine that is slower for a time (`tfswap doctor --calibrate` measures again); GPUs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from tfswap.compiler.options import Options
from tfswap.compiler.plan_cache import OFF, PlanCache
from tfswap.errors import InvalidModel, OpLibraryError, TfswapError
from tfswap.kernels.calibration import Calibration
from tfswap.kernels.device import DeviceModel
from tfswap.native.build import cache_dir
from tfswap.native.load import status
from tfswap.support.json_fields import decode, parse_json

log = logging.getLogger("tfswap")

SWITCH = "TFSWAP_CALIBRATION"
"""The environment variable which turns calibrations off, by a word of plan_cache.OFF: the default rates hold."""
LONGEST_S = 120.0
"""A measurement that takes longer, on a machine that is overloaded, is given up."""
PROGRAM = "tfswap.device.calibration_kernels"
SOURCES = (
    "analysis/cost.py",
    "analysis/work.py",
    "device/calibration_kernels.py",
    "kernels/calibration.py",
    "kernels/hardware.py",
)
"""The sources that the figures of a calibration depend on."""
PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "CPU implementer", "CPU part")
"""Lines of /proc/cpuinfo that name a processor: the last two on ARM."""


def calibrated(model: DeviceModel, options: Options | None = None) -> DeviceModel:
    """`model`, with the calibration of this machine where it is this machine's CPU.

    Args:
        options: those of the plan. A profile has rates of its own, and needs none.
    """
    if model.host_is_separate or is_off() or (options is not None and options.profile is not None):
        return model
    return model._replace(calibration=_of_process(model.onednn, model.intra_op_threads, model.inter_op_threads))


def is_off() -> bool:
    return os.environ.get(SWITCH, "").strip().lower() in OFF


@functools.cache
def _of_process(onednn: bool, intra_op_threads: int, inter_op_threads: int) -> Calibration | None:
    return find(DeviceModel("cpu", onednn, intra_op_threads, inter_op_threads))


def find(model: DeviceModel, *, again: bool = False) -> Calibration | None:
    """The calibration of this machine's CPU, kept or measured now; None where it can't be kept or measured.

    Args:
        again: measure it even where there is one.
    """
    try:
        cache = PlanCache(cache_dir() / "calibrations", "calibrations", "TFSWAP_CACHE_DIR")
    except OpLibraryError as error:
        log.info("tfswap: this machine is not calibrated: %s", error)
        return None
    name = _name(model)
    kept = None if again else cache.read(name, _parse)
    if kept is not None:
        return kept.calibration
    if not status().built:
        log.info("tfswap: this machine is not calibrated, since the ops are not built yet")
        return None
    if not cache.is_writable():
        log.info("tfswap: this machine is not calibrated: %s can't be written to", cache.folder)
        return None
    with cache.alone(name):
        kept = None if again else cache.read(name, _parse)
        if kept is None:
            kept = _Kept(_measured(model))
            cache.write(name, json.dumps([kept.calibration]) + "\n")
    return kept.calibration


class _Kept:
    """The content of an entry."""

    def __init__(self, calibration: Calibration | None):
        self.calibration = calibration


def _parse(text: str) -> _Kept:
    """Raises InvalidModel."""
    content = parse_json(text)
    if not isinstance(content, list) or len(content) != 1:
        raise InvalidModel("it is no calibration")
    if content[0] is None:
        return _Kept(None)
    return _Kept(_checked(content[0]))


def _checked(content: object) -> Calibration:
    found = decode(Calibration, content, "calibration")
    if found != found.bounded():
        raise InvalidModel("its figures are out of bounds")
    return found


def _measured(model: DeviceModel) -> Calibration | None:
    """As measured by a process with this one's settings of TensorFlow."""
    log.info("tfswap: measuring this machine's kernels, once, for plans' costs")
    try:
        done = subprocess.run(
            [sys.executable, "-m", PROGRAM, str(model.intra_op_threads), str(model.inter_op_threads)],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=True,
        )
        return _checked(parse_json(done.stdout.splitlines()[-1]))
    except (OSError, ValueError, IndexError, subprocess.SubprocessError, TfswapError) as error:
        log.warning("tfswap: this machine's kernels can't be measured, so costs are the default ones: %s", error)
        return None


def _environment() -> dict[str, str]:
    """The environment of a process that measures: of this one, without requests to plan, or to watch, its steps.

    The BFC allocator keeps what is freed, as in planned steps; others return large blocks to the system each time.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TFSWAP_")}
    if folder := os.environ.get("TFSWAP_CACHE_DIR"):
        kept["TFSWAP_CACHE_DIR"] = folder
    kept.pop("TF_CPU_BFC_MEM_LIMIT_IN_MB", None)
    root = str(Path(__file__).resolve().parents[2])
    return kept | {
        SWITCH: OFF[0],
        "CUDA_VISIBLE_DEVICES": "-1",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
    }


def _name(model: DeviceModel) -> str:
    import tensorflow as tf

    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256(f"{tf.version.VERSION} {tf.version.GIT_VERSION}\n{processor()}\n".encode())
    digest.update(f"{model.onednn} {model.intra_op_threads} {model.inter_op_threads}\n".encode())
    for source in SOURCES:
        digest.update(hashlib.sha256((root / source).read_bytes()).digest())
    return digest.hexdigest()[:32]


@functools.cache
def processor() -> str:
    """What the system says of the first processor; empty where it does not."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except (OSError, UnicodeDecodeError):
        return ""
    lines = (line.partition(":")[::2] for line in first.splitlines())
    found = {name.strip(): value.strip() for name, value in lines}
    return ", ".join(f"{name} {found[name]}" for name in PROCESSOR if name in found)
