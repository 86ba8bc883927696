"""The page that gpu_proof.py makes of its figures. Nothing on it is typed by hand."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from gpu.batch import PLANNED
from gpu.environment import link_gb_s
from gpu.nets import DEFAULT, LIMITS, PEERS, REFERENCES

PUBLISHED_CUT, PUBLISHED_TIME = 0.35, 1.21
"""VGG19's memory and time by offloading (Hascoet et al. 2019)."""
COPY = "copy (x + 0)"
"""The codecs' row of a copy on the device, which reads and writes each byte."""
EMULATED = (
    "The GPU is emulated (docs/emulated_gpu.md): its peaks and values are what a GPU's would be; its times and rates "
    "say nothing of a GPU's."
)
IDENTICAL, DIFFER, UNKNOWN = "identical", "differ", "not compared"

Figures = dict[str, Any]


def page(results: Figures) -> str:
    """The whole page, in Markdown."""
    parts = [_head(results.get("environment", {})), _in_short(results), _nets(results), _concurrent_copies(results)]
    parts += [_batches(results), _copies(results), _codecs(results.get("codecs", {}).get("gb_s", {}))]
    parts += [_pinned(results.get("pinned", {})), _tests(results.get("tests", {})), _missing(results)]
    return "\n".join(part for part in parts if part)


def _head(found: Figures) -> str:
    gpu = found.get("gpu", {})
    named = gpu.get("name") or found.get("details", {}).get("device_name") or "a machine that was not recorded"
    rows = [(key, value) for key, value in {**found, **found.get("build", {}), **gpu}.items() if isinstance(value, str)]
    rows += [(key, f"{value:,}") for key, value in found.items() if type(value) is int]
    notes = [EMULATED] if found.get("emulated") else []
    notes += ["Nets and tensors are small ones."] if found.get("small nets") else []
    lines = [
        f"# Figures of a GPU: {named}\n",
        "Made by `python benchmarks/gpu_proof.py`.\n",
        *(f"{n}\n" for n in notes),
    ]
    return "\n".join([*lines, _table(("", ""), rows)])


def _limited(results: Figures) -> Iterator[tuple[str, Figures]]:
    """The steps under a limit, by net and limit."""
    for key, row in results.items():
        if key.startswith("nets:") and "limit_bytes" in row and "peak_bytes" in row:
            yield key[len("nets:") :].replace(":", ", "), row


def _in_short(results: Figures) -> str:
    limited = dict(_limited(results))
    if not limited:
        return ""
    over = [name for name, row in limited.items() if row["peak_bytes"] > row["limit_bytes"]]
    first_over = [name for name, row in limited.items() if max(row["first_peaks"]) > row["limit_bytes"]]
    verdicts = {name: _values(results, *name.split(", ")) for name in limited}
    ratios = [row["peak_bytes"] / row["planned_bytes"] for row in limited.values()]
    total = len(limited)
    lines = [
        f"limit kept by {total - len(over)} of {total} steps{_named(over)}",
        f"first steps: by {total - len(first_over)} of {total}{_named(first_over)}",
        f"values identical to TensorFlow's in {_count(verdicts, IDENTICAL)} of {total}"
        f"{_named([f'{name}: {verdict}' for name, verdict in verdicts.items() if verdict != IDENTICAL])}",
        f"peak over plan: {min(ratios):.3f} to {max(ratios):.3f}, median {statistics.median(ratios):.3f}",
    ]
    for limit in LIMITS:
        times = [time for name in limited if name.endswith(f", {limit}") and (time := _time(results, name))]
        if times:
            lines.append(f"time over the unoptimised step's, {limit}: median {statistics.median(times):.2f}")
    return "\n".join(["## In short\n", *(f"- {line}" for line in lines), ""])


def _count(verdicts: dict[str, str], verdict: str) -> int:
    return list(verdicts.values()).count(verdict)


def _named(names: Sequence[str]) -> str:
    return f" (not: {'; '.join(names)})" if names else ""


def _time(results: Figures, name: str) -> float | None:
    """A step's time over that of the net's unoptimised step."""
    net, how = name.split(", ")
    default = results.get(f"nets:{net}:{DEFAULT}", {}).get("median_s")
    return results[f"nets:{net}:{how}"]["median_s"] / default if default else None


def _values(results: Figures, net: str, how: str) -> str:
    """Whether a step's values are the unoptimised step's, or one of the references'."""
    row = results[f"nets:{net}:{how}"]
    found = {each: results.get(f"nets:{net}:{each}", {}).get("digest") for each in (DEFAULT, *REFERENCES)}
    if row["digest"] in found.values():
        return IDENTICAL
    return DIFFER if all(found.values()) or (found[DEFAULT] and how in PEERS) else UNKNOWN


def _nets(results: Figures) -> str:
    rows: list[Sequence[str]] = []
    notes: list[str] = []
    for key, row in results.items():
        part, net, how, *_ = [*key.split(":"), "", ""]
        default = results.get(f"nets:{net}:{DEFAULT}", {})
        if part != "nets" or "peak_bytes" not in row or "peak_bytes" not in default or how in (DEFAULT, *REFERENCES):
            continue
        ratio, limit, verdict = (
            row["median_s"] / default["median_s"],
            row.get("limit_bytes"),
            _values(results, net, how),
        )
        peaks = [row["peak_bytes"], max(row["first_peaks"])]
        sizes = [_mb(limit), _mb(row.get("planned_bytes")), *(_marked(peak, limit) for peak in peaks)]
        shown = f"**{verdict}**" if verdict == DIFFER and how not in PEERS else verdict
        named = f"{net}, {how}" + (", refused: at its floor" if how != "floor" and "floor_bytes" in row else "")
        rows.append((named, *sizes, _mb(default["peak_bytes"]), f"{ratio:.2f}", shown))
        if net == "vgg19" and limit:
            cut = 1 - row["peak_bytes"] / default["peak_bytes"]
            notes.append(
                f"VGG19, {how}: {cut:.0%} less memory at {ratio:.2f} of the time, where {PUBLISHED_CUT:.0%} less "
                f"at {PUBLISHED_TIME:.2f} is published for offloading (Hascoet et al. 2019), on another GPU."
            )
    if not rows:
        return ""
    order = list(dict.fromkeys(row[0].split(",")[0] for row in rows))
    rows.sort(key=lambda row: order.index(row[0].split(",")[0]))
    columns = ("net, limit", "limit", "planned", "peak", "first steps", "unoptimised", "time", "values")
    reported = "Sizes in MB (10^6 bytes), times over the unoptimised step's. Bold: over the limit."
    return "\n".join(["## Peaks, values and times\n", reported, "", _table(columns, rows), *notes, ""])


def _concurrent_copies(results: Figures) -> str:
    rows = []
    for name, row in _limited(results):
        of = row.get("streams", {})
        if of.get("copies_s", 0) > 1e-3:
            times = (row["median_s"], of["kernels_s"], of["copies_s"])
            shown = [f"{1e3 * each:.1f}" for each in times]
            rows.append((name, *shown, f"{of['concurrent_s'] / of['copies_s']:.0%}"))
    columns = ("net", "step, ms", "kernels, ms", "copies, ms", "of these concurrent with kernels")
    return f"## Copies concurrent with kernels\n\n{_table(columns, rows)}" if rows else ""


def _batches(results: Figures) -> str:
    rows = []
    for net in dict.fromkeys(key.split(":")[1] for key in results if key.startswith("batch:")):
        default, ours = (results.get(f"batch:{net}:{how}", {}) for how in (DEFAULT, PLANNED))
        if default.get("batch") and ours.get("batch"):
            multiple = f"{ours['batch'] / default['batch']:.1f}"
            time = f"{ours['example_s'] / default['example_s']:.2f}"
            found = str(ours["batch"]) if ours["ended"] else f"at least {ours['batch']}"
            rows.append((net, _mb(default["memory_bytes"]), str(default["batch"]), found, multiple, time))
    columns = ("net", "memory, MB", "unoptimised", "tfswap", "times", "time for an example")
    return f"## The largest batch\n\n{_table(columns, rows)}" if rows else ""


def _copies(results: Figures) -> str:
    found = results.get("copies", {}).get("gb_s")
    if not found:
        return ""
    link = link_gb_s(results.get("environment", {}).get("gpu", {}))
    best = {way: max(row[way] for row in found) for way in ("out", "in")}
    shares = "" if link is None else f"{best['out'] / link:.0%} out and {best['in'] / link:.0%} in"
    note = f"The link has {link:.0f} GB/s in each direction; of these {shares}.\n\n" if shares else ""
    rows = [[f"{value:,.1f}" for value in row.values()] for row in found]
    return f"## Copies, GB/s\n\n{note}{_table(list(found[0]), rows)}"


def _codecs(found: Figures) -> str:
    if not found:
        return ""
    copy = found.get(COPY)
    rows = [
        (op, _cell(rate), "")
        if isinstance(rate, str)
        else (op, _rate(rate), f"{rate / copy:.2f}" if isinstance(copy, float) else "")
        for op, rate in found.items()
    ]
    note = "A copy on the device reads and writes each byte: the device memory's rate is twice its own."
    return f"## Codecs, GB/s of the tensor\n\n{note}\n\n{_table(('op', 'rate', 'of a copy'), rows)}"


def _pinned(found: Figures) -> str:
    rows = [
        (name, _rate(one["device_gb_s"]), _rate(one["pinned_gb_s"]), "identical" if one["same"] else "**differ**")
        for name, one in found.items()
        if isinstance(one, dict)
    ]
    columns = ("kernel", "variable on the device, GB/s", "in pinned host memory, GB/s", "values")
    return f"## Variables in pinned host memory\n\n{_table(columns, rows)}" if rows else ""


def _tests(found: Figures) -> str:
    lines = found.get("output", "").strip().splitlines()
    return f"## Tests marked `gpu`\n\n`{lines[-1].strip('= ')}`\n" if lines else ""


def _missing(results: Figures) -> str:
    rows = []
    for key, row in results.items():
        if reason := row.get("failed") or row.get("not_run"):
            lines = row.get("output", "").strip().splitlines()
            rows.append((key, "failed" if "failed" in row else "not run", _cell(": ".join([reason, *lines[-1:]]))))
    return f"## Failed, or not run\n\n{_table(('part', '', 'reason'), rows)}" if rows else ""


def _mb(nbytes: int | None) -> str:
    """In MB, with a decimal where these are few."""
    return "" if nbytes is None else f"{nbytes / 1e6:,.{0 if nbytes >= 1e8 else 1}f}"


def _rate(gb_s: float) -> str:
    return f"{gb_s:,.{0 if gb_s >= 10 else 1}f}"


def _marked(nbytes: int, limit_bytes: int | None) -> str:
    return f"**{_mb(nbytes)}**" if limit_bytes is not None and nbytes > limit_bytes else _mb(nbytes)


def _cell(text: str) -> str:
    """What a cell can hold of a message."""
    return " ".join(text.split())[:200].replace("|", "\\|")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
