"""Examples use internals that exist, and short ones run. With -m slow all run whole, as a user runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from folders import ROOT
from processes import run_forked

tf = pytest.importorskip("tensorflow")


EXAMPLES = ROOT / "examples"


def printed_by(name: str, *arguments: str) -> str:
    """What an example prints, which must succeed."""
    command = [sys.executable, f"examples/{name}.py", *arguments]
    done = subprocess.run(command, cwd=EXAMPLES.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def peaks(printed: str) -> tuple[float, float]:
    """Before and after, in MiB, of a table's row."""
    rows = re.findall(r"^ *peak(?: measured)?, MiB +([\d.]+) +([\d.]+)$", printed, re.MULTILINE)
    assert len(rows) == 1, printed
    return float(rows[0][0]), float(rows[0][1])


def limit(printed: str) -> float:
    """In MiB, of a table's row, or of the line that says that it was held."""
    found = re.findall(r"^ *limit,? (?:MiB +)?([\d.]+)", printed, re.MULTILINE)
    assert len(found) == 1, printed
    return float(found[0])


def test_a_decoder_with_attention_keeps_a_limit():
    """Each training in a fresh process, and what starts them in a forked one."""
    command = ["seq2seq.py", "--length", "12", "--limit", "60%", "--steps", "2"]

    def run():
        import os
        import runpy

        os.chdir(EXAMPLES)
        sys.path.insert(0, os.getcwd())
        sys.argv = command
        runpy.run_path(sys.argv[0], run_name="__main__")

    done = run_forked(run)
    assert "held, losses identical" in done.stdout


@pytest.mark.slow
def test_two_workers_keep_their_limits():
    done = subprocess.run([sys.executable, "multi_worker.py"], cwd=EXAMPLES, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical to the bit; limits held" in done.stdout


def test_what_examples_share_says_that_it_is_none():
    done = subprocess.run([sys.executable, "side_by_side.py"], cwd=EXAMPLES, capture_output=True, text=True)
    assert done.returncode == 1
    assert "run one of these" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keras_fit", "saved_model", "seq2seq", "transformer"])
def test_an_example_run_whole_prints_before_and_after(name: str) -> None:
    printed = printed_by(name)
    before, after = peaks(printed)
    assert after <= limit(printed) < before
    verdict = printed.splitlines()[-1]
    assert "held" in verdict
    assert "losses identical" in verdict


@pytest.mark.slow
def test_the_demo_run_whole_trains_where_the_step_as_it_is_runs_out_of_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    printed = printed_by("train_under_cap", "--plot", str(picture))
    before, after = peaks(printed)
    assert after <= limit(printed) < before
    cap = re.search(r"unoptimised, on a device of (\d+) MiB", printed)
    assert cap is not None
    assert limit(printed) < int(cap[1]) < before
    assert "ResourceExhaustedError: OOM when allocating tensor" in printed
    assert re.search(r"^ *trains under the cap +no +yes$", printed, re.MULTILINE)
    assert "losses identical to the bit; limit held" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
