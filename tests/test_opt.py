"""`tfswap opt`: passes by name on a graph in text form; and what passes print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfswap.compiler.prepare import PREPARE
from tfswap.frontends import cli
from tfswap.frontends.apply_passes import PASSES
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.passes.contract import Pass, Target, watching

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
    assert {row.apply.name for row in PREPARE} <= {each["name"] for each in listed}
    assert all(each["ensures"] for each in listed)
    assert len({each["name"] for each in listed}) == len(listed) == len(PASSES)


@pytest.mark.parametrize(
    ("text", "passes", "message"),
    [
        (TWICE, "merge", "no pass is called 'merge'"),
        ("%x = ", "prune", "line 1"),
        (TWICE.replace("Exp(%x)", "Exp(%sum)"), "defer-constants", "has a cycle"),
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
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_graph_is_printed_after_the_passes_that_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TFSWAP_PRINT_PASSES", "free-constants, merge-equal-nodes")
    graph, target = parse_graph(TWICE), Target(DeviceModel())
    PASSES["free-constants"](graph, target)
    PASSES["merge-equal-nodes"](graph, target)
    PASSES["prune"](graph, target)
    said = capsys.readouterr().err
    assert said.count("# after merge-equal-nodes: 1 changes") == said.count("# after") == 1
    assert "%sum = AddV2(%a, %a)" in said


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
