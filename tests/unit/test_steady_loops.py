"""Loops whose iterations leave as many bytes each: values lie where they do after all, though few are replayed."""

from __future__ import annotations

import random

import pytest

from tfswap.analysis import control_flow
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.simulator.bfc_allocator import Arena

CPU = DeviceModel("cpu", False, 2, 2)
ARGUMENTS = "%i = Placeholder() -> int32[]\n%a = Placeholder() -> float32[1024]\n%b = Placeholder() -> float32[1024]\n"


def loop(body: str) -> Graph:
    """A loop with a counter, a limit and two values of 4 KiB; the body makes %i_, %a_ and %b_."""
    inside = f"{ARGUMENTS}%n = Placeholder() -> int32[]\n"
    return parse_graph(
        f"{inside}%loop = While(%i, %a, %b, %n) -> int32[], float32[1024], float32[1024], int32[]\n"
        "feeds %i, %a, %b, %n\nfetches %loop:1, %loop:2\nbody %loop\n"
        + "".join(f"  {line}\n" for line in inside.splitlines())
        + "  %less = Less(%i, %n) -> bool[]\n  feeds %i, %a, %b, %n\n  fetches %less\nbody %loop\n"
        + "".join(f"  {line}\n" for line in inside.splitlines())
        + "  %one = Const() -> int32[] = (1,)\n  %i_ = AddV2(%i, %one) -> int32[]\n"
        + "".join(f"  {line}\n" for line in body.splitlines())
        + "  feeds %i, %a, %b, %n\n  fetches %i_, %a_, %b_, %n\n"
    )


def chunks_after(graph: Graph, count: int, seed: int) -> list[tuple[int, int, bool]]:
    """The chunks of a fragmented arena after `count` iterations."""
    node = graph["loop"]
    made = control_flow.record(node, graph.bodies[node], CPU, [None] * 4, [(0,), None, None, (count,)])
    arena, choose = Arena(), random.Random(seed)
    small = [arena.allocate(256 * choose.randint(1, 40)) for _ in range(60)]
    for address in choose.sample(small, 30):
        arena.free(address)
    taken: list[int] = []
    for kind, amount in made.events:
        if kind == "free":
            arena.free(taken[amount])
        else:
            size = amount if kind == "temp" else (node.outputs[amount].nbytes or 0)
            address = arena.allocate(size)
            if kind == "temp":
                taken.append(address)
    return arena.chunks


BODIES = {
    "one": "%a_ = MatMul(%a, %a) -> float32[1024]\n%b_ = Identity(%b) -> float32[1024]",
    "two": "%a_ = MatMul(%a, %b) -> float32[1024]\n%b_ = MatMul(%a_, %b) -> float32[1024]",
    "two, and a larger one": (
        "%wide = Concat(%a, %b) -> float32[2048]\n%a_ = MatMul(%wide, %b) -> float32[1024]\n"
        "%b_ = MatMul(%a_, %wide) -> float32[1024]"
    ),
}


@pytest.mark.parametrize("body", BODIES)
def test_values_lie_where_they_do_after_all_iterations(body: str, monkeypatch: pytest.MonkeyPatch):
    graph = loop(BODIES[body])
    numbers = range(40, 46)
    short = [chunks_after(graph, n, seed) for n in numbers for seed in range(5)]
    monkeypatch.setattr(control_flow, "SETTLING_TRIPS", 100)
    assert short == [chunks_after(graph, n, seed) for n in numbers for seed in range(5)]


def test_of_a_large_body_few_iterations_are_replayed():
    graph = loop(BODIES["one"])
    node = graph["loop"]
    body = graph.bodies[node][1]
    for i in range(400):
        body.add("NoOp", f"nothing{i}")
    made = control_flow.record(node, graph.bodies[node], CPU, [None] * 4, [(0,), None, None, (10_000,)])
    # Of each a comparison, a counter and a product.
    assert len(made.events) < 8 * (control_flow.STEADY_TRIPS + control_flow.ROTATION_TRIPS)
