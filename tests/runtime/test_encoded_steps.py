"""Steps with encodings in TensorFlow: their values, what is copied, saved models, memory."""

from __future__ import annotations

import pytest
import tensorflow as tf
from encoded_nets import Activated, EncodedNet, SwappedNets
from nets import bits, floor_of, trained, unoptimised
from processes import on_arena
from slow import slow

import tfswap
from tfswap.ir import custom_ops
from tfswap.ir.permits import TENSOR_TACTICS

ACTIVATIONS = {
    "leaky": lambda h: tf.maximum(h, 0.1 * h),
    "clipped": lambda h: tf.clip_by_value(h, -1.0, 1.0),
    "times a mask": lambda h: h * tf.cast(h > 0, tf.float32),
    "chosen": lambda h: tf.where(h > 0, h, 0.2 * h),
    "relu": lambda h: tf.maximum(h, 0.0),
    "bounded": lambda h: tf.minimum(1.0, h),
    "by the old op": lambda h: tf.raw_ops.Select(condition=h > 0, x=h, y=0.2 * h),
}


@pytest.mark.parametrize(
    "activation",
    [
        "leaky",
        "clipped",
        "times a mask",
        "chosen",
        *slow("relu", "bounded", "by the old op"),
    ],
)
def test_what_depends_on_a_predicate_waits_as_a_mask(activation):
    def program():
        net = Activated(ACTIVATIONS[activation])
        x = net.x
        odd = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 3e38, 0.0, 1.0]
        special = tf.concat([[odd * 8], x[1:77]], 0)
        floor = floor_of(net.traced(), x, tactics=("encode",))
        step = tfswap.optimize(net.traced(), memory_limit=floor + floor // 10, tactics=("encode",))
        calls = (x,), (special,), (x[:0],)
        expected, _ = unoptimised(lambda: trained(net.weights, net.start, net.traced(), *calls))
        made, peak = trained(net.weights, net.start, step, *calls)
        ops = [op.type for op in step.get_concrete_function(tf.TensorSpec(x.shape)).graph.get_operations()]
        return [made == expected, peak, floor, ops.count("Tfswap>EncodeMask"), 4 * tf.size(x).numpy().item()]

    same, peak, floor, masks, map_bytes = on_arena(program)
    assert same
    assert peak <= floor + floor // 10
    assert masks >= 4, "one for each layer"
    # The inputs of four layers stay for their weights' gradients, and of a comparison's four maps none.
    assert floor < 8.25 * map_bytes


@pytest.mark.parametrize("options", [{"tactics": TENSOR_TACTICS}, {"tactics": ("encode",)}])
def test_a_step_with_encodings_keeps_its_bits_and_its_limit(options):
    def program():
        net = EncodedNet()
        x = net.x
        reference = net.traced()
        expected, _ = unoptimised(lambda: net.run(reference, x, x, x[:5]))
        floor = floor_of(net.traced(), x, **options)
        limit = floor + floor // 10  # the arena is another by then
        step = tfswap.optimize(net.traced(), memory_limit=limit, **options)
        made, peak = net.run(step, x, x, x[:5])
        ops = [op.type for op in step.get_concrete_function(tf.TensorSpec(x.shape)).graph.get_operations()]
        return [made == expected, peak, limit, len(step.plan().encoded), sorted(set(ops)), str(step.report())]

    found = on_arena(program)
    same, peak, limit, count, ops, report = found
    assert same
    assert peak <= limit, report
    assert count == 7, report
    assert not {"ReluGrad", "Relu6Grad", "LeakyReluGrad", "MaxPoolGrad"} & set(ops)
    assert set(ops) >= custom_ops.FROM_ENCODED | {custom_ops.ENCODE_MASK, custom_ops.ENCODE_MAX_POOL}


def test_what_is_encoded_travels_so():
    """Masks in place of maps, to the same bits; and rounded floats, to the bits of those that stay."""

    def program():
        nets, both = SwappedNets(), ("swap", "encode")
        limit = nets.near_floor("masks", tactics=both)
        plain, maps = nets.run("masks", limit, tactics=("swap",))
        same, masks = nets.run("masks", limit, tactics=both)
        assert same == plain == nets.unoptimised("masks")
        both, alone = ({"tactics": tactics, "precision": "fp8"} for tactics in (both, ("encode",)))
        rounded, floats = nets.run("floats", nets.near_floor("floats", **both), **both)
        stayed, nothing = nets.run("floats", nets.near_floor("floats", **alone), **alone)
        assert rounded == stayed
        assert not nothing
        return [maps, masks, floats]

    found = on_arena(program)
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
    def made():
        net, model = EncodedNet(), tf.Module()
        model.weights, model.mixed, model.train_step = net.weights, net.mixed, net.traced()
        given, rewritten = str(tmp_path / "in"), str(tmp_path / "out")
        tf.saved_model.save(model, given)
        options = {"memory_limit": "80%", "batch_size": 32, "tactics": ("encode",)}
        report = tfswap.optimize_graph(given, rewritten, **options)
        expected = bits(unoptimised(model.train_step, net.x))
        return [len(report.encoded), expected[0].hex()]

    found = on_arena(made)
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
