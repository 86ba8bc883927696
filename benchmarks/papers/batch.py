"""The largest batch under a fixed cap (Meng et al. 2017, TFLMS): TensorFlow as it is, and with tfswap.

The arena is TensorFlow's own and hard limited to the cap, so that what does not fit ends in ResourceExhaustedError.
What a step takes grows in proportion to its batch, in addition to its variables: so two runs give the next batch to
try, and a few more find the largest one that was seen to run; the smallest that was seen to fail stands next to it.
What the floor
allows: no plan can do without the variables and the largest kernel's own needs, while kernels stay whole; the batch at
which these two alone fill the cap follows from the two largest batches that ran.

Times are of both batches by turns, the smaller one's in an arena with room to spare: what ran once in the cap may not
another time, since the order in which TensorFlow's executor runs kernels is free.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from papers.harness.page import Comparison, Plot, Section, Series, Table, against_published, mib, spread
from papers.harness.turns import (
    MIB,
    TACTICS,
    UNOPTIMISED,
    Form,
    Running,
    Took,
    attempt,
    quartiles,
    reported_by,
    was_refused,
)

OURS = Form("tfswap", limit=None)
ROOMY_MIB = 6000
TRIES, TIMED = 12, 5
"""How many batches are tried at most, and how many steps of the largest are timed, after two that are not."""
FULL = 0.95
"""Host memory that is used by so much bounds a plan: the next batch would take more."""
CLOSE = 0.02
"""Batches that differ by no more count as equal; needs so close above the cap are the cap's own, whose holes are in
the way: they say nothing of what a batch needs."""


COLUMNS = (
    "net",
    "cap, MiB",
    "batch, unoptimised",
    "batch, tfswap",
    "times",
    "the floor allows",
    "peak, MiB",
    "on the host, MiB",
    "time, predicted, over an unoptimised step of that batch",
    "time per example, over the smaller batch's",
    "CPU time per example, over the smaller batch's",
)
P100 = (
    "net",
    "tactics",
    "batch, unoptimised",
    "batch, tfswap",
    "times",
    "the floor allows",
    "of that",
    "on the host, MiB",
    "time, predicted, over an unoptimised step of that batch",
)
AXES = "batch, times the largest unoptimised one", "time per example, over the smaller batch's, by the clock"
NOTES = (
    "The largest batch of an unoptimised step is one that ran: since its order is free, it need not run another time.",
    f"Times are of both batches by turns, {TIMED} rounds, the smaller one's in an arena with room to spare.",
    "Few tries are made for each: a batch between the largest that ran and the smallest that failed may fit as well.",
    "A cap of 16 GB on a real GPU was not tried. Where variables take most of the cap, as in the convolutional nets "
    "here, the unoptimised step fits few examples, and multiples are larger than they would be there.",
    "Multiples of a batch of few examples are coarse: of 3, where 4 failed, a multiple of 40 may be one of 30.",
)


class Case(NamedTuple):
    """A net under a cap.

    Attributes:
        net, size: of nets.NETS, and what it is called with besides its batch.
        cap_mib: the arena.
        first: half of a batch that is tried with room to spare.
    """

    net: str
    size: dict[str, Any]
    cap_mib: int
    first: int


CASES = {
    "ResNet-50": Case("application", {"name": "ResNet50", "size": 64}, 640, 8),
    "ResNet-101": Case("application", {"name": "ResNet101", "size": 64}, 800, 4),
    "Inception-V3": Case("application", {"name": "InceptionV3", "size": 96}, 500, 4),
    "DCGAN": Case("gan", {}, 160, 32),
    "LSTM, 1 layer": Case("lstm_lm", {"layers": 1}, 64, 8),
    "LSTM, 4 layers": Case("lstm_lm", {"layers": 4}, 64, 8),
    "LSTM, 16 layers": Case("lstm_lm", {"layers": 16}, 96, 8),
    "NMT, 8 layers, 50 steps": Case("nmt", {"length": 50}, 64, 4),
    "NMT, 8 layers, 400 steps": Case("nmt", {"length": 400}, 160, 1),
}


LONG, TIMES = "NMT, 8 layers, 400 steps", 30
"""Attention over long sequences, and how many times the batch it is to come to."""
ATTENTION = "batches-of-an-encoder-and-decoder-with-attention"


class Planned(NamedTuple):
    """A net at its paper's size on Meng et al.'s machine, and what its batches are multiples of."""

    net: str
    size: dict[str, Any]
    unit: int


DEVICE = "p100"
PAPERS, PAPERS_MULTIPLE, PAPERS_TIME = "ResNet-50 on a described P100", 4.6, 1.1
"""The net whose batch Meng et al. made this many times larger by swapping, at under 10% more time."""
PLANNED = {
    PAPERS: Planned("application", {"name": "ResNet50", "size": 224}, 16),
    "ResNet-101 on a described P100": Planned("application", {"name": "ResNet101", "size": 224}, 16),
    "ResNet-152 on a described P100": Planned("application", {"name": "ResNet152", "size": 224}, 16),
    "Inception-V3 on a described P100": Planned("application", {"name": "InceptionV3", "size": 299}, 16),
    "DCGAN on a described P100": Planned("gan", {"size": 64, "width": 128}, 64),
    "LSTM, 4 layers on a described P100": Planned("lstm_lm", {"layers": 4, "width": 1500, "words": 10000}, 32),
    "NMT, 8 layers, 50 steps on a described P100": Planned("nmt", {"length": 50, "width": 1024, "words": 20000}, 16),
}
PARTS = (*CASES, *PLANNED)


def measure(part: str) -> Any:
    return reported_by({"module": "batch", "part": part}, 2000) if part in PLANNED else search(CASES[part])


def search(case: Case) -> dict[str, Any]:
    """The largest batches that ran, both ways, and all tries."""
    cap = case.cap_mib * MIB
    roomy = [attempt(case.net, case.size | {"batch": n * case.first}, UNOPTIMISED, ROOMY_MIB, 2) for n in (1, 2)]
    plain = _largest(case, UNOPTIMISED, [(_batch(one), one["peak_bytes"]) for one in roomy], cap)
    best = max((t for t in plain if t["fits"]), key=_batch, default=None)
    begin = _batch(best) if best else case.first
    same = attempt(case.net, case.size | {"batch": begin}, OURS, case.cap_mib)
    tries = [same]
    if same["fits"]:
        tries += _largest(case, OURS, [(0, same["persistent_bytes"]), (begin, same["floor_bytes"])], cap)
    ours = max((t for t in tries if t["fits"]), key=_batch, default=None)
    found = {"case": case._asdict(), "same": same, "tries": [*plain, *tries], "unoptimised": best, "ours": ours}
    return found | ({"timed": timed(case, best, ours)} if best and ours else {})


def timed(case: Case, plain: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Time per example of the larger batch over the smaller one's, of steps by turns: by clock, each round's ratio.

    Args:
        plain, ours: the largest batches that ran.
    """
    with tempfile.TemporaryDirectory() as folder:
        pair = [
            Running(case.net, one["size"], form, Path(folder), arena_mib=arena_mib, onednn=False)
            for one, form, arena_mib in ((plain, UNOPTIMISED, ROOMY_MIB), (ours, OURS, case.cap_mib))
        ]
        try:
            for round_ in range(1 + TIMED):
                for one in pair:
                    one.step(counts=round_ > 0)
        finally:
            for one in pair:
                one.close()
    rounds = list(zip(*(one.took for one in pair), strict=True))
    of_examples = _batch(plain) / _batch(ours)
    return {n: [of_examples * getattr(o, n) / getattr(p, n) for p, o in rounds] for n in Took._fields}


def child(spec: dict[str, Any]) -> None:
    """Report batches that have a plan on the described machine, by swapping alone and by all tactics. Nothing runs."""
    import tensorflow as tf
    from papers.harness.nets import NETS

    import tfswap

    case = PLANNED[spec["part"]]
    step, arguments = NETS[case.net](batch=case.unit, **case.size)
    specs = [tf.TensorSpec(a.shape, a.dtype) for a in arguments]
    rows = []
    papers = PAPERS_MULTIPLE if spec["part"] == PAPERS else 0.0
    for tactics in (("swap",), TACTICS):
        fit = tfswap.max_batch(tf.function(step), *specs, device=DEVICE, tactics=tactics, multiple_of=case.unit)
        rows.append({"tactics": tactics, "unoptimised": fit.unoptimised_size, "ours": fit.size})
        rows[-1] |= {"memory_bytes": fit.limit_bytes, "host_bytes": fit.host_bytes, "time_ratio": fit.time_ratio}
        rows[-1]["allowed"] = _at(_needs(step, specs, fit.size, case.unit), fit.limit_bytes)
        if size := round(papers * fit.unoptimised_size / case.unit) * case.unit:
            rows[-1]["at_papers_multiple"] = _planned_at(step, specs, size, tactics, fit.limit_bytes)
    print(json.dumps(rows))


def _planned_at(
    step: Any, specs: Sequence[Any], size: int, tactics: tuple[str, ...], limit_bytes: int
) -> dict[str, Any]:
    """What `tfswap.simulate` would predict of a batch under one limit: it tries limits that are evenly spaced, and the
    device's is none of these. A time of None: no plan keeps the limit.
    """
    made = _optimizer(step, specs, size, tactics)
    best = made.search.fastest(limit_bytes - made.extra_margin_bytes)
    return {"size": size, "time_ratio": best and made.baseline.time_ratio(best.candidate.timing.total_s)}


def _optimizer(step: Any, specs: Sequence[Any], size: int, tactics: tuple[str, ...]) -> Any:
    """What plans the step of a batch for the described machine."""
    import tensorflow as tf

    from tfswap.compiler.offline import offline_optimizer
    from tfswap.frontends.resizable_step import find_step
    from tfswap.frontends.simulate import target

    on, options, costs = target(DEVICE, None, tactics, None, None, None, None)
    sized = [tf.TensorSpec([size, *spec.shape[1:]], spec.dtype) for spec in specs]
    found = find_step(tf.function(step), sized, device=on.device)
    return offline_optimizer(found.graph(), on.device, options, found.variables, costs)


def _needs(step: Any, specs: Sequence[Any], size: int, unit: int) -> list[tuple[float, float]]:
    """What no plan can do without, at a batch and at the next smaller or larger one."""
    from tfswap.simulator.working_set import largest_working_set

    found = []
    for batch in (size - unit or size + unit, size):
        made = _optimizer(step, specs, batch, TACTICS)
        found.append((batch, made.resident_bytes + largest_working_set(made.flow)[1]))
    return sorted(found)


def present(found: dict[str, Any]) -> Section:
    lines, ratios, floors = [], {}, {}
    for name, net in found.items():
        if name in PLANNED:
            continue
        case, plain, ours = net["case"], net["unoptimised"], net["ours"]
        line = [name, str(case["cap_mib"]), _reported(net["tries"], plain), _reported(net["tries"], ours)]
        if plain and ours:
            ratios[name] = _batch(ours) / _batch(plain)
            bound = allowed(case, net["tries"])
            floors[name] = _batch(ours) / bound
            line += [f"{ratios[name]:.1f}", f"{bound:.0f}", mib(ours["peak_bytes"]), mib(ours["host_bytes"])]
            line.append(f"{ours['predicted_ratio']:.2f}")
            line += [
                spread(statistics.median(ratios), quartiles(ratios))
                for ratios in (net["timed"][clock] for clock in Took._fields)
            ]
        lines.append(line + [""] * (len(COLUMNS) - len(line)))
    tables = [
        Table(
            "In arenas that are hard limited to the cap; in brackets the smallest batch that was refused before "
            "anything ran, or, unless noted otherwise, ran out of memory:",
            COLUMNS,
            lines,
        )
    ]
    words = [", ".join(f"{name} {times:.1f}" for name, times in ratios.items()) + " times"] if ratios else []
    if planned := [[name, *line] for name in PLANNED if name in found for line in _planned(found[name])]:
        title = (
            "On a described P100, images of their papers' sizes; planned, and nothing of it ran. Of nets of loops it "
            "is not given what the floor allows, since loops are swapped inside of themselves:"
        )
        tables.append(Table(title, P100, planned))
        words += [_planned_by(tactics, planned) for tactics in (SWAPPING, ALL)]
    papers = found.get(PAPERS, [])
    times = [(name, found[name]["timed"]["clock_s"]) for name in ratios]
    points = [Series(name, [(ratios[name], statistics.median(rounds))]) for name, rounds in times]
    plots = [Plot("batch", "Each net's largest batch, and its time", *AXES, points)] * bool(points)
    return Section(
        "The largest batch under a cap",
        f"ResNet-50 {PAPERS_MULTIPLE} times by swapping at under 10% more time (Meng et al. 2017), 4.9 (TFLMS); 2 to "
        "30 times over all their nets",
        "; ".join(words),
        "a CPU's arena of some MiB, with plain kernels, stands in for 16 GB: variables and workspaces are a larger "
        "part of it; small images. The P100's host has 128 GB, and time is predicted, over an unoptimised step of that "
        "batch",
        tables,
        plots,
        notes=[
            *NOTES,
            *(f"{name}: {_share(share)} of the batch that the floor allows." for name, share in floors.items()),
            *_long(ratios),
            *_bound_by_host(found),
            *_at_the_papers_multiple(papers),
        ],
        brief="; ".join(_brief(ratios, found)),
        comparisons=_compared(ratios, found),
    )


def _planned_by(tactics: str, planned: Sequence[list[str]]) -> str:
    of = [line for line in planned if line[1] == tactics]
    each = [f"{line[0].partition(' on a')[0]} {line[4]} (at {line[-1]} of the time)" for line in of]
    return f"planned for a described P100 by {tactics}: {', '.join(each)} times"


def _brief(ratios: dict[str, float], found: dict[str, Any]) -> list[str]:
    brief = [f"ResNet-50 {ratios['ResNet-50']:.1f} times in a CPU's arena"] if "ResNet-50" in ratios else []
    if brief:
        time = statistics.median(found["ResNet-50"]["timed"]["clock_s"])
        brief[0] += f" by all tactics, at {time:.2f} of the time per example"
    brief += [
        f"{row['ours'] / row['unoptimised']:.1f} planned for a described P100 by {_tactics(row)}, at a predicted "
        f"{row['time_ratio']:.2f} of the time"
        for row in found.get(PAPERS, [])[:1]
    ]
    brief += [
        f"the published {PAPERS_MULTIPLE} times at a predicted {row['at_papers_multiple']['time_ratio']:.2f}"
        for row in found.get(PAPERS, [])[:1]
        if row.get("at_papers_multiple", {}).get("time_ratio")
    ]
    return brief


def _compared(ratios: dict[str, float], found: dict[str, Any]) -> list[Comparison]:
    """ResNet-50's multiple and times against the published ones."""
    made = []
    if "ResNet-50" in ratios:
        time = statistics.median(found["ResNet-50"]["timed"]["clock_s"])
        made.append(against_published("ResNet-50's batch", ratios["ResNet-50"] / PAPERS_MULTIPLE))
        made.append(against_published("its time per example", PAPERS_TIME / time))
    for row in found.get(PAPERS, []):
        if time := row.get("at_papers_multiple", {}).get("time_ratio"):
            label = f"predicted time on a described P100 at {PAPERS_MULTIPLE} times the batch, {_tactics(row)}"
            made.append(against_published(label, PAPERS_TIME / time))
    return made


SWAPPING, ALL = "swapping alone", "all tactics"


def _tactics(row: dict[str, Any]) -> str:
    return SWAPPING if row["tactics"] == ["swap"] else ALL


def _at_the_papers_multiple(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What time the paper's multiple is published at, and what is predicted here."""
    if not rows:
        return []
    times = [
        f"{row['ours'] / row['unoptimised']:.1f} times planned here by {_tactics(row)} take a predicted "
        f"{row['time_ratio']:.2f} of the time"
        for row in rows
    ]
    notes = [
        f"ResNet-50: {PAPERS_MULTIPLE} times the batch is published at under 10% more time, on a P100 that ran it. The "
        f"{', the '.join(times)}. At such times the multiples are not comparable."
    ]
    at = [(row, row["at_papers_multiple"]) for row in rows if "at_papers_multiple" in row]
    reported = [
        f"{one['time_ratio']:.2f} by {_tactics(row)}" if one["time_ratio"] else f"no plan by {_tactics(row)}"
        for row, one in at
    ]
    if at:
        notes.append(
            f"ResNet-50 at {at[0][1]['size']}, {PAPERS_MULTIPLE} times the unoptimised batch, in the same memory: "
            f"predicted time {' and '.join(reported)}."
        )
    return notes


def _bound_by_host(found: dict[str, Any]) -> list[str]:
    """Which plans fill the described machine's host memory, so that it bounds them and not the device's."""
    from tfswap.kernels.hardware import described

    host = described(DEVICE).host_bytes
    full = [
        f"{name.partition(' on a')[0]} by {_tactics(row)}"
        for name in PLANNED
        for row in found.get(name, ())
        if host and row["host_bytes"] >= FULL * host
    ]
    return [f"Bound by the described machine's host memory: {', '.join(full)}."] * bool(full)


def _share(share: float) -> str:
    """Rounded down, so that it never reads as more than it is."""
    return f"{math.floor(1000 * share) / 1000:.3f}"


def _long(ratios: dict[str, float]) -> list[str]:
    """What attention over long sequences comes to, and where else that is measured."""
    times = ratios.get(LONG, TIMES)
    if times >= TIMES:
        return []
    return [
        f"Below {TIMES} times: {LONG} ({times:.1f}). {TIMES} times the batch over 400 steps of attention, of another "
        f'net and under another cap, is in [Measurements](../measurements/sizes.md#{ATTENTION}), "Batches of an '
        'encoder and decoder with attention".'
    ]


def _reported(tries: Sequence[dict[str, Any]], best: dict[str, Any] | None) -> str:
    """The largest batch that ran, and the smallest above it that did not."""
    if best is None:
        return "none"
    failed = [t for t in tries if t["how"] == best["how"] and not t["fits"] and _batch(t) > _batch(best)]
    if not failed:
        return f"{_batch(best)}"
    least = min(failed, key=_batch)
    return f"{_batch(best)} ({_batch(least)}{' refused' * was_refused(least)})"


def _planned(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            _tactics(row),
            str(row["unoptimised"]),
            str(row["ours"]),
            f"{row['ours'] / row['unoptimised']:.1f}" if row["unoptimised"] else "",
            *([f"{row['allowed']:.0f}", _share(row["ours"] / row["allowed"])] if _is_bound(row) else ["", ""]),
            mib(row["host_bytes"]),
            f"{row['time_ratio']:.2f}",
        ]
        for row in rows
    ]


def _is_bound(row: dict[str, Any]) -> bool:
    """Whether what the kernels of the trace need bounds the batch. A loop is one of them, and needs less where what it
    holds is swapped inside of it.
    """
    return row["ours"] <= row["allowed"]


def allowed(case: dict[str, Any], tries: Sequence[dict[str, Any]]) -> float:
    """The batch at which what no plan can do without fills the cap, by the line through the two largest that ran."""
    ran = {_batch(t): t["persistent_bytes"] + t["working_set_bytes"] for t in tries if "working_set_bytes" in t}
    return _at(sorted(ran.items())[-2:], case["cap_mib"] * MIB)


def _batch(tried: dict[str, Any]) -> int:
    return tried["size"]["batch"]


def _at(points: Sequence[tuple[float, float]], cap: float) -> float:
    """Where the line through two points comes to the cap."""
    (x, y), (u, v) = points
    return x + (cap - y) * (u - x) / (v - y) if v != y else float(x)


def _largest(case: Case, form: Form, points: list[tuple[float, float]], cap: int) -> list[dict[str, Any]]:
    """Tries, towards the largest batch whose needs come to the cap.

    Args:
        points: batches and bytes that they need; the line through the last two says what to try.
    """
    tries: list[dict[str, Any]] = []
    low, high, reported = 0, UNKNOWN, True
    for _ in range(TRIES):
        step = max(1, int(low * CLOSE))
        if high - low <= step:
            break
        between = low + low // 4 if high == UNKNOWN else (low + high) // 2
        batch = int(_at(points[-2:], cap)) if reported else between
        batch = min(max(batch, low + step), max(high - step, low + 1))
        tried = attempt(case.net, case.size | {"batch": batch}, form, case.cap_mib)
        tries.append(tried)
        low, high = (batch, high) if tried["fits"] else (low, batch)
        is_peak = form.how == UNOPTIMISED.how and tried["fits"]
        needs = tried["peak_bytes"] if is_peak else tried.get("floor_bytes", 0)
        # A step whose order is free makes do with the cap: a peak just below that says nothing either.
        reported = needs < cap * (1 - CLOSE) if is_peak else tried["fits"] or needs > cap * (1 + CLOSE)
        if reported:
            points.append((batch, needs))
    return tries


UNKNOWN = 1 << 30
"""A batch that surely fails."""
