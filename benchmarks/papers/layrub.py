"""Layrub's kind of networks (Liu et al., TACO 2018): how far memory falls, and at what cost in time.

Each net runs as it is, under limits that cost little, and at the floor, in turns. The classics have Keras' or
benchmarks/gist.py's layers on smaller images than ImageNet's, but large enough for feature maps to take more than
variables do, as they do at ImageNet's size; AlexNet, most of which is variables, has that very size. The ResNets of
more than 152 layers are bottleneck blocks on images of 32x32 (benchmarks/planning_time.py), as in SuperNeurons' and
Layrub's tables by their number of layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import planning_time
from papers.harness.page import (
    FORM_COLUMNS,
    PEAK,
    STEP_TIME,
    Plot,
    Section,
    Series,
    Table,
    against_published,
    cut,
    form_lines,
    lowest_peak,
)
from papers.harness.turns import REFERENCE, UNOPTIMISED, WITHOUT_GRAPPLER, Form, compare

CUT, BEST, SLOWER = 0.582, 0.989, 1.12
PUBLISHED_TIME = 1.241
"""What is to be passed: the average cut, the best one, and what the average may cost."""


class Case(NamedTuple):
    """A net, its limits as shares of the unoptimised peak besides the floor, and how it is run.

    Of the limits the last is the one by which the demands are judged. It was fixed before these runs, and taken from
    earlier runs of the same net.
    """

    net: str
    size: dict[str, Any]
    shares: tuple[float, ...] = (0.55, 0.40)
    rounds: int = 15
    arena_mib: int = 8000
    alone: bool = False


CASES = {
    "AlexNet": Case("classic", {"name": "alexnet", "batch": 32, "size": 227}, (0.65,)),
    "VGG16": Case("application", {"name": "VGG16", "batch": 16, "size": 128, "momentum": 0.0}, (0.50,)),
    "Inception (GoogLeNet)": Case("classic", {"name": "inception", "batch": 16, "size": 128}, (0.60, 0.50)),
    "ResNet-50": Case("application", {"name": "ResNet50", "batch": 16, "size": 128}, (0.50, 0.40)),
    "ResNet-101": Case("application", {"name": "ResNet101", "batch": 16, "size": 128}, (0.40,)),
    "ResNet-152": Case("application", {"name": "ResNet152", "batch": 16, "size": 128}, (0.40,)),
    "ResNet of 302 layers": Case("deep_resnet", {"layers": 302}, (0.40, 0.20)),
    "ResNet of 1,517 layers": Case(
        "deep_resnet", {"layers": 1517, "batch": 32}, (0.20, 0.011), rounds=3, arena_mib=15000, alone=True
    ),
}


PARTS = tuple(CASES)
ONEDNN = True


def measure(part: str) -> dict[str, Any]:
    case = CASES[part]
    # The deepest has more nodes than Grappler is asked for (MOST_NODES in tfswap/compiler/grappler.py).
    reference = WITHOUT_GRAPPLER if case.alone else REFERENCE
    forms = [UNOPTIMISED, reference, *(Form(_label(share), limit=share) for share in case.shares)]
    forms.append(Form("tfswap, its floor"))
    how = {"rounds": case.rounds, "arena_mib": case.arena_mib, "alone": case.alone, "onednn": ONEDNN}
    return {"case": case._asdict(), "onednn": ONEDNN, "lines": compare(case.net, case.size, forms, **how)}


def _label(share: float) -> str:
    return f"tfswap, {100 * share:g}%"


def _images(size: dict[str, Any]) -> str:
    side = size.get("size", planning_time.SIZE)
    return f"{size.get('batch', planning_time.BATCH)} images of {side}x{side}"


class Figures(NamedTuple):
    """Of a net in one form: its cut, and times over the unoptimised step's, with their quartiles; its cut of the
    predicted unoptimised peak, and of the lowest of any unoptimised step.
    """

    cut: float
    cpu: float
    clock: float
    predicted_cut: float
    lowest_cut: float
    form: str
    cpu_spread: Sequence[float]
    clock_spread: Sequence[float]


class Set(NamedTuple):
    """A limit for each net."""

    figures: Sequence[Figures]

    @property
    def means(self) -> tuple[float, float, float]:
        """The cut, the CPU time and the time by the clock."""
        nets = self.figures
        return tuple(statistics.mean(column) for column in zip(*(net[:3] for net in nets), strict=True))

    @property
    def reported(self) -> str:
        """All of these, and what the cut is of the predicted unoptimised peaks."""
        average, cpu, clock = self.means
        predicted = statistics.mean(net.predicted_cut for net in self.figures)
        return (
            f"-{average:.1%} on average (-{self.lowest:.1%} of the lowest unoptimised peaks, -{predicted:.1%} of the "
            f"predicted ones) and -{self.best:.1%} at "
            f"best, at {cpu:.2f} of the CPU time and {clock:.2f} by the clock on average"
        )

    @property
    def lowest(self) -> float:
        """The average cut of the lowest unoptimised peaks."""
        return statistics.mean(net.lowest_cut for net in self.figures)

    @property
    def missed(self) -> str:
        """What of the demands is not met, in short."""
        unmet = [reported for reported, held in self.demands.items() if not held]
        noise = self._within_noise.strip(" .")
        return f"; not met: {', '.join(unmet)}{f' ({noise})' * bool(noise)}" if unmet else ""

    @property
    def best(self) -> float:
        """The largest cut."""
        return max(net.cut for net in self.figures)

    @property
    def demands(self) -> dict[str, bool]:
        """What is to be passed, and whether it is."""
        (average, cpu, clock), best = self.means, self.best
        return {
            f"the average cut ({average:.1%}, to be more than {CUT:.1%})": average > CUT,
            f"the best cut ({best:.1%}, to be {BEST:.1%})": best >= BEST,
            f"the average time by CPU ({cpu:.4f}, to be at most {SLOWER:.2f})": cpu <= SLOWER,
            f"the average time by the clock ({clock:.4f}, to be at most {SLOWER:.2f})": clock <= SLOWER,
        }

    @property
    def quartiles(self) -> dict[str, tuple[float, float]]:
        """By clock, the means of the nets' quartiles of time."""
        columns = {"CPU": [net.cpu_spread for net in self.figures], "clock": [net.clock_spread for net in self.figures]}
        return {
            clock: (statistics.mean(low for low, _ in spreads), statistics.mean(high for _, high in spreads))
            for clock, spreads in columns.items()
        }

    @property
    def spreads(self) -> str:
        """The means of the nets' quartiles of time, by each clock."""
        reported = [f"{clock} {low:.2f} to {high:.2f}" for clock, (low, high) in self.quartiles.items()]
        return f"means of the nets' quartiles: {', '.join(reported)}"

    def judged(self, name: str) -> str:
        """Which demands it meets."""
        met, unmet = ([reported for reported, held in self.demands.items() if held is one] for one in (True, False))
        parts = [f"{verb}: {', '.join(which)}" for verb, which in (("met", met), ("not met", unmet)) if which]
        return f"Demands {name}: {'; '.join(parts)} ({self.spreads}).{self._within_noise}"

    @property
    def _within_noise(self) -> str:
        """Which demands on time the quartiles lie on both sides of."""
        names = {"CPU": "CPU", "clock": "the clock"}
        around = [names[clock] for clock, (low, high) in self.quartiles.items() if low <= SLOWER < high]
        if not around:
            return ""
        return f" By {' and by '.join(around)} they lie on both sides of {SLOWER:.2f}: that demand is within the noise."


def _figures(line: dict[str, Any], unoptimised: dict[str, Any]) -> Figures:
    return Figures(
        cut(line["peak_bytes"], unoptimised["peak_bytes"]),
        line["cpu_ratio"],
        line["clock_ratio"],
        cut(line["peak_bytes"], line["baseline_bytes"]),
        cut(line["peak_bytes"], lowest_peak(unoptimised)),
        line["label"],
        line["cpu_spread"],
        line["clock_spread"],
    )


def present(found: dict[str, Any]) -> Section:
    lines: list[list[str]] = []
    tried: dict[str, list[Figures]] = {}
    refused: list[str] = []
    notes: list[str] = []
    for name, net in found.items():
        measured = net["lines"]
        size = net["case"]["size"]
        title = f"{name}, {_images(size)}" + ", plain kernels" * (not net["onednn"])
        lines += [[title, *line] for line in form_lines(measured)]
        planned = [line for line in measured if line["how"] == "tfswap"]
        ours = [line for line in planned if line["fits"]]
        refused += [f"{name} at {line['label']}" for line in planned if not line["fits"]]
        tried[name] = [_figures(line, measured[0]) for line in ours]
        odd = [
            line["label"]
            for line in ours
            if {one["label"] for one in ours} - {line["label"]} - set(line["same_losses_as"])
        ]
        notes += [f"{name}: losses of {', '.join(odd)} are not those of tfswap's other forms."] * bool(odd)
    judged = [
        next((one for one in forms if one.form == _label(CASES[name].shares[-1])), None)
        for name, forms in tried.items()
    ]
    floors, fixed = Set([max(forms) for forms in tried.values()]), Set([one for one in judged if one is not None])
    limits = ", ".join(f"{name} {CASES[name].shares[-1]:.3g}" for name in tried)
    said = [one.reported for one in (floors, fixed)]
    words = f"at limits that were fixed before these runs, one for each net, {said[1]}; at the floors {said[0]}"
    notes += [fixed.judged(f"at the shares {limits}"), floors.judged("at the floors")]
    notes += ["These shares were fixed before these runs, and come from earlier runs of the same nets."]
    brief = (
        f"-{fixed.means[0]:.1%} on average (-{fixed.lowest:.1%} of the lowest unoptimised peaks) and -{fixed.best:.1%} "
        f"at best, at {fixed.means[2]:.2f} of the time{fixed.missed}"
    )
    shallow = Set([one for name, one in zip(tried, judged, strict=True) if one is not None and not _is_deep(name)])
    if shallow.figures and shallow.figures != fixed.figures:
        brief += f"; -{shallow.means[0]:.1%} without the two deepest ResNets"
        notes.append(_without_deep(tried, shallow))
    together = Set([one for name, one in zip(tried, judged, strict=True) if one is not None and not CASES[name].alone])
    if together.figures and together.figures != fixed.figures:
        notes += [f"Of only the nets whose forms take turns, at these limits: {together.reported}."]
    notes += _notes_of_runs(found, refused)
    return Section(
        "Layrub: deep CNNs",
        "memory -58.2% on average and -98.9% at best, at 24.1% more time (Liu et al., TACO 2018)",
        words,
        "their base is Caffe, ours TensorFlow's own peak; small images, a CPU's arena; oneDNN's kernels. Keras' nets "
        "(VGG16, ResNets to 152) have ten classes behind a mean, and no fully connected layers; those of 302 and 1,517 "
        "layers are blocks of one width alone",
        [Table("", ("net", *FORM_COLUMNS), lines)],
        [_plot(tried)],
        notes,
        brief=brief,
        comparisons=(
            against_published("average cut of memory", fixed.means[0] / CUT),
            against_published("best cut of memory", fixed.best / BEST),
            against_published("average time", PUBLISHED_TIME / fixed.means[2]),
        ),
    )


def _notes_of_runs(found: dict[str, Any], refused: Sequence[str]) -> list[str]:
    notes = ["tfswap's forms of a net have the same losses, to the bit, unless noted otherwise."]
    notes += [f"Out of reach: {', '.join(refused)}."] * bool(refused)
    notes += [
        f"{name}: forms one after the other and {net['case']['rounds']} steps of each, so that its time says little."
        for name, net in found.items()
        if net["case"]["alone"]
    ]
    rounds = ", ".join(f"{name} {net['case']['rounds']}" for name, net in found.items())
    notes += [f"Rounds: {rounds}."]
    return notes


def _without_deep(nets: Iterable[str], shallow: Set) -> str:
    return (
        f"Without {' and '.join(name for name in nets if _is_deep(name))} the average cut at these limits is "
        f"-{shallow.means[0]:.1%}, which is {'more' if shallow.means[0] > CUT else 'not more'} than {CUT:.1%}, at "
        f"{shallow.means[1]:.2f} of the CPU time and {shallow.means[2]:.2f} by the clock."
    )


def _is_deep(name: str) -> bool:
    """Whether a net is one of those whose many layers are nearly all of its memory."""
    return CASES[name].net == "deep_resnet"


def _plot(tried: dict[str, list[Figures]]) -> Plot:
    series = [
        Series(net, sorted([(1.0, 1.0), *((1 - one.cut, one.clock) for one in forms)]), joined=True)
        for net, forms in tried.items()
    ]
    return Plot("layrub", "Each net's memory against time", PEAK, STEP_TIME, series)
