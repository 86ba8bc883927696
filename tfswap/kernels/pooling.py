"""Max pooling and its gradient. Average pooling allocates its output only (plain_outputs.py)."""

from __future__ import annotations

from tfswap.kernels.memory_rules import UNARY, Entry, KernelMemory, candidates, events_rule, with_events
from tfswap.kernels.onednn import onednn
from tfswap.kernels.temporaries import OUT0, UNKNOWN, Events, Facts, Measured


def max_pool(facts: Facts) -> Events | Measured:
    """maxpooling_op.cc has no temporary; oneDNN's kernel stores the position of each maximum, a byte each."""
    if not facts.device.is_gpu and facts.device.onednn:
        positions = facts.outputs[0].num_elements or 0
        return onednn(facts, [positions], usual=[positions])
    return (OUT0,), not facts.device.is_gpu


def max_pool_with_positions(facts: Facts) -> Measured:
    """mkl_maxpooling_op.cc: the positions of the maxima are its second output (passes/prepare/pool_argmax.py)."""
    (out, *scratch), exact, usual = onednn(facts)
    return (out, ("out", 1), *scratch), exact, (*usual, ("out", 1))


def max_pool_grad_from_positions(facts: Facts) -> Measured:
    """mkl_maxpooling_op.cc: reads the stored positions; nothing is pooled again."""
    return onednn(facts)


def max_pool_grad(facts: Facts) -> KernelMemory:
    """maxpooling_op.cc, MaxPoolingGradOp: pools again, into the buffer of the pooled input, and writes over the image.

    oneDNN's kernel (mkl_maxpooling_op.cc) replaces it where the pooled tensor is the direct output of its MaxPool. It
    does not write over the image.
    """
    events, exact = _repeated_pooling(facts)
    if facts.device.onednn:
        return with_events(events, exact=exact)
    memory = with_events(events, forward=candidates(facts, 0, (0,)), exact=exact)
    return memory._replace(temp_forward=((0, (1,)),) if events[0][0] == "temp" else ())


def _repeated_pooling(facts: Facts) -> Events:
    """The pooled image, and each maximum's 64-bit position."""
    pooled = facts.inputs[1]
    if pooled.nbytes is None:
        return UNKNOWN
    if facts.device.is_gpu:
        return (OUT0,), False
    positions = (pooled.num_elements or 0) * 8
    return (("temp", pooled.nbytes), ("temp", positions), OUT0), not facts.device.onednn


RULES: dict[str, Entry] = {
    "MaxPoolGradWithArgmax": UNARY,
    "_MklNativeMaxPool": Entry(events_rule(max_pool_with_positions)),
    "_MklNativeMaxPool3D": Entry(events_rule(max_pool_with_positions)),
    "_MklNativeMaxPool3DGrad": Entry(events_rule(max_pool_grad_from_positions)),
    "_MklNativeMaxPoolGrad": Entry(events_rule(max_pool_grad_from_positions)),
    "MaxPool": Entry(events_rule(max_pool)),
    "MaxPool3D": Entry(events_rule(max_pool)),
    "MaxPoolGrad": Entry(max_pool_grad),
    "MaxPoolGradV2": Entry(max_pool_grad),
}
