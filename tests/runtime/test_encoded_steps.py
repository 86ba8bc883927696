"""Steps with encodings in TensorFlow: their values, what is copied, saved models, memory."""

from __future__ import annotations

import pytest
from processes import on_arena
from slow import slow

from tfswap.ir import custom_ops

NET = """
import json
import numpy as np
import tensorflow as tf
import tfswap
from nets import bits, floor_of, trained, unoptimised

slab = tf.raw_ops.Empty(shape=[500 << 20], dtype=tf.uint8)
del slab
weights = [tf.Variable(tf.random.stateless_normal([3, 3, 8, 8], seed=(i, 1)) * 0.2) for i in range(6)]
start = [w.numpy() for w in weights]
mixed = tf.Variable(tf.random.stateless_normal([12 * 12 * 8] * 2, seed=(9, 9)) * 0.03)

def forward(x):
    h = tf.nn.relu(tf.nn.conv2d(x, weights[0], 1, "SAME"))
    h = tf.nn.max_pool2d(h, 2, 2, "VALID")
    h = tf.nn.conv2d(h, weights[1], 1, "SAME")
    h = tf.nn.relu6(3 * h) + tf.nn.leaky_relu(h, 0.1)
    h = tf.nn.experimental.stateless_dropout(h, 0.3, seed=[1, 2])
    h = tf.nn.max_pool2d(tf.nn.conv2d(h, weights[2], 1, "SAME"), 3, 2, "SAME")
    h = tf.reshape(tf.nn.relu(tf.nn.conv2d(h, weights[3], 1, "SAME")), [-1, 12 * 12 * 8])
    for _ in range(8):  # for so long everything waits
        h = h @ mixed
    return tf.reduce_mean(h**2)

def train(x):
    with tf.GradientTape() as tape:
        loss = forward(x)
    for w, g in zip(weights, tape.gradient(loss, weights[:4])):
        w.assign_sub(0.1 * g)
    return loss

def run(function, *batches):
    return trained(weights, start, function, *((x,) for x in batches))

x = tf.random.stateless_normal([32, 48, 48, 8], seed=(3, 3))
signature = [tf.TensorSpec([None, 48, 48, 8])]
"""


PREDICATES = """
import json
import tensorflow as tf
from nets import floor_of, trained, unoptimised
import tfswap

slab = tf.raw_ops.Empty(shape=[400 << 20], dtype=tf.uint8)
del slab
weights = [tf.Variable(tf.random.stateless_normal([64, 64], seed=(i, 1)) * 0.2) for i in range(4)]
start = [w.numpy() for w in weights]

def train(x):
    with tf.GradientTape() as tape:
        h = x
        for w in weights:
            h = activation(h @ w) + x
            # The activation's result is not needed.
            h = tf.reshape(tf.reduce_sum(tf.reshape(h, [-1, 8, 8, 1]), 3, True) * 0.5, [-1, 64]) + x
        loss = tf.reduce_mean(h * h)
    for w, g in zip(weights, tape.gradient(loss, weights)):
        w.assign_sub(0.01 * g)
    return loss

def traced():
    return tf.function(train, input_signature=[tf.TensorSpec([None, 64])])

x = tf.random.stateless_normal([1 << 14, 64], seed=(3, 3))
special = tf.concat([[[float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 3e38, 0.0, 1.0] * 8], x[1:77]], 0)
"""


@pytest.mark.parametrize(
    "activation",
    [
        "tf.maximum(h, 0.1 * h)",
        "tf.clip_by_value(h, -1.0, 1.0)",
        "h * tf.cast(h > 0, tf.float32)",
        "tf.where(h > 0, h, 0.2 * h)",
        *slow("tf.maximum(h, 0.0)", "tf.minimum(1.0, h)", "tf.raw_ops.Select(condition=h > 0, x=h, y=0.2 * h)"),
    ],
)
def test_what_depends_on_a_predicate_waits_as_a_mask(activation):
    pytest.importorskip("tensorflow")
    same, peak, floor, masks, map_bytes = on_arena(
        f"activation = lambda h: {activation}"
        + PREDICATES
        + """
floor = floor_of(traced(), x, tactics=("encode",))
step = tfswap.optimize(traced(), memory_limit=floor + floor // 10, tactics=("encode",))
calls = (x,), (special,), (x[:0],)
expected, _ = unoptimised(lambda: trained(weights, start, traced(), *calls))
made, peak = trained(weights, start, step, *calls)
ops = [op.type for op in step.get_concrete_function(tf.TensorSpec(x.shape)).graph.get_operations()]
print(json.dumps([made == expected, peak, floor, ops.count("Tfswap>EncodeMask"), 4 * tf.size(x).numpy().item()]))
"""
    )
    assert same
    assert peak <= floor + floor // 10
    assert masks >= 4, "one for each layer"
    # The inputs of four layers stay for their weights' gradients, and of a comparison's four maps none.
    assert floor < 8.25 * map_bytes


@pytest.mark.parametrize("asked", ["", ', tactics=("encode",)'])
def test_a_step_with_encodings_keeps_its_bits_and_its_limit(asked):
    pytest.importorskip("tensorflow")
    found = on_arena(
        NET
        + f"""
reference = tf.function(train, input_signature=signature)
expected, _ = unoptimised(lambda: run(reference, x, x, x[:5]))
floor = floor_of(tf.function(train, input_signature=signature), x{asked})
limit = floor + floor // 10  # the arena is another by then
step = tfswap.optimize(tf.function(train, input_signature=signature), memory_limit=limit{asked})
made, peak = run(step, x, x, x[:5])
ops = [op.type for op in step.get_concrete_function(tf.TensorSpec([32, 48, 48, 8])).graph.get_operations()]
print(json.dumps([made == expected, peak, limit, len(step.plan().encoded), sorted(set(ops)), str(step.report())]))
"""
    )
    same, peak, limit, count, ops, report = found
    assert same
    assert peak <= limit, report
    assert count == 7, report
    assert not {"ReluGrad", "Relu6Grad", "LeakyReluGrad", "MaxPoolGrad"} & set(ops)
    assert set(ops) >= custom_ops.FROM_ENCODED | {custom_ops.ENCODE_MASK, custom_ops.ENCODE_MAX_POOL}


# Steps of which the gradients need only the signs of the maps, and steps whose products read the maps.
SWAPPED = """
import json
import tensorflow as tf
import tfswap
from nets import bits, floor_of, trained, unoptimised

slab = tf.raw_ops.Empty(shape=[500 << 20], dtype=tf.uint8)
del slab
shapes = {"masks": [1024], "floats": [128, 128]}
weights = {name: [tf.Variable(tf.random.stateless_normal(shape, seed=(i, 1)) * 0.1) for i in range(12)]
           for name, shape in shapes.items()}
start = {name: [w.numpy() for w in each] for name, each in weights.items()}
layers = {"masks": lambda h, w: h + tf.nn.relu(tf.roll(h, 1, 1) + w), "floats": lambda h, w: tf.tanh(h @ w)}

def made(name):
    def train(x):
        with tf.GradientTape() as tape:
            h = x
            for w in weights[name]:
                h = layers[name](h, w)
            loss = tf.reduce_mean(h)
        for w, g in zip(weights[name], tape.gradient(loss, weights[name])):
            w.assign_sub(g)
        return loss
    return tf.function(train)

def run(name, limit=None, **options):
    x = tf.random.stateless_normal([512, 1024] if name == "masks" else [4096, 128], seed=(3, 3))
    step = made(name)
    if limit is None:
        return unoptimised(lambda: trained(weights[name], start[name], step, (x,), (x,)))[0]
    if limit == "floor":
        floor = floor_of(step, x, **options)
        return floor + floor // 50
    step = tfswap.optimize(step, memory_limit=limit, **options)
    found, peak = trained(weights[name], start[name], step, (x,), (x,))
    stays, stats = step.plan().evictions, step.stats()
    assert stats.out_bytes == sum(s.nbytes for s in stays if s.out is not None)
    assert stats.in_bytes == sum(s.nbytes for s in stays)
    assert peak <= limit
    return found, {s.tensor: s.nbytes for s in stays}
"""


def test_what_is_encoded_travels_so():
    """Masks in place of maps, to the same bits; and rounded floats, to the bits of those that stay."""
    pytest.importorskip("tensorflow")
    found = on_arena(
        SWAPPED
        + """
both = ("swap", "encode")
limit = run("masks", "floor", tactics=both)
plain, maps = run("masks", limit, tactics=("swap",))
same, masks = run("masks", limit, tactics=both)
assert same == plain == run("masks")
both, alone = ({"tactics": tactics, "precision": "fp8"} for tactics in (both, ("encode",)))
rounded, floats = run("floats", run("floats", "floor", **both), **both)
stayed, nothing = run("floats", run("floats", "floor", **alone), **alone)
assert rounded == stayed
assert not nothing
print(json.dumps([maps, masks, floats]))
"""
    )
    maps, masks, floats = (
        {name: nbytes for name, nbytes in each.items() if kind in name and not name.startswith("gradient")}
        for each, kind in zip(found, ("Relu", "Relu", "Tanh_"), strict=True)
    )
    assert {name.partition("_")[0] for name in maps} == {"Relu:0", "Relu"}
    assert set(maps.values()) == {512 * 1024 * 4}
    assert {name.rpartition("/")[2] for name in masks} == {"EncodeMask:0"}
    assert set(masks.values()) == {512 * 1024 // 8}
    assert {name.rpartition("/")[2] for name in floats} == {"EncodeFloats:0"}
    assert set(floats.values()) == {4096 * 128}


def test_a_saved_model_with_encodings_says_what_to_import(tmp_path):
    pytest.importorskip("tensorflow")
    found = on_arena(
        NET
        + f"""
class Model(tf.Module):
    def __init__(self):
        super().__init__()
        self.weights, self.mixed = weights, mixed
        self.train_step = tf.function(train, input_signature=signature)

model = Model()
tf.saved_model.save(model, {str(tmp_path / "in")!r})
report = tfswap.optimize_graph(
    {str(tmp_path / "in")!r}, {str(tmp_path / "out")!r}, memory_limit="80%", batch_size=32, tactics=("encode",))
expected = bits(unoptimised(model.train_step, x))
print(json.dumps([len(report.encoded), expected[0].hex()]))
"""
    )
    count, expected = found
    assert count == 6
    text = (tmp_path / "out" / "README.txt").read_text()
    assert "import tfswap.ops.codecs" in text

    def program():
        import tensorflow as tf
        from nets import bits

        from tfswap.frontends.verify_model import verify_model

        verify_model(str(tmp_path / "out"))
        model = tf.saved_model.load(str(tmp_path / "out"))
        return bits(model.train_step(tf.random.stateless_normal([32, 48, 48, 8], seed=(3, 3))))[0].hex()

    loaded = on_arena(program)
    assert loaded == expected


def test_the_codecs_are_loaded_for_plans_that_use_them_only():
    pytest.importorskip("tensorflow")

    def program():
        import tensorflow as tf
        from nets import Net, batch

        import tfswap
        from tfswap.native import build
        from tfswap.native.load import status

        net = Net()
        step = tfswap.optimize(tf.function(net.step), memory_limit="75%")
        step(batch())
        return [len(step.plan().encoded), len(step.plan().order) > 0, status(build.CODECS).loaded]

    found = on_arena(program)
    assert found == [0, True, False]


def test_relus_and_gradients_from_masks_write_over_what_they_are_given():
    pytest.importorskip("tensorflow")

    def program():
        import tensorflow as tf

        import tfswap.ops.codecs as codecs

        x = tf.random.stateless_normal([1 << 20], seed=(1, 2))
        mask, shape = codecs.encode_mask(x, "positive"), tf.constant([1 << 20])
        peaks = {}
        for name, work in {
            "relu": tf.nn.relu,
            "relu6": tf.nn.relu6,
            "leaky relu": tf.nn.leaky_relu,
            "relu's gradient": lambda y: codecs.multiply_by_mask(y, mask),
            "leaky relu's": lambda y: codecs.leaky_relu_grad_from_mask(y, mask),
            "choice": lambda y: codecs.select_by_mask(mask, y, 0.0, shape),
        }.items():
            function = tf.function(lambda work=work: tf.reduce_sum(work(tf.exp(x))), autograph=False)
            function()
            tf.config.experimental.reset_memory_stats("CPU:0")
            before = tf.config.experimental.get_memory_info("CPU:0")["current"]
            function()
            peaks[name] = (tf.config.experimental.get_memory_info("CPU:0")["peak"] - before) >> 20
        return peaks

    found = on_arena(program)
    assert len(found) == 6
    assert set(found.values()) == {4}  # MiB: one map, not two
