"""Runs tfswap's C++ under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: `make sanitize`.

    python sanitize.py [PYTEST_ARGS]

First the core without TensorFlow (ops_core*_test.cc) under each. Then the ops inside TensorFlow, which runs where
AddressSanitizer is preloaded: both libraries are built with it and with UndefinedBehaviorSanitizer, into
build/sanitize, and run the tests of the ops and calls with wrong arguments (fuzz_ops.py). An error ends the process
that made it, so that its test fails, and says where.

Not checked: leaks (TensorFlow never frees much of what it makes) and races inside TensorFlow's process (its own
binaries are not built for ThreadSanitizer, which would see none of their locks).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

from folders import PYTHONPATH, ROOT, TESTS

CORE = ROOT / "tfswap" / "ops" / "csrc" / "core"
# These do not depend on TensorFlow.
ALONE = ("host_pool", "system_memory", "copy_engine", "spill_file", "disk_home", "byte_planes", "runtime")
FOLDER = ROOT / "build" / "sanitize"

COMPILER = ("g++", "-g1", "-fno-omit-frame-pointer")

# absl's headers compare the addresses of functions with nothing in constant expressions, which GCC refuses where it is
# to search for null; TensorFlow hides its classes' type information, which `vptr` needs.
UNDEFINED = (
    "-fsanitize=undefined",
    "-fno-sanitize=null,nonnull-attribute,returns-nonnull-attribute,vptr",
    "-fno-sanitize-recover=undefined",
)
# NDEBUG_SANITIZER keeps absl's hash tables as TensorFlow's own build has them: else they have a member more.
ADDRESS = ("-fsanitize=address", "-DNDEBUG_SANITIZER")

# TensorFlow takes memory by `new` and gives it back by `free`, and its libraries define some names twice.
OPTIONS = "detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0:allocator_may_return_null=1"

CHECKED = (
    "ops/test_ops.py",
    "ops/test_ops_memory.py",
    "ops/test_ops_copies.py",
    "ops/test_home_slices.py",
    "ops/test_slice_ops.py",
    "runtime/test_state_at_home.py::test_another_thread_reads_old_values_or_new_ones",
    "runtime/test_state_faults.py::test_a_step_that_fails_leaves_each_variable_with_old_or_new_bytes",
    "runtime/test_state_on_disk.py::test_updates_in_slices_are_stored_on_disk",
    "runtime/test_chunk_ends.py",
    "property/test_real_allocator.py::test_chunks_are_exact_as_long_as_a_step_requests_it",
    "ops/test_codecs.py",
    "ops/test_lossy_codecs.py",
    "ops/test_list_zeros.py",
    "ops/test_loop_ops.py",
    "ops/test_ordered_splits.py",
    "runtime/test_spill.py",
    "property/test_fuzz_ops.py",
    "property/test_arena_replay.py",
    "property/test_native_replay.py",
    "property/test_native_orders.py",
    "property/test_native_reruns.py",
    "property/test_native_timing.py",
    "unit/test_unordered.py",
    "runtime/test_groups.py::test_a_step_with_groups_peaks_as_planned_and_has_its_values",
    "runtime/test_groups.py::test_the_node_runs_its_kernels_says_which_failed_and_refuses_damaged_attributes",
    "runtime/test_ordered_sums.py",
    "runtime/test_variable_buffers.py",
    "runtime/test_control_flow.py::test_any_sequence_of_branches_keeps_the_limit",
    "runtime/test_control_flow.py::test_loops_with_no_bound_keep_their_plan_however_often_they_run",
    "runtime/test_turns.py::test_what_a_step_calls_does_not_wait_for_it",
    "runtime/test_turns.py::test_a_turn_ends_with_a_call_that_fails",
    "runtime/test_pairs_in_steps.py::test_a_pair_that_fails_says_why_and_keeps_nothing",
    "runtime/test_concurrent.py::test_micro_batches_have_the_loops_bits_and_the_planned_peak",
    "runtime/test_body_pairs.py::test_in_loops_the_second_runs_on_another_thread",
    "runtime/test_body_pairs.py::test_a_kernel_of_a_pair_that_fails_in_a_loop_is_reported_by_name",
    "runtime/test_body_pairs.py::test_a_step_that_is_cancelled_while_a_pair_runs_in_a_loop_ends_and_keeps_nothing",
)
CALLS = 5000
# It compiles for GPUs, by a library that finds its parts only where AddressSanitizer does not open it.
LEFT_OUT = "tests/ops/test_codecs.py::test_the_gpu_kernels_compile"


def main(pytest_arguments: list[str]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for flags in (("-fsanitize=thread",), (*ADDRESS, *UNDEFINED)):
        run_core(flags)
    environment = {
        **os.environ,
        "CXX": shlex.join((*COMPILER, *ADDRESS, *UNDEFINED)),
        "TFSWAP_CACHE_DIR": str(FOLDER),
        "TFSWAP_FUZZ_CALLS": str(CALLS),
        "ASAN_OPTIONS": OPTIONS,
        "TF_ENABLE_ONEDNN_OPTS": "0",  # or the codecs' tests skip
        "PYTHONPATH": PYTHONPATH,
    }
    build = "from tfswap.native import build; [build.ensure_built(s, build.tensorflow_facts()) for s in {}]"
    say("building the ops: some minutes")
    subprocess.run([sys.executable, "-c", build.format("(build.CORE, build.CODECS)")], env=environment, check=True)
    say("running the ops' tests in TensorFlow")
    environment["LD_PRELOAD"] = " ".join(map(library, ("libasan.so", "libubsan.so", "libstdc++.so")))
    tests = [str(TESTS / name) for name in CHECKED]
    arguments = ["-q", "--deselect", LEFT_OUT, *tests, *pytest_arguments]
    subprocess.run([sys.executable, "-m", "pytest", *arguments], env=environment, check=True)
    say("clean")


def run_core(flags: tuple[str, ...]) -> None:
    say(f"the core alone, {' '.join(flags)}")
    program = FOLDER / "core_test"
    sources = [
        *sorted((TESTS / "ops").glob("ops_core*_test.cc")),
        *(CORE / f"{name}.cc" for name in ALONE),
    ]
    subprocess.run(
        [*COMPILER, "-std=c++17", "-O1", *flags, "-I", CORE, *sources, "-pthread", "-o", program],
        check=True,
    )
    # Lanes and files live as long as the process.
    subprocess.run([program], env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}, check=True)


def library(name: str) -> str:
    """Where the compiler has it."""
    return subprocess.run(
        [COMPILER[0], f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()


def say(line: str) -> None:
    print(f"sanitize: {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
