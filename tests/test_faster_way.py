"""Which of two ways is faster is found out while it is done, and again when the machine does something else."""

from __future__ import annotations

import subprocess
from pathlib import Path

from processes import ROOT

PROGRAM = """
#include <cstdio>
#include "online_choice.h"

// How often each way was taken, of `turns`, where they take so long.
void Take(tfswap::FasterWay* faster, int turns, double first_s, double second_s) {
  int taken[2] = {};
  for (int turn = 0; turn < turns; ++turn) {
    const int way = faster->Next();
    ++taken[way];
    faster->Took(way, way == 0 ? first_s : second_s);
  }
  std::printf("%d %d\\n", taken[0], taken[1]);
}

int main() {
  tfswap::FasterWay faster;
  Take(&faster, 640, 2, 1);
  Take(&faster, 100, 1, 1.5);
  Take(&faster, 640, 1, 1.5);
}
"""


def test_the_faster_way_is_taken_and_soon_another_where_that_has_become_faster(tmp_path: Path):
    source, program = tmp_path / "ways.cc", tmp_path / "ways"
    source.write_text(PROGRAM)
    core = ROOT / "tfswap" / "ops" / "csrc" / "core"
    subprocess.run(["g++", "-std=c++17", "-O1", "-pthread", "-I", core, source, "-o", program], check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    learnt, changed, again = ([int(count) for count in line.split()] for line in lines)
    assert learnt[1] > 0.9 * sum(learnt)
    assert changed[0] > 30, "in the first hundred turns after that"
    assert again[0] > 0.9 * sum(again)
