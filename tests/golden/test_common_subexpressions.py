"""Nodes that TensorFlow merges before it runs a step are merged in the planned step too: sums keep their bits."""

from __future__ import annotations

from processes import last_json, run_forked

from tfswap.ir import op_traits


def program():
    import numpy as np
    import tensorflow as tf

    import tfswap

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    x = tf.constant(np.random.default_rng(0).normal(size=(64, 4096)), tf.float32)

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            h = tf.exp(x)
            # h * h is the last of h's readers, so its gradient's two equal halves are the first that are added.
            loss = tf.reduce_sum(tf.sin(h)) + tf.reduce_sum(tf.cos(7 * h)) + tf.reduce_sum(h * h)
        return tape.gradient(loss, x)

    plain = tf.function(gradient)
    assert [len(op.inputs) for op in plain.get_concrete_function(x).graph.get_operations() if op.type == "AddN"] == [4]
    ordered = tfswap.optimize(tf.function(gradient), memory_limit="95%")
    same = ordered(x).numpy().tobytes() == plain(x).numpy().tobytes()
    assert not ordered.plan().changes_nothing
    assert same


def commutative():
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session

    found = op_def_pb2.OpList()
    found.ParseFromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    return [op.name for op in found.op if op.is_commutative]


def test_a_sum_starts_where_tensorflow_starts_it():
    run_forked(program)


def test_commutative_ops_are_those_of_tensorflow():
    known = sorted(name for name in last_json(run_forked(commutative)) if op_traits.is_known(name))
    assert sorted(op for op in known if op_traits.is_commutative(op)) == known
