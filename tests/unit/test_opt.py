"""`tfswap opt`: passes by name on a graph in text form; and the output of TFSWAP_PRINT_PASSES."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tfswap.compiler.lower import LOWER
from tfswap.compiler.prepare import PREPARE
from tfswap.compiler.tactics import BODIES, FORM
from tfswap.frontends import cli
from tfswap.frontends.apply_passes import PASSES
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.bisect import Applied, first_failing
from tfswap.passes.contract import Pass, watching
from tfswap.plan.plan import Eviction, Plan

TWICE = """\
%x = Placeholder() {dtype=float32} -> float32[4]
%a = Exp(%x) {T=float32} -> float32[4]
%b = Exp(%x) {T=float32} -> float32[4]
%sum = AddV2(%a, %b) {T=float32} -> float32[4]
feeds %x
fetches %sum
"""


@pytest.fixture
def graph_file(tmp_path: Path) -> str:
    path = tmp_path / "step.graph"
    path.write_text(TWICE)
    return str(path)


def test_passes_are_applied_in_the_order_in_which_they_are_named(
    graph_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["opt", graph_file, "--passes=merge-equal-nodes,prune"]) == cli.OK
    graph = parse_graph(capsys.readouterr().out)
    assert [node.name for node in graph] == ["x", "a", "sum"]
    assert cli.main(["opt", graph_file, "--passes=merge-equal-nodes,prune", "--json"]) == cli.OK
    assert json.loads(capsys.readouterr().out)["changes"] == {"merge-equal-nodes": 1, "prune": 1}


def test_every_pass_of_the_table_is_listed_with_what_it_ensures(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["opt", "graph.txt"]) == cli.FAILED
    assert "--passes" in capsys.readouterr().err
    assert cli.main(["opt", "--json"]) == cli.OK
    listed = json.loads(capsys.readouterr().out)["passes"]
    assert {row.apply.name for row in (*PREPARE, *BODIES, *FORM, *LOWER)} == {each["name"] for each in listed}
    assert all(each["ensures"] for each in listed)
    assert len({each["name"] for each in listed}) == len(listed) == len(PASSES)


@pytest.mark.parametrize(
    ("text", "passes", "message"),
    [
        (TWICE, "merge", "no pass is called 'merge'"),
        ("%x = ", "prune", "line 1"),
        (TWICE.replace("Exp(%x)", "Exp(%sum)"), "defer-constants", "has a cycle"),
        (TWICE + "body %sum\n  %y = Const() -> float32[8]\n  fetches %y\n", "prune", "has 1 bodies in place of 0"),
        ("%x = Const() -> float32[99999999999999999999]\nfetches %x\n", "order-bodies", "than a process can address"),
        (None, "prune", "can't be read"),
    ],
)
def test_what_can_not_be_applied_is_an_error_of_one_line(
    text: str | None, passes: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.graph"
    if text is not None:
        path.write_text(text)
    assert cli.main(["opt", str(path), f"--passes={passes}"]) == cli.FAILED
    reported = capsys.readouterr().err
    assert message in reported and reported.count("\n") == 1


def test_a_graph_is_printed_after_the_passes_that_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TFSWAP_PRINT_PASSES", "free-constants, merge-equal-nodes")
    graph, target = parse_graph(TWICE), Target(DeviceModel())
    PASSES["free-constants"](graph, target)
    PASSES["merge-equal-nodes"](graph, target)
    PASSES["prune"](graph, target)
    reported = capsys.readouterr().err
    assert reported.count("# after merge-equal-nodes: 1 changes") == reported.count("# after") == 1
    assert "%sum = AddV2(%a, %a)" in reported


def test_a_graph_is_printed_before_a_pass_that_is_named_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TFSWAP_PRINT_PASSES", "before:merge-equal-nodes,prune")
    graph, target = parse_graph(TWICE), Target(DeviceModel())
    PASSES["prune"](graph, target)
    assert "#" not in capsys.readouterr().err, "it changes nothing"
    PASSES["merge-equal-nodes"](graph, target)
    reported = capsys.readouterr().err
    assert reported.count("#") == reported.count("# before merge-equal-nodes") == 1
    assert "%sum = AddV2(%a, %b)" in reported


def test_watchers_see_each_pass_and_its_changes() -> None:
    seen: list[tuple[str, int]] = []

    def watch(done: Pass[...], graph: Graph, changes: int, seconds: float) -> None:
        seen.append((done.name, changes))
        assert seconds >= 0

    with watching(watch):
        for name in ("merge-equal-nodes", "prune"):
            PASSES[name](graph := parse_graph(TWICE), Target(DeviceModel()))
    assert seen == [("merge-equal-nodes", 1), ("prune", 0)]
    PASSES["prune"](graph, Target(DeviceModel()))
    assert len(seen) == 2


# --- plans ----------------------------------------------------------------------------------------------------


def test_passes_carry_out_a_plan_that_is_given(
    graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["opt", graph_file, "--passes=carry-out"]) == cli.FAILED
    assert "--plan=FILE" in capsys.readouterr().err
    plan = Plan("", None, ("a", "b", "sum"), (Eviction("a:0", 16, 0, 1, 1, 2),), 0, 0, 0, 1.0, "test")
    (tmp_path / "plan.json").write_text(plan.to_json())
    asked = ["opt", graph_file, "--passes=order-bodies,carry-out,prune", f"--plan={tmp_path / 'plan.json'}"]
    assert cli.main(asked) == cli.OK
    graph = parse_graph(capsys.readouterr().out)
    assert [node.op for node in graph if node.op.startswith("Tfswap")] == [
        "Tfswap>SwapOut",
        "Tfswap>Release",
        "Tfswap>SwapIn",
        "Tfswap>Await",
    ]
    assert [tensor.node.op for tensor in graph["sum"].inputs] == ["Tfswap>Await", "Exp"]


def test_times_are_printed_for_each_pass(graph_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["opt", graph_file, "--passes=merge-equal-nodes,prune", "--times"]
    assert cli.main(asked) == cli.OK
    reported = capsys.readouterr().out
    assert reported.startswith("# merge-equal-nodes: 1 changes, ") and len(parse_graph(reported)) == 3
    assert cli.main([*asked, "--json"]) == cli.OK
    assert json.loads(capsys.readouterr().out)["seconds"].keys() == {"merge-equal-nodes", "prune"}


# --- bisection ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [*range(9), None])
def test_the_first_pass_is_found_after_which_a_property_fails(first: int | None) -> None:
    graphs = [parse_graph(TWICE) for _ in range(10)]
    failing = set() if first is None else set(map(id, graphs[first + 1 :]))
    applied = [Applied(f"pass-{i}", graph, 1, 0.0) for i, graph in enumerate(graphs[1:])]
    asked: list[Graph] = []
    found = first_failing(graphs[0], applied, lambda graph: (asked.append(graph), id(graph) not in failing)[1])
    assert (found and found.name) == (None if first is None else f"pass-{first}")
    assert len(asked) <= 6


def test_a_command_bisects_passes(graph_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    passes = "--passes=free-constants,merge-equal-nodes,split-add-n,prune"
    reads_both = shlex.join([sys.executable, "-c", "import sys; sys.exit('AddV2(%a, %b)' not in sys.stdin.read())"])
    assert cli.main(["opt", graph_file, passes, f"--bisect={reads_both}"]) == cli.OK
    out = capsys.readouterr().out
    assert out.strip() == "it fails after merge-equal-nodes"
    holds = shlex.join([sys.executable, "-c", ""])
    assert cli.main(["opt", graph_file, passes, f"--bisect={holds}", "--json"]) == cli.OK
    assert json.loads(capsys.readouterr().out)["failing"] is None
    fails = shlex.join([sys.executable, "-c", "raise SystemExit(1)"])
    assert cli.main(["opt", graph_file, passes, f"--bisect={fails}"]) == cli.FAILED
    assert "before the first pass" in capsys.readouterr().err
