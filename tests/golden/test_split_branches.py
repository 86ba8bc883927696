"""Conditionals in parts: what each part gets, and what keeps an update in the last part."""

from __future__ import annotations

import pytest

from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.tactics.split_branches import split_branches

TARGET = Target(DeviceModel("cpu"))
FEEDS = [
    *(f"%{name} = Placeholder() {{dtype=float32}} -> float32[64,16]" for name in ("g", "h")),
    *(f"%{name} = Placeholder() {{dtype=resource}} -> resource[]" for name in ("v", "w", "count")),
]
UPDATES = (
    "%one = Const() {dtype=float32} -> float32[]",
    "%rate = ReadVariableOp(%count) {dtype=float32} -> float32[]",
    "%v/change = Mul(%g, %rate) {T=float32} -> float32[64,16]",
    "%v/write = AssignSubVariableOp(%v, %v/change) {dtype=float32}",
    "%w/change = Mul(%h, %rate) {T=float32} -> float32[64,16]",
    "%w/write = AssignSubVariableOp(%w, %w/change) {dtype=float32}",
    "%counted = AssignAddVariableOp(%count, %one) {dtype=float32} ^rate",
    "%result = Identity(%one) {T=float32} ^counted ^v/write ^w/write -> float32[]",
)
SKIPPED = ("%result = Const() {dtype=float32} -> float32[]",)


def step(*updates: str) -> Graph:
    """A step whose conditional updates v with g, and w with h, and counts; or does nothing."""
    arguments, types = "%g, %h, %v, %w, %count", "float32, float32, resource, resource, resource"
    attrs = f"Tcond=bool, Tin=({types}), Tout=(float32), then_branch=b'a', else_branch=b'b'"
    lines = ["%p = Placeholder() {dtype=bool} -> bool[]", *FEEDS]
    lines += [f"%taken = If(%p, {arguments}) {{{attrs}}} -> float32[]", "%read = Identity(%taken) -> float32[]"]
    lines += [f"feeds %p, {arguments}", "fetches %read"]
    for nodes in (updates, SKIPPED):
        ends = [f"feeds {arguments}", "fetches %result"]
        if nodes is updates:
            ends.append("targets %v/write, %w/write, %counted")
        lines += ["body %taken", *(f"  {line}" for line in (*FEEDS, *nodes, *ends))]
    return parse_graph("\n".join(lines) + "\n")


def test_each_update_gets_a_conditional_of_its_own() -> None:
    graph = step(*UPDATES)
    assert split_branches(graph, TARGET, 64) == 2
    first, second, rest = [node for node in graph.topological() if node in graph.bodies]
    inputs = [[tensor.node.name for tensor in node.inputs] for node in (first, second, rest)]
    assert inputs == [["p", "g", "v", "count"], ["p", "h", "w", "count"], ["p", "count"]]
    assert rest.name == "taken" and set(rest.controls) == {first, second}
    targets = [[n.name for n in graph.bodies[node][0].targets] for node in (first, second, rest)]
    assert targets == [["v/write"], ["w/write"], ["counted"]]
    assert [len(node.outputs) for node in (first, second, rest)] == [0, 0, 1]
    assert all(len(node.attrs["Tin"]) == len(node.inputs) - 1 for node in (first, second, rest))
    for node in (first, second, rest):
        assert all(len(body.feeds) == len(node.inputs) - 1 for body in graph.bodies[node])
    assert [node.name for node in graph.bodies[first][0]] == ["g", "v", "count", "rate", "v/change", "v/write"]


WHOLE = {
    "an update reads what is counted": [
        UPDATES[0],
        "%counted = AssignAddVariableOp(%count, %one) {dtype=float32}",
        "%rate = ReadVariableOp(%count) {dtype=float32} ^counted -> float32[]",
        *UPDATES[2:6],
        UPDATES[7],
    ],
    "both need one gradient": [line.replace("Mul(%h", "Mul(%g") for line in UPDATES],
    "one reads the variable of the other": [
        *UPDATES[:4],
        "%again = ReadVariableOp(%v) {dtype=float32} ^v/write -> float32[64,16]",
        *(line.replace("Mul(%h", "Mul(%again") for line in UPDATES[4:]),
    ],
    "the result needs what both need": [
        *UPDATES[:7],
        "%both = AddV2(%g, %h) {T=float32} -> float32[64,16]",
        "%axes = Const() {dtype=int32} -> int32[2] = (0, 1)",
        "%result = Sum(%both, %axes) {T=float32, Tidx=int32, keep_dims=false} -> float32[]",
    ],
}


@pytest.mark.parametrize("name", WHOLE)
def test_conditionals_that_stay_whole(name: str) -> None:
    graph = step(*WHOLE[name])
    assert split_branches(graph, TARGET, 64) == 0
    assert len(graph.bodies) == 1


def test_small_tensors_stay_together() -> None:
    assert split_branches(step(*UPDATES), TARGET, 4096) == 0
