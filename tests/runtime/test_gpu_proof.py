"""The command of benchmarks/gpu_proof.py from end to end, on an emulated GPU, with small nets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
from folders import ROOT
from gpu.figures import read

PROOF = ROOT / "benchmarks" / "gpu_proof.py"
EMULATED = {"GPU_PROOF_EMULATED": "1", "GPU_PROOF_SMALL": "1"}


@pytest.fixture(scope="module")
def emulated() -> dict[str, str]:
    if why := emulated_gpu.why_not():
        pytest.skip(why)
    emulated_gpu.library()
    return EMULATED


def start(*arguments: str | Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROOF), "--processes", "1", *map(str, arguments)],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str | Path, **env: str) -> tuple[int, str, str]:
    process = start(*arguments, **env)
    out, err = process.communicate()
    return process.returncode, out, err


def check(figures: dict[str, Any]) -> None:
    """Each step under a limit has kept it, from the first on, as planned, and with TensorFlow's values."""
    for name, row in figures.items():
        if "limit_bytes" in row:
            assert max(row["peak_bytes"], *row["first_peaks"]) <= row["limit_bytes"], name
            assert row["peak_bytes"] == row["planned_bytes"], name
            net = name.rpartition(":")[0]
            hows = ("default", "no_memory_optimizer", "no_grappler")
            assert row["digest"] in {figures.get(f"{net}:{how}", {}).get("digest") for how in hows}, name


def test_without_a_gpu_an_error_says_so_in_one_line(tmp_path):
    path = tmp_path / "proof.json"
    status, out, err = run("copies", "--json", path, CUDA_VISIBLE_DEVICES="-1")
    assert (status, out, err) == (2, "", "gpu_proof.py: TensorFlow sees no GPU here.\n")
    assert not path.exists()


@pytest.mark.slow
def test_parts_run_in_pieces_that_meet_in_one_file_and_page(emulated, tmp_path):
    path, page = tmp_path / "proof.json", tmp_path / "proof.md"
    status, out, err = run("copies", "nets:blocks:default", "nets:blocks:60%", "--json", path, **emulated)
    assert status == 0, out + err
    assert [line.split()[0] for line in out.splitlines()] == list(read(path))
    first = read(path)
    more = ("copies", "pinned", "nets:blocks:60%", "nets:blocks:xla")
    status, out, err = run(*more, "--resume", "--json", path, **emulated)
    assert status == 0, out + err
    figures = read(path)
    assert list(figures) == [
        "environment",
        "copies",
        "nets:blocks:default",
        "nets:blocks:60%",
        "pinned",
        "nets:blocks:xla",
    ]
    assert all(figures[name] == found for name, found in first.items() if name != "environment")
    check(figures)
    assert all(found["same"] for found in figures["pinned"].values() if isinstance(found, dict))
    text = page.read_text()
    assert "- limit kept by 1 of 1 steps" in text and "| blocks, 60% |" in text and "Copies, GB/s" in text
    assert "| nets:blocks:xla | not run | XLA does not compile for emulated GPUs |" in text
    assert run("--page", path)[0] == 0 and page.read_text() == text


def children(folder: Path) -> list[int]:
    """The processes of a command whose temporary files are in `folder`."""
    found = []
    for each in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"GPU_PROOF_LOCK={folder}".encode() in each.read_bytes():
                found.append(int(each.parent.name))
        except OSError:  # it has ended
            continue
    return found


def test_a_command_that_is_stopped_leaves_its_figures_and_no_process(emulated, tmp_path):
    path = tmp_path / "proof.json"
    process = start("nets:blocks", "--json", path, TMPDIR=str(tmp_path), **emulated)
    assert process.stdout and process.stdout.readline().startswith("environment ok")
    while not children(tmp_path):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, out + err
    assert children(tmp_path) == []
    assert list(read(path)) == ["environment"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_parts_run_on_an_emulated_gpu(emulated, tmp_path):
    path = tmp_path / "proof.json"
    status, out, err = run("--minutes", "55", "--json", path, **emulated)
    assert status == 0, out + err
    figures = read(path)
    check(figures)
    not_run = {name: row["not_run"] for name, row in figures.items() if "not_run" in row}
    assert "XLA" in not_run.pop("nets:blocks:xla")
    assert all("measured at the smallest limit" in reason for reason in not_run.values())
    codecs = figures["codecs"]["gb_s"]
    assert codecs and all(isinstance(rate, float) for rate in codecs.values()), codecs
    for net in ("resnet50", "blocks"):
        assert figures[f"batch:{net}:tfswap"]["batch"] > figures[f"batch:{net}:default"]["batch"] > 0
