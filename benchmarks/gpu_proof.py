"""Does tfswap keep its promise on the GPU of this machine, and what does that cost? One command, one page.

    python benchmarks/gpu_proof.py --json proof.json     # all parts, 20 minutes on an H100; writes proof.md next to it
    python benchmarks/gpu_proof.py --json proof.json --resume --minutes 9   # what the file does not have yet
    python benchmarks/gpu_proof.py nets:resnet50 codecs --json proof.json   # these parts; what else the file has stays
    python benchmarks/gpu_proof.py nets:vgg19:75% --json proof.json         # one net under one limit
    python benchmarks/gpu_proof.py --page                # docs/gpu_figures.md, from benchmarks/results/gpu.json

    environment   the GPU, its driver, its link, and all versions
    pinned        kernels that read and write a variable whose buffer is pinned host memory: values, and bandwidth
    tests         the tests marked "gpu"
    copies        rates of the swap ops, compared with the link's, and with those of TensorFlow's own copies from and to
                  pageable memory
    codecs        rates of the codecs, compared with the device memory's
    nets          by net: peak under the limit, values, planned against measured, time against the unoptimised step,
                  the copies' time that passes concurrent with kernels; recompute_grad and XLA, and tfswap at their
                  peaks
    batch         the largest batch of ResNet-50 and of a transformer in 8 GiB, unoptimised and with tfswap

They run in this order, so that what matters most has been measured when time is out: first what takes short, then eight
nets at 60%, then these at 40% and at the smallest limit, the peers, the largest batches, and the peers' net under other
limits. After the times that an H200 took with four processes, the parts up to `codecs` take 4 minutes, the nets 10,
the peers and batches 5.

`GPU_PROOF_EMULATED=1 GPU_PROOF_SMALL=1` tries the command itself on the emulated GPUs of the tests, with small nets;
`GPU_PROOF_SMALL=1` alone tries it on a GPU.

Each measurement is a process of its own. A part that fails is reported with the end of its output, and the others go
on; one that `--minutes` leaves no time for is reported as not run. Where one command may not take 20 minutes, run it
with `--resume` until nothing is left. A file has figures of one kind of GPU and one TensorFlow. No network is needed.
The exit status is 1 where a part failed, and 2 where nothing could be run.

Values are compared bit by bit, after the same number of steps, with the unoptimised step's, and where they differ from
it with those without Grappler's memory optimizer, or without Grappler: "digest" is of all losses and variables. All run
deterministic kernels, and with the same bound on cuDNN's workspaces, which decides which of its algorithms are tried.
Peaks are the allocator's own. Times are medians of steps that each end with the loss on the host.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu import batch, environment, kernels, nets, page, process
from gpu.figures import ENVIRONMENT, Figures, FiguresError, read
from gpu.runner import Runner

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "gpu.json"
PAGE = ROOT / "docs" / "gpu_figures.md"

WORKSPACE_MIB = 1 if process.SMALL else 32
"""What cuDNN may take for a convolution, unoptimised and optimised."""

Case = tuple[str, ...]
PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    ENVIRONMENT: environment.environment,
    "pinned": kernels.pinned,
    "tests": environment.tests,
    "copies": kernels.copies,
    "codecs": kernels.codecs,
    "nets": nets.measure,
    "batch": batch.largest,
}


def cases(part: str) -> list[Case]:
    """What a part is made of by default: the arguments of its processes."""
    if part == "batch":
        return [(part, net, how) for net in batch.NETS for how in batch.HOWS]
    if part != "nets":
        return [(part,)]
    hows = (nets.DEFAULT, *nets.LIMITS)
    return [(part, net, how) for net in nets.NETS for how in hows] + [(part, nets.PEERS_NET, how) for how in nets.PEERS]


def chosen(given: str) -> list[Case]:
    """The cases that PART[:CASE[:HOW]] names; none where there is no such part."""
    names = tuple(given.split(":"))
    found = [case for part in PARTS if part == names[0] for case in cases(part) if case[: len(names)] == names]
    if not found and len(names) == 3 and names[0] == "nets" and names[1] in nets.NETS:
        limit = re.fullmatch(r"[1-9]\d*%?", names[2])
        return [names] if limit or names[2] in nets.REFERENCES else []
    return found


def stages(wanted: list[Case], results: dict[str, Any]) -> Iterator[list[Case]]:
    """The cases in the order in which they run; those of a later stage depend on the figures of earlier ones."""

    def rank(case: Case) -> int:
        _, net, how = case
        if net == nets.PEERS_NET:
            return 2 if how in (nets.DEFAULT, *nets.PEERS) else 4
        return 0 if how in (nets.DEFAULT, nets.LIMITS[0]) else 1

    of_nets = sorted((case for case in wanted if case[0] == "nets"), key=rank)
    yield [case for case in of_nets if rank(case) < 4]
    for reference in nets.REFERENCES:
        yield [("nets", net, reference) for net in dict.fromkeys(case[1] for case in of_nets) if differs(net, results)]
    last = [case for case in of_nets if rank(case) == 4]
    yield at_peers_peaks(of_nets, results) + [case for case in wanted if case[0] == "batch"] + last
    for reference in nets.REFERENCES:
        yield [("nets", nets.PEERS_NET, reference)] if last and differs(nets.PEERS_NET, results) else []


def differs(net: str, results: dict[str, Any]) -> bool:
    """Whether values under a limit are those of no step that ran without."""
    rows = {key.split(":")[2]: row for key, row in results.items() if key.startswith(f"nets:{net}:")}
    known = {rows.get(how, {}).get("digest") for how in (nets.DEFAULT, *nets.REFERENCES)}
    return any("limit_bytes" in row and row["digest"] not in known for row in rows.values())


def at_peers_peaks(of_nets: list[Case], results: dict[str, Any]) -> list[Case]:
    """tfswap under the peaks that its peers were measured at."""
    ran = [how for _, net, how in of_nets if net == nets.PEERS_NET and how in nets.PEERS]
    peaks = (results.get(f"nets:{nets.PEERS_NET}:{how}", {}).get("peak_bytes") for how in ran)
    return [("nets", nets.PEERS_NET, str(peak)) for peak in peaks if peak]


def needless(case: Case, results: dict[str, Any]) -> str:
    """Why a case is measured as another one; "" where it isn't."""
    *net, how = case
    earlier = nets.LIMITS[: nets.LIMITS.index(how)] if how in nets.LIMITS else ()
    refused = [each for each in earlier if "floor_bytes" in results.get(":".join((*net, each)), {})]
    return f"{refused[0]} is refused, and measured at the smallest limit" if refused else ""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART[:CASE[:HOW]]", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--json", type=Path, help="write the figures here; those that are there already stay")
    parser.add_argument("--resume", action="store_true", help="run only what the file has no figures of")
    parser.add_argument("--minutes", type=float, default=20, help="parts that do not fit into this time are not run")
    parser.add_argument("--processes", type=int, default=4, help="processes that plan side by side; one runs steps")
    parser.add_argument(
        "--page",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="JSON",
        help="make the page of these figures; run nothing",
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = [given for given in arguments.parts if not chosen(given)]
    if unknown:
        parser.error(f"no part is named {unknown[0]!r}; there are {', '.join(PARTS)}")
    if arguments.resume and not arguments.json:
        parser.error("--resume needs --json")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.child:
        part, *rest = arguments.child
        print(json.dumps(PARTS[part](*rest)), flush=True)
        return 0
    try:
        if arguments.page:
            made = PAGE if arguments.page == RESULTS else arguments.page.with_suffix(".md")
            made.write_text(page.page(read(arguments.page)))
            return 0
        return run_parts(arguments)
    except FiguresError as error:
        print(f"gpu_proof.py: {error}", file=sys.stderr)
        return 2


def run_parts(arguments: argparse.Namespace) -> int:
    """Run the chosen parts, and write their figures; returns the exit status."""
    wanted = [case for given in arguments.parts or PARTS for case in chosen(given)]
    figures = Figures(arguments.json)
    failed: list[str] = []

    def run_case(case: Case) -> None:
        reason = needless(case, figures.results)
        done(case, {"not_run": reason} if reason else runner.measure(case))

    def done(case: Case, found: dict[str, Any]) -> None:
        name = ":".join(case)
        figures.add(name, found)
        if "failed" in found:
            failed.append(name)
        print(name, summary(found) if arguments.json else json.dumps(found), flush=True)
        if arguments.json:
            arguments.json.with_suffix(".md").write_text(page.page(figures.results))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes end with this one
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(
            [sys.executable, __file__, "--child"], 60 * arguments.minutes, child_environment(Path(folder, "lock"))
        )
        found = runner.measure((ENVIRONMENT,))
        if found.get("gpus") == 0:
            raise FiguresError("TensorFlow sees no GPU here.")
        done((ENVIRONMENT,), found)

        def left(of: list[Case]) -> list[Case]:
            return [case for case in of if not (arguments.resume and figures.has(":".join(case)))]

        alone = [case for case in wanted if case[0] not in (ENVIRONMENT, "nets", "batch")]
        runner.run(left(alone), run_case, 1)
        for stage in stages(wanted, figures.results):
            runner.run(left(stage), run_case, arguments.processes)
    if failed:
        print(f"gpu_proof.py: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def child_environment(lock: Path) -> dict[str, str]:
    folders = [str(ROOT), *([str(ROOT / "tests")] if process.EMULATED else []), os.environ.get("PYTHONPATH", "")]
    return {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CUDNN_WORKSPACE_LIMIT_IN_MB": str(WORKSPACE_MIB),
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TFSWAP_PLAN_CACHE": "off",
        "GPU_PROOF_LOCK": str(lock),
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
    }


def summary(found: dict[str, Any]) -> str:
    """How a measurement went, in a line."""
    if "failed" in found:
        return f"FAILED: {found['failed']}: {(found.get('output', '').strip().splitlines() or [''])[-1][:300]}"
    if "not_run" in found:
        return f"not run: {found['not_run']}"
    return f"ok, {found['took_s']:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
