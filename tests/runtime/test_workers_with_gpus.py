"""Workers of a MultiWorkerMirroredStrategy with several GPUs each: a plan for each device, the same on all workers."""

from __future__ import annotations

import functools
import socket
from typing import Any

import pytest
import several_gpus
import tensorflow as tf
from processes import on_workers, reserved_ports

import tfswap

GPUS_EACH = 2


@pytest.fixture
def on_workers_with_gpus():
    import emulated_gpu

    if why := emulated_gpu.why_not():
        pytest.skip(why)
    emulated_gpu.library()
    environment = emulated_gpu.Gpus(memory=1 << 28, count=GPUS_EACH).environment()
    return lambda program: on_workers(program, **environment)


@functools.cache
def strategy() -> Any:
    """One for the process: each new one starts TensorFlow's collectives again, and ends those that another worker has
    begun by then (`TFE_EnableCollectiveOps`).
    """
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def replicas() -> several_gpus.Made:
    return several_gpus.layered(strategy())


def test_each_device_of_each_worker_keeps_its_limit(on_workers_with_gpus):
    def program(rank):
        import emulated_gpu

        emulated_gpu.attach()
        return several_gpus.compare(replicas, "65%")

    for found in on_workers_with_gpus(program):
        assert found["same"] and all(found["moves"].values()), found
        for device, (planned, measured) in found["planned"].items():
            assert planned == measured <= found["limits"][device] < found["unoptimised"][device], found


def test_what_one_device_cannot_keep_is_refused_on_all_workers(on_workers_with_gpus):
    def program(rank):
        import emulated_gpu

        emulated_gpu.attach()
        variables, step, inputs = replicas()
        before = [each.numpy().tobytes().hex() for variable in variables for each in variable.values]
        limits = {"GPU:0": "65%", "GPU:1": "65%" if rank == 0 else "1MiB"}
        with pytest.raises(tfswap.InfeasibleMemoryLimit) as refused:
            tfswap.optimize(tf.function(step), memory_limit=limits)(*inputs)
        after = [each.numpy().tobytes().hex() for variable in variables for each in variable.values]
        return [str(refused.value), refused.value.floor_bytes, before == after]

    (other, floor, same), (own, floor_there, same_there) = on_workers_with_gpus(program)
    assert "on GPU:1: memory_limit is 1048576 bytes" in own and floor == floor_there > 1 << 20
    assert "worker 1" in other and same and same_there, other


def test_ports_of_workers_are_taken_by_their_servers_alone():
    with reserved_ports(1) as (port,), socket.socket() as other, socket.socket() as server:
        with pytest.raises(OSError, match="in use"):
            other.bind(("localhost", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("", port))
        server.listen()
        with socket.create_connection(("localhost", port)), server.accept()[0] as accepted:
            assert accepted.getsockname()[1] == port
