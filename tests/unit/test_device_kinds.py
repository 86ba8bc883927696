"""Code that plans or rewrites reads what a device can do (`DeviceModel`, `Target`), not its kind."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "tfswap"

READS = {
    "analysis/encodings.py": "the table of codecs has a column for each kind",
    "compiler/grappler.py": "Grappler's rules depend on the kind, of which it is given a description",
    "frontends/apply_passes.py": "an argument of `tfswap opt`",
    "frontends/cli.py": "an argument of `tfswap opt`",
    "frontends/doctor.py": "lists a machine's devices",
    "frontends/profile.py": "TensorFlow's profiler names its lines by the kind",
    "importers/run_grappler.py": "whether a machine has the devices that a file names",
    "passes/prepare/outer_products.py": "bits were compared for the CPU's kernels",
    "runtime/nested_calls.py": "GPUs are not handled",
}
"""The other files that read the kind, and why."""


def _reads_kind(path: Path) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "is_gpu")
        or (isinstance(node, ast.Constant) and node.value in ("gpu", "GPU", "GPU:0"))
        for node in ast.walk(ast.parse(path.read_text()))
    )


def test_the_kind_of_a_device_is_read_in_kernels_and_device_only() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in ("kernels", "device") and _reads_kind(path)
    }
    assert found - {*READS} == set(), "name what the device can do, as in kernels/device.py"
    assert {*READS} - found == set()
