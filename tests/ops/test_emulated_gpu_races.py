"""Races that are made on purpose on emulated GPUs: each is reported in each run, with both sides.

A race is made by a wait that streams leave out, by an event before its work ends, or by a program without a wait.
test_race_detector.py has programs of streams and events alone. A copied callback keeps memory and does not race, so
it is in test_gpus.py.
"""

from __future__ import annotations

import functools

import pytest
from slow import slow
from swap_copies import eventually

tf = pytest.importorskip("tensorflow")

SHAPE = [256, 256]
BETWEEN = "between" if int(tf.version.VERSION.split(".")[1]) >= 21 else "compute"
"""The role of the stream that copies between devices: before TensorFlow 2.21 that of the sending device's kernels."""


def swapped(y, x):
    """`y` after it was in host memory, before its copy back has ended; its ticket; what ran of `x` in its memory."""
    from tfswap.ops import copies

    handle = copies.swap_out(y)
    with tf.control_dependencies([copies.release(handle)]):
        z = tf.reduce_sum(tf.exp(tf.square(x)))  # in the tensor's memory, which is free when it comes back
    with tf.control_dependencies([z]):
        return *copies.swap_in(handle, tf.float32, y.shape), z


@functools.cache
def swap(awaits=True):
    from tfswap.ops import copies

    @tf.function
    def step(x):
        tensor, ticket, z = swapped(x * 2.0, x)
        return tf.reduce_sum((copies.await_copy(tensor, ticket) if awaits else tensor) * 3.0) + z

    return step


def one_swap():
    swap()(tf.ones(SHAPE))


def unawaited():
    swap(awaits=False)(tf.ones(SHAPE))


@functools.cache
def two_swaps_of_one_size():
    from tfswap.ops import copies

    @tf.function
    def step(x):
        tensor, ticket, _ = swapped(x * 2.0, x)
        first = copies.await_copy(tensor, ticket)
        with tf.control_dependencies([first]):
            tensor, ticket, _ = swapped(x * 5.0, x)
        return tf.reduce_sum(copies.await_copy(tensor, ticket) * first)

    return step


def one_swap_after_the_other():
    two_swaps_of_one_size()(tf.ones(SHAPE))


def two_steps():
    one_swap()
    one_swap()


@functools.cache
def updated_variable():
    from tfswap.ops import copies

    variable = tf.Variable(tf.ones(SHAPE))

    @tf.function
    def step():
        handle = copies.swap_out(variable.read_value())
        with tf.control_dependencies([copies.release(handle)]):
            variable.assign_add(tf.ones(SHAPE))
        return variable.read_value()

    return step


def update_of_what_is_copied():
    updated_variable()()


@functools.cache
def sent(device):
    """A function whose product is copied to another device. Outside of functions TensorFlow waits for all streams."""

    @tf.function
    def step(x):
        y = x * 2.0
        with tf.device(device):
            return tf.reduce_sum(y)

    return step


def copy_to_the_host():
    return sent("CPU:0")(tf.ones(SHAPE))


def copy_to_the_device():
    with tf.device("CPU:0"):
        host = tf.ones(SHAPE)
    y = tf.ones(SHAPE) * 2.0
    del y  # its kernel may still run, in memory that the copy is given
    return [tf.identity(host) for _ in range(3)]


def copy_between_devices():
    return sent("GPU:1")(tf.ones(SHAPE))


# By what is left out: the program, the faults, and words of a line that reports it.
RACES = {
    "the copy out waits for the kernel": (one_swap, {"ignored_waits": ("out",)}, ("SwapOut", "reads", "Mul")),
    "the copy in waits for kernels that use its memory": (
        one_swap,
        {"ignored_waits": ("in",)},
        ("SwapIn", "writes", "compute stream"),
    ),
    "Release waits for the copy out": (
        one_swap,
        {"early_events": ("out",)},
        ("a free of", "writes", "SwapOut"),
    ),
    "the copy in waits for the copy out": (
        one_swap,
        {"early_events": ("out",)},
        ("SwapIn", "reads", "SwapOut", "to host stream of GPU:0) writes"),
    ),
    "Await waits for the copy in": (one_swap, {"early_events": ("in",)}, ("Mul", "reads", "SwapIn")),
    "there is an Await": (unawaited, {}, ("Mul", "reads", "SwapIn")),
    "the copy in has read the pinned buffer before it is filled again": (
        one_swap_after_the_other,
        {"early_events": ("in",)},
        ("SwapOut", "writes", "SwapIn", "to device stream of GPU:0) reads"),
    ),
    "the last step's copy in has read the pinned buffer": (
        two_steps,
        {"early_events": ("in",)},
        ("SwapOut", "writes", "SwapIn", "to device stream of GPU:0) reads"),
    ),
    "a kernel that works in place waits for the copy out": (
        update_of_what_is_copied,
        {"early_events": ("out",)},
        ("AssignAddVariableOp", "writes", "SwapOut"),
    ),
    "TensorFlow's copy to the host waits for the kernel": (
        copy_to_the_host,
        {"ignored_waits": ("out",)},
        ("a copy of", "to the host", "reads", "Mul"),
    ),
    "memory is freed after TensorFlow's copy to the host": (
        copy_to_the_host,
        {"early_events": ("out",)},
        ("a free of", "writes", "to the host", "reads"),
    ),
    "TensorFlow's copy to the device waits for kernels that use its memory": (
        copy_to_the_device,
        {"ignored_waits": ("in",)},
        ("a copy of", "to the device", "writes", "compute stream"),
    ),
    "the receiving device's kernel waits for the copy between devices": (
        copy_between_devices,
        {"early_events": (BETWEEN,)},
        ("Sum", "compute stream of GPU:1) reads", "between devices"),
    ),
}
if BETWEEN != "compute":
    RACES |= {
        "memory is freed after the copy between devices": (
            copy_between_devices,
            {"early_events": ("between",)},
            ("a free of", "writes", "between devices", "reads"),
        ),
        "the copy between devices waits for the sending device's kernel": (
            copy_between_devices,
            {"ignored_waits": ("between",)},
            ("between devices", "reads", "Mul"),
        ),
    }


def found_in(runs, gpus):
    found = {}
    for name, (program, faults, words) in RACES.items():
        if faults:
            program()
            settle()
            gpus.clear_races()
            program()
        before = gpus.report() if faults else ""
        reported = 0
        for _ in range(runs):
            settle()
            gpus.clear_races()
            gpus.set_faults(**faults)
            program()
            gpus.set_faults()
            reported += eventually(functools.partial(is_reported, gpus, words), timeout_s=10)
        found[name] = [before, reported]
        settle()
    return found


def is_reported(gpus, words):
    """Whether there is a line with all of these words. Memory may be freed shortly after a program has its result."""
    return any(all(word in line for word in words) for line in gpus.report().splitlines())


def settle():
    """All streams' ends are seen, and accesses that raced lie before whatever comes next."""
    swap()(tf.ones(SHAPE)).numpy()
    copy_between_devices().numpy()
    for device in ("GPU:0", "GPU:1"):
        with tf.device(device):
            tf.test.experimental.sync_devices()


@pytest.mark.emulated_gpu(count=2, ends_late=True)
@pytest.mark.parametrize("runs", [5, *slow(20)])
def test_each_race_is_reported_in_each_run(on_gpus, runs):
    found = on_gpus(lambda gpus: found_in(runs, gpus))
    assert found == {name: ["", runs] for name in RACES}


@pytest.mark.emulated_gpu(ends_late=True)
def test_lists_pass_on_what_a_copy_reads(on_gpus):
    """An element that is taken from a list has its buffer, into which nothing is written."""

    def program(gpus):
        from tfswap.ops import copies

        @tf.function
        def step(x):
            value, like = x * 2.0, {"element_shape": SHAPE, "element_dtype": tf.float32}
            handle = copies.swap_out(value)
            with tf.control_dependencies([handle]):
                kept = tf.raw_ops.TensorListPushBack(
                    input_handle=tf.raw_ops.EmptyTensorList(max_num_elements=1, **like), tensor=value
                )
            first = tf.raw_ops.TensorListGetItem(input_handle=kept, index=0, **like)
            last = tf.raw_ops.TensorListPopBack(input_handle=kept, **like)[1]
            with tf.control_dependencies([first, last, copies.release(handle)]):
                return tf.reduce_sum(first + last)

        return [float(step(tf.ones(SHAPE))), gpus.report()]

    assert on_gpus(program) == [4.0 * 256 * 256, ""]
