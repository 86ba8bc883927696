"""What each tactic adds, and what each part of swapping is good for.

One by one, each at the smallest limit that it reaches: a tensor's memory for each output (computed), liveness (which
TensorFlow has), an order, swaps without the pool, the pool, kernels that run again, encodings; and kernels that run
again, or encodings, without swaps. Parts, switched off in turn under one limit, each by other figures in a plan that is
the same otherwise, which is carried out as plans from files are:

    no prefetch          a copy in starts where its tensor is read, and not before: prefetch distance 0
    no trigger           a buffer is freed where its copy out starts, so that the step waits for the copy
    one kernel ahead     copies in start one kernel before the reader, as vDNN has it
    no copy threads      the thread that runs the kernels makes each copy itself
    four copy threads    a lane in each direction has four threads where it has one otherwise
    no pool reuse        the host pool's memory is given back to the system after each step

The same over a link that copies are throttled to: they take as long, and hardly any of the cores, as a GPU's copy
engines do; the plan is made for that link, with measured times.

Back-pressure itself can't be switched off: without it a buffer would be freed while it is copied. The tensor cache (a
smaller batch keeps what has room) is a plan of its own for sizes that recur: a part by itself, where steps of a smaller
batch run by the plan of the larger one, and then by their own.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from papers.harness.page import FORM_COLUMNS, Section, Table, cut, form_lines, mib
from papers.harness.standing import EVEN, OVERLAP, Over, of_lines
from papers.harness.turns import REFERENCE, UNOPTIMISED, Form, compare, quartiles, reported_by

from tfswap.plan.plan import Eviction, Plan

NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet": ("peer", {"name": "resnet"}),
    "transformer": ("peer", {"name": "transformer"}),
    "Inception (GoogLeNet)": ("classic", {"name": "inception", "batch": 16, "size": 128}),
}
"""The last has the pools that encodings are for."""
LIMIT = 0.5
NO_POOL = "no pool reuse"
NO_PREFETCH = "no prefetch"
SWAPS = f"swaps, {LIMIT:.0%}"
STEPWISE = (
    Form("order alone", tactics=()),
    Form("and swaps, no pool reuse", tactics=("swap",), edit=NO_POOL),
    Form("and the pool's reuse", tactics=("swap",)),
    Form("and recomputation", tactics=("swap", "recompute")),
    Form("and encodings", tactics=("swap", "recompute", "encode")),
)
ALONE = (
    Form("recomputation alone", tactics=("recompute",)),
    Form("encodings alone", tactics=("encode",)),
)


def _edited(change: Callable[[Eviction], Eviction]) -> Callable[[Plan], Plan]:
    def edit(plan: Plan) -> Plan:  # its splits are for steps of the schedule, which is another then
        return dataclasses.replace(plan, evictions=tuple(map(change, plan.evictions)), splits=())

    return edit


def _no_prefetch(one: Eviction) -> Eviction:
    return dataclasses.replace(one, back=one.use)


def _one_ahead(one: Eviction) -> Eviction:
    return dataclasses.replace(one, back=max(one.back, one.use - 1))


def _immediately(one: Eviction) -> Eviction:
    return one if one.out is None else dataclasses.replace(one, release=min(one.release, one.out + 1))


def _threads(count: int) -> Callable[[Plan], Plan]:
    def edit(plan: Plan) -> Plan:
        import tfswap.ops

        tfswap.ops.configure(copy_threads=count)
        return plan

    return edit


def give_back_pool() -> None:
    """What is left of the host pool when its limit has been nothing for a moment: what is in use."""
    import tfswap.ops

    limit = tfswap.ops.configuration().host_memory_limit
    tfswap.ops.configure(host_memory_limit=0)
    tfswap.ops.configure(host_memory_limit=limit)


EDITS: dict[str, Callable[[Plan], Plan]] = {
    NO_PREFETCH: _edited(_no_prefetch),
    "one kernel ahead": _edited(_one_ahead),
    "no trigger": _edited(_immediately),
    "no copy threads": _threads(0),
    "four copy threads": _threads(4),
    NO_POOL: lambda plan: plan,
}
"""By name: from a plan to the plan that is carried out in its place."""
AFTER: dict[str, Callable[[], None]] = {NO_POOL: give_back_pool}
"""By name of an edit: what is done between steps."""

ROUNDS = 9
NO_LIVENESS = "no liveness: each tensor until the step ends (computed)"
CACHE = "tensor cache"
LARGE, SMALL, RECURS = 8192, 6144, 10
"""Rows of the batches, and the steps after which the smaller one has a plan of its own."""
LINK = 2e9
LINKED = {f"{name} over {LINK / 1e9:.0f} GB/s": name for name in NETS}
PARTS = (*NETS, *LINKED, CACHE)
ARENA_MIB = 2000


def measure(part: str) -> dict[str, Any]:
    if part == CACHE:
        return reported_by({"module": "ablation"}, 1000)
    if part in LINKED:
        return _linked(*NETS[LINKED[part]])
    net, size = NETS[part]
    forms = [UNOPTIMISED, REFERENCE]
    forms += [*STEPWISE, *ALONE, *_parts()]
    return {"rounds": ROUNDS, "lines": compare(net, size, forms, rounds=ROUNDS, arena_mib=ARENA_MIB)}


def _parts(**how: Any) -> list[Form]:
    """Swaps as they are planned, and with each part switched off."""
    whole = Form(SWAPS, limit=LIMIT, tactics=("swap",), **how)
    return [whole, *(whole._replace(label=edit, edit=edit) for edit in EDITS)]


def _linked(net: str, size: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "profile.json"))
        reported_by({"module": "ablation", "net": net, "size": size, "profile": path}, ARENA_MIB)
        forms = [UNOPTIMISED, REFERENCE, *_parts(link=LINK, profile=path)]
        return {"rounds": ROUNDS, "lines": compare(net, size, forms, rounds=ROUNDS, arena_mib=ARENA_MIB)}


def child(spec: dict[str, Any]) -> None:
    print(json.dumps(_profiled(**spec) if "profile" in spec else _cached()))


def _profiled(net: str, size: dict[str, Any], profile: str, **_: Any) -> str:
    """Measure a step over the link, and write that."""
    import tensorflow as tf
    from papers.harness.nets import NETS

    import tfswap.ops

    tfswap.ops.configure(bandwidth_bytes_per_s=LINK)
    made, arguments = NETS[net](**size)
    tfswap.profile(tf.function(made), *arguments, save_to=profile)
    return profile


def _cached() -> dict[str, Any]:
    """What steps of a smaller batch move and take: by the plan for the larger one, and by their own."""
    import accuracy
    import tensorflow as tf

    import tfswap
    from tfswap.runtime import step_cache

    step_cache.RECURS = RECURS
    made, (x,) = accuracy.mlp(batch=LARGE)
    traced = tf.function(made, input_signature=[tf.TensorSpec([None, x.shape[1]])])
    step: Any = tfswap.optimize(traced, memory_limit=f"{LIMIT:.0%}", tactics=("swap",))
    step(x)
    small = x[:SMALL]
    rows: dict[str, list[list[float]]] = {"the larger one's plan": [], "its own plan": []}
    for name, steps in zip(rows, (RECURS - 1, RECURS + 1), strict=True):
        for _ in range(steps):
            clock, cpu = time.perf_counter(), time.process_time()
            step(small).numpy()
            took = time.perf_counter() - clock, time.process_time() - cpu
            rows[name].append([*took, step.stats().out_bytes])
    limit, peak = step.report().memory_limit_bytes, tf.config.experimental.get_memory_info("CPU:0")["peak"]
    columns = {name: list(zip(*of[2:], strict=True)) for name, of in rows.items()}
    found = {
        "medians": {name: [statistics.median(column) for column in of] for name, of in columns.items()},
        "spreads": {name: [quartiles(column) for column in of] for name, of in columns.items()},
    }
    return {"rows": [LARGE, SMALL], "limit_bytes": limit, "peak_bytes": peak} | found


def present(found: dict[str, Any]) -> Section:
    tables, words, notes, brief = [], [], [], []
    for name, net in found.items():
        if name == CACHE:
            tables.append(_cache(net))
            words.append(_cached_in_words(net))
            continue
        lines = net["lines"]
        tables.append(Table(f"{name}, {net['rounds']} rounds:", COLUMNS, _lines(lines)))
        whole = next(line for line in lines if line["label"] == SWAPS)
        if whole["fits"]:
            parts = [line for line in lines[lines.index(whole) + 1 :] if line["fits"]]
            costs = {line["label"]: of_lines(line, whole, "clock") for line in parts}
            words.append(f"{name}: " + ", ".join(f"{label} {_cost(over)}" for label, over in costs.items()))
            if NO_PREFETCH in costs:
                brief.append(f"{name} {_cost(costs[NO_PREFETCH])}")
        notes += _raised(name, lines)
    return Section(
        "Ablation",
        "none of the papers switches all of these off",
        f"step time, by the clock, over that of the same swaps as planned: {'; '.join(words)}; {OVERLAP}",
        "a CPU with plain kernels, whose copies share the cores with them and are short compared with them: overlap "
        f"wins less than on a GPU, but for copies that are throttled to {LINK / 1e9:.0f} GB/s each way",
        tables,
        notes=[
            "Back-pressure can't be switched off: a buffer would be freed while it is copied. What steps wait for by "
            'it is under "waits, out".',
            "A limit is for a plan as it was planned: one that is changed afterwards promises nothing, and its chunks "
            "lie otherwise.",
            f'The pool is that of host memory for what is swapped out: with "{NO_POOL}" it is returned to the system '
            "after each step.",
            *notes,
        ],
        brief=f"step time without prefetching over the same swaps with it: {', '.join(brief)}" if brief else "",
    )


def _cost(over: Over) -> str:
    return f"{EVEN} at {over.reported}" if over.level else over.reported


def _raised(name: str, lines: Sequence[dict[str, Any]]) -> list[str]:
    """Tactics that come to a higher limit than those before them."""
    steps = [line for line in lines if line["label"] in {form.label for form in STEPWISE} and line["fits"]]
    return [
        f'{name}: "{line["label"]}" raises the lowest limit that is reached, from {mib(before["limit_bytes"])} to '
        f"{mib(line['limit_bytes'])} MiB."
        for before, line in itertools.pairwise(steps)
        if line["limit_bytes"] > before["limit_bytes"] * (1 + FLOOR_NOISE)
    ]


FLOOR_NOISE = 0.005
"""Floors that differ by less count as equal: constants lie elsewhere in each process's arena."""


def _cached_in_words(found: dict[str, Any]) -> str:
    """What a plan of its own gains a smaller batch."""
    (clock, _, out), (own_clock, _, own_out) = found["medians"].values()
    (low, high), (least, most) = (spreads[0] for spreads in found["spreads"].values())
    verb = "gains nothing in time" if low <= most and least <= high else "differs in time"
    return (
        f"the tensor cache {verb}: {1e3 * own_clock:.0f} ms against {1e3 * clock:.0f}, with {mib(own_out)} MiB copied "
        f"out against {mib(out)}"
    )


COLUMNS = (*FORM_COLUMNS, "waits, out, ms", "waits, in, ms", "copies itself, ms")


def _lines(lines: list[dict[str, Any]]) -> list[list[str]]:
    """Where tactics are added one by one, the first line is computed: each output of each kernel has a buffer, and all
    are held until the step ends.
    """
    reported = []
    for cells, line in zip(form_lines(lines), lines, strict=True):
        if line["edit"] and line["kept"] is False:
            cells[-1] = "no: not planned for"
        stalls = [f"{1e3 * seconds:.1f}" for seconds in line.get("stalls_s", ())]
        reported.append([*cells, *stalls] if stalls else _padded(cells))
    if all(line["label"] != STEPWISE[0].label for line in lines):
        return reported
    base, held = lines[0]["peak_bytes"], next(line["all_bytes"] for line in lines if "all_bytes" in line)
    reported[0][0] = f"liveness: {reported[0][0]}"
    return [_padded([NO_LIVENESS, "", mib(held), f"{-100 * cut(held, base):+.1f}%"]), *reported]


def _padded(cells: list[str]) -> list[str]:
    return cells + [""] * (len(COLUMNS) - len(cells))


def _cache(found: dict[str, Any]) -> Table:
    large, small = found["rows"]
    lines = []
    for name, (clock, cpu, out) in found["medians"].items():
        clocks, cpus, _ = found["spreads"][name]
        times = [
            f"{1e3 * one:.0f} ({1e3 * low:.0f} to {1e3 * high:.0f})"
            for one, (low, high) in ((clock, clocks), (cpu, cpus))
        ]
        lines.append([name, mib(out), *times])
    title = f"Tensor cache: an MLP's steps of {small} rows, under {mib(found['limit_bytes'])} MiB planned for {large}:"
    return Table(title, ("planned by", "copied out, MiB", "time, ms", "CPU time, ms"), lines)
