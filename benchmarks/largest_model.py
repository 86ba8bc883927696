"""The largest GPT-like models that train on described GPUs, simulated: nothing runs, and no weight is allocated.

    python benchmarks/largest_model.py                              # RTX 4090 and H100, 256 GiB and 1 TiB; an hour
    python benchmarks/largest_model.py --device rtx-4090 --host 256 --layers 40

Weights, gradients and Adam's slots are float32: 12 bytes of state a parameter, at home in host memory, with new values
and swapped tensors, or on the device. The width is fixed; the number of layers is the largest whose step has a plan for
the device's memory and this host memory. One layer more has none. The step is that of `language_models.py` with a
sequence of 1024.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from language_models import Shape, training_step, without_values

STATE_BYTES = 12
"""Of a parameter: a weight and two slots."""
WORDS, LENGTH = 50_304, 1024
WIDTHS = {256: (8192, 64), 1024: (12_288, 96)}
"""By GiB of host memory, the width of the model and its heads: about those of published models of that size."""
DEVICES = "rtx-4090", "h100"


def planned(layers: int, device: str, host_gib: int, batch: int, width: int, heads: int) -> dict[str, Any] | None:
    """The fastest plan for such a step; None where there is none."""
    import tensorflow as tf

    from tfswap.compiler.offline import offline_optimizer
    from tfswap.compiler.resident_margin import fastest
    from tfswap.frontends.resizable_step import find_step
    from tfswap.frontends.simulate import target
    from tfswap.ir.permits import TACTICS
    from tfswap.kernels.hardware import described

    of = Shape(layers, width, heads, WORDS, LENGTH, batch)
    step, _ = training_step(of, without_values)
    tokens = tf.TensorSpec([batch, LENGTH], tf.int32)
    on, options, costs = target(described(device), None, TACTICS, host_gib << 30, None, None, None)
    found = find_step(step, (tokens, tokens), device=on.device)
    graph = found.graph()
    optimizer = offline_optimizer(graph, on.device, options, found.variables, costs)
    best = fastest(optimizer, on.memory_bytes)
    if best is None:
        return None
    memory, seconds = best.candidate.memory, best.candidate.timing.total_s
    return {
        "parameters": of.parameters,
        "nodes": len(graph),
        "peak": best.candidate.peak_bytes,
        "host": memory.host_peak_bytes,
        "s": seconds,
        "tokens": batch * LENGTH,
        "slice": best.variant.rewriting.slice_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", nargs="+", default=DEVICES)
    parser.add_argument("--host", nargs="+", type=int, default=[*WIDTHS], help="GiB of host memory")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, help="this number alone")
    args = parser.parse_args()
    print("| GPU | host memory, GiB | layers | width | parameters, 10^9 | peak, GiB | host, GiB | step, s ", end="")
    print("| ms/token | planning, s |")
    print("| --- |" + " --: |" * 9)
    for device in args.device:
        for host_gib in args.host:
            report(device, host_gib, args.batch, args.layers)


def report(device: str, host_gib: int, batch: int, layers: int | None) -> None:
    """Print a row of the largest model, or of one with these layers."""
    from tfswap.kernels.hardware import described

    began = time.monotonic()
    width, heads = WIDTHS[host_gib]

    def tried(count: int) -> dict[str, Any] | None:
        return planned(count, device, host_gib, batch, width, heads)

    if layers is None:
        layers, found = largest(host_gib << 30, described(device).memory_bytes or 0, width, tried)
    else:
        found = tried(layers)
    if found is None:
        print(f"| {device} | {host_gib} | {layers} | {width} | no plan |")
        return
    sizes = f"{layers} | {width} | {found['parameters'] / 1e9:.1f} | {found['peak'] / 2**30:.1f}"
    times = f"{found['s']:.1f} | {1e3 * found['s'] / found['tokens']:.2f} | {time.monotonic() - began:.0f}"
    print(f"| {device} | {host_gib} | {sizes} | {found['host'] / 2**30:.1f} | {times} |", flush=True)


def largest(
    host_bytes: int, device_bytes: int, width: int, tried: Callable[[int], dict[str, Any] | None]
) -> tuple[int, dict[str, Any] | None]:
    """The largest number of layers that has a plan, with its figures."""

    def most(nbytes: int) -> int:
        """How many layers' state these bytes can have at most."""
        return (nbytes // STATE_BYTES - 2 * WORDS * width) // (12 * width**2)

    fits, over, found = 0, most(host_bytes + device_bytes) + 1, None
    count = most(host_bytes) - 1  # some bytes are for new values and swapped tensors
    while over - fits > 1:
        made = tried(count)
        if made is None:
            over = count
        else:
            fits, found = count, made
        count = fits + 1 if found and over - fits <= 4 else (fits + over) // 2
    return fits, found


if __name__ == "__main__":
    main()
