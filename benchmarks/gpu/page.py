"""The page that gpu_proof.py makes of its figures. Nothing on it is typed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu.batch import PLANNED
from gpu.nets import REFERENCES

PUBLISHED_CUT, PUBLISHED_TIME = 0.35, 1.21
"""VGG19's memory and time by offloading (Hascoet et al. 2019)."""

Figures = dict[str, Any]


def page(results: Figures) -> str:
    """The whole page, in Markdown."""
    parts = [_head(results.get("environment", {})), _nets(results), _concurrent_copies(results), _batches(results)]
    parts += [_rates(results, "copies", "Copies, GB/s"), _rates(results, "codecs", "Codecs, GB/s of the tensor")]
    parts += [_pinned(results.get("pinned", {})), _tests(results.get("tests", {})), _missing(results)]
    return "\n".join(part for part in parts if part)


def _head(found: Figures) -> str:
    gpu = found.get("gpu", {})
    named = gpu.get("name") or ", ".join(found.get("devices", ())) or "a machine that was not recorded"
    rows = [(key, value) for key, value in {**found, **found.get("build", {}), **gpu}.items() if isinstance(value, str)]
    rows += [(key, f"{value:,}") for key, value in found.items() if isinstance(value, int)]
    table = _table(("", ""), rows)
    return f"# Figures of a GPU: {named}\n\nMade by `python benchmarks/gpu_proof.py`.\n\n{table}"


def _nets(results: Figures) -> str:
    rows: list[Sequence[str]] = []
    notes: list[str] = []
    for net in dict.fromkeys(key.split(":")[1] for key in results if key.startswith("nets:")):
        references = {results.get(f"nets:{net}:{how}", {}).get("digest") for how in REFERENCES} - {None}
        default = results.get(f"nets:{net}:default", {})
        if "peak_bytes" not in default:
            continue
        for key, row in results.items():
            if not key.startswith(f"nets:{net}:") or "peak_bytes" not in row or row is default:
                continue
            how = key.split(":")[2]
            if how in REFERENCES:
                continue
            ratio = row["median_s"] / default["median_s"]
            values = "identical" if row["digest"] in references else "differ" if len(references) > 1 else "not compared"
            peaks = [row["peak_bytes"], max(row["first_peaks"])]
            limit = row.get("limit_bytes")
            sizes = [_mb(limit), _mb(row.get("planned_bytes")), *(_marked(peak, limit) for peak in peaks)]
            rows.append((f"{net}, {how}", *sizes, _mb(default["peak_bytes"]), f"{ratio:.2f}", values))
            if net == "vgg19" and limit:
                cut = 1 - row["peak_bytes"] / default["peak_bytes"]
                notes.append(
                    f"VGG19, {how}: {cut:.0%} less memory at {ratio:.2f} of the time, where {PUBLISHED_CUT:.0%} less "
                    f"at {PUBLISHED_TIME:.2f} is published for offloading (Hascoet et al. 2019), on another GPU."
                )
    if not rows:
        return ""
    columns = ("net, limit", "limit", "planned", "peak", "first steps", "unoptimised", "time", "values")
    reported = "Sizes in MB (10^6 bytes), times over the unoptimised step's. Bold: over the limit."
    return "\n".join(["## Peaks, values and times\n", reported, "", _table(columns, rows), *notes, ""])


def _concurrent_copies(results: Figures) -> str:
    rows = []
    for key, row in results.items():
        of = row.get("streams", {}) if key.startswith("nets:") else {}
        if of.get("copies_s", 0) > 1e-3 and "limit_bytes" in row:
            times = (row["median_s"], of["kernels_s"], of["copies_s"])
            shown = [f"{1e3 * each:.1f}" for each in times]
            rows.append((key[5:].replace(":", ", "), *shown, f"{of['concurrent_s'] / of['copies_s']:.0%}"))
    columns = ("net", "step, ms", "kernels, ms", "copies, ms", "of these concurrent with kernels")
    return f"## Copies concurrent with kernels\n\n{_table(columns, rows)}" if rows else ""


def _batches(results: Figures) -> str:
    rows = []
    for net in dict.fromkeys(key.split(":")[1] for key in results if key.startswith("batch:")):
        default, ours = (results.get(f"batch:{net}:{how}", {}) for how in ("default", PLANNED))
        if default.get("batch") and ours.get("batch"):
            multiple = f"{ours['batch'] / default['batch']:.1f}"
            time = f"{ours['example_s'] / default['example_s']:.2f}"
            rows.append((net, _mb(default["memory_bytes"]), str(default["batch"]), str(ours["batch"]), multiple, time))
    columns = ("net", "memory, MB", "unoptimised", "tfswap", "times", "time for an example")
    return f"## The largest batch\n\n{_table(columns, rows)}" if rows else ""


def _rates(results: Figures, part: str, title: str) -> str:
    found = results.get(part, {}).get("gb_s")
    if isinstance(found, dict):
        rows = [(op, rate if isinstance(rate, str) else f"{rate:,.0f}") for op, rate in found.items()]
        return f"## {title}\n\n{_table(('op', 'rate'), rows)}"
    if found:
        rows = [[f"{value:,.1f}" for value in row.values()] for row in found]
        return f"## {title}\n\n{_table(list(found[0]), rows)}"
    return ""


def _pinned(found: Figures) -> str:
    rows = [
        (name, f"{one['device_gb_s']:,.0f}", f"{one['pinned_gb_s']:,.0f}", "identical" if one["same"] else "**differ**")
        for name, one in found.items()
        if isinstance(one, dict)
    ]
    columns = ("kernel", "variable on the device, GB/s", "in pinned host memory, GB/s", "values")
    return f"## Variables in pinned host memory\n\n{_table(columns, rows)}" if rows else ""


def _tests(found: Figures) -> str:
    lines = found.get("output", "").strip().splitlines()
    return f"## Tests marked `gpu`\n\n`{lines[-1].strip('= ')}`\n" if lines else ""


def _missing(results: Figures) -> str:
    reasons = {key: row.get("failed") or row.get("not_run") for key, row in results.items()}
    rows = [(key, reason) for key, reason in reasons.items() if reason]
    return f"## Failed, or not run\n\n{_table(('part', 'reason'), rows)}" if rows else ""


def _mb(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:,.0f}"


def _marked(nbytes: int, limit_bytes: int | None) -> str:
    return f"**{_mb(nbytes)}**" if limit_bytes is not None and nbytes > limit_bytes else _mb(nbytes)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
