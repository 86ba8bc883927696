"""Training steps of benchmarks/peers.py's two models in PyTorch, and what makes them smaller there; no TensorFlow.

checkpoint, save_on_cpu, and torch.compile with `activation_memory_budget`, which chooses what is computed again.

    python benchmarks/papers/harness/pytorch_step.py transformer checkpoint

is one form of a step, which reports itself as JSON after a first step, and then takes one for each line of input. A
step's peak is that of PyTorch's CPU allocator, from the profiler's record of every allocation and release, next to what
is there before the step. `save_on_cpu` copies what the backward pass waits for to
host memory; on a CPU that is the same memory, so these copies are put into numpy's, which PyTorch does not count: the
peak is then what a device would hold.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch._functorch.config
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Block = Callable[[Any], Any]


def normalised(h: Any, axes: tuple[int, ...]) -> Any:
    mean = h.mean(axes, keepdim=True)
    variance = ((h - mean) ** 2).mean(axes, keepdim=True)
    return (h - mean) * torch.rsqrt(variance + 1e-5)


class Weights(list[Any]):
    """All parameters that a model has made."""

    def make(self, *shape: int, scale: float) -> Any:
        generator = torch.Generator().manual_seed(len(self))
        self.append((scale * torch.randn(shape, generator=generator)).requires_grad_())
        return self[-1]


def transformer(layers: int, width: int = 192, heads: int = 4, length: int = 96, batch: int = 8) -> Any:
    weights = Weights()
    mask = torch.tril(torch.ones(length, length))

    def make_block() -> Block:
        gains = [weights.make(width, scale=1.0) for _ in range(2)]
        project = weights.make(width, 3 * width, scale=width**-0.5)
        join = weights.make(width, width, scale=width**-0.5)
        widen = weights.make(width, 4 * width, scale=width**-0.5)
        narrow = weights.make(4 * width, width, scale=0.5 * width**-0.5)

        def block(h: Any) -> Any:
            qkv = ((gains[0] * normalised(h, (-1,))) @ project).reshape(batch, length, 3, heads, width // heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
            scores = (q @ k.transpose(-1, -2)) * (width // heads) ** -0.5
            mixed = torch.softmax(scores - 1e9 * (1 - mask), -1) @ v
            h = h + mixed.permute(0, 2, 1, 3).reshape(batch, length, width) @ join
            return h + functional.gelu((gains[1] * normalised(h, (-1,))) @ widen) @ narrow

        return block

    blocks = [make_block() for _ in range(layers)]
    return weights, blocks, torch.randn(batch, length, width), torch.randn(batch, length, width)


def resnet(layers: int, width: int = 16, size: int = 32, batch: int = 16) -> Any:
    weights = Weights()

    def make_block() -> Block:
        shapes = (width, 4 * width, 1), (width, width, 3), (4 * width, width, 1)
        kernels = [weights.make(o, i, n, n, scale=(2 / (n * n * i)) ** 0.5) for o, i, n in shapes]

        def block(h: Any) -> Any:
            inner = h
            for kernel in kernels:
                inner = normalised(
                    functional.conv2d(torch.relu(inner), kernel, padding=kernel.shape[-1] // 2), (1, 2, 3)
                )
            return h + inner

        return block

    blocks = [make_block() for _ in range(layers)]
    return weights, blocks, torch.randn(batch, 4 * width, size, size), torch.randn(batch, 4 * width, size, size)


MODELS: dict[str, tuple[Callable[[int], Any], int]] = {"transformer": (transformer, 6), "ResNet": (resnet, 8)}


def to_host(tensor: Any) -> Any:
    return np.array(tensor.detach().numpy()), tensor.dtype


def from_host(packed: Any) -> Any:
    return torch.from_numpy(packed[0]).clone()


COMPILED = {f"torch.compile, budget {share}": share for share in (1.0, 0.5, 0.2)}
"""By form its `activation_memory_budget`: the share of what a backward pass keeps by default."""


def compiled(loss_of: Callable[..., Any], budget: float) -> Callable[..., Any]:
    """What torch.compile makes of a forward pass and its loss, with a budget for what is kept for the backward pass.

    Compiled when it is first called.
    """
    made = torch.compile(loss_of)

    def call(*arguments: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return made(*arguments)

    return call


def forms(blocks: list[Block]) -> dict[str, tuple[list[Block], Any]]:
    """By name: the blocks as they are called, and what is around the forward pass."""

    def checkpointed(block: Block) -> Block:
        return lambda h: checkpoint(block, h, use_reentrant=False)

    def offload() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(to_host, from_host)

    wrapped = [checkpointed(block) for block in blocks]
    return {
        "PyTorch": (blocks, contextlib.nullcontext),
        "checkpoint": (wrapped, contextlib.nullcontext),
        "save_on_cpu": (blocks, offload),
        "checkpoint, save_on_cpu": (wrapped, offload),
    }


def peak_bytes(step: Callable[[], Any]) -> int:
    """The most that PyTorch's allocator has handed out during a step, beyond what was out before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def make_step(name: str, form: str) -> tuple[Callable[[], float], int]:
    """A training step with momentum, and the bytes of the contents before it."""
    make_model, layers = MODELS[name]
    weights, blocks, x, y = make_model(layers)
    slots = [torch.zeros_like(w) for w in weights]
    called, around = forms(blocks)["PyTorch" if form in COMPILED else form]

    def forward(x: Any, y: Any) -> Any:
        h = x
        for block in called:
            h = block(h)
        return ((h - y) ** 2).mean()

    loss_of = compiled(forward, COMPILED[form]) if form in COMPILED else forward

    def step() -> float:
        with around():
            loss = loss_of(x, y)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, slot, gradient in zip(weights, slots, gradients, strict=True):
                slot.mul_(0.9).add_(gradient)
                weight.sub_(1e-4 * slot)
        return float(loss)

    return step, sum(t.numel() * t.element_size() for t in (*weights, *slots, x, y))


def main(name: str, form: str) -> None:
    step, there_bytes = make_step(name, form)
    step()
    most_bytes = there_bytes + peak_bytes(step)
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}), flush=True)
    for _ in sys.stdin:
        started, cpu_started = time.perf_counter(), time.process_time()
        step()
        took = time.perf_counter() - started, time.process_time() - cpu_started
        print(json.dumps([*took, most_bytes, 0]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
