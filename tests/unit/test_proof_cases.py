"""benchmarks/gpu_proof.py without a GPU: the order of its cases, its file, its processes, the search, and the page."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import gpu_proof
import pytest
from gpu import batch, runner
from gpu.figures import Figures, FiguresError, read
from gpu.page import page
from gpu.runner import Runner
from hypothesis import given
from hypothesis import strategies as st

H200 = {"gpu": {"name": "NVIDIA H200"}, "tensorflow": "2.21.0", "tfswap": "abc"}


# --- cases ------------------------------------------------------------------------------------------------------------


def test_the_eight_nets_run_first_at_60_percent_and_the_peers_net_last():
    wanted = [case for part in gpu_proof.PARTS for case in gpu_proof.chosen(part)]
    first, *_, last, _, _ = gpu_proof.stages(wanted, {})
    hows = [how for _, _, how in first]
    assert set(hows[:16]) == {"default", "60%"} and set(hows[16:32]) == {"40%", "floor"}
    assert first[32:] == [("nets", "blocks", how) for how in ("default", "recompute_grad", "xla")]
    assert [case[0] for case in last] == ["batch"] * 4 + ["nets"] * 3
    assert len({case[1] for case in first[:32]}) == 8


def test_cases_can_be_chosen_to_the_limit():
    assert gpu_proof.chosen("nets:vgg19:75%") == [("nets", "vgg19", "75%")]
    assert len(gpu_proof.chosen("nets:vgg19")) == 4
    assert gpu_proof.chosen("codecs") == [("codecs",)]


@pytest.mark.parametrize("given", ["codec", "nets:vgg", "nets:vgg19:much", "nets:vgg19:60%:1", "batch:vgg19", ""])
def test_what_is_no_part_is_an_error(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_proof.py", given])
    with pytest.raises(SystemExit) as error:
        gpu_proof.main()
    assert error.value.code == 2
    assert f"no part is named {given!r}" in capsys.readouterr().err.splitlines()[-1]


def step(digest: str, **more: Any) -> dict[str, Any]:
    return {"digest": digest, "peak_bytes": 5, "first_peaks": [5], "median_s": 1.0, **more}


def test_references_run_only_where_values_are_not_the_unoptimised_steps():
    results = {"nets:gpt:default": step("a"), "nets:gpt:60%": step("a", limit_bytes=6, planned_bytes=5)}
    assert not gpu_proof.differs("gpt", results)
    results["nets:gpt:40%"] = step("b", limit_bytes=6, planned_bytes=5)
    assert gpu_proof.differs("gpt", results)
    results["nets:gpt:no_grappler"] = {"digest": "b"}
    assert not gpu_proof.differs("gpt", results)


def test_a_net_that_cannot_have_a_limit_is_measured_at_its_smallest_once():
    results = {"nets:gpt:60%": step("a", limit_bytes=6, floor_bytes=6)}
    assert gpu_proof.needless(("nets", "gpt", "40%"), results) and gpu_proof.needless(("nets", "gpt", "floor"), results)
    assert not gpu_proof.needless(("nets", "gpt", "60%"), results)
    assert not gpu_proof.needless(("nets", "gpt", "default"), results)
    assert not gpu_proof.needless(("nets", "vgg19", "40%"), results)


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "{", "[]", '{"codecs": 1}', "[" * 100_000, "\x00", "é\udcff"])
def test_a_damaged_file_is_an_error_of_one_line_and_stays(content, tmp_path):
    path = tmp_path / "proof.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    before = path.read_bytes()
    with pytest.raises(FiguresError, match="is not a file of figures") as error:
        Figures(path)
    assert len(str(error.value).splitlines()) == 1
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_written_is_an_error_before_anything_runs(tmp_path):
    read_only = tmp_path / "read_only.json"
    read_only.write_text("{}")
    read_only.chmod(0o444)
    (tmp_path / "folder").mkdir()
    for path in (read_only, tmp_path / "folder", tmp_path / "none" / "proof.json", Path("/proc/proof.json")):
        with pytest.raises(FiguresError, match=r"Name another|can't be") as error:
            Figures(path)
        assert len(str(error.value).splitlines()) == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "read_only.json"]


def test_a_later_run_adds_to_the_file(tmp_path):
    path = tmp_path / "proof.json"
    first = Figures(path)
    first.add("environment", H200)
    first.add("codecs", {"gb_s": {}})
    first.add("batch:blocks:tfswap", {"not_run": "no time was left"})
    first.add("copies", {"failed": "ended with 1"})
    second = Figures(path)
    second.add("environment", H200 | {"tfswap": "abd"})
    second.add("codecs", {"not_run": "no time was left"})
    second.add("copies", {"gb_s": []})
    found = read(path)
    assert found["codecs"] == {"gb_s": {}} and found["copies"] == {"gb_s": []}
    assert found["environment"]["tfswap"] == "abc, abd"
    assert [second.has(name) for name in ("codecs", "copies", "batch:blocks:tfswap", "tests")] == [1, 1, 0, 0]


@pytest.mark.parametrize("other", [{"gpu": {"name": "H100"}}, {"tensorflow": "2.20.0"}, {"small nets": True}])
def test_figures_of_other_machines_do_not_meet_in_one_file(other, tmp_path):
    Figures(tmp_path / "proof.json").add("environment", H200)
    with pytest.raises(FiguresError, match=r"has figures of NVIDIA H200, tensorflow 2\.21\.0, and this is"):
        Figures(tmp_path / "proof.json").add("environment", {**H200, **other})


# --- processes --------------------------------------------------------------------------------------------------------

CHILD = [sys.executable, "-c"]
ENDS = {
    "import os; print('{}'); os.abort()": "ended with SIGABRT",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": "ended with SIGKILL",
    "raise SystemExit('TensorFlow sees no GPU')": "ended with 1",
    "print('no figures')": "ended with 0",
    "print(5)": "ended with 0",
    "import sys; sys.stdout.buffer.write(bytes([0xff]))": "ended with 0",
}


def test_measurements_that_fail_are_reported_and_the_others_go_on():
    found: dict[str, Any] = {}
    programs = [*ENDS, "print('{\"gb_s\": 1}')"]
    cases = Runner(CHILD, 600, {})
    cases.run([(program,) for program in programs], lambda case: found.update({case[0]: cases.measure(case)}), 2)
    assert {program: found[program]["failed"] for program in ENDS} == ENDS
    assert "no GPU" in found["raise SystemExit('TensorFlow sees no GPU')"]["output"]
    assert found[programs[-1]]["gb_s"] == 1 and "failed" not in found[programs[-1]]


SLEEPS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"


def test_what_hangs_is_ended_with_what_it_started(monkeypatch):
    monkeypatch.setattr(runner, "LONGEST_S", 1)
    began = time.monotonic()
    assert Runner(CHILD, 600, {}).measure((SLEEPS,))["failed"] == "took more than 1 s"
    assert time.monotonic() - began < 300


def test_without_time_left_nothing_fails(monkeypatch):
    assert Runner(CHILD, 0, {}).measure((SLEEPS,)) == {"not_run": "no time was left"}
    monkeypatch.setattr(runner, "LEAST_S", 0)
    stopped = Runner(CHILD, 1, {}).measure((SLEEPS,))
    assert stopped["not_run"].startswith("no time was left: it was stopped after")


def test_an_error_in_one_worker_ends_all():
    cases = Runner(CHILD, 600, {})

    def fails(case: tuple[str, ...]) -> None:
        cases.measure(case)
        raise FiguresError("the disk is full")

    with pytest.raises(FiguresError):
        cases.run([("print('{}')",), (SLEEPS,), (SLEEPS,)], fails, 2)
    with pytest.raises(InterruptedError):
        cases.measure((SLEEPS,))


def test_processes_know_how_long_they_may_go_on():
    program = "import json, os, time; print(json.dumps({'left': float(os.environ['GPU_PROOF_UNTIL']) - time.time()}))"
    assert 0 < Runner(CHILD, 50, {}).measure((program,))["left"] <= 50
    assert "GPU_PROOF_UNTIL" not in os.environ


# --- the search for the largest batch ---------------------------------------------------------------------------------


@given(
    fixed=st.floats(0, 0.5),
    largest=st.floats(2, 3000),
    curve=st.floats(0, 0.3),
    more=st.floats(1, 12),
    how=st.sampled_from(batch.HOWS),
)
def test_the_search_ends_near_the_largest_batch(fixed, largest, curve, more, how):
    """Needs grow with the batch, in part with its square, and come to the memory at `largest`."""
    memory, tried = 1 << 30, []

    def needs_bytes(size: int) -> int:
        share = size / largest
        return int(memory * (fixed + (1 - fixed - curve) * share + curve * share**2))

    size: int | None = batch.FIRST[how] * max(1, int(largest / more))
    while size is not None and len(tried) < batch.TRIES:
        runs = needs_bytes(size) <= memory
        known = runs == (how == batch.DEFAULT)  # peaks of what runs, smallest limits of what is refused
        tried.append(batch.Tried(size, needs_bytes(size) if known else None, 1.0 if runs else None))
        size = batch.next_batch(tried, memory)
    assert len({one.batch for one in tried}) == len(tried)
    best = max((one.batch for one in tried if one.example_s), default=0)
    assert 0.94 * largest - 1.001 <= best <= 1.001 * largest


def test_the_search_halves_where_all_refusals_name_the_same_limit():
    memory, tried = 1000, []
    size: int | None = 192
    while size is not None and len(tried) < batch.TRIES:
        runs = size <= 550
        tried.append(batch.Tried(size, None if runs else 1001, 1.0 if runs else None))
        size = batch.next_batch(tried, memory)
    assert 0.94 * 550 <= max(one.batch for one in tried if one.example_s) <= 550


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_published_page_is_that_of_the_published_figures():
    assert page(read(gpu_proof.RESULTS)) == gpu_proof.PAGE.read_text(), "python benchmarks/gpu_proof.py --page"


def test_a_page_says_what_failed_and_what_broke_its_promise():
    results = {
        "environment": H200,
        "nets:gpt:default": step("a"),
        "nets:gpt:60%": step("a", limit_bytes=6, planned_bytes=5),
        "nets:gpt:40%": step("b", limit_bytes=4, planned_bytes=4),
        "nets:gpt:no_memory_optimizer": {"digest": "c"},
        "nets:gpt:no_grappler": {"digest": "d"},
        "codecs": {"failed": "ended with 1", "output": "first\nlast | line"},
        "tests": {"not_run": "pytest is not installed"},
    }
    text = page(results)
    assert "- limit kept by 1 of 2 steps (not: gpt, 40%)" in text
    assert "- values identical to TensorFlow's in 1 of 2 (not: gpt, 40%: differ)" in text
    assert "| codecs | failed | ended with 1: last \\| line |" in text
    assert "| tests | not run | pytest is not installed |" in text


@pytest.mark.parametrize("missing", [{}, {"environment": {"failed": "ended with 1"}}, {"batch:blocks:default": {}}])
def test_a_page_can_be_made_of_any_part(missing):
    assert page(missing).startswith("# Figures of a GPU: a machine that was not recorded")


def test_each_part_of_published_figures_makes_a_page_by_itself():
    for name, found in json.loads(gpu_proof.RESULTS.read_text()).items():
        assert page({name: found})
