"""Zeros in the shape of loops' lists: one tensor for all elements of a size, with TensorFlow's own values."""

from __future__ import annotations

from typing import Any

import pytest
from processes import on_arena
from slow import slow
from step_peaks import measuring

tf: Any = pytest.importorskip("tensorflow")

import tfswap.ops  # noqa: E402, F401 registers the kernel
from tfswap.importers.function import import_function  # noqa: E402
from tfswap.ir.custom_ops import KERNEL, OWN_KERNEL  # noqa: E402
from tfswap.kernels.device import DeviceModel  # noqa: E402
from tfswap.passes.contract import Target  # noqa: E402
from tfswap.passes.prepare.zeros_like import share_list_zeros  # noqa: E402


def zeros_like(handle: Any, *, own: bool) -> Any:
    """Of a list, by tfswap's kernel or by TensorFlow's."""
    from tensorflow.core.framework.attr_value_pb2 import AttrValue

    @tf.function(autograph=False)
    def made(handle: Any) -> Any:
        zeros = tf.raw_ops.ZerosLike(x=handle)
        if own:
            zeros.op._set_attr(KERNEL, AttrValue(s=OWN_KERNEL.encode()))
        return zeros

    with tf.device("CPU:0"):
        return made(handle)


def elements(handle: Any, dtype: Any) -> list[Any]:
    count = int(tf.raw_ops.TensorListLength(input_handle=handle))
    get = tf.raw_ops.TensorListGetItem
    return [
        get(input_handle=handle, index=i, element_shape=tf.constant(-1), element_dtype=dtype).numpy()
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.int64, tf.bool, tf.complex64])
def test_elements_are_zeros_of_their_own_shapes(dtype: Any) -> None:
    handle = tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=dtype)
    for shape in ([2, 6], [3, 4], [12], [], [5], [0, 3], [2, 6]):
        handle = tf.raw_ops.TensorListPushBack(input_handle=handle, tensor=tf.cast(tf.ones(shape), dtype))
    for made, expected in zip(
        elements(zeros_like(handle, own=True), dtype), elements(zeros_like(handle, own=False), dtype), strict=True
    ):
        assert made.shape == expected.shape
        assert made.dtype == expected.dtype
        assert made.tobytes() == expected.tobytes()


def test_what_is_not_set_stays_so() -> None:
    reserved = tf.raw_ops.TensorListReserve(element_shape=tf.constant([3]), num_elements=4, element_dtype=tf.float32)
    handle = tf.raw_ops.TensorListSetItem(input_handle=reserved, index=2, item=[1.0, 2.0, 3.0])
    zeros = zeros_like(handle, own=True)
    # A list that was put together with another takes the other's elements where it has none itself.
    total = tf.raw_ops.AddN(inputs=[zeros, handle])
    assert [each.tolist() for each in elements(total, tf.float32)] == [[0.0] * 3, [0.0] * 3, [1.0, 2.0, 3.0], [0.0] * 3]


def of_lists(*inner: Any) -> Any:
    scalar = tf.constant([], tf.int32)
    outer = tf.raw_ops.EmptyTensorList(element_shape=scalar, max_num_elements=-1, element_dtype=tf.variant)
    for each in inner:
        outer = tf.raw_ops.TensorListPushBack(input_handle=outer, tensor=each)
    return outer


def nested_elements(outer: Any, count: int) -> list[list[Any]]:
    """Of a list of as many lists, the last list first."""
    found: list[list[Any]] = []
    for _ in range(count):
        outer, inside = tf.raw_ops.TensorListPopBack(
            input_handle=outer, element_shape=tf.constant([], tf.int32), element_dtype=tf.variant
        )
        found.append(elements(inside, tf.float32))
    return found


def test_lists_in_a_list_are_of_zeros_too() -> None:
    inner = tf.raw_ops.TensorListFromTensor(tensor=tf.ones([2, 3]), element_shape=tf.constant([3]))
    other = tf.raw_ops.TensorListFromTensor(tensor=tf.ones([1, 5]), element_shape=tf.constant([5]))
    outer = of_lists(inner, other, inner)
    zeros = nested_elements(zeros_like(outer, own=True), 3)
    assert [[each.tolist() for each in inside] for inside in zeros] == [[[0.0] * 3] * 2, [[0.0] * 5], [[0.0] * 3] * 2]


def test_optionals_in_a_list_are_of_zeros_too() -> None:
    def pop(outer: Any) -> Any:
        return tf.raw_ops.TensorListPopBack(
            input_handle=outer, element_shape=tf.constant([], tf.int32), element_dtype=tf.variant
        )

    some = tf.raw_ops.OptionalFromValue(components=[tf.ones([3]), tf.ones([2], tf.int64)])
    rest, none = pop(zeros_like(of_lists(some, tf.raw_ops.OptionalNone()), own=True))
    assert not tf.raw_ops.OptionalHasValue(optional=none)
    first, second = tf.raw_ops.OptionalGetValue(
        optional=pop(rest)[1], output_types=[tf.float32, tf.int64], output_shapes=[[3], [2]]
    )
    assert first.numpy().tolist() == [0.0] * 3
    assert second.numpy().tolist() == [0, 0]
    assert second.dtype == tf.int64


def test_what_has_no_zeros_is_left_to_tensorflow() -> None:
    words = tf.raw_ops.TensorListFromTensor(tensor=tf.constant(["a"]), element_shape=tf.constant([], tf.int32))
    reported = []
    for own in (False, True):
        with pytest.raises(tf.errors.InvalidArgumentError, match="unsupported dtype string") as error:
            zeros_like(words, own=own)
        reported.append(error.value.message.partition("Trying")[2].splitlines()[0])
    assert reported[0] == reported[1]


@pytest.mark.parametrize(("limit", "options"), [("30MiB", {"tactics": ()}), *slow(("85%", {})), ("70%", {})])
def test_second_order_through_lists_is_planned_to_the_byte(limit: str, options: dict[str, Any]) -> None:
    def program():
        import tensorflow as tf
        from second_order_program import raw, x

        import tfswap

        def bits(values):
            return [v.numpy().tobytes().hex() for v in values]

        # Steps with loops are planned as they were traced.
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        expected = bits(tf.function(raw)(x))
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
        step = tfswap.optimize(tf.function(raw), memory_limit=limit, **options)
        step(x)
        peaks: list[int] = []
        with measuring(peaks):
            same = bits(step(x)) == expected
        report = step.report()
        return {
            "same": same,
            "peak": peaks[0],
            "planned": report.planned_peak_bytes,
            "limit": report.memory_limit_bytes,
        }

    found = on_arena(program)
    assert found["same"]
    assert found["peak"] <= found["planned"] <= found["limit"]
    # Conditions of loops, of a byte each, are evaluated without being allocated.
    assert found["planned"] - found["peak"] <= 512


def test_sums_of_lists_are_planned_to_the_byte() -> None:
    """Each sum of two has elements of its own, which go when it is added on."""

    def program():
        import tensorflow as tf

        import tfswap

        def total(x, count):
            lists = [tf.raw_ops.TensorListFromTensor(tensor=x * (i + 1), element_shape=[1 << 16]) for i in range(count)]
            added = tf.raw_ops.AddN(inputs=lists)
            return tf.raw_ops.TensorListStack(
                input_handle=added, element_shape=[1 << 16], element_dtype=tf.float32, num_elements=4
            )

        def looped(x, count):
            def body(i, sum):
                return i + 1, sum + tf.reduce_sum(total(x, count))

            return tf.while_loop(lambda i, _: i < 2, body, [0, 0.0])[1]

        def measured(count):
            x = tf.ones([4, 1 << 16])
            step = tfswap.optimize(tf.function(lambda x: looped(x, count)), memory_limit="100%")
            step(x)
            tf.config.experimental.reset_memory_stats("CPU:0")
            value = float(step(x))
            peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
            return peak, step.report().planned_peak_bytes, value

        return [measured(count) for count in range(2, 10)]

    found = on_arena(program)
    for count, (peak, planned, value) in enumerate(found, 2):
        assert (peak, value) == (planned, 2 * sum(range(1, count + 1)) * 4.0 * (1 << 16)), count


def test_a_loop_s_gradient_holds_one_zero_and_keeps_its_bits() -> None:
    def program():
        import tensorflow as tf
        from list_zeros_program import raw, x

        import tfswap

        def bits(values):
            return [v.numpy().tobytes() for v in values]

        expected = bits(tf.function(raw)(x))
        step = tfswap.optimize(tf.function(raw), memory_limit="100%", tactics=())
        step(x)
        tf.config.experimental.reset_memory_stats("CPU:0")
        same = bits(step(x)) == expected
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        report = step.report()
        zeros = [name for name, _ in report.alive_at_peak if "zeros_like" in name]
        return {
            "same": same,
            "peak": peak,
            "planned": report.planned_peak_bytes,
            "base": report.baseline_peak_bytes,
            "zeros": len(zeros),
            "list": x.shape.num_elements() * 4,
        }

    found = on_arena(program)
    assert found["same"]
    assert found["peak"] <= found["planned"] <= found["base"] - found["list"] // 2
    assert found["zeros"] <= 2


def test_gpus_are_left_to_tensorflow() -> None:
    def step(x: Any) -> Any:
        return tf.raw_ops.ZerosLike(x=tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=tf.constant([3])))

    graph = import_function(tf.function(step).get_concrete_function(tf.TensorSpec([2, 3])))
    assert share_list_zeros(graph.copy(), Target(DeviceModel(kind="gpu"))) == 0
    assert share_list_zeros(graph, Target(DeviceModel())) == 1
