"""The emulated GPU's race detector on programs of streams and events: each race is found, whatever the times, and
nothing else is (race_detector_test.cc).

Three streams compute, copy to the device ("in") and copy to the host ("out"). Bytes 100 to 200 are a tensor's on the
device, 900 to 1000 its place in pinned host memory.
"""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import emulated_gpu
import pytest

from tfswap.native import build

pytestmark = pytest.mark.skipif(bool(emulated_gpu.why_not()), reason=emulated_gpu.why_not() or "-")

STREAMS = "stream compute\nstream in\nstream out\n"

SWAP = """
    run compute make w 100 200
    wait out compute
    run out swap_out r 100 200 w 900 1000
    record copied out
    see copied
    free compute release w 100 200
    run compute reuse w 100 200
    wait in compute
    run in swap_in r 900 1000 w 100 200
    record back in
    see back
    run compute use r 100 200
"""
"""A tensor goes out, its memory is used, and it comes back, as it must."""


def without(line: str) -> str:
    assert line in SWAP
    return SWAP.replace(line, "")


RACES = {
    "the copy out does not wait for the kernel": (
        without("wait out compute"),
        "swap_out (out) reads 100 bytes that make (compute) writes",
    ),
    "the copy in does not wait for kernels that use its memory": (
        without("wait in compute"),
        "swap_in (in) writes 100 bytes that reuse (compute) writes",
    ),
    "the memory is freed before the copy out has ended": (
        without("see copied"),
        "release (compute) writes 100 bytes that swap_out (out) reads",
    ),
    "the tensor is read before the copy in has ended": (
        without("see back"),
        "use (compute) reads 100 bytes that swap_in (in) writes",
    ),
    "the event is recorded before the copy": (
        without("record copied out").replace("run out swap_out", "record copied out\n run out swap_out"),
        "release (compute) writes 100 bytes that swap_out (out) reads",
    ),
    "the host sees the end of another event": (
        SWAP.replace("see copied", "see other").replace("wait out compute", "record other compute\n wait out compute"),
        "release (compute) writes 100 bytes that swap_out (out) reads",
    ),
    "a pinned buffer is filled again before the copy in has read it": (
        """
        run in swap_in r 900 1000 w 100 200
        run compute other w 300 400
        wait out compute
        run out swap_out r 300 400 w 900 1000
        """,
        "swap_out (out) writes 100 bytes that swap_in (in) reads",
    ),
    "a pinned buffer is read before the copy out has filled it": (
        """
        run compute make w 100 200
        wait out compute
        run out swap_out r 100 200 w 900 1000
        run in swap_in r 900 1000 w 300 400
        """,
        "swap_in (in) reads 100 bytes that swap_out (out) writes",
    ),
    "the next step takes a buffer from the pool that this step's copy still fills": (
        """
        run compute make w 100 200
        wait out compute
        run out first_step r 100 200 w 900 1000
        stream out_of_another
        wait out_of_another compute
        run out_of_another second_step r 100 200 w 950 1050
        """,
        "second_step (out_of_another) writes 100 bytes that first_step (out) writes",
    ),
    "only a part of the tensor overlaps": (
        """
        run in swap_in r 900 1000 w 100 200
        run compute use r 199 300
        """,
        "use (compute) reads 101 bytes that swap_in (in) writes",
    ),
    "a kernel writes what the copy out reads": (
        """
        run compute make w 100 200
        wait out compute
        run out swap_out r 100 200 w 900 1000
        run compute in_place r 100 200 w 100 200
        """,
        "in_place (compute) writes 100 bytes that swap_out (out) reads",
    ),
    "memory is freed that is still copied in": (
        """
        run in swap_in r 900 1000 w 100 200
        free compute dropped w 100 200
        """,
        "dropped (compute) writes 100 bytes that swap_in (in) writes",
    ),
    "two devices copy to each other's memory": (
        """
        stream other_device
        run compute make w 100 200
        run other_device send r 100 200 w 5000 5100
        """,
        "send (other_device) reads 100 bytes that make (compute) writes",
    ),
    "an earlier reader is hidden behind a later one": (
        """
        run compute make w 100 200
        record made compute
        wait_event out made
        run out slow r 100 200 w 900 1000
        wait_event in made
        run in fast r 100 200 w 2000 2100
        record read in
        see read
        free compute release w 100 200
        """,
        "release (compute) writes 100 bytes that slow (out) reads",
    ),
}

ORDERED = {
    "a swap": SWAP,
    "waits for events": SWAP.replace("wait out compute", "record e compute\n wait_event out e"),
    "a wait through a third stream": """
        run compute make w 100 200
        wait in compute
        wait out in
        run out swap_out r 100 200 w 900 1000
    """,
    "two readers": """
        run compute make w 100 200
        wait out compute
        run out swap_out r 100 200 w 900 1000
        run compute use r 100 200
    """,
    "neighbours": """
        run in swap_in r 900 1000 w 100 200
        run compute use r 200 300 w 0 100
    """,
    "memory that has been given back to the system": """
        run in swap_in r 900 1000 w 100 200
        forget 0 1000
        run compute use r 100 200
    """,
    "one stream": """
        run compute make w 100 200
        run compute use r 100 200 w 100 200
        free compute free w 100 200
    """,
}


@pytest.fixture(scope="module")
def detect(tmp_path_factory):
    program = tmp_path_factory.mktemp("races") / "race_detector_test"
    folder = emulated_gpu.SOURCES.folder
    sources = [str(Path(__file__).with_suffix("").with_name("race_detector_test.cc")), str(folder / "race_detector.cc")]
    command = [*build.find_compiler().command, "-std=c++17", *build.COMPILE_FLAGS, "-Werror", "-pthread"]
    subprocess.run([*command, "-I", str(folder), *sources, "-o", str(program)], check=True)

    def run(commands: str) -> list[str]:
        text = STREAMS + textwrap.dedent(commands)
        return subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout.splitlines()

    return run


@pytest.mark.parametrize("name", RACES)
def test_each_race_is_reported_with_both_sides_and_their_streams(detect, name):
    commands, report = RACES[name]
    assert f"{report}, and does not wait for it" in detect(commands)


@pytest.mark.parametrize("name", ORDERED)
def test_what_is_ordered_is_no_race(detect, name):
    assert detect(ORDERED[name]) == []
