"""Reports which parts of this machine tfswap can use, and how to install what is missing. Works without TensorFlow."""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING, Any

from tfswap.compiler import calibration
from tfswap.compiler.rival_rewriters import FLAGS, clusters_by_environment
from tfswap.device import arena, machine
from tfswap.errors import TfswapError
from tfswap.kernels.calibration import Calibration
from tfswap.support.sizes import format_bytes

if TYPE_CHECKING:
    from tfswap.native.load import OpLibraryStatus


def examine(*, calibrate: bool = False) -> tuple[dict[str, Any], str]:
    """The facts, and the same as text.

    Args:
        calibrate: measure this machine's kernels again.
    """
    from tfswap.native import build
    from tfswap.native.load import status
    from tfswap.version import __version__

    library, codecs = status(), status(build.CODECS)
    errors = [library.error] if library.error else [f"encodings: {codecs.error}"] if codecs.error else []
    content: dict[str, Any] = {
        "tfswap": __version__,
        "python": platform.python_version(),
        "python_executable": sys.executable,
        "platform": platform.platform(),
        "tensorflow": library.tensorflow_version,
        "compiler": library.compiler,
        "compiler_version": library.compiler_version,
        "op_library": _library(library),
        "codec_library": _library(codecs),
        "devices": [],
        "processor": calibration.processor(),
        "calibration": None,
        "advice": list(errors),
    }
    if library.tensorflow_version is not None:
        content["devices"] = _devices(content["advice"])
        content["calibration"] = _calibration(calibrate)
        _advise(content)
    content["ok"] = not errors
    return content, _render(content)


def _calibration(again: bool) -> dict[str, float] | None:
    """The rates of this machine's CPU over the default ones; None where those hold."""
    if calibration.is_off():
        return None
    found = calibration.find(machine.current_device(on_cpu=True)[1], again=again)
    return None if found is None else found._asdict()


def _library(status: OpLibraryStatus) -> dict[str, Any]:
    return {
        "path": None if status.library is None else str(status.library),
        "cache": None if status.cache_dir is None else str(status.cache_dir),
        "built": status.built,
        "loaded": status.loaded,
    }


def _devices(advice: list[str]) -> list[dict[str, Any]]:
    import tensorflow as tf

    found = []
    for device in tf.config.list_logical_devices():
        name = device.name.rpartition("device:")[2]
        try:
            with tf.device(name):
                held = tf.zeros([1 << 10])  # an allocator without statistics reports 0 even now
            info = arena.memory_info(name)
            keeps = info is not None and info.current_bytes > 0
            del held
            limit = arena.device_limit_bytes(name) if device.device_type in ("CPU", "GPU") else None
        except (TfswapError, ValueError, tf.errors.OpError) as error:
            advice.append(f"the memory of {name} can't be read: {error}")
            keeps, limit = False, None
        found.append({"name": name, "keeps_figures": keeps, "limit_bytes": limit, "kind": device.device_type})
    return found


def _advise(content: dict[str, Any]) -> None:
    advice = content["advice"]
    if not content["op_library"]["built"] and not advice:
        advice.append('the ops are not built yet: it happens at first use, or now with python -c "import tfswap.ops"')
    kinds = {d["kind"] for d in content["devices"]}
    if "GPU" not in kinds and not arena.cpu_uses_bfc():
        advice.append(
            "TensorFlow sees no GPU, and the CPU's memory is not capped: to try limits on the CPU set "
            "TF_CPU_ALLOCATOR_USE_BFC=1 and TF_CPU_BFC_MEM_LIMIT_IN_MB=N before Python starts"
        )
    if os.environ.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async":
        advice.append(
            "TF_GPU_ALLOCATOR=cuda_malloc_async: limits are kept in the bytes that tensors take; what the "
            "driver's pool takes is not bounded. Unset it for TensorFlow's own arena, which keeps to the limit"
        )
    if clusters_by_environment():
        advice.append(f"{FLAGS}={os.environ[FLAGS]!r} lets XLA cluster steps, which tfswap refuses: unset it")


def _render(content: dict[str, Any]) -> str:
    compiler = content["compiler"]
    if compiler and content["compiler_version"]:
        compiler = f"{compiler}  ({content['compiler_version']})"
    rows = [
        ("tfswap", content["tfswap"]),
        ("Python", f"{content['python']}  ({content['python_executable']})"),
        ("TensorFlow", content["tensorflow"] or "missing"),
        ("compiler", compiler or "missing"),
        ("op library", _library_state(content["op_library"])),
        ("codecs", _library_state(content["codec_library"])),
    ]
    for device in content["devices"]:
        limit = device["limit_bytes"]
        capped = f"capped at {format_bytes(limit)}" if limit else "no limit of its own"
        figures = "measures its peak" if device["keeps_figures"] else "keeps no figures of its peak"
        rows.append((device["name"], f"{capped}, {figures}"))
    if content["tensorflow"]:
        rows.append(("costs", _costs(content["calibration"])))
    lines = [f"{name:<12}{text}" for name, text in rows]
    if content["advice"]:
        lines += ["", *(f"- {a}" for a in content["advice"])]
    return "\n".join([*lines, "", "All found." if content["ok"] else "Something is missing: see above."])


def _costs(found: dict[str, float] | None) -> str:
    if calibration.is_off():
        return f"the default rates of a CPU: {calibration.SWITCH} is off"
    if found is None:
        return "the default rates of a CPU: this one was not measured"
    return f"as measured on this CPU: {Calibration(**found)}"


def _library_state(library: dict[str, Any]) -> str:
    state = "loaded" if library["loaded"] else "built" if library["built"] else "not built yet"
    return f"{state}  ({library['path'] or library['cache']})"
