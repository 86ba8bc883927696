"""Smallest limits of convolutional nets with channels last on emulated GPUs, whose kernels copy filters and images.

The copies are those of TensorFlow's GPU kernels (csrc/temporaries.cc), which tfswap counts: a net takes what it is
refused below.
"""

from __future__ import annotations

import re

import pytest
import tensorflow as tf
from gpu_compare import check, compare, draws, reporting

import tfswap


def plain(variables, x):
    for kernel in variables:
        x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
    return tf.reduce_mean(x * x)


def strided(variables, x):
    x = tf.nn.relu(tf.nn.conv2d(x, variables[0], 2, "SAME"))
    for kernel in variables[1:]:
        x += tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
    return tf.reduce_mean(x * x)


def pooled(variables, x):
    for kernel in variables:
        x = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "VALID")), 2, 2, "VALID")
    return tf.reduce_mean(x * x)


# By net: filters, and the images' shape.
NETS = {
    plain: ([[3, 3, 16, 16]] * 5, (8, 32, 32, 16)),
    strided: ([[5, 5, 8, 16], *[[3, 3, 16, 16]] * 4], (8, 48, 48, 8)),
    pooled: ([[3, 3, 4, 16], [3, 3, 16, 32], [3, 3, 32, 64]], (8, 48, 48, 4)),
}


def smallest(net):
    """A program that finds the net's smallest limit, by what refuses a smaller one."""

    def program(gpus):
        filters, images = NETS[net]
        try:
            compare(gpus, net, filters, draws(*images), limit=4096)
        except tfswap.InfeasibleMemoryLimit as error:
            return {"floor": error.floor_bytes}

    return program


@pytest.mark.parametrize("net", NETS)
def test_a_net_takes_what_it_is_refused_below(on_gpus, net):
    def program(gpus):
        filters, images = NETS[net]
        return compare(gpus, net, filters, draws(*images), limit=floor)

    floor = on_gpus(reporting(smallest(net)))["floor"]
    found = on_gpus(reporting(program))
    check(found, swaps=False)
    assert found["planned"][1] > floor - 4096, found


@pytest.mark.emulated_gpu(temporaries=False)
def test_kernels_that_copy_nothing_take_less_than_planned(on_gpus):
    def program(gpus):
        filters, images = NETS[plain]
        return compare(gpus, plain, filters, draws(*images))

    found = on_gpus(reporting(program))
    check(found, swaps=False, exact=False)
    assert found["planned"][1] < found["planned"][0]


def branches(variables, x, i):
    """Each branch's gradient makes zeros for the other branches' variables, which TensorFlow folds."""
    for k in range(3):
        x = tf.switch_case((i[0] + k) % 4, [lambda x=x, w=w: tf.nn.relu(x @ w) for w in variables])
    return tf.reduce_mean(x * x)


def test_what_a_refusal_calls_persistent_is_less_than_it_needs(on_gpus):
    def program(gpus):
        try:
            compare(gpus, branches, [[64, 64]] * 4, draws(128, 64), tf.constant([1]), limit="75%")
        except tfswap.InfeasibleMemoryLimit as error:
            (kibibytes,) = re.findall(r"([0-9.]+) KiB are persistent", str(error))
            return {"floor": error.floor_bytes, "persistent": 1024 * float(kibibytes)}

    found = on_gpus(reporting(program))
    assert 0 < found["persistent"] < found["floor"]
