"""The order in which Eigen adds up a product: what it depends on, and that slices follow it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tfswap.kernels.bounded_gradients import products_of_rows
from tfswap.kernels.contraction_order import MOST_DEPTH, is_one_block, product_order
from tfswap.kernels.device import DeviceModel

CACHES = {"l1_l2_bytes": (48 << 10, 1 << 20), "l3_cache_bytes": 32 << 20}
TWO = DeviceModel(intra_op_threads=2, **CACHES)
SIDES = st.integers(2, 2000)


def test_a_large_product_has_one_part_in_blocks() -> None:
    order = product_order(576, 64, 100_000, TWO)
    assert order is not None and order.part == 100_000
    assert order.block == order.last_block == 320


def test_a_product_of_few_columns_has_a_part_for_each_thread() -> None:
    for threads in (2, 4, 8):
        order = product_order(500, 6, 100_000, TWO._replace(intra_op_threads=threads))
        assert order is not None and order.part == -(-100_000 // threads // 8) * 8
        assert order.block <= 320


def test_without_caches_no_order_is_known() -> None:
    assert product_order(500, 8, 100_000, DeviceModel(intra_op_threads=2)) is None
    assert products_of_rows(500, 8, 100_000, DeviceModel(intra_op_threads=2)) is None


@given(SIDES, SIDES, st.integers(1, 50_000), st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_parts_and_blocks_are_the_depth(rows: int, columns: int, depth: int, threads: int) -> None:
    order = product_order(rows, columns, depth, TWO._replace(intra_op_threads=threads))
    assert order is not None
    assert 1 <= order.block <= order.part <= depth and 1 <= order.last_block <= order.part


@given(SIDES, st.integers(1, 300), st.integers(1, 50_000), st.sampled_from([1, 2, 4, 8]))
def test_products_of_a_sum_are_one_block_each(width: int, made: int, rows: int, threads: int) -> None:
    device = TWO._replace(intra_op_threads=threads)
    found = products_of_rows(width, made, rows, device)
    if found is None or made == 1:
        return
    assert found.shard == found.last_shard and found.shard.rows == rows and found.depth <= MOST_DEPTH
    for chunk in {found.chunk, width % found.chunk or found.chunk}:
        assert all(is_one_block(chunk, made, depth, device) for depth in found.shard.depths)
