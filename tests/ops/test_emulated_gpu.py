"""The emulated GPUs themselves: what they emulate and what they check. test_gpus.py runs tfswap on them."""

from __future__ import annotations

import ctypes
import os

import pytest
from emulated_gpu import Link

tf = pytest.importorskip("tensorflow")

MIB = 1 << 20


# --- the devices ------------------------------------------------------------------------------------------------------


@pytest.mark.emulated_gpu(count=2, memory=8 * MIB)
def test_devices_have_their_number_their_memory_and_the_cpus_values(on_gpus):

    def program(gpus):
        from tensorflow.python.client import device_lib

        def product(device):
            with tf.device(device):
                return tf.linalg.matmul(a, a, transpose_b=True)

        a = tf.random.stateless_normal([64, 32], seed=(1, 2))
        products = [product(device) for device in ("GPU:0", "GPU:1", "CPU:0")]
        with tf.device("GPU:0"):
            try:
                _ = [tf.zeros([MIB // 4 * 3]) for _ in range(4)]  # 12 MiB
            except tf.errors.ResourceExhaustedError as error:
                exhausted = "GPU:0" in error.message or "OOM" in error.message
        return {
            "devices": [each.device for each in products],
            "same": all((each.numpy() == products[2].numpy()).all() for each in products),
            "limits": [each.memory_limit for each in device_lib.list_local_devices() if each.device_type == "GPU"],
            "exhausted": exhausted,
            "between": gpus.counts().copies_between,
            "report": gpus.report(),
        }

    found = on_gpus(program)
    assert [each.rsplit("device:", 1)[1] for each in found["devices"]] == ["GPU:0", "GPU:1", "CPU:0"]
    assert found["same"] and found["exhausted"] and found["between"] and not found["report"]
    assert found["limits"] == [8 * MIB] * 2


def test_channels_first_give_the_cpus_values(on_gpus):
    def program():
        import numpy as np
        import tensorflow as tf

        draws = np.random.default_rng(0)
        x, k = draws.normal(size=[4, 9, 8, 3]).astype("f"), draws.normal(size=[3, 3, 3, 5]).astype("f")
        with tf.device("GPU:0"):
            y = tf.nn.conv2d(tf.transpose(x, [0, 3, 1, 2]), k, [1, 1, 2, 1], "SAME", data_format="NCHW")
            y = tf.nn.max_pool2d(y, [2, 3], [1, 2], "VALID", data_format="NCHW")
            y = tf.transpose(y, [0, 2, 3, 1])
        with tf.device("CPU:0"):
            z = tf.nn.max_pool2d(tf.nn.conv2d(x, k, [1, 2, 1, 1], "SAME"), [2, 3], [1, 2], "VALID")
        return [y.device[-5:], bool((y.numpy() == z.numpy()).all())]

    found = on_gpus(program)
    assert found == ["GPU:0", True]


def test_blocks_of_images_with_channels_first(on_gpus):
    def program():
        import numpy as np

        x = np.arange(2 * 4 * 6 * 8, dtype="f").reshape(2, 4, 6, 8)
        first = x.transpose(0, 3, 1, 2)
        with tf.device("GPU:0"):
            y = tf.nn.space_to_depth(first, 2, data_format="NCHW")
            z = tf.nn.depth_to_space(first, 2, data_format="NCHW")
        with tf.device("CPU:0"):
            deep, wide = tf.nn.space_to_depth(x, 2), tf.nn.depth_to_space(x, 2)
        pairs = [(y, deep), (z, wide)]
        return [bool((a.numpy().transpose(0, 2, 3, 1) == b.numpy()).all()) for a, b in pairs] + [y.device[-5:]]

    assert on_gpus(program) == [True, True, "GPU:0"]


def taken_by_kernels(gpus):
    import numpy as np

    def taken(run, *inputs):
        # Bytes of the arena besides results, while that runs.
        inputs = [tf.identity(tf.constant(each)) for each in inputs]
        run(*inputs)
        before = tf.config.experimental.get_memory_info("GPU:0")["current"]
        tf.config.experimental.reset_memory_stats("GPU:0")
        result = run(*inputs)
        return tf.config.experimental.get_memory_info("GPU:0")["peak"] - before - result.shape.num_elements() * 4

    x, k = np.zeros([4, 16, 16, 8], "f"), np.zeros([3, 3, 8, 16], "f")
    y = np.zeros([4, 16, 16, 16], "f")
    return {
        "convolution": taken(lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"), x, k),
        "padded": taken(lambda x, k: tf.nn.conv2d(x, k, 2, "SAME"), x, k),
        "image": taken(
            lambda k, y: tf.raw_ops.Conv2DBackpropInput(
                input_sizes=x.shape, filter=k, out_backprop=y, strides=[1] * 4, padding="SAME"
            ),
            k,
            y,
        ),
        "filter": taken(
            lambda x, y: tf.raw_ops.Conv2DBackpropFilter(
                input=x, filter_sizes=k.shape, out_backprop=y, strides=[1] * 4, padding="SAME"
            ),
            x,
            y,
        ),
        "softmax": taken(tf.nn.softmax, np.zeros([64, 64], "f")),
        "relu": taken(tf.nn.relu, x),
        "report": gpus.report(),
    }


@pytest.mark.emulated_gpu(workspace=3 * MIB)
@pytest.mark.parametrize("allowed_mib", [4096, 1, 0])
def test_kernels_take_what_those_of_gpus_take(on_gpus, allowed_mib):
    """A convolution copies its filter and, with channels last, its image and result; and has a workspace."""
    found = on_gpus(taken_by_kernels, TF_CUDNN_WORKSPACE_LIMIT_IN_MB=str(allowed_mib))
    image, filter, result = (4 * n for n in (4 * 16 * 16 * 8, 3 * 3 * 8 * 16, 4 * 16 * 16 * 16))
    padded = -(-image * 17 * 17 // (16 * 16 * 256)) * 256  # one more row and column, as the allocator rounds it
    workspace = min(3, allowed_mib) * MIB
    assert found == {
        "convolution": filter + image + result + workspace,
        "padded": filter + padded + image + result // 4 + workspace,
        "image": filter + image + result + workspace,
        "filter": filter + image + result + workspace,
        "softmax": 2 * 64 * 64 * 4,
        "relu": 0,
        "report": "",
    }


def tried_convolutions():
    import tensorflow as tf

    x, w = tf.zeros([4, 16, 16, 8]), tf.zeros([3, 3, 8, 16])
    info = tf.config.experimental.get_memory_info

    def taken(images):
        before = info("GPU:0")["current"]
        tf.config.experimental.reset_memory_stats("GPU:0")
        result = tf.nn.conv2d(images, w, 1, "SAME")
        peak = info("GPU:0")["peak"] - before
        return peak - (info("GPU:0")["current"] - before) if result is not None else 0

    first, second = taken(x), taken(x)
    return {"first": first, "second": second}


@pytest.mark.emulated_gpu(memory=64 * MIB, workspace=(70 * MIB, 3 * MIB, MIB, 4 * MIB, 0))
@pytest.mark.parametrize(
    ("settings", "tried_mib", "chosen_mib"),
    [
        ({"TF_DISABLE_RZ_CHECK": "1"}, 4, 3),
        ({"TF_DISABLE_RZ_CHECK": "1", "TF_CUDNN_WORKSPACE_LIMIT_IN_MB": "2"}, 1, 1),
        ({}, 36, 3),  # a second result, and 16 MiB of red zones around it and each workspace
    ],
)
def test_a_convolutions_first_run_tries_algorithms(on_gpus, settings, tried_mib, chosen_mib):
    """The largest workspace counts once, later runs have the chosen one's; what does not fit is passed over."""
    image, filter, result = (4 * n for n in (4 * 16 * 16 * 8, 3 * 3 * 8 * 16, 4 * 16 * 16 * 16))
    always = filter + image + result
    second_result = result if tried_mib == 36 else 0
    found = on_gpus(tried_convolutions, **settings)
    assert (found["first"], found["second"]) == (
        always + second_result + tried_mib * MIB,
        always + chosen_mib * MIB,
    )


@pytest.mark.emulated_gpu(temporaries=False, workspace=3 * MIB)
def test_kernels_take_nothing_where_that_is_requested(on_gpus):
    assert not any(each for each in on_gpus(taken_by_kernels).values())


def two_copies():
    import time

    import tensorflow as tf

    from tfswap.ops import copies

    @tf.function
    def there_and_back(x):
        handle = copies.swap_out(x)
        with tf.control_dependencies([copies.release(handle)]):
            tensor, ticket = copies.swap_in(handle, tf.float32, x.shape)
        return copies.await_copy(tensor, ticket)

    x = tf.zeros([1 << 20])
    there_and_back(x)
    start = time.monotonic()
    there_and_back(x)
    with tf.device("CPU:0"):
        pinned_s = time.monotonic() - start
        start = time.monotonic()
        tf.identity(x)
        pageable_s = time.monotonic() - start
    return {"pinned_s": pinned_s, "pageable_s": pageable_s}


@pytest.mark.emulated_gpu(to_device=Link(40e6), to_host=Link(80e6, latency_us=30e3), pageable=Link(20e6))
def test_copies_take_the_links_time(on_gpus):
    """Times from below only: the machine may be busy. 4 MiB take 105 ms in, 52 and 30 out, 210 where not pinned."""
    found = on_gpus(two_copies)
    assert found["pinned_s"] >= 4 * MIB / 40e6 + 4 * MIB / 80e6 + 0.030
    assert found["pageable_s"] >= 4 * MIB / 20e6


@pytest.mark.emulated_gpu(kernel_us=20e3)
def test_kernels_take_their_time_while_the_host_goes_on(on_gpus):
    def program():
        import time

        import tensorflow as tf

        x = tf.ones([4])
        x = tf.sqrt(x)
        x.numpy()
        start = time.monotonic()
        for _ in range(10):
            x = tf.sqrt(x)
        enqueued_s = time.monotonic() - start
        x.numpy()
        return [enqueued_s, time.monotonic() - start]

    found = on_gpus(program)
    assert found[0] < found[1] and found[1] >= 0.2


# --- memory -----------------------------------------------------------------------------------------------------------


def tensor_and_its_address():
    from tfswap.device import arena

    nbytes = 8 << 20  # nothing else on the device is as large, so that its size shows where the tensor is
    x = tf.fill([nbytes // 4], 7.0)
    x.numpy()
    [begin] = [begin for begin, size, in_use in arena.snapshot("GPU:0").chunks if in_use and size >= nbytes]
    return x, begin


def test_host_code_that_touches_device_memory_is_killed(on_gpus):
    def program():
        _, begin = kept = tensor_and_its_address()

        def status_of(touch):
            child = os.fork()
            if child == 0:
                touch()
                os._exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        reads = status_of(lambda: ctypes.string_at(begin, 4))
        writes = status_of(lambda: ctypes.memset(begin, 0, 4))
        del kept
        return [reads, writes, status_of(lambda: None)]

    killed = on_gpus(program)
    assert killed == [-11, -11, 0]


@pytest.mark.emulated_gpu(protect=False)
def test_freed_memory_holds_no_numbers(on_gpus):
    def program():
        x, begin = tensor_and_its_address()
        there = ctypes.string_at(begin, 4000)
        del x
        return [there.hex(), ctypes.string_at(begin, 4000).hex()]

    there, freed = on_gpus(program)
    assert there == tf.fill([1000], 7.0).numpy().tobytes().hex()
    assert freed == "ff" * 4000


@pytest.mark.emulated_gpu(temporaries=False)
def test_what_cpu_kernels_take_besides_is_not_in_the_devices_arena(on_gpus):
    """The gradient of a filter takes a column matrix of the image, on a CPU."""

    def program():
        import tensorflow as tf

        images, gradients = tf.ones([8, 32, 32, 8]), tf.ones([8, 32, 32, 8])

        def gradient():
            return tf.raw_ops.Conv2DBackpropFilter(
                input=images, filter_sizes=[3, 3, 8, 8], out_backprop=gradients, strides=[1, 1, 1, 1], padding="SAME"
            )

        gradient()
        tf.config.experimental.reset_memory_stats("GPU:0")
        before = tf.config.experimental.get_memory_info("GPU:0")["current"]
        result = gradient()
        peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
        return [peak - before, result.shape.num_elements()]

    took, result = on_gpus(program)
    assert took == 4 * result  # a multiple of 256


def test_kernels_that_cpus_run_asynchronously_touch_the_devices_memory(on_gpus):
    def program(gpus):
        import tensorflow as tf

        def cropped():
            with tf.GradientTape() as tape:
                tape.watch([images, boxes])
                y = tf.image.crop_and_resize(images, boxes, [0, 1], [4, 4])
                loss = tf.reduce_sum(y * y)
            return [y, *tape.gradient(loss, [images, boxes])]

        images = tf.random.stateless_normal([2, 8, 8, 3], seed=(1, 2))
        boxes = tf.constant([[0.0, 0.0, 1.0, 1.0], [0.2, 0.1, 0.9, 0.8]])
        before = gpus.counts().kernels
        there = cropped()
        kernels = gpus.counts().kernels - before
        with tf.device("CPU:0"):
            here = cropped()
        return {
            "there": [each.device[-5:] for each in there],
            "kernels": kernels >= 3,
            "same": [bool((x.numpy() == y.numpy()).all()) for x, y in zip(there, here, strict=True)],
            "report": gpus.report(),
        }

    found = on_gpus(program)
    assert found == {"there": ["GPU:0"] * 3, "kernels": True, "same": [True] * 3, "report": ""}


def test_kernels_run_on_reference_variables(on_gpus):
    """TensorFlow 1's, and the temporary one that Grappler makes of a sum whose terms are added as they are ready."""

    def program(gpus):
        import tensorflow as tf

        @tf.function
        def accumulated(x):
            return tf.math.accumulate_n([x @ x, tf.sin(x), x * 2.0])

        x = tf.fill([64, 64], 2.0)
        y = accumulated(x)
        with tf.Graph().as_default(), tf.device("GPU:0"), tf.compat.v1.Session() as session:
            variable = tf.compat.v1.get_variable("v", initializer=tf.ones([8, 8]), use_resource=False)
            session.run(variable.initializer)
            assigned = session.run(tf.compat.v1.assign_add(variable, tf.fill([8, 8], 2.0)))
            read = session.run(variable * 2.0)
        return [
            y.device[-5:],
            float(tf.reduce_max(abs(y - (x @ x + tf.sin(x) + x * 2.0)))),
            assigned.tolist() == [[3.0] * 8] * 8,
            read.tolist() == [[6.0] * 8] * 8,
            gpus.report(),
        ]

    found = on_gpus(program)
    device, difference, *others = found
    assert device == "GPU:0" and difference < 1e-4 and others == [True, True, ""]


# --- races ------------------------------------------------------------------------------------------------------------


def swaps(gpus, faults):
    from tfswap.ops import copies

    @tf.function
    def step(x):
        y = x * 2.0
        handle = copies.swap_out(y)
        with tf.control_dependencies([copies.release(handle)]):
            z = tf.reduce_sum(tf.exp(tf.square(x)))  # in the tensor's memory, which is free when it comes back
        with tf.control_dependencies([z]):
            tensor, ticket = copies.swap_in(handle, tf.float32, x.shape)
        return tf.reduce_sum(copies.await_copy(tensor, ticket) * 3.0) + z

    x = tf.random.stateless_normal([512, 512], seed=(3, 4))
    expected = float(tf.reduce_sum(x * 2.0 * 3.0) + tf.reduce_sum(tf.exp(tf.square(x))))
    step(x)
    before = gpus.report()
    gpus.set_faults(**faults)
    results = [float(step(x)) for _ in range(3)]
    gpus.set_faults()
    return {"before": before, "report": gpus.report().splitlines(), "right": results == [expected] * 3}


FAULTS = {
    "copies out do not wait for kernels": ({"ignored_waits": ("out",)}, ("SwapOut", "reads", "Mul")),
    "copies in do not wait for kernels": ({"ignored_waits": ("in",)}, ("SwapIn", "writes", "compute stream")),
    "copies out seem to have ended": ({"early_events": ("out",)}, ("a free of", "writes", "SwapOut")),
    "copies in seem to have ended": ({"early_events": ("in",)}, ("Mul", "reads", "SwapIn")),
}


@pytest.mark.emulated_gpu(ends_late=True)
@pytest.mark.parametrize("name", FAULTS)
def test_a_wait_that_is_left_out_of_a_swap_is_reported_in_every_run(on_gpus, name):
    faults, words = FAULTS[name]
    found = on_gpus(lambda gpus: swaps(gpus, faults))
    assert not found["before"]
    assert any(all(word in line for word in words) for line in found["report"]), found["report"]


def test_swaps_have_no_races(on_gpus):
    found = on_gpus(lambda gpus: swaps(gpus, {}))
    assert not found["report"] and found["right"]


@pytest.mark.emulated_gpu(ends_late=True)
def test_views_of_what_a_copy_reads_write_nothing(on_gpus):
    def program(gpus):
        import tensorflow as tf

        from tfswap.ops import copies

        @tf.function
        def step(x):
            y = x * 2.0
            handle = copies.swap_out(y)
            with tf.control_dependencies([handle]):
                views = [tf.bitcast(y, tf.int32), y[:256], *tf.unstack(y[:2]), *tf.split(y, 2)]
                total = tf.add_n([tf.reduce_sum(tf.cast(view, tf.float32)) for view in views])
            with tf.control_dependencies([total]):
                released = copies.release(handle)
            with tf.control_dependencies([released]):
                tensor, ticket = copies.swap_in(handle, tf.float32, x.shape)
            return total + tf.reduce_sum(copies.await_copy(tensor, ticket))

        step(tf.ones([512, 512]))
        return gpus.report()

    assert on_gpus(program) == ""


@pytest.mark.emulated_gpu(count=2, between=Link(latency_us=100e3))
def test_assignments_of_what_a_copy_reads_write_nothing(on_gpus):
    """A value becomes a variable's buffer while it is copied to the other device, as Keras' count of steps."""

    def program(gpus):
        @tf.function
        def step():
            value = variable + tf.fill([512], 1.0)
            with tf.device("GPU:1"):
                sent = tf.identity(value) * 2.0
            later = value
            for _ in range(20):
                later = tf.sin(later)
            with tf.control_dependencies([later]):
                variable.assign(value)
            return sent, later

        variable = tf.Variable(tf.ones([512]))
        results = [float(step()[0][0]) for _ in range(3)]
        return {"results": results, "between": gpus.counts().copies_between, "report": gpus.report()}

    found = on_gpus(program)
    assert found["results"] == [4.0, 6.0, 8.0] and found["between"] >= 3 and found["report"] == ""


def unawaited(gpus):
    import tensorflow as tf

    from tfswap.ops import copies

    @tf.function
    def step(x):
        handle = copies.swap_out(x * 2.0)
        with tf.control_dependencies([copies.release(handle)]):
            tensor, _ = copies.swap_in(handle, tf.float32, x.shape)
        return tf.reduce_sum(tensor)

    step(tf.ones([512, 512]))
    return gpus.report()


@pytest.mark.emulated_gpu(ends_late=True)
def test_a_tensor_that_is_read_without_its_await_is_reported(on_gpus):
    report = on_gpus(unawaited)
    assert (
        "Sum" in report and "reads 1048576 bytes that a copy of 1048576 bytes to the device by Tfswap>SwapIn" in report
    )
