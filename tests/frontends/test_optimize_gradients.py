"""Gradients of a function that `tfswap.optimize` wraps: those that the user defines, and those taken outside of it."""

from __future__ import annotations

import logging

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from nets import Net, batch, bits, called, unoptimised  # noqa: E402

import tfswap  # noqa: E402 needs TensorFlow to be worth it

pytestmark = pytest.mark.usefixtures("nothing_left_in_the_pool")


# --- gradients that the user defines ------------------------------------------------------------------------


@tf.custom_gradient
def steep(x):
    """What it computes has another gradient."""
    y = tf.exp(-x * x)
    return y, lambda upstream: upstream * y * -2.0


class CustomNet(Net):
    """Its activations' gradients are the user's own."""

    def loss(self, x, scale=1.0):
        h = x
        for weight in self.weights:
            h = steep(h @ weight)
        return tf.reduce_mean(h) * scale

    def step_by_symbols(self, x):
        loss = self.loss(x)
        for weight, gradient in zip(self.weights, tf.gradients(loss, self.weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss


@pytest.mark.parametrize("step_of", [lambda net: net.step, lambda net: net.step_by_symbols])
def test_a_custom_gradient_is_swapped_and_changes_no_bit(step_of):
    """Symbolic gradients are colocated with nodes of the forward pass; the one around a custom gradient is bypassed."""
    net, twin = CustomNet(), CustomNet()
    step, reference = tfswap.optimize(step_of(net), memory_limit="50%"), tf.function(step_of(twin))
    for seed in range(2):
        assert bits(step(batch(seed=seed))) == bits(unoptimised(reference, batch(seed=seed)))
    assert bits(net.weights) == bits(twin.weights)
    assert step.plan().evictions


def symbols(function, x):
    @tf.function
    def outer(x):
        return tf.gradients(function(x), x)

    return outer(x)


def tape(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        results = function(x)
    return tape.gradient(results, x)


@pytest.mark.parametrize(
    ("derive", "of"),
    [
        (symbols, lambda function, x: function),
        (symbols, lambda function, x: function.get_concrete_function(x)),
        (tape, lambda function, x: function.get_concrete_function(x)),
    ],
)
def test_who_differentiates_a_rewritten_step_gets_the_custom_gradient(derive, of):
    """Also where the plan needed nothing that has no derivative: no copies, and no small results."""
    net = CustomNet(layers=3)

    def features(x):
        with tf.GradientTape() as inner:
            h = x
            for weight in net.weights:
                h = steep(h @ weight)
            loss = tf.reduce_mean(h)
        for weight, gradient in zip(net.weights, inner.gradient(loss, net.weights), strict=True):
            weight.assign_sub(0.0 * gradient)
        return h

    x = batch()
    step = tfswap.optimize(tf.function(features), memory_limit="100%", tactics=())
    step(x)
    assert step.plan().order
    found, expected = derive(of(step, x), x), tape(tf.function(features), x)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert np.abs(expected).max() > 0


# --- gradients from outside ---------------------------------------------------------------------------------


def test_an_accumulator_that_can_not_be_planned_for_gets_the_right_derivatives_and_one_warning(caplog):
    """Of what can tests/runtime/test_outside_gradients.py and test_separate_passes.py are about."""
    net, twin = Net(), Net()
    forward = tfswap.optimize(tf.function(net.loss), memory_limit="105%", tactics=())
    reference = tf.function(twin.loss)
    x = batch()
    with caplog.at_level(logging.WARNING, "tfswap"):
        for _ in range(2):
            found, expected = [], []
            for function, result in [(forward, found), (reference, expected)]:
                result += forward_mode(function, x, None)
            assert all(np.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(found, expected, strict=True))
    warned = [r for r in caplog.records if "forward accumulator" in r.message]
    assert len(warned) == 1, "reported once for a function"
    # Without a tape it is the planned one again.
    assert bits(forward(x)) == bits(unoptimised(reference, x))
    assert forward.plan().order


def persistent(function, x, weight):
    with tf.GradientTape(persistent=True) as tape:
        loss = function(x)
    return [tape.gradient(loss, weight), tape.jacobian(loss, weight)]


def second_order(function, x, weight):
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = function(x)
        gradient = inner.gradient(loss, weight)
    return [outer.gradient(gradient, weight)]


def forward_mode(function, x, weight):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        loss = function(x)
    return [accumulator.jvp(loss)]


@pytest.mark.parametrize(
    ("derive", "warning"),
    [(persistent, "has no memory limit"), (second_order, ""), (forward_mode, "runs as it was traced")],
)
def test_whatever_is_derived_outside_is_right(derive, warning, caplog):
    net, twin = Net(layers=2), Net(layers=2)
    function = tfswap.optimize(tf.function(net.loss), memory_limit="105%", tactics=())
    found = derive(function, batch(64), net.weights[0])
    assert warning in caplog.text
    expected = derive(tf.function(twin.loss), batch(64), twin.weights[0])
    for a, b in zip(found, expected, strict=True):
        assert np.abs(b).max() > 0
        assert np.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_tape_that_watches_nothing_of_it_changes_nothing(caplog):
    step = called(Net())
    with caplog.at_level(logging.WARNING, "tfswap"), tf.GradientTape(watch_accessed_variables=False):
        step(batch())
    assert step.plan().evictions
    assert not caplog.records


def test_a_tape_around_a_tf_function_that_calls_it():
    net, twin = Net(), Net()
    forward = tfswap.optimize(tf.function(net.loss), memory_limit="100%", tactics=())

    @tf.function
    def train(x):
        with tf.GradientTape() as tape:
            loss = forward(x)
        return loss, tape.gradient(loss, net.weights)

    loss, gradients = train(batch())
    with tf.GradientTape() as tape:
        expected = twin.loss(batch())
    for a, b in zip(gradients, tape.gradient(expected, twin.weights), strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-7)
    assert np.allclose(loss, expected)
