"""From the figures of headlines.py to pages of Markdown and their plots. No figure on a page is typed by hand.

`index.md` has a line for each row with its verdict, and one chart. Each row has a page of its own with its tables. A
row's module says what its figures mean (`present`); this module only formats it.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from papers.harness.turns import REFERENCES

MIB = 2**20
COLOURS = ("#2563c9", "#d9480f", "#2b8a3e", "#862e9c", "#c92a2a", "#0b7285", "#5f3dc4", "#495057")

MARKED = 30
"""Points of a line, at most, that are marked."""


INSIDE = 6
"""Series of a plot, at most, whose legend finds room among them."""


class Table(NamedTuple):
    """A table; `title` stands above it."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]


class Series(NamedTuple):
    """Points of a plot, joined by a line or each with a label of its own."""

    label: str
    points: Sequence[tuple[float, float]]
    joined: bool = False


class Plot(NamedTuple):
    """A plot, saved as NAME.png next to the page."""

    name: str
    title: str
    x: str
    y: str
    series: Sequence[Series]


BETTER, LEVEL, WORSE = "better", "level", "worse"
NEAR = 0.03
"""A figure within this share of a published one is level with it."""


class Comparison(NamedTuple):
    """One figure of tfswap's against the same measure of a paper or of another tool.

    Attributes:
        label: the measure.
        gain: how many times better tfswap's figure is: above 1 where it is better.
        standing: BETTER, LEVEL or WORSE.
    """

    label: str
    gain: float
    standing: str


def against_published(label: str, gain: float) -> Comparison:
    """A comparison with a single published figure, whose spread is unknown."""
    return Comparison(label, gain, LEVEL if abs(gain - 1) <= NEAR else BETTER if gain > 1 else WORSE)


class Section(NamedTuple):
    """What one row says.

    Attributes:
        title: of the page.
        published: the paper's figure, and whose it is.
        ours: the same measure here, computed from the figures.
        differs: what is not as the paper had it.
        tables, plots: the figures.
        notes: what was not measured, and where a peer wins.
        brief: one or two of our figures, for the table of all rows; all of them where it is empty.
        comparisons: our figures against theirs.
        answer: what the page's reader comes for, as its first line.
        details: tables for a page of their own, ROW_details.md.
    """

    title: str
    published: str
    ours: str
    differs: str
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()
    brief: str = ""
    comparisons: Sequence[Comparison] = ()
    answer: str = ""
    details: Sequence[Table] = ()

    @property
    def verdict(self) -> str:
        """BETTER, LEVEL or WORSE where all comparisons agree, and else how many there are of each."""
        counts = {kind: sum(c.standing == kind for c in self.comparisons) for kind in (BETTER, LEVEL, WORSE)}
        said = [kind for kind, count in counts.items() if count]
        return said[0] if len(said) == 1 else ", ".join(f"{kind} in {counts[kind]}" for kind in said) or NO_RIVAL


NO_RIVAL = "nothing to compare with"

INDEX = """# Comparisons

tfswap against published results and against other tools, one row for each.

{table}
![Figures of tfswap over theirs](overview.png)

Each point of the chart is one comparison. To the right of 1 tfswap's figure is the better one. Level means within
{near:.0%} of a published figure, or, of two tools, that the quartiles of the rounds' ratios lie on both sides of 1. A
memory that a tool reaches and tfswap does not counts as worse.

All rows are of a CPU's arena. Figures of a real GPU are on [a page of their own](../gpu.md). [Method](method.md) says
how the rows were measured. Figures of systems that did not run here are in [As published](published.md).
{missing}"""

METHOD = """# Method

The pages of comparisons are made from `benchmarks/results`, a JSON file for each row:

```sh
python benchmarks/headlines.py               # measures all rows; ROW or ROW:PART ... only these
python benchmarks/headlines.py --pages       # makes these pages and their plots from the files
```

The row pytorch needs PyTorch, here or in another environment: `pip install ".[peers]"`, or `--python PYTHON`.

{peaks}

Where a page says nothing else, times are step times over those of the unoptimised step, taken in turns, round by
round: medians, and in brackets their quartiles; CPU seconds, of all threads, vary less than the clock on a machine that
others use, and do not show kernels that wait. Quartiles are of one run's rounds; between runs medians differ by more
on a machine that others use.

In tables with a column "in the step", losses of all steps are compared with those of "memory optimizer off" or of
"Grappler off" where there is such a form, and else with the unoptimised step's. They are identical, to the bit, unless
the table says otherwise. "memory optimizer off" is TensorFlow as it is by default, but without Grappler's memory
optimizer, and tfswap's steps have its bits; those of graphs of more than 100,000 nodes have the bits of "Grappler off",
with no graph optimizer at all. The memory optimizer reorders large sums, so that last bits of an unoptimised step
differ from run to run ([Limits](../limits.md)). Training carries that on: where a table has "unoptimised" itself as
off, TensorFlow differs from TensorFlow, and the figure is the largest relative difference of all steps ([the
cause](../measurements/variation.md#how-far-last-bits-carry)).

A limit that is called a share, "50%", is that share of what the unoptimised step of the same run peaked at in its first
steps; the column "memory" is over the highest peak of all its steps, which may come later. "on the host" is host
memory that the plan takes for swapped tensors. A first call traces, and with tfswap it plans too; where a form is named
by its floor, it is planned twice, and where a plan is changed, again.
"""


PEAKS = (
    "Peaks are those of TensorFlow's allocator, of all steps. Those of planned steps do not depend on what else the "
    "machine does. An unoptimised step has no fixed order: which of its kernels overlap, and so its peak, depends on "
    "how long each takes, which varies with what else the machine does ([Memory model](../memory_model.md)). Cuts "
    "are of the highest peak that was seen, and differ between runs as it does "
    "([by how much](../measurements/variation.md#what-cuts-are-of)). The predicted peak, of a machine with nothing "
    "else to do, stands next to the measured one on the pages of offloading, Layrub, policies, kinds, ablation and "
    "depth."
)
WIDTH = 120


def mib(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:.1f}"


def cut(nbytes: float, base: float) -> float:
    """The share by which memory shrank."""
    return 1 - nbytes / base


def spread(middle: float, around: Sequence[float]) -> str:
    """A figure, and in brackets its quartiles."""
    low, high = around
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def ratio(line: dict[str, Any], clock: str) -> str:
    """A time ratio and its quartiles."""
    if f"{clock}_ratio" not in line:
        return ""
    return spread(line[f"{clock}_ratio"], line[f"{clock}_spread"])


FORM_COLUMNS = (
    "form",
    "limit, MiB",
    "peak, MiB",
    "memory",
    "on the host, MiB",
    "first call, s",
    "time, clock",
    "time, CPU",
    "in the step",
    "limit kept",
)


def form_lines(lines: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Of what `turns.compare` found, the first of which is the unoptimised step."""
    base = lines[0]["peak_bytes"]
    predicted = next((line["baseline_bytes"] for line in lines if "baseline_bytes" in line), None)
    right = next((line for line in lines if line["how"] in REFERENCES and line["fits"]), lines[0])
    found = [_form_line(line, base, right["label"]) for line in lines]
    found[0][0] += f" (predicted {mib(predicted)} MiB)" * (predicted is not None)
    return found


def _form_line(line: dict[str, Any], base: int, right: str) -> list[str]:
    limit = mib(line.get("limit_bytes"))
    if not line["fits"]:
        return [line["label"], limit, *[""] * 6, f"out of reach: its floor is {mib(line.get('floor_bytes'))}", ""]
    done = [f"{line[k]} {k}" for k in ("swapped", "recomputed", "encoded") if line.get(k)]
    done += ["order alone"] * (line["how"] == "tfswap" and not done)
    if line.get("loss_off"):
        done.append(f'losses {line["loss_off"]:.0e} off those of "{right}"')
    done += ["losses not compared"] * (line.get("loss_off") is None)
    kept = {None: "", True: "yes", False: "**NO**"}[line["kept"]]
    share = f"{-100 * cut(line['peak_bytes'], base):+.1f}%" if line["peak_bytes"] != base else ""
    times = [ratio(line, clock) for clock in ("clock", "cpu")]
    host, first = mib(line.get("host_bytes")), f"{line['first_s']:.1f}" if "first_s" in line else ""
    return [line["label"], limit, _peak(line), share, host, first, *times, ", ".join(done), kept]


def lowest_peak(line: dict[str, Any]) -> int:
    """Of all steps; of those whose peaks were not kept one by one, the highest."""
    return line.get("lowest_peak_bytes", line["peak_bytes"])


def _peak(line: dict[str, Any]) -> str:
    """The highest of all steps, and the lowest where that differs."""
    highest, lowest = mib(line["peak_bytes"]), mib(lowest_peak(line))
    return highest if lowest == highest else f"{highest} ({lowest})"


PEAK, STEP_TIME = "peak over unoptimised", "step time over unoptimised, by the clock"
"""What plots of memory against time have on their axes."""


def memory_time(name: str, title: str, lines: Sequence[dict[str, Any]], clock: str = "clock") -> Plot:
    """Memory against time: tfswap's own curve, and everything else as points."""
    base = lines[0]["peak_bytes"]
    done = [line for line in lines if line["fits"] and f"{clock}_ratio" in line]

    def point(line: dict[str, Any]) -> tuple[float, float]:
        return line["peak_bytes"] / base, line[f"{clock}_ratio"]

    ours = [
        line for line in done if line["how"] == "tfswap" and line["solver"] == "default" and len(line["tactics"]) > 1
    ]
    others = [line for line in done if line not in ours]
    series = [Series("tfswap", sorted(point(line) for line in ours), joined=True)]
    series += [Series(line["label"], [point(line)]) for line in others]
    time = {"cpu": "step CPU time over unoptimised", "clock": STEP_TIME}[clock]
    return Plot(name, title, PEAK, time, series)


def make_pages(figures: dict[str, Any], folder: Path, rows: Sequence[str]) -> None:
    """Write the pages and plots of all rows that were measured into `folder`."""
    sections = sections_of(figures, rows)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts_of(figures, sections, rows).items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    for section in sections.values():
        for plot in section.plots:
            draw(plot, folder / f"{plot.name}.png")
    draw_overview(sections, folder / "overview.png")


def module_of(row: str) -> Any:
    """A row's module: PARTS, `measure` and `present`."""
    return importlib.import_module(f"papers.{row}")


def sections_of(figures: dict[str, Any], rows: Sequence[str]) -> dict[str, Section]:
    """By row, what the parts that were measured say, in their order.

    A row's module may also have `across`: notes that need the figures of other rows.
    """
    sections = {row: module_of(row).present(_found(figures, row)) for row in rows if row in figures}
    for row, section in sections.items():
        if across := getattr(module_of(row), "across", None):
            sections[row] = section._replace(notes=[*section.notes, *across(figures)])
    return sections


def _found(figures: dict[str, Any], row: str) -> dict[str, Any]:
    """What was measured of a row, by part, in the order of its parts."""
    return {part: figures[row][part]["found"] for part in module_of(row).PARTS if part in figures.get(row, ())}


def texts_of(figures: dict[str, Any], sections: dict[str, Section], rows: Sequence[str]) -> dict[str, str]:
    """By name, the pages. Rows and parts that were not measured are named on them."""
    from papers.harness import predictions

    columns = "row", "published", "here", "verdict"
    lines = [(f"[{s.title}]({row}.md)", s.published, s.brief or s.ours, s.verdict) for row, s in sections.items()]
    missing = ", ".join(row for row in rows if row not in sections)
    peaks = textwrap.fill(f"{PEAKS} {predictions.reported(figures)}", WIDTH)
    pages = {row: _page(row, section, figures[row]) for row, section in sections.items()}
    pages |= {f"{row}_details": _details(row, section) for row, section in sections.items() if section.details}
    pages["index"] = INDEX.format(
        table=_table(columns, lines), near=NEAR, missing=f"\nNot measured yet: {missing}.\n" if missing else ""
    )
    return pages | {"method": METHOD.replace("{peaks}", peaks), "published": _published()}


def _published() -> str:
    """What is quoted as papers have it."""
    from papers.harness import published

    tables = [text for one in published.tables() for text in (f"{one.title}\n", _table(one.columns, one.lines))]
    return "\n".join([published.HEAD, *tables])


def _details(name: str, section: Section) -> str:
    lines = [f"# {section.title}: details\n", f"All that was measured for [{section.title}]({name}.md).\n"]
    return "\n".join([*lines, *(text for table in section.details for text in _titled(table))])


def _titled(table: Table) -> list[str]:
    return [f"{table.title}\n"] * bool(table.title) + [_table(table.columns, table.lines)]


def _page(name: str, section: Section, row: dict[str, Any]) -> str:
    lines = [
        f"# {section.title}\n",
        *[f"{section.answer}\n"] * bool(section.answer),
        f"**{section.verdict[0].upper()}{section.verdict[1:]}.** Published: {section.published}.\n",
    ]
    lines += [f"Here: {section.ours}.\n", f"What differs: {section.differs}.\n"]
    if section.comparisons:
        rows = [(c.label, f"{c.gain:.2f}", c.standing) for c in section.comparisons]
        lines.append(_table(("tfswap's figure over theirs, above 1 is better", "times", "verdict"), rows))
    for table in section.tables:
        lines += _titled(table)
    lines += [f"Every form that was measured: [details]({name}_details.md).\n"] * bool(section.details)
    lines += [f"![{plot.title}]({plot.name}.png)\n" for plot in section.plots]
    missing = [part for part in module_of(name).PARTS if part not in row]
    notes = [*section.notes, *[f"Not measured: {'; '.join(missing)}."] * bool(missing)]
    lines += [f"- {note}" for note in notes] + [""] * bool(notes)
    return "\n".join([*lines, _taken(name, row)])


def _taken(name: str, row: dict[str, Any]) -> str:
    """How, where and when the parts of a row were measured; those of one machine and its versions share a table."""
    places: dict[str, list[list[str]]] = {}
    for part, one in row.items():
        t = one["taken"]
        where = t["machine"] if MEMORY.search(t["machine"]) else f"{t['machine']}, {UNRECORDED}"
        versions = t["versions"].split(", ")
        ours = next((version for version in versions if version.startswith("tfswap")), "")
        others = [version for version in versions if version != ours]
        line = [part, ours.removeprefix("tfswap "), t["when"], f"{t['took_s'] / 60:.1f}", f"{t['load']:.1f}"]
        places.setdefault("; ".join([where, f"{t['cores']} cores", ", ".join(others)]), []).append(line)
    command = f"python benchmarks/headlines.py {name}"
    if name == "pytorch":
        command += " --python PYTHON"  # an interpreter that has PyTorch
    tables = [text for place, lines in places.items() for text in (f"{place}:\n", _table(TAKEN, lines))]
    summary = f"<summary>Measured by <code>{command}</code></summary>"
    return "\n".join(['<details markdown="1">', f"{summary}\n", *tables, "</details>\n"])


TAKEN = ("part", "tfswap", "when", "minutes", "load of the machine")
MEMORY, UNRECORDED = re.compile(r"\d+ GiB$"), "memory and vector instructions not recorded"
"""How a machine's words end where its memory is given, and the words for machines without it."""


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows) + "\n"


def draw(plot: Plot, path: Path) -> None:
    """A plot as PNG."""
    from matplotlib.figure import Figure

    crowded = len(plot.series) > INSIDE
    figure = Figure(figsize=(9 if crowded else 7, 4.5 if crowded else 4), layout="constrained")
    axes = figure.add_subplot()
    for n, one in enumerate(plot.series):
        if one.points:
            xs, ys = zip(*one.points, strict=True)
            line = "o-" if len(one.points) <= MARKED else "-"
            style = line if one.joined else "DsvXP*^<>hd"[n % 11]
            axes.plot(xs, ys, style, label=one.label, markersize=6, color=COLOURS[n % len(COLOURS)])
    axes.set(xlabel=plot.x, ylabel=plot.y)
    axes.set_title(plot.title, fontsize=10)
    axes.grid(alpha=0.3)
    if crowded:
        figure.legend(fontsize=8, loc="outside right upper")
    else:
        axes.legend(fontsize=8)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def draw_overview(sections: dict[str, Section], path: Path) -> None:
    """All comparisons of all rows, as points over a logarithmic axis."""
    from matplotlib.figure import Figure

    rows = [section for section in sections.values() if section.comparisons]
    figure = Figure(figsize=(9, 0.5 * len(rows) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(1, color="#868e96", linewidth=1)
    for n, (kind, colour) in enumerate(STANDINGS.items()):
        points = [(c.gain, y) for y, row in enumerate(rows) for c in row.comparisons if c.standing == kind]
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, "ov^"[n], label=kind, color=colour, alpha=0.7, linestyle="none")
    axes.set_yticks(range(len(rows)), [row.title for row in rows])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="tfswap's figure over theirs (above 1: tfswap's is better)")
    marks = [mark for mark in MARKS if any(c.gain <= mark for row in rows for c in row.comparisons)]
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})


STANDINGS = {BETTER: "#2b8a3e", LEVEL: "#495057", WORSE: "#c92a2a"}
MARKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10)


def as_text(table: Table) -> str:
    """A table for terminals."""
    rows = [list(map(str, row)) for row in (table.columns, *table.lines)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(table.columns))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"  {table.title}"] * bool(table.title) + [f"  {line}" for line in lines])
