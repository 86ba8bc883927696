"""Costs: predicted times of kernels, profiles that outlive a trace, described machines, and the curve."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from layered_steps import Layer, training_step

from tfswap.analysis.cost import GRAIN_S, kernel_seconds, spread_over, unordered_seconds, work_seconds
from tfswap.ir.graph import Graph, Node
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import Rates, default_rates

CPU = DeviceModel("cpu", False, 2, 2)
RATES = Rates(1e9, 1e9, 1e9, 1e9, 1e9, 0.0)
MIB = 2**20


def node_of(text: str) -> Node:
    """The last node of a graph in text."""
    return list(parse_graph(text))[-1]


def step_graph() -> Graph:
    return training_step([Layer("dense"), Layer("relu")] * 3, rows=512, width=128)


# --- the analytic model ------------------------------------------------------------------------------------------


def test_a_contraction_takes_its_multiply_adds():
    matmul = "%a = Placeholder() -> float32[300,400]\n%b = Placeholder() -> float32[400,500]\n%c = MatMul(%a, %b)"
    assert work_seconds(node_of(f"{matmul} -> float32[300,500]"), RATES) == 2 * 300 * 400 * 500 / 1e9
    turned = "%a = Placeholder() -> float32[400,300]\n%b = Placeholder() -> float32[400,500]\n"
    turned += "%c = MatMul(%a, %b) {transpose_a=true} -> float32[300,500]"
    assert work_seconds(node_of(turned), RATES) == 2 * 300 * 400 * 500 / 1e9


def test_a_convolution_and_its_gradients_count_the_same_multiply_adds():
    image, kernel, result = "float32[2,8,8,16]", "float32[3,3,16,32]", "float32[2,8,8,32]"
    sizes = f"%x = Placeholder() -> {image}\n%w = Placeholder() -> {kernel}\n%g = Placeholder() -> {result}\n"
    sizes += "%s = Placeholder() -> int32[4]\n"
    flops = 2 * (2 * 8 * 8 * 32) * (3 * 3 * 16)
    rates = Rates(1e9, math.inf, math.inf, 1.0, 1.0, 0.0)
    forward = work_seconds(node_of(f"{sizes}%c = Conv2D(%x, %w) -> {result}"), rates)
    weights = work_seconds(node_of(f"{sizes}%c = Conv2DBackpropFilter(%x, %s, %g) -> {kernel}"), rates)
    inputs = work_seconds(node_of(f"{sizes}%c = Conv2DBackpropInput(%s, %w, %g) -> {image}"), rates)
    assert forward == flops / 1e9
    assert forward < weights < inputs < 4 * forward  # TensorFlow's own kernels of these are slower
    cudnn = replace(rates, cudnn=True)
    assert work_seconds(node_of(f"{sizes}%c = Conv2DBackpropFilter(%x, %s, %g) -> {kernel}"), cudnn) == forward
    assert work_seconds(node_of(f"{sizes}%c = Conv2DBackpropInput(%s, %w, %g) -> {image}"), cudnn) == forward


def test_a_gradient_of_a_volume_costs_by_how_it_is_computed():
    """As columns where the cache has them be small, otherwise by Eigen, which puts zeros between the strides."""
    sizes = "%x = Placeholder() -> float32[2,24,24,24,32]\n%w = Placeholder() -> float32[2,2,2,32,64]\n"
    sizes += "%g = Placeholder() -> float32[2,12,12,12,64]\n%s = Placeholder() -> int32[5]\n"
    filters = node_of(f"{sizes}%c = Conv3DBackpropFilterV2(%x, %s, %g) {{strides=[1,2,2,2,1]}} -> float32[2,2,2,32,64]")
    image = node_of(f"{sizes}%c = Conv3DBackpropInputV2(%s, %w, %g) {{strides=[1,2,2,2,1]}} -> float32[2,24,24,24,32]")
    server = default_rates(DeviceModel("cpu", False, 2, 2, l3_cache_bytes=384 * MIB))
    for node, measured_s in ((filters, 0.075), (image, 0.0555)):
        assert 0.8 < work_seconds(node, server) / measured_s < 1.25
        assert work_seconds(node, default_rates(CPU)) < measured_s / 20


CONVOLUTION, GRADIENTS = "Conv2D(%x, %w)", ("Conv2DBackpropFilter(%x, %s, %g)", "Conv2DBackpropInput(%s, %w, %g)")


@pytest.mark.parametrize("op", GRADIENTS)
def test_a_gradient_of_a_convolution_costs_the_same_in_either_layout(op: str):
    def seconds(layout: str, image: str, result: str) -> float:
        text = f"%x = Placeholder() -> float32[{image}]\n%w = Placeholder() -> float32[3,3,16,32]\n"
        text += f"%g = Placeholder() -> float32[{result}]\n%s = Placeholder() -> int32[4]\n"
        made = "float32[3,3,16,32]" if "Filter" in op else f"float32[{image}]"
        return work_seconds(node_of(f"{text}%c = {op} {{data_format=b'{layout}'}} -> {made}"), RATES)

    assert seconds("NHWC", "2,8,6,16", "2,8,6,32") == seconds("NCHW", "2,16,8,6", "2,32,8,6")


@pytest.mark.parametrize(
    "op", ["Conv2D(%x, %w)", "Conv2DBackpropFilter(%x, %s, %g)", "Conv2DBackpropInput(%s, %w, %g)"]
)
def test_what_cudnn_reads_with_channels_first_is_copied_for_it(op: str):
    """As a SavedModel's convolutions are, which come as they were saved; what Grappler has turned round is not."""

    def seconds(layout: str, image: str, result: str, rates: Rates, dtype: str = "float32") -> float:
        text = f"%x = Placeholder() -> {dtype}[{image}]\n%w = Placeholder() -> {dtype}[3,3,16,32]\n"
        text += f"%g = Placeholder() -> {dtype}[{result}]\n%s = Placeholder() -> int32[4]\n"
        made = result if op == CONVOLUTION else "3,3,16,32" if "Filter" in op else image
        return work_seconds(node_of(f"{text}%c = {op} {{data_format=b'{layout}'}} -> {dtype}[{made}]"), rates)

    last, first = ("NHWC", "2,8,6,16", "2,8,6,32"), ("NCHW", "2,16,8,6", "2,32,8,6")
    cudnn = replace(RATES, cudnn=True)
    copies = 2 * 4 * (2 * 8 * 6) * (16 + 32) / 1e9
    assert seconds(*last, cudnn) == pytest.approx(seconds(*first, cudnn) + copies)
    for rates, dtype in ((replace(cudnn, channels_last=True), "float32"), (cudnn, "float16")):
        assert seconds(*last, rates, dtype) == seconds(*first, rates, dtype)


def test_what_reads_shapes_only_or_passes_a_variable_on_moves_nothing():
    source = "%x = Placeholder() -> float32[1000,1000]\n%v = VarHandleOp() -> resource[]\n"
    assert work_seconds(node_of(f"{source}%s = Shape(%x) -> int32[2]"), RATES) == 0
    assert work_seconds(node_of(f"{source}%r = ReadVariableOp(%v) -> float32[1000,1000]"), RATES) == 0
    assert work_seconds(node_of(f"{source}%r = Relu(%x) -> float32[1000,1000]"), RATES) == 8e6 / 1e9


def test_rows_cost_the_same_from_a_large_table_and_a_small_one():
    def seconds(rows: int) -> float:
        given = f"%t = Placeholder() -> float32[{rows},64]\n%i = Placeholder() -> int32[100]\n"
        return work_seconds(node_of(f"{given}%r = Gather(%t, %i) -> float32[100,64]"), RATES)

    assert seconds(200) == seconds(1_000_000) > 0


def test_a_small_kernel_runs_on_one_core_and_a_large_one_on_all():
    rates = Rates(1e9, 1e9, 4e9, 1e9, 1e9, 0.0, cores=4)

    def seconds(elements: int) -> float:
        return work_seconds(
            node_of(f"%x = Placeholder() -> float32[{elements}]\n%y = Neg(%x) -> float32[{elements}]"), rates
        )

    one_core = 8 / 1e9  # per element: 8 bytes at a quarter of 4e9
    assert seconds(1000) == pytest.approx(1000 * one_core)
    assert seconds(5000) == GRAIN_S
    assert seconds(10**6) == pytest.approx(10**6 * one_core / 4)


def test_small_kernels_run_side_by_side_when_nothing_orders_them():
    rates = Rates(1e9, 1e9, 1e9, 1e9, 1e9, 0.0, cores=2)
    small, large = GRAIN_S / 2, GRAIN_S * 10
    assert unordered_seconds([small] * 4, [1] * 4, [(), (), (), ()], rates) == pytest.approx(2 * small)
    assert unordered_seconds([small] * 4, [1] * 4, [(), (0,), (1,), (2,)], rates) == pytest.approx(4 * small)
    assert unordered_seconds([large] * 4, [2] * 4, [(), (), (), ()], rates) == pytest.approx(4 * large)


def test_a_batch_of_products_is_shared_among_cores_where_the_products_are_large_or_onednn_computes_them():
    def cores(shape: str, rates: Rates) -> float:
        text = f"%x = Placeholder() {{dtype=float32}} -> float32[{shape}]\n"
        text += f"%y = BatchMatMulV2(%x, %x) {{adj_x=false, adj_y=false}} -> float32[{shape}]\nfeeds %x\nfetches %y\n"
        return spread_over(parse_graph(text)["y"], rates)

    plain, onednn = (default_rates(DeviceModel("cpu", on, 4, 4)) for on in (False, True))
    assert cores("16,128,128", plain) == 1
    assert 1 < cores("16,512,512", plain) < 4
    assert cores("16,128,128", onednn) == cores("16,512,512", onednn) > 1
    assert plain.copy_share == 0.25 < onednn.copy_share < 1


def einsum(equation: str, left: str, right: str, result: str) -> Node:
    text = f"%a = Placeholder() -> float32[{left}]\n%b = Placeholder() -> float32[{right}]\n"
    return node_of(text + f'%c = Einsum(%a, %b) {{equation=b"{equation}"}} -> float32[{result}]')


def test_an_einsum_takes_its_multiply_adds():
    rates = Rates(1e9, math.inf, math.inf, 1.0, 1.0, 0.0, 2)
    product = "%a = Placeholder() -> float32[64,512]\n%b = Placeholder() -> float32[512,1024]\n%c = MatMul(%a, %b)"
    same = einsum("ij,jk->ik", "64,512", "512,1024", "64,1024")
    assert work_seconds(same, rates) == work_seconds(node_of(f"{product} -> float32[64,1024]"), rates)
    batch = "%a = Placeholder() -> float32[8,64,96]\n%b = Placeholder() -> float32[8,96,32]\n%c = BatchMatMulV2(%a, %b)"
    same = einsum("bij,bjk->bik", "8,64,96", "8,96,32", "8,64,32")
    assert work_seconds(same, rates) == work_seconds(node_of(f"{batch} -> float32[8,64,32]"), rates)


def test_an_einsum_that_transposes_takes_longer_and_one_of_vectors_streams():
    seconds = [
        work_seconds(einsum(e, *given, "64,100,256"), default_rates(CPU))
        for e, given in (
            ("bt,bh->bth", ("64,100", "64,256")),
            ("bh,bt->bth", ("64,256", "64,100")),
        )
    ]
    assert 5 < seconds[1] / seconds[0] < 20  # measured: 8
    stream = "%a = Placeholder() -> float32[64,100]\n%b = Placeholder() -> float32[64,256]\n"
    stream += "%c = Tensordot(%a, %b) -> float32[64,100,256]"
    assert seconds[0] == work_seconds(node_of(stream), default_rates(CPU))


def test_the_gradient_of_a_slice_writes_zeros_and_the_slice():
    def seconds(slice_of: str) -> float:
        sizes = "".join(f"%{name} = Placeholder() -> int32[3]\n" for name in "sbex")
        text = f"{sizes}%g = Placeholder() -> float32[{slice_of}]\n"
        return work_seconds(
            node_of(f"{text}%c = StridedSliceGrad(%s, %b, %e, %x, %g) -> float32[100,64,256]"), default_rates(CPU)
        )

    assert 10 * seconds("1,64,256") < seconds("100,64,256")


def test_a_small_product_of_two_matrices_takes_one_core():
    def cores(shape: str, rates: Rates) -> float:
        text = f"%x = Placeholder() {{dtype=float32}} -> float32[{shape}]\n"
        return spread_over(
            parse_graph(f"{text}%y = MatMul(%x, %x) -> float32[{shape}]\nfeeds %x\nfetches %y\n")["y"], rates
        )

    plain, onednn = (default_rates(DeviceModel("cpu", on, 4, 4)) for on in (False, True))
    assert cores("256,256", plain) == 1
    assert cores("512,512", plain) == cores("256,256", onednn) == 4


def test_kernels_that_tensorflow_runs_on_one_core():
    text = """\
%x = Placeholder() {dtype=float32} -> float32[2,48,48,48,16]
%y = Placeholder() {dtype=float32} -> float32[2,24,24,24,16]
%m = MaxPool3DGrad(%x, %y, %y) {ksize=(1, 2, 2, 2, 1), strides=(1, 2, 2, 2, 1)} -> float32[2,48,48,48,16]
%r = Relu(%x) -> float32[2,48,48,48,16]
feeds %x, %y
fetches %m, %r
"""
    rates = default_rates(DeviceModel("cpu", False, 4, 4))
    graph = parse_graph(text)
    assert (spread_over(graph["m"], rates), spread_over(graph["r"], rates)) == (1, 4)
    assert 30e-3 < kernel_seconds(graph["m"], rates) < 120e-3  # 62 to 70 ms were measured
