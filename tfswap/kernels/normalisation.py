"""Batch normalisation, softmax and cross entropy."""

from __future__ import annotations

from tfswap.ir.types import HALVES
from tfswap.kernels.events import free, out, temp
from tfswap.kernels.memory_rules import UNARY, Entry, KernelMemory, candidates, events_rule, outs, with_events
from tfswap.kernels.onednn import onednn
from tfswap.kernels.reductions import partial_rows
from tfswap.kernels.temporaries import OUT0, Event, Events, Facts


def fused_batch_norm(facts: Facts) -> KernelMemory:
    """fused_batch_norm_op.cc: the batch's mean and variance may be written into the buffers of the running ones."""
    if facts.device.onednn:
        row = facts.outputs[1].nbytes or 0
        return with_events((*outs(len(facts.outputs)), ("temp", row), ("temp", row)), exact=False)
    forward = (*candidates(facts, 1, (3,)), *candidates(facts, 2, (4,)))
    return KernelMemory(forward=forward, events=outs(len(facts.outputs)))


def fused_batch_norm_grad(facts: Facts) -> KernelMemory:
    """fused_batch_norm_op.cc: one or two rows of coefficients, and partial sums three times or twice.

    16-bit floats are computed in float32: a temporary of twice the input's size.
    """
    outs = tuple(map(out, range(len(facts.outputs))))
    channels = facts.inputs[2].nbytes
    if channels is not None and facts.device.onednn:
        return with_events((*outs, *[temp(channels)] * 3), exact=False)
    if channels is None or facts.device.is_gpu:
        return with_events(outs, exact=False)
    training = bool(facts.attrs.get("is_training", True))
    coefficients = 1 if training else 2
    events: list[Event] = [*outs, *[temp(channels)] * coefficients]
    if facts.outputs[0].dtype in HALVES:  # the centred input, in float32
        events.append(("temp", 4 * (facts.inputs[1].num_elements or 0)))
    first = len(events) - len(outs)
    rows = partial_rows(facts, facts.inputs[1])
    if rows:
        for index in range(3 if training else 2):
            events += [temp(rows), free(first + index)]
    exact = facts.attrs.get("data_format") != b"NCHW"
    return with_events(events, exact=exact)._replace(process_bytes=rows)


def softmax_cross_entropy(facts: Facts) -> Events:
    """xent_op.cc, sparse_xent_op.cc: one number per example."""
    loss = facts.outputs[0].nbytes
    if loss is None:
        return (OUT0, ("out", 1)), False
    return (("temp", loss), OUT0, ("out", 1)), True


def cross_entropy(facts: Facts) -> KernelMemory:
    """The gradient (output 1) may be written over the logits (input 0)."""
    events, exact = softmax_cross_entropy(facts)
    return with_events(events, forward=candidates(facts, 1, (0,)), exact=exact)


RULES: dict[str, Entry] = {
    "_FusedBatchNormEx": Entry(fused_batch_norm),
    "_FusedBatchNormGradEx": Entry(fused_batch_norm_grad, attrs=("is_training",)),
    "_MklFusedInstanceNorm": Entry(events_rule(onednn)),
    "_MklLayerNorm": Entry(events_rule(onednn)),
    "LogSoftmax": UNARY,
    "Softmax": UNARY,
    "FusedBatchNorm": Entry(fused_batch_norm),
    "FusedBatchNormGrad": Entry(fused_batch_norm_grad, attrs=("is_training",)),
    "FusedBatchNormGradV2": Entry(fused_batch_norm_grad, attrs=("is_training",)),
    "FusedBatchNormGradV3": Entry(fused_batch_norm_grad, attrs=("is_training",)),
    "FusedBatchNormV2": Entry(fused_batch_norm),
    "FusedBatchNormV3": Entry(fused_batch_norm),
    "SoftmaxCrossEntropyWithLogits": Entry(cross_entropy),
    "SparseSoftmaxCrossEntropyWithLogits": Entry(cross_entropy),
}
