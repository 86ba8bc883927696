"""What examples take from inside of tfswap is there, and short ones run. The others are run by hand: they take a
minute, or a gigabyte.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

tf = pytest.importorskip("tensorflow")

from nets import Net  # noqa: E402 needs TensorFlow

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_demo_draws_the_memory_of_a_step_without_and_with_a_plan():
    spec = importlib.util.spec_from_file_location("train_under_cap", EXAMPLES / "train_under_cap.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    step = tf.function(Net(layers=4, width=64).step)
    found = demo.memory_curves(step, (tf.zeros([2048, 64]),), 4 << 20)
    without, planned = json.loads(json.dumps(found))  # as the demo's processes hand them on
    assert max(planned) <= 4 << 20 < max(without)
    with demo.memory_optimizer_off():
        assert float(step(tf.ones([4, 64]))) >= 0


def test_a_decoder_with_attention_keeps_a_limit():
    command = [sys.executable, "seq2seq.py", "--length", "30", "--limit", "40%", "--steps", "2"]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held, losses identical" in done.stdout


def test_two_workers_keep_their_limits():
    done = subprocess.run([sys.executable, "multi_worker.py"], cwd=EXAMPLES, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical to the bit; limits held" in done.stdout


def test_what_examples_share_says_that_it_is_none():
    done = subprocess.run([sys.executable, "side_by_side.py"], cwd=EXAMPLES, capture_output=True, text=True)
    assert done.returncode == 1
    assert "run one of these" in done.stderr
