"""Is the limit kept for steps of many kinds, with TensorFlow's bits and with the planned peak?

    python benchmarks/kinds_of_steps.py                       # all, more than an hour on two cores
    python benchmarks/kinds_of_steps.py diffusion deq --limit 70

The steps are those of step_kinds: image models, sequences, graphs, derivatives of derivatives, loops. Each runs
unoptimised, twice as a reference (TensorFlow without Grappler's memory optimizer, and without Grappler), and under a
limit that is a share of the unoptimised peak; in processes of their own on the CPU's arena, in turns
(papers/harness/turns.py). A step whose floor is above the limit is refused, and then runs at its floor. Exit status 1
where a limit is passed, a measured peak is above the planned one, or losses are those of no reference.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from papers.harness.turns import FLOOR, MIB, REFERENCE, UNOPTIMISED, WITHOUT_GRAPPLER, Form, compare
from step_kinds import KINDS

NAMES = tuple(name for names in KINDS.values() for name in names)
VARYING = ("rcnn_head",)
"""Steps whose bits TensorFlow itself does not repeat: gradients of `crop_and_resize` are added as threads come."""


def measure(name: str, share: float, rounds: int) -> list[str]:
    """Print a row of the table; return what was not kept."""
    references = [UNOPTIMISED, REFERENCE, WITHOUT_GRAPPLER]
    lines = compare("kind", {"name": name}, [*references, Form("under the limit", limit=share)], rounds=rounds)
    line, note = lines[-1], ""
    if not line["fits"]:
        lines = compare("kind", {"name": name}, [*references, Form("its floor", limit=FLOOR)], rounds=rounds)
        line, note = lines[-1], " (its floor)"
    if not line["fits"]:
        print(f"| `{name}` | | refused | | | | |", flush=True)
        return [f"{name}: its floor does not fit"]
    wrong = broken(name, line)
    sizes = (lines[0]["peak_bytes"], line["limit_bytes"], line["planned_bytes"], line["peak_bytes"])
    texts = [f"{nbytes / MIB:.2f}" for nbytes in sizes]
    texts[1] += note
    same = ", ".join(line["same_losses_as"]) or "none"
    print(f"| `{name}` | {' | '.join(texts)} | {line['clock_ratio']:.2f} | {same} |", flush=True)
    return [f"{name}: {what}" for what in wrong]


def broken(name: str, line: dict[str, Any]) -> list[str]:
    """What a step did not keep."""
    found = ["the limit is passed"] * (not line["kept"])
    found += ["the measured peak is above the plan"] * (line["peak_bytes"] > line["planned_bytes"])
    references = {form.label for form in (UNOPTIMISED, REFERENCE, WITHOUT_GRAPPLER)}
    return found + ["other losses"] * (name not in VARYING and references.isdisjoint(line["same_losses_as"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--limit", type=int, default=60, help="percent of the unoptimised peak")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each form that count")
    args = parser.parse_args()
    unknown = {*args.steps} - {*NAMES}
    if unknown:
        parser.error(f"no such step: {', '.join(sorted(unknown))}")
    print("| step | unoptimised, MiB | limit | planned | measured | time | losses of |")
    print("|---|---|---|---|---|---|---|")
    wrong = [what for name in args.steps or NAMES for what in measure(name, args.limit / 100, args.rounds)]
    for what in wrong:
        print(what, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
