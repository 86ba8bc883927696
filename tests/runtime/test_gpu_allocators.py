"""Steps on emulated GPUs whose allocator is no arena: TF_GPU_ALLOCATOR=cuda_malloc_async.

Its peak counts the bytes that were requested. A plan counts those that an arena would give for them, which are no less.
"""

from __future__ import annotations

import logging

import pytest
import tensorflow as tf
from gpu_compare import DEVICE, SHAPES, batch, check, compare, draws, made, relu_loss, reporting
from slow import slow
from test_gpus import a_conditional, a_loop, resnet, transformer

from tfswap.device import arena

ASYNC = {"TF_GPU_ALLOCATOR": "cuda_malloc_async"}


def swaps(gpus):
    return compare(gpus, relu_loss, SHAPES, draws(512, 128), tactics=("swap",))


@pytest.mark.emulated_gpu(ends_late=True)
@pytest.mark.parametrize("net", [swaps, resnet, transformer, *slow(a_loop), a_conditional])
def test_steps_keep_their_limit_in_requested_bytes_and_say_so_once(on_gpus, net):
    def program(gpus):
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("tfswap").addHandler(handler)
        found = net(gpus)
        return {**found, "said": [line for line in lines if "allocator" in line]}

    found = on_gpus(reporting(program), **ASYNC)
    check(found, swaps=False, exact=False)
    [said] = found["said"]
    assert said.startswith("tfswap: the allocator of GPU:0 has no chunks") and "\n" not in said


def test_a_step_is_planned_again_where_other_tensors_have_come(on_gpus):
    def program(gpus):
        x = batch()
        _variables, step = made()

        def peak():
            tf.config.experimental.reset_memory_stats(DEVICE)
            step(x).numpy()
            return tf.config.experimental.get_memory_info(DEVICE)["peak"]

        first = [peak(), peak()]
        held = tf.zeros([32 << 10])
        held.numpy()
        second = [peak(), peak()]
        limit = step.plan().limit_bytes
        return {"kept": max(first + second) <= limit, "held": held.shape[0] * 4, "room": limit - first[1]}

    found = on_gpus(reporting(program), **ASYNC)
    assert found["kept"] and found["report"] == []
    assert found["room"] < found["held"]  # so that there had to be another plan


def test_the_device_has_no_chunks_a_limit_and_statistics_of_requested_bytes(on_gpus):
    def program(gpus):
        limit = arena.device_limit_bytes(DEVICE)
        x = tf.fill([1001], 2.0)  # 4,004 bytes, for which an arena gives 4,096
        x.numpy()
        before = tf.config.experimental.get_memory_info(DEVICE)
        del x
        after = tf.config.experimental.get_memory_info(DEVICE)
        try:
            tf.zeros([limit // 4 + 1]).numpy()
            exhausted = False
        except tf.errors.ResourceExhaustedError:
            exhausted = True
        kept = [tf.zeros([limit // 64]) for _ in range(12)]  # of a sixteenth each
        del kept[::2]
        in_pieces = tf.zeros([limit // 16 * 2])  # between them there is no such gap
        return {
            "chunks": len(arena.snapshot(DEVICE).chunks),
            "limit": limit,
            "bytes": before["current"] - after["current"],
            "exhausted": exhausted,
            "sum": float(tf.reduce_sum(in_pieces) + tf.reduce_sum(kept[0])),
            "report": gpus.report(),
        }

    found = on_gpus(program, **ASYNC)
    expected = {"chunks": 0, "limit": 256 << 20, "bytes": 4004, "exhausted": True, "sum": 0.0, "report": ""}
    assert found == expected
