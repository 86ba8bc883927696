"""What do blocks that XLA compiles gain, one by one? Predicted against measured, of all blocks that a step may have.

    python benchmarks/fused_blocks.py                        # the four nets of peers.py, some minutes
    python benchmarks/fused_blocks.py resnet --rounds 40

Each different block of a step runs alone, in turns: as TensorFlow's kernels for its members, and as XLA's block, which
also recomputes what it reads of earlier ones. Times are of the CPU, lower quartiles over the rounds, in microseconds;
"gain" is of all blocks with this content, in a step. Arguments are larger than the caches together, as in a step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

COLD_BYTES, MOST_COPIES = 96 << 20, 24
"""Arguments are copied until they take more than the caches hold."""


class Timed(NamedTuple):
    """A function, and the seconds of its calls."""

    call: Callable[[list[Any]], Any]
    taken: list[float]

    def run(self, arguments: list[Any]) -> None:
        started = time.process_time()
        self.call(arguments)
        self.taken.append(time.process_time() - started)

    @property
    def seconds(self) -> float:
        return statistics.quantiles(self.taken, n=4)[0]


def blocks_of(name: str) -> tuple[Any, list[Any], Any]:
    """A net's step as it is planned, all blocks that it may have, and its trace."""
    import tensorflow as tf
    from papers.harness.peer_nets import MODELS, make_step

    from tfswap.analysis.cost import Costs
    from tfswap.analysis.fusion import candidate_blocks
    from tfswap.compiler.calibration import calibrated
    from tfswap.compiler.grappler import as_planned
    from tfswap.device.machine import current_device
    from tfswap.importers.function import import_function

    model = MODELS[name]()
    concrete = tf.function(make_step(model)).get_concrete_function(*model.arguments)
    device = calibrated(current_device(on_cpu=True)[1])
    graph = as_planned(import_function(concrete, model.arguments), concrete, device)
    return graph, candidate_blocks(graph, Costs.of(device)), concrete


def measured(block: Any, graph: Any, concrete: Any, rounds: int) -> tuple[float, float]:
    """Seconds of TensorFlow's kernels for the block's members, and of XLA's block, both without a call of nothing."""
    import tensorflow as tf

    from tfswap.compiler.fused_blocks import block_alone, members_alone
    from tfswap.exporters.flat_function import FlatFunction

    def argument(kind: Any) -> Any:
        if kind.dtype == "bool":
            return tf.ones(kind.shape, tf.bool)
        return tf.random.stateless_uniform(kind.shape, (1, 2), 0.1, 1.0)

    pairs: list[tuple[Timed, list[list[Any]]]] = []
    for alone in (members_alone(block, graph), block_alone(block)):
        given = [argument(feed.outputs[0]) for feed in alone.feeds]
        nbytes = sum(t.dtype.size * t.shape.num_elements() for t in given)
        copies = [given]
        for _ in range(min(MOST_COPIES, COLD_BYTES // max(1, nbytes))):
            copies.append([tf.raw_ops.DeepCopy(x=t) for t in given])
        pairs.append((Timed(FlatFunction(alone, "alone", given, concrete), []), copies))
    for timed, copies in pairs:
        timed.call(copies[0])
    for number in range(rounds):
        for timed, copies in pairs:
            timed.run(copies[number % len(copies)])
    unfused, fused = (timed.seconds for timed, _ in pairs)
    return unfused, fused


def show(name: str, rounds: int) -> None:
    from tfswap.compiler.fused_blocks import content_of

    graph, blocks, concrete = blocks_of(name)
    different = {content_of(block): block for block in blocks}
    counts = Counter(content_of(block) for block in blocks)
    print(f"\n{name}: {len(blocks)} blocks, {len(different)} different ones")
    print("times  kernels  predicted: TF  XLA  gain  measured: TF  XLA  gain  last member (what it makes)")
    predicted = found = taken = 0.0
    for content, block in different.items():
        if not block.outputs:
            continue
        unfused, fused = measured(block, graph, concrete, rounds)
        count, kernels = counts[content], len(block.members)
        gains = [1e6 * count * gain for gain in (block.unfused_s - block.seconds, unfused - fused)]
        predicted, found = predicted + gains[0], found + gains[1]
        taken += gains[1] if gains[0] > 0 else 0.0
        last = block.members[-1]
        print(
            f"{count:5} {kernels:8} {1e6 * block.unfused_s:14.0f} {1e6 * block.seconds:4.0f} {gains[0]:5.0f} "
            f"{1e6 * unfused:13.0f} {1e6 * fused:4.0f} {gains[1]:5.0f}  {last.name[-50:]} "
            f"({last.op} {last.outputs[0].shape}; {'+'.join(sorted({n.op for n in block.nodes}))[:90]})",
            flush=True,
        )
    print(f"all: predicted {predicted:.0f}, measured {found:.0f}; of those predicted to gain: {taken:.0f}")


def main() -> None:
    from papers.harness.peer_nets import MODELS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", metavar="NET", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    for name in args.nets or MODELS:
        show(name, args.rounds)


if __name__ == "__main__":
    os.environ.update({"TF_CPP_MIN_LOG_LEVEL": "2", "TF_CPU_ALLOCATOR_USE_BFC": "1"})
    main()
