"""The README.txt of a rewritten SavedModel: what it needs, how to load it, and the plan of each function."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

from tfswap.compiler.model_file import PLAN_NAME, README_NAME
from tfswap.compiler.offline import SCOPE_NOTE, Planned
from tfswap.compiler.options import Options
from tfswap.compiler.origin import REQUEST_NAME, Origin, numbered
from tfswap.ir.custom_ops import NAMESPACE
from tfswap.plan.plan import Plan
from tfswap.support.sizes import format_bytes, format_count

SECTION = "The function "
"""The beginning of the section about one function."""

_PORTABLE = [
    "It has TensorFlow's own ops alone and loads like any other. The peaks below are predictions: without",
    "tfswap's ops nothing holds them. Where tfswap is, tfswap.load(path_of_this_folder) keeps the limit.",
    "",
]


def readme(folder: Path, function: str, changed: Mapping[str, Planned], options: Options) -> str:
    """The text for a rewritten folder, which may have been rewritten for other functions before.

    Args:
        folder: without the new text, but with that of earlier rewritings.
        changed: the plans of the function's traces, by name.
    """
    from tfswap.version import __version__

    earlier = Origin.read(folder) if (folder / REQUEST_NAME).is_file() else []  # the latest first
    rewritten = [step for origin in earlier for step in origin.steps if step.rewritten]
    plans = [Plan.load(folder / name) for step in rewritten for name in step.plan_names.values()]
    plans += [plan for made in changed.values() for plan in made.plans.values()]
    several = any("" not in made.plans for made in changed.values()) or any(step.devices for step in rewritten)
    lines = ["This SavedModel was rewritten by tfswap, function by function, to keep its device memory under a limit."]
    lines += _PORTABLE if options.portable else _how_to_load(max(plan.needs for plan in plans), several)
    lines += [f"{SECTION}{function!r}, by tfswap {__version__}:"]
    for name, made in changed.items():
        lines += _figures(name, made)
    lines += _limits(options)
    lines += ["", f"The plan is in {PLAN_NAME}. Larger inputs than it was made for take more memory.", ""]
    if earlier and (folder / README_NAME).is_file():
        _, _, sections = (folder / README_NAME).read_text(encoding="utf-8").partition(f"\n{SECTION}")
        plan = numbered(PLAN_NAME, len(earlier))  # as Origin.make_room calls it
        lines += [SECTION + sections.replace(f"The plan is in {PLAN_NAME}.", f"The plan is in {plan}.", 1)]
    return "\n".join(lines)


def _how_to_load(needs: str, several: bool) -> list[str]:
    """How to load a model with tfswap's ops.

    Args:
        needs: the module with the ops of all plans; that of the codecs, the last by name, includes the others.
        several: whether steps are planned for several devices, and variables have theirs.
    """
    options = ", options=tf.saved_model.LoadOptions(\n        experimental_variable_policy='save_variable_devices')"
    return [
        "It uses tfswap's own ops:",
        "",
        "    pip install .        (in a clone of tfswap, of this version or a later one)",
        "",
        "    import tfswap",
        "    model = tfswap.load(path_of_this_folder)",
        "",
        "That keeps the limit whatever else the process has on the device: it plans again where the plan in",
        "this file does not fit. Without planning again, the file loads so too:",
        "",
        "    import tensorflow as tf",
        f"    import {needs}",
        f"    model = tf.saved_model.load(path_of_this_folder{options if several else ''})",
        "",
        "A step that can't keep its limit then fails before it begins, with a ResourceExhaustedError.",
        f"Without that import TensorFlow says that ops whose names begin with {NAMESPACE} are not registered.",
        "",
    ]


def _figures(name: str, made: Planned) -> list[str]:
    """The plan of one trace, for each device."""
    lines: list[str] = []
    for device, plan in made.plans.items():
        report = made.report.devices[device]
        kernels, packed = format_count(len(plan.encoded), "kernel"), format_count(len(plan.packed), "tensor")
        lines += [
            f"  {name}{f' on {device}' if device else ''}:",
            f"  limit          {format_bytes(plan.limit_bytes or 0)}",
            f"  peak before    {format_bytes(report.baseline_peak_bytes)} (predicted)",
            f"  peak planned   {format_bytes(plan.planned_peak_bytes)}",
            f"  swapped        {format_count(len({a.tensor for a in plan.evictions}), 'tensor')}",
            f"  encoded        for {kernels}, and {packed}",
            f"  host memory    {format_bytes(plan.host_bytes)}",
            f"  disk           {format_bytes(plan.disk_bytes)}",
        ]
        if SCOPE_NOTE in report.notes:
            lines += ["", *textwrap.wrap(f"  {SCOPE_NOTE[0].upper()}{SCOPE_NOTE[1:]}.", 100, subsequent_indent="  ")]
    return lines


def _limits(options: Options) -> list[str]:
    """Limits of the memory for swapped tensors."""
    lines: list[str] = []
    host_limit_bytes, spill = options.host_limit_bytes, options.spill
    if host_limit_bytes is not None and not options.portable:
        lines += [
            "",
            f"Swapped tensors may take {format_bytes(host_limit_bytes)} of host memory (host_memory_limit). The",
            "ops keep that limit wherever the model is loaded; other rewritten functions have theirs on top.",
        ]
    if spill is not None:
        lines += ["", f"What host memory has no room for goes to a file without a name in {spill.folder} (spill_dir)."]
    return lines
