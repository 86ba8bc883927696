"""Which device a step is on, where there are emulated GPUs (tests/emulated_gpu)."""

from __future__ import annotations

import pytest
import several_gpu_kinds
import several_gpus
import tensorflow as tf
from gpu_compare import SHAPES, batch, draws, made, relu_loss, reporting, trained, weights

import tfswap
import tfswap.ops
from tfswap.passes.device_carriers import unit


def on_cpu(gpus):
    with tf.device("CPU:0"):
        _variables, step = made()
        x = tf.identity(batch())
        expected = [float(trained(relu_loss, weights(*SHAPES))(x))]
        kernels = gpus.counts().kernels
        tf.config.experimental.reset_memory_stats("CPU:0")
        losses = [float(step(x)) for _ in range(2)]
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return {
        "same": losses[:1] == expected,
        "kept": peak <= step.plan().limit_bytes,
        "swaps": bool(step.plan().evictions),
        "kernels": gpus.counts().kernels - kernels,
    }


def test_a_step_on_the_cpu_is_planned_for_the_cpus_arena(on_gpus):
    arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "256"}
    found = on_gpus(reporting(on_cpu), **arena)
    assert found == {"same": True, "kept": True, "swaps": True, "kernels": 0, "report": []}


def on_device(h):
    with tf.device("CPU:0"):
        return tf.sin(h)


def on_missing_gpu(h):
    with tf.device("GPU:7"):
        return tf.sin(h)


def printed(h):
    tf.print("a loss", h[0, 0])
    return h


def from_text(h):
    return h + tf.cast(tf.strings.length(tf.strings.as_string(h[0, 0])), tf.float32)


def printed_on_the_gpu(h):
    """TensorFlow's strategies name a replica's device on all of its ops."""
    with tf.device("GPU:0"):
        return printed_in_a_loop(printed(h))


def printed_in_a_loop(h):
    def body(i, h):
        return i + 1, printed(tf.tanh(h))

    return tf.while_loop(lambda i, _: i < 20, body, [0, h], maximum_iterations=20)[1]


def scattered_in_a_branch(h):
    def rows():
        return tf.where(tf.scatter_nd([[1], [7]], [True, True], [512])[:, tf.newaxis], h, 2.0 * h)

    return tf.cond(h[0, 0] > 0.0, rows, lambda: tf.sin(h))


ON_THE_CPU = {
    "a device": on_device,
    "an op": printed,
    "an op that names the GPU": printed_on_the_gpu,
    "an op of a loop": printed_in_a_loop,
    "an op of a branch": scattered_in_a_branch,
    "a kernel that TensorFlow places by itself": from_text,
}


@pytest.mark.parametrize("part", [*ON_THE_CPU, "a variable"])
def test_a_part_on_the_cpu_runs_there_and_the_rest_keeps_its_limit(on_gpus, part):
    def program(gpus):
        def loss_of(variables, x):
            h = ON_THE_CPU.get(part, tf.identity)(x @ variables[0])
            for variable in variables[1:]:
                h = tf.nn.relu(h @ variable)
            return tf.reduce_mean(h * h)

        def make():
            variables = weights(*SHAPES)
            if part == "a variable":
                with tf.device("CPU:0"):
                    variables[0] = tf.Variable(variables[0], name="hosted")
            return variables, trained(loss_of, variables).python_function, [tf.constant(draws(512, 128))]

        return several_gpus.compare(make, tactics=("swap",))

    found = on_gpus(reporting(program))
    planned, measured = found["planned"]["GPU:0"]
    assert found["same"] and found["report"] == [] and found["moves"]["GPU:0"]
    assert planned == measured <= found["limits"]["GPU:0"] < found["unoptimised"]["GPU:0"]


def read_in_a_loop(layers, x, count):
    return tf.while_loop(lambda i, _: i < 4, lambda i, t: (i + 1, t + layers(x[i])), [0, 0.0], maximum_iterations=4)[1]


def read_in_a_branch(layers, x, count):
    return layers(tf.cond(count % 2 == 0, lambda: 2.0 * x, lambda: x + 1.0))


def printed_first(layers, x, count):
    tf.print("a batch", x)
    return layers(x)


@pytest.mark.parametrize("read", [read_in_a_loop, read_in_a_branch, printed_first])
def test_arguments_of_a_step_that_counts_on_the_cpu(on_gpus, read):
    """GPUs have no variables of int32: a count of steps is on the CPU, and so is a part of the step."""

    def program(_):
        def make():
            variables, count = weights(*SHAPES), tf.Variable(0)

            def step(x):
                count.assign_add(1)
                with tf.GradientTape() as tape:
                    loss = read(lambda h: relu_loss(variables, h), x, count)
                for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                    variable.assign_sub(0.1 * gradient)
                return loss

            return [*variables, count], step, [tf.constant(draws(4, 128, 128))]

        return several_gpus.compare(make, "80%", tactics=("swap",))

    found = on_gpus(reporting(program))
    planned, measured = found["planned"]["GPU:0"]
    assert found["same"] and found["report"] == []
    assert planned == measured <= found["limits"]["GPU:0"]


REFUSED = {
    "a GPU that is not there": (on_missing_gpu, "has the device GPU:7, and there are GPU:0 only"),
}


@pytest.mark.parametrize("part", REFUSED)
def test_what_has_no_place_is_refused_by_name_before_anything_runs(on_gpus, part):
    def program(_):
        def loss_of(variables, x):
            h = REFUSED[part][0](x @ variables[0])
            for variable in variables[1:]:
                h = tf.nn.relu(h @ variable)
            return tf.reduce_mean(h * h)

        variables = weights(*SHAPES)
        before = [each.numpy() for each in variables]
        step = tfswap.optimize(trained(loss_of, variables), memory_limit="60%", tactics=("swap",))
        try:
            step(tf.constant(draws(512, 128)))
        except tfswap.UnsupportedGraph as error:
            same = all((each.numpy() == value).all() for each, value in zip(variables, before, strict=True))
            return {"reported": str(error), "same": same}

    found = on_gpus(reporting(program))
    reported = REFUSED[part][1]
    assert reported in found["reported"] and found["same"] and "\n" not in found["reported"]


def placed_by_tensorflow(step, inputs):
    """By name, where TensorFlow puts the nodes of a step, which is called."""
    from tensorflow.python.eager import context

    running = context.context()
    running.enable_run_metadata()
    step(*inputs)
    made = running.export_run_metadata()
    running.disable_run_metadata()
    function = next(each for each in made.function_graphs if len(each.partition_graphs) > 1)
    return {node.name: unit(node.device) for part in function.partition_graphs for node in part.node}


PLACED = {
    "a pipeline": several_gpus.pipeline,
    "a pipeline with GELU": several_gpu_kinds.feed_forward,
    "split layers": several_gpu_kinds.split_layers,
    "replicas": several_gpus.mirrored,
    "replicas with Adam": several_gpu_kinds.adam,
    "an embedding on the CPU": several_gpus.with_the_host,
    "layers on the CPU": several_gpus.shared_with_the_host,
}


@pytest.mark.emulated_gpu(count=2)
@pytest.mark.parametrize("kind", PLACED)
def test_grappler_sees_nodes_where_tensorflow_puts_them(on_gpus, kind):
    def program(_):
        from tfswap.device.live import devices_of
        from tfswap.device.placement import tensorflow_devices
        from tfswap.importers.function import import_function
        from tfswap.runtime.captures import with_placeholders

        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        _, python_function, inputs = PLACED[kind]()
        step = tf.function(python_function)
        traced = step.get_concrete_function(*inputs)
        expected = placed_by_tensorflow(step, inputs)
        given, captured = tf.nest.flatten(inputs, expand_composites=True), with_placeholders(traced)
        graph = import_function(traced, given, {})
        found = tensorflow_devices(graph, [*given, *captured], devices_of(traced, captured)[0].model)
        computed = [node.name for node in graph if node not in graph.feeds]
        return {
            "differ": {
                name: [found[name], expected.get(name)] for name in computed if found[name] != expected.get(name)
            },
            "devices": len({found[name] for name in computed}),
        }

    found = on_gpus(program)
    assert found["differ"] == {} and found["devices"] > 1


def backwards(names=True, around=""):
    """Layers whose first half is on the second GPU, for an argument and a captured tensor on the first.

    Args:
        names: whether the kernels of layers name the devices of their variables.
        around: a device of all of the step, its gradients and updates too, except what names another.
    """
    devices = [*several_gpus.gpus()[::-1]]
    variables = []
    for i in range(8):
        with tf.device(devices[i // 4]):
            variables.append(tf.Variable(0.1 * draws(64, 64, seed=i)))
    with tf.device(devices[1]):
        x, shift = tf.constant(draws(1024, 64)), tf.constant(draws(1024, 64, seed=9))

    def loss_of(h):
        for i, variable in enumerate(variables):
            with tf.device(devices[i // 4] if names else None):
                h = tf.nn.relu(tf.sin(h @ variable + shift if i == 1 else h @ variable))
        return tf.reduce_mean(h * h)

    def step(x):
        with tf.device(around):
            return several_gpus.trained(variables, loss_of, x)

    return variables, step, [x]


HANDED = {
    "arguments and captures on another GPU than their readers": (backwards, "80%"),
    "variables on another GPU than their readers": (lambda: backwards(names=False), "100%"),
    "updates that name another GPU than their variables": (lambda: backwards(around="GPU:1"), "100%"),
}


@pytest.mark.emulated_gpu(count=2, jitter=6, kernel_us=20.0)
@pytest.mark.parametrize("kind", HANDED)
def test_what_is_on_another_gpu_than_its_reader_is_copied_by_the_plan(on_gpus, kind):
    found = on_gpus(reporting(lambda _: several_gpus.compare(*HANDED[kind])))
    assert found["same"] and found["report"] == []
    for device, (planned, measured) in found["planned"].items():
        assert planned == measured <= found["limits"][device], found


@pytest.mark.emulated_gpu(count=2, kernel_us=20.0)
def test_an_argument_that_comes_from_elsewhere_than_planned_is_counted(on_gpus):
    """It is copied before the step begins, and held during it as the caller's own."""

    def program(_):
        _, python_function, (x,) = backwards()
        step = tfswap.optimize(tf.function(python_function), memory_limit={"GPU:0": "90%", "GPU:1": "100%"})
        found = []
        for device in ("GPU:0", "GPU:1", "CPU:0", "GPU:0"):
            with tf.device(device):
                given = tf.identity(x)
            loss, peaks = several_gpus.peaks_of(lambda given=given: step(given).numpy())
            found.append([bool(loss > 0.0), *(peaks[each] <= step.plan(each).planned_peak_bytes for each in peaks)])
        return {"found": found}

    found = on_gpus(reporting(program))
    assert all(map(all, found["found"])) and found["report"] == [], found


def on_two_cpus(gpus):
    """A GPU's step with parts on two logical CPUs, which share an arena."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.device("GPU:0"):
        variables, x = several_gpus.layers(4), tf.constant(draws(512, 64))

    def loss_of(h):
        for variable in variables:
            h = tf.nn.relu(tf.sin(h @ variable))
        with tf.device("CPU:0"):
            h = tf.cos(h)
        with tf.device("CPU:1"):
            h = tf.tanh(h)
        return tf.reduce_mean(h * h)

    def step(x):
        return several_gpus.trained(variables, loss_of, x)

    limits = {"GPU:0": "90%", "CPU:0": "64MiB"}
    with pytest.raises(tfswap.UnsupportedGraph) as refused:
        tfswap.optimize(tf.function(step), memory_limit=limits)(x)
    return {"refused": str(refused.value), "runs": float(tfswap.optimize(tf.function(step), memory_limit="90%")(x))}


def test_a_part_on_another_cpu_is_not_under_the_limit_of_the_first(on_gpus):
    found = on_gpus(reporting(on_two_cpus))
    assert "runs on CPU:1 too, which shares the arena of CPU:0, and memory_limit has CPU:0" in found["refused"]
    assert found["runs"] > 0 and found["report"] == []
