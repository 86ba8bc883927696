"""Steps with oneDNN's kernels, as TensorFlow runs by default: the bits are those of the step as it was.

In processes of their own, since TensorFlow reads its setting once.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tensorflow as tf
from processes import last_json, run_python, run_together, start_python

import tfswap
from tfswap.analysis.analyse import analyse_body, analyse_dataflow
from tfswap.ir.permits import Permit
from tfswap.ir.text import parse_graph
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.kernel_memory import kernel_memory
from tfswap.kernels.target import Target
from tfswap.passes.prepare.onednn_fusion import fuse_onednn, keep_unfused
from tfswap.passes.prepare.pool_argmax import keep_gradients_unpaired, keep_pool_argmax


def grappler_off():
    """Grappler makes other kernels of a step."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def trained(net, optimizer, batch, limit):
    """What three steps leave, and their peak; and the step."""
    optimizer.build(net.trainable_variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, net(images, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True)
        )
        return loss

    step = tfswap.optimize(step, memory_limit=limit) if limit else tf.function(step)
    tf.config.experimental.reset_memory_stats("CPU:0")
    bits = [step(*batch).numpy().tobytes().hex() for _ in range(3)]
    bits += [v.numpy().tobytes().hex() for v in (*net.variables, *optimizer.variables)]
    return {"bits": bits, "peak": tf.config.experimental.get_memory_info("CPU:0")["peak"]}, step


def convolutional(limit):
    keras = tf.keras
    grappler_off()
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((24, 24, 3))])
    for width, strides in ((16, 1), (32, 1), (32, 2), (24, 1)):
        net.add(keras.layers.Conv2D(width, 3, strides=strides, padding="same", activation="relu"))
        net.add(keras.layers.BatchNormalization())
    net.add(keras.layers.GlobalAveragePooling2D())
    net.add(keras.layers.Dense(10))
    batch = tf.random.stateless_normal((16, 24, 24, 3), (1, 2)), tf.range(16) % 10
    found, _step = trained(net, keras.optimizers.SGD(0.1, momentum=0.9), batch, limit)
    found["joined"] = 0
    if limit:
        from tensorflow.python.eager import context

        found["joined"] = sum(
            node.op == "_MklNativeConv2DBackpropFilterWithBias"
            for name in context.context().list_function_names()
            for node in context.context().get_function_def(name).node_def
        )
    return found


def test_the_bits_are_those_of_the_step_as_it_was():
    setting = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "256", "TF_ENABLE_ONEDNN_OPTS": "1"}
    programs = [lambda limit=limit: convolutional(limit) for limit in (None, "60%")]
    plain, planned = map(last_json, run_together(programs, **setting))
    assert planned["joined"] == 4
    assert planned["peak"] < plain["peak"]
    assert planned["bits"] == plain["bits"]


def pooling(limit):
    keras = tf.keras
    grappler_off()
    keras.utils.set_random_seed(1)
    slab = tf.raw_ops.Empty(shape=[250, 2**20], dtype=tf.uint8)
    del slab
    h = images = keras.Input((32, 32, 3))
    for width, window, strides in ((32, 3, 2), (32, 3, 1), (48, 2, 2), (48, 3, 1)):
        h = keras.layers.Conv2D(width, 3, padding="same", activation="relu")(h)
        pooled = keras.layers.MaxPooling2D(window, strides, "same")(h)
        h = pooled if strides > 1 else keras.layers.Concatenate()([h, pooled])
    net = keras.Model(images, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(h)))
    batch = tf.random.stateless_normal((64, 32, 32, 3), (1, 2)), tf.range(64) % 10
    found, step = trained(net, keras.optimizers.SGD(0.1), batch, limit)
    return found | {"planned": step.report().planned_peak_bytes if limit else None}


def test_what_a_pooling_keeps_for_its_gradient_is_planned():
    """oneDNN keeps where each maximum lies, a byte each, from the forward pass on (passes/prepare/pool_argmax.py)."""
    setting = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "256", "TF_ENABLE_ONEDNN_OPTS": "1"}
    programs = [lambda limit=limit: pooling(limit) for limit in (None, "85%", "70%")]
    plain, *planned = map(last_json, run_together(programs, **setting))
    for one in planned:
        assert one["bits"] == plain["bits"]
        assert one["peak"] <= one["planned"] < 1.02 * one["peak"]


# A bias may be added by the convolution's kernel, and the sum is rounded once then.
def joined(kind, limit):
    keras = tf.keras
    keras.mixed_precision.set_global_policy("mixed_bfloat16" if kind == "bfloat16" else "float32")
    if kind == "frozen":
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    keras.utils.set_random_seed(1)
    h = images = keras.Input((32, 32, 3))
    for width in (16, 32, 32):
        h = keras.layers.Conv2D(width, 3, padding="same", activation="relu", bias_initializer="random_normal")(h)
        pooled = keras.layers.MaxPooling2D(3, 1 if kind == "pools" else 2, "same")(h)
        h = keras.layers.Concatenate()([h, pooled]) if kind == "pools" else pooled
    if kind == "added":  # both biases have one gradient, which the pass joins with one of the two filters'
        for width in (32, 24):
            h = keras.layers.ReLU()(h)
            twice = keras.layers.Conv2D(width, 3, padding="same")(keras.layers.Conv2D(32, 3, padding="same")(h))
            h = keras.layers.Add()([twice, keras.layers.Conv2D(width, 1)(h)])
    h = keras.layers.Conv2D(8, 3)(keras.layers.ZeroPadding2D()(h))
    h = keras.layers.Flatten()(h) if kind == "frozen" else keras.layers.GlobalAveragePooling2D()(h)
    net = keras.Model(images, keras.layers.Dense(10, dtype="float32")(h))
    for layer in net.layers[: len(net.layers) - 1 if kind == "frozen" else 0]:
        layer.trainable = False
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    images, labels = tf.random.stateless_normal((32, 32, 32, 3), (1, 2)), tf.range(32) % 10
    weights = net.trainable_variables

    def forward(images):
        return net(images, training=True)

    def both(images):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, net(images, training=True))
        return loss, tape.gradient(loss, weights)

    traced_both = kind not in ("pools", "outside")
    traced = both if traced_both else forward
    traced = tfswap.optimize(traced, memory_limit=limit) if limit else tf.function(traced)

    def step():
        if traced_both:
            return traced(images)
        with tf.GradientTape() as tape:
            loss = loss_of(labels, traced(images))
        return loss, tape.gradient(loss, weights)

    for _ in range(2):
        loss, slopes = step()
    return [t.numpy().tobytes().hex() for t in (loss, *slopes)]


@pytest.mark.parametrize(
    ("kind", "limit"), [("bfloat16", "80%"), ("frozen", "96%"), ("outside", "80%"), ("pools", "60%"), ("added", "80%")]
)
def test_the_bits_are_those_of_kernels_that_tensorflow_joins(kind, limit):
    """A convolution with its bias, a pool with its gradient; and what TensorFlow runs apart stays so in every order."""
    if kind == "bfloat16" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("oneDNN has no kernels of bfloat16 for this processor")
    setting = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "256", "TF_ENABLE_ONEDNN_OPTS": "1"}
    programs = [lambda one=one: joined(kind, one) for one in (None, limit)]
    plain, planned = map(last_json, run_together(programs, **setting))
    assert planned == plain


def volumes(limit):
    keras = tf.keras
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((8, 16, 16, 3))])
    for width in (8, 16):
        net.add(keras.layers.ZeroPadding3D(1))
        net.add(keras.layers.Conv3D(width, 3, activation="relu", bias_initializer="random_normal", trainable=False))
        net.add(keras.layers.Conv3D(width, 3, padding="same", trainable=False))
    net.add(keras.layers.Reshape((2048, 16)))  # which TensorFlow checks
    for _ in range(6):
        net.add(keras.layers.Dense(16, activation="relu"))
    net.add(keras.layers.Flatten())
    net.add(keras.layers.Dense(10))
    batch = tf.random.stateless_normal((16, 8, 16, 16, 3), (1, 2)), tf.range(16) % 10
    found, step = trained(net, keras.optimizers.SGD(0.01), batch, limit)
    return [found["bits"], found["peak"], step.plan().planned_peak_bytes if limit else 0]


def test_volumes_that_are_padded_inside_of_a_fused_kernel_are_as_large_as_traced():
    """TensorFlow infers the shape of such a kernel's result as if there were no padding."""
    setting = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "512", "TF_ENABLE_ONEDNN_OPTS": "1"}
    programs = [lambda limit=limit: volumes(limit) for limit in (None, "75%")]
    ended = run_together(programs, **setting)
    assert "planned as it was traced" not in ended[1].stderr
    (plain, _, _), (bits, peak, planned) = map(last_json, ended)
    assert bits == plain
    assert peak <= planned < 1.01 * peak


ATTRS = '{T=float32, strides=[1,1,1,1], padding=b"VALID", data_format=b"NHWC"}'
CONVOLUTIONS = f"""
%x = Placeholder() {{dtype=float32}} -> float32[8,16,16,32]
%w = Placeholder() {{dtype=float32}} -> float32[3,3,32,32]
%b = Placeholder() {{dtype=float32}} -> float32[32]
%two = Const() -> int32[4,2] = (0, 0, 1, 1, 1, 1, 0, 0)
%one = Conv2D(%x, %w) {ATTRS} -> float32[8,14,14,32]
%biased = BiasAdd(%one, %b) {{T=float32}} -> float32[8,14,14,32]
%pad = Pad(%biased, %two) {{T=float32, Tpaddings=int32}} -> float32[8,16,16,32]
%padded = Conv2D(%pad, %w) {ATTRS} -> float32[8,14,14,32]
%behind = BiasAdd(%padded, %b) {{T=float32}} -> float32[8,14,14,32]
%read = Conv2D(%x, %w) {ATTRS} -> float32[8,14,14,32]
%again = BiasAdd(%read, %b) {{T=float32}} -> float32[8,14,14,32]
%sum = AddV2(%read, %again) {{T=float32}} -> float32[8,14,14,32]
feeds %x, %w, %b
fetches %behind, %sum
"""
ONEDNN = DeviceModel("cpu", onednn=True)


def test_what_the_processor_has_no_kernels_of_onednn_s_for_is_not_joined():
    """And takes what TensorFlow's own kernels take."""
    text = CONVOLUTIONS.replace("float32", "bfloat16")
    without = ONEDNN._replace(onednn_dtypes=("float32",))
    with_both = ONEDNN._replace(onednn_dtypes=("bfloat16", "float16", "float32"))
    assert fuse_onednn(parse_graph(text), Target(without)) == keep_unfused(parse_graph(text), Target(without)) == 0
    for each in (text, CONVOLUTIONS):
        assert fuse_onednn(parse_graph(each), Target(with_both)) == 2
    pixels, filters = TensorType("bfloat16", (8, 14, 14, 32)), TensorType("bfloat16", (3, 3, 32, 32))
    attrs = {"T": "bfloat16", "strides": (1, 1, 1, 1), "padding": b"VALID"}

    def taken(device):
        return kernel_memory("Conv2D", attrs, [pixels, filters], [pixels], device)

    assert taken(without) == taken(DeviceModel("cpu")) != taken(with_both)


def test_a_pad_or_else_a_bias_goes_into_the_convolution_that_nothing_else_reads():
    graph = parse_graph(CONVOLUTIONS)
    assert fuse_onednn(graph, Target(DeviceModel("cpu"))) == 0
    graph.add_control(graph["sum"], graph["one"])
    assert fuse_onednn(graph, Target(ONEDNN)) == 2
    graph.prune()
    assert {"one", "pad"}.isdisjoint(node.name for node in graph)
    assert graph["biased"].op == "_MklNativeConv2DWithBias"
    assert [read.name for read in graph["biased"].inputs] == ["x:0", "w:0", "b:0"]
    assert graph["sum"].controls == (graph["biased"],)
    assert graph["padded"].op == "_MklNativePadWithConv2D"
    assert [read.name for read in graph["padded"].inputs] == ["biased:0", "w:0", "two:0"]
    assert graph["padded"].attrs["Tpaddings"] == "int32"
    assert (graph["behind"].op, graph["again"].op) == ("BiasAdd", "BiasAdd")
    assert keep_unfused(graph, Target(ONEDNN)) == 0


def test_what_is_waited_for_or_read_in_vain_stays_as_it_is():
    graph = parse_graph(CONVOLUTIONS)
    graph.read_in_vain = frozenset({"one:0"})  # by a node that TensorFlow's passes still see
    graph.add_control(graph["b"], graph["padded"])  # so that the bias comes after the convolution
    graph.add_control(graph["b"], graph["pad"])
    assert fuse_onednn(graph.copy(), Target(ONEDNN)) == 0
    assert fuse_onednn(parse_graph(CONVOLUTIONS), Target(ONEDNN)) == 2


def test_gradients_of_16_bit_floats_are_onednn_s_too():
    """TensorFlow's own would take a column buffer, of up to 30 MiB."""
    sizes, image = TensorType("int32", (4,)), TensorType("bfloat16", (32, 32, 32, 16))
    kernel, padding = TensorType("bfloat16", (3, 3, 16, 16)), {"padding": b"SAME"}
    inputs = image, sizes, image

    def most(device):
        events = kernel_memory("Conv2DBackpropFilter", padding, inputs, (kernel,), device).events
        return max(size for kind, size in events if kind == "temp")

    assert most(ONEDNN) < 2**20 < most(ONEDNN._replace(onednn_dtypes=("float32",)))


@pytest.mark.parametrize("op", ["_FusedConv2D", "_MklNativeFusedConv2D", "_MklNativePadWithFusedConv2D"])
def test_what_a_fused_kernel_adds_is_written_over(op):
    image, kernel, bias = (TensorType("float32", shape) for shape in ((8, 14, 14, 32), (1, 1, 32, 32), (32,)))

    def forward(*fused, device=ONEDNN):
        inputs = (image, kernel, bias, image)[: 2 + len([f for f in fused if f != b"Relu"])]
        return kernel_memory(op, {"fused_ops": fused}, inputs, (image,), device).forward

    assert forward(b"BiasAdd", b"Add", b"Relu") == ((0, (3,)),)
    assert forward(b"BiasAdd", b"Relu") == ()
    assert forward(b"BiasAdd", b"Add", device=DeviceModel("cpu")) == ()


def test_what_was_planned_as_two_stays_apart():
    graph = parse_graph(CONVOLUTIONS)
    assert keep_unfused(graph, Target(ONEDNN)) == 3
    for name in ("biased", "padded", "behind"):
        assert graph[name].inputs[0].node.op == "Tfswap>Defer"
    assert keep_unfused(graph, Target(ONEDNN)) == 0


@pytest.mark.parametrize("op", ["Conv2DBackpropInput", "Conv2DBackpropFilter"])
def test_gradients_with_explicit_padding_are_tensorflows_own(op):
    sizes, image, window = TensorType("int32", (4,)), TensorType("float32", (8, 40, 40, 16)), (3, 3, 16, 16)
    kernel, gradient = TensorType("float32", window), TensorType("float32", (8, 40, 38, 16))
    inputs, result = ((sizes, kernel, gradient), image) if op.endswith("Input") else ((image, sizes, gradient), kernel)
    same, explicit = (
        kernel_memory(op, {"padding": padding}, inputs, (result,), ONEDNN) for padding in (b"SAME", b"EXPLICIT")
    )
    own = kernel_memory(op, {"padding": b"EXPLICIT"}, inputs, (result,), DeviceModel("cpu"))
    assert explicit.events == own.events != same.events


WINDOW = '{T=float32, ksize=[1,2,2,1], strides=[1,2,2,1], padding=b"SAME", data_format=b"NHWC"}'
POOLED = f"""
%x = Placeholder() {{dtype=float32}} -> float32[8,16,16,32]
%g = Placeholder() {{dtype=float32}} -> float32[8,8,8,32]
%p = MaxPool(%x) {WINDOW} -> float32[8,8,8,32]
%i = Identity(%p) {{T=float32}} -> float32[8,8,8,32]
"""


def test_only_gradients_that_read_what_a_pooling_made_take_its_places():
    text = f"""{POOLED}
%direct = MaxPoolGrad(%x, %p, %g) {WINDOW} -> float32[8,16,16,32]
%other = MaxPoolGrad(%x, %i, %g) {WINDOW} -> float32[8,16,16,32]
feeds %x, %g
fetches %direct, %other
"""
    graph = parse_graph(text)
    assert keep_pool_argmax(graph, Target(DeviceModel("cpu"))) == 0
    assert keep_pool_argmax(graph, Target(ONEDNN)) == 1
    ops = {node.name: node.op for node in graph}
    assert (ops["p"], ops["direct"], ops["other"]) == ("_MklNativeMaxPool", "_MklNativeMaxPoolGrad", "MaxPoolGrad")
    (pool,) = (node for node in graph if node.name == "p")
    assert pool.outputs[1].nbytes == 8 * 8 * 8 * 32


def test_a_gradient_whose_pool_runs_again_is_not_paired_with_it():
    text = f"""{POOLED}
%grad = MaxPoolGrad(%x, %i, %g) {WINDOW} -> float32[8,16,16,32]
feeds %x, %g
fetches %grad
"""
    before, graph = parse_graph(text), parse_graph(text.replace("%i, %g)", "%p, %g)"))
    assert keep_gradients_unpaired(before.copy(), Target(ONEDNN), before) == 0
    assert keep_gradients_unpaired(graph.copy(), Target(ONEDNN), graph) == 0
    assert keep_gradients_unpaired(graph, Target(ONEDNN), before) == 1
    assert graph["grad"].inputs[1].node.op == "Tfswap>Defer"


@pytest.mark.parametrize(
    ("layout", "window", "shape", "device", "places"),
    [
        ("NHWC", (1, 3, 3, 1), (8, 8, 8, 32), "", 8 * 8 * 8 * 32),
        ("NHWC", (1, 3, 3, 1), (8, 8, 8, 32), "/device:CPU:0", 8 * 8 * 8 * 32),
        ("NHWC", (1, 3, 3, 1), (8, 8, 8, 32), "/device:CPU:1", None),
        ("NCHW", (1, 1, 3, 3), (8, 32, 8, 8), "", 8 * 8 * 8 * 32),
        ("NCHW", (1, 3, 3, 1), (8, 32, 8, 8), "", None),  # over channels
        ("NHWC", (1, 16, 16, 1), (8, 8, 8, 32), "", 4 * 8 * 8 * 8 * 32),
        ("NDHWC", (1, 2, 2, 2, 1), (2, 4, 8, 8, 32), "", 2 * 4 * 8 * 8 * 32),
    ],
)
def test_places_are_kept_where_tensorflow_would_keep_them(layout, window, shape, device, places):
    sizes, ones = ",".join(map(str, window)), ",".join("1" * len(window))
    op = "MaxPool3D" if len(window) == 5 else "MaxPool"
    attrs = f'{{T=float32, ksize=[{sizes}], strides=[{ones}], padding=b"SAME", data_format=b"{layout}"}}'
    kind = f"float32[{','.join(map(str, shape))}]"
    graph = parse_graph(
        f"""
%x = Placeholder() {{dtype=float32}} -> {kind}
%p = {op}(%x) {attrs} -> {kind}
%g = {op}Grad(%x, %p, %x) {attrs} -> {kind}
feeds %x
fetches %g
"""
    )
    (pool,) = (node for node in graph if node.name == "p")
    pool.device = device
    graph.restrict(pool.out(), Permit(frozenset(), "so"))
    assert keep_pool_argmax(graph, Target(ONEDNN)) == (places is not None)
    if places is not None:
        assert pool.outputs[1].nbytes == places
        assert not graph.permits[pool.out(1)].tactics


def test_a_loop_s_body_has_tensorflow_s_own_kernels():
    """oneDNN's pass does not see into it; their gradients' column buffers are far larger."""
    assert ONEDNN.in_bodies == DeviceModel("cpu")
    text = """
%x = Placeholder() {dtype=float32} -> float32[8,16,16,32]
%k = Placeholder() {dtype=float32} -> float32[3,3,32,32]
%c = Conv2D(%x, %k) {T=float32, strides=[1,1,1,1], padding=b"SAME", data_format=b"NHWC"} -> float32[8,16,16,32]
feeds %x, %k
fetches %c
"""
    own = analyse_dataflow(parse_graph(text), DeviceModel("cpu")).events
    assert analyse_body(parse_graph(text), ONEDNN).events == own
    assert analyse_dataflow(parse_graph(text), ONEDNN).events != own


DEFAULT = """
import json, os
os.environ.pop("TF_ENABLE_ONEDNN_OPTS", None)
import tensorflow as tf
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # too late: TensorFlow has decided
from tensorflow.python.eager import context
from tfswap.device.machine import current_device
context.context().enable_run_metadata()
tf.function(lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"))(tf.ones((1, 8, 8, 16)), tf.ones((3, 3, 16, 16)))
graphs = context.context().export_run_metadata().partition_graphs
made = any(node.op.startswith("_Mkl") for graph in graphs for node in graph.node)
device = current_device()
os.environ["TF_NUM_INTRAOP_THREADS"] = "7"  # too late as well
print(json.dumps([made, device[1].onednn, current_device() == device]))
"""


def test_the_default_is_tensorflow_s_own_on_this_cpu():
    made, taken, kept = last_json(run_python(DEFAULT))
    assert made == taken
    assert kept


def products():
    from tfswap.device.machine import current_device
    from tfswap.importers.function import import_function

    tf.config.threading.set_intra_op_parallelism_threads(2)
    device = current_device()[1]
    bounds = {}
    for number, (x, y, first, second) in enumerate(
        (
            ((16, 256, 256), (16, 256, 32), True, False),  # as the gradients of attention are
            ((16, 256, 256), (16, 32, 256), True, True),
            ((16, 256, 256), (16, 256, 32), False, False),
            ((4, 512, 512), (4, 512, 512), True, True),
        )
    ):
        name = f"product_{number}"

        @tf.function
        def function(a, b, first=first, second=second, name=name):
            return tf.raw_ops.BatchMatMulV2(x=a, y=b, adj_x=first, adj_y=second, name=name)

        concrete = function.get_concrete_function(tf.TensorSpec(x), tf.TensorSpec(y))
        (node,) = [each for each in import_function(concrete) if each.name == name]
        memory = kernel_memory(node.op, node.attrs, [t.type for t in node.inputs], list(node.outputs), device)
        bounds[name] = [node.outputs[0].nbytes, sum(size for kind, size in memory.events if kind == "temp")]
        function(tf.zeros(x), tf.zeros(y)).numpy()
    return bounds


def test_batched_products_take_no_more_scratch_than_is_planned():
    arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "256", "TF_ENABLE_ONEDNN_OPTS": "1"}
    process = start_python(products, **arena, TF_CPP_VMODULE="log_memory=2", TF_CPP_MIN_LOG_LEVEL="0")
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    for name, (output_bytes, scratch_bytes) in json.loads(out.splitlines()[-1]).items():
        found = re.findall(rf'MemoryLogTensorAllocation .*kernel_name: "{name}" .*requested_bytes: (\d+)', errors)
        asked = [int(size) for size in found]
        asked.remove(output_bytes)
        assert sum(asked) <= scratch_bytes
