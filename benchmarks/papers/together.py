"""Which tool when: XLA, recomputation, micro-batches, tfswap and two of them in one step, at the same share of memory.

The forms are those of benchmarks/peers.py --together. For each model and share the page names the fastest form whose
measured peak is within the share, whichever tool planned it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from papers.harness.page import PEAK, STEP_TIME, Comparison, Plot, Section, Series, Table, mib, ratio
from papers.harness.standing import CLOCKS, EVEN, RULE, Over, as_comparison, of_rounds
from papers.harness.turns import written_by
from papers.peers import ratios_of

SCRIPT = Path(__file__).parent.parent / "peers.py"
ROUNDS = {"transformer": 9, "resnet": 9, "wide_resnet": 5}
SHARES = {"transformer": (100, 60, 40, 25), "resnet": (60, 40), "wide_resnet": (40, 25)}
"""By model, percent of the unoptimised step's peak."""
PARTS = tuple(f"{model}_{share}" for model, shares in SHARES.items() for share in shares)
REFERENCE = "memory optimizer off"
OURS = "tfswap"
TOOLS = {
    "unoptimised": "nothing to do",
    "xla": "`jit_compile=True` on the step: other last bits, and the process keeps XLA's compiler",
    "xla blocks": "`jit_compile=True` on each block: forward and backward are compiled apart, which holds more",
    "recompute_grad": "every block in `tf.recompute_grad`: the blocks are chosen by hand",
    "accumulate 2": "two micro-batches: no use where a batch is normalised as a whole; sums in another order",
    "accumulate 4": "four micro-batches: as two",
    OURS: "a limit in bytes that is kept, TensorFlow's bits; the first call plans",
    f"{OURS}, xla blocks": "tfswap around a step of compiled blocks: it plans what lies between the blocks",
    f"{OURS}, recompute_grad": "tfswap around a step with recomputed blocks",
    f"{OURS}, accumulate 2": "tfswap around a step of two micro-batches",
    f"{OURS}, accumulate 4": "tfswap around a step of four micro-batches",
}
"""The forms, and what each requires or changes."""


def measure(part: str) -> list[dict[str, Any]]:
    model, share = part.rsplit("_", 1)
    return written_by(SCRIPT, model, "--together", str(int(share) / 100), "--rounds", str(ROUNDS[model]))[model]


class Need(NamedTuple):
    """One model in one share of its memory, and what was measured of it."""

    name: str
    share: int
    rows: list[dict[str, Any]]

    @property
    def called(self) -> str:
        return f"{self.name} in {self.share}%"

    @property
    def fitting(self) -> list[dict[str, Any]]:
        """The forms within the share, the fastest first."""
        most = self.rows[0]["asked_bytes"]
        forms = [row for row in self.rows if row["label"] != REFERENCE and row["peak_bytes"] <= most]
        return sorted(forms, key=lambda row: self.over(row, self.rows[0]).ratio)

    @property
    def level(self) -> list[dict[str, Any]]:
        """The fastest form, and those that take as long."""
        return [row for row in self.fitting if row is self.fitting[0] or self.over(row, self.fitting[0]).level]

    def over(self, row: dict[str, Any], other: dict[str, Any]) -> Over:
        """A form's time over another's, by the clock."""
        return of_rounds(*([took[0] for took in one["took_s"]] for one in (row, other)))

    def best(self, *, ours: bool) -> dict[str, Any] | None:
        """The fastest within the share with tfswap, or without it."""
        return next((row for row in self.fitting if row["label"].startswith(OURS) is ours), None)

    def timed(self, row: dict[str, Any] | None) -> str:
        """A form and its time over the unoptimised step's, for a table."""
        return "none" if row is None else f"{row['label']}: {self.over(row, self.rows[0]).reported}"

    @property
    def comparison(self) -> Comparison | None:
        """tfswap, alone or with another tool, over the fastest without it; None where nothing else is within."""
        ours, theirs = self.best(ours=True), self.best(ours=False)
        if theirs is None:
            return None
        label = f"{self.called}: {(ours or self.rows[0])['label']} over {theirs['label']}, by the clock"
        return as_comparison(label, self.over(ours, theirs) if ours else None, reached=ours is not None)


def needs_of(found: dict[str, list[dict[str, Any]]]) -> list[Need]:
    parts = [(part.rsplit("_", 1), rows) for part, rows in found.items()]
    return [Need(model.replace("_", " "), int(share), rows) for (model, share), rows in parts]


def present(found: dict[str, list[dict[str, Any]]]) -> Section:
    needs = needs_of(found)
    reached = [need for need in needs if need.fitting]
    with_ours = [need for need in reached if any(row["label"].startswith(OURS) for row in need.level)]
    both = [need for need in reached if need.fitting[0]["label"].startswith(f"{OURS},")]
    brief = (
        f"of {len(needs)} needs, each a model in a share of its memory: a form with tfswap is the fastest or level "
        f"with it in {len(with_ours)}, tfswap around another tool is the fastest in {len(both)}"
    )
    return Section(
        "Which tool when",
        "none: these are what users have",
        f"{brief} (by the clock; {RULE})",
        "a CPU with oneDNN's kernels: on a GPU, XLA and swapping are other than here",
        [
            Table("The fastest form within a share of the unoptimised step's peak:", NEED_COLUMNS, _by_need(needs)),
            Table(BY_TOOL, (*TOOL_COLUMNS, *(need.called for need in reached)), _by_tool(reached)),
        ],
        [_plot(name, [need for need in needs if need.name == name]) for name in dict.fromkeys(n.name for n in needs)],
        [
            "A time is over the unoptimised step's, which has all of its memory. A form that is level with the fastest "
            "is as good a choice: take the one whose conditions suit.",
            "The bits of TensorFlow are those of the unoptimised step or of the step without Grappler's memory "
            "optimizer.",
            "RematScope, Grappler's memory optimizer and a second device are compared with tfswap on [the page of "
            "peers](peers.md).",
            *_losses(reached),
        ],
        comparisons=[one for need in needs if (one := need.comparison)],
        brief=brief,
        answer=_answer(reached),
        details=[
            Table(f"{need.called}, {len(need.rows[0]['took_s'])} rounds:", COLUMNS, _lines(need)) for need in needs
        ],
    )


def _answer(needs: Sequence[Need]) -> str:
    """The fastest form, by the models and shares in which it is so."""
    names = dict.fromkeys(need.fitting[0]["label"] for need in needs)
    parts = [
        f"{name.replace(', ', ' with ')} in {_listed([n for n in needs if n.fitting[0]['label'] == name])}"
        for name in names
    ]
    return f"The fastest form within a share of a model's memory: {'; '.join(parts)}."


def _listed(needs: Sequence[Need]) -> str:
    models = dict.fromkeys(need.name for need in needs)
    shares = {name: " and ".join(f"{n.share}%" for n in needs if n.name == name) for name in models}
    return ", ".join(f"{share} of the {name}'s" for name, share in shares.items())


NEED_COLUMNS = "model", "memory", "fastest", "as fast", "without tfswap", "tfswap alone", "with TensorFlow's bits"


def _by_need(needs: Sequence[Need]) -> list[list[str]]:
    lines = []
    for need in needs:
        fastest = need.fitting[0] if need.fitting else None
        alone = next((row for row in need.fitting if row["label"] == OURS), None)
        same_bits = next((row for row in need.fitting if 0.0 in row["differs"].values()), None)
        line = [need.name, f"{need.share}%", need.timed(fastest)]
        line += ["; ".join(row["label"] for row in need.level if row is not fastest)]
        line += [need.timed(need.best(ours=False)), need.timed(alone) if alone else "below its floor"]
        lines.append([*line, need.timed(same_bits)])
    return lines


TOOL_COLUMNS = "tool", "what it requires or changes"
BY_TOOL = (
    "The same by tool: times within the share, bold where it is the fastest or level with it; empty where it takes "
    "more memory."
)


def _by_tool(needs: Sequence[Need]) -> list[list[str]]:
    return [[tool, what, *(_time(tool, need) for need in needs)] for tool, what in TOOLS.items()]


def _time(tool: str, need: Need) -> str:
    for row in need.fitting:
        if row["label"] == tool:
            time = f"{need.over(row, need.rows[0]).ratio:.2f}"
            return f"**{time}**" if row in need.level else time
    return ""


def _losses(needs: Sequence[Need]) -> list[str]:
    """Where the fastest form within a share is one without tfswap, and by how much."""
    notes = []
    for need in needs:
        ours, theirs = need.best(ours=True), need.best(ours=False)
        if ours and theirs and (over := need.over(ours, theirs)).ratio > 1 and over.standing != EVEN:
            notes.append(f"{need.called}: {theirs['label']} is faster than {ours['label']}, by {over.reported}.")
    return notes


COLUMNS = "form", "peak, MiB", "within", "process in all, MiB", "time, clock", "time, CPU", "values"


def _lines(need: Need) -> list[list[str]]:
    base, within = need.rows[0], need.fitting
    lines = []
    for row in need.rows:
        times = [ratio(ratios_of(row["took_s"], base["took_s"]), clock) for clock in CLOCKS]
        same = [name for name, off in row["differs"].items() if not off]
        values = f"as {' and '.join(same)}" if same else f"off by {min(row['differs'].values()):.0e}"
        values += "" if row.get("limit_kept", True) else "; **limit broken**"
        yes = "yes" if row in within else "" if row["label"] == REFERENCE else "no"
        lines.append([row["label"], mib(row["peak_bytes"]), yes, mib(row["resident_bytes"]), *times, values])
    return lines


def _plot(name: str, needs: Sequence[Need]) -> Plot:
    """Every form at every share: a series for each."""
    points: dict[str, list[tuple[float, float]]] = {}
    for need in needs:
        base = need.rows[0]
        for row in need.rows[2:]:
            at = row["peak_bytes"] / base["peak_bytes"], need.over(row, base).ratio
            points.setdefault(row["label"], []).append(at)
    series = [Series(label, sorted(at), joined=label == OURS) for label, at in points.items()]
    return Plot(f"together_{name.replace(' ', '_')}", name, PEAK, STEP_TIME, series)
