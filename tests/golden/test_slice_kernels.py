"""Kernels in slices of rows, on graphs in text, and which are chosen."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from test_passes import Golden

from tfswap.compiler import slice_choices
from tfswap.compiler.slice_choices import SliceChoices
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node
from tfswap.ir.text import parse_graph
from tfswap.kernels.close_lines import added_terms, most_difference
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.slice_lines import LINES, slicing_of
from tfswap.kernels.slices import Kind, RowSlices, Slicing, reads_in_place, rows_of, slices_of
from tfswap.kernels.target import Target
from tfswap.passes.tactics.slice_kernels import slice_kernels
from tfswap.plan.plan import Slices

DEVICE = DeviceModel("cpu", intra_op_threads=2, l3_cache_bytes=32 << 20, l1_l2_bytes=(32 << 10, 1 << 20))
TARGET = Target(DEVICE)
IN_SLICES = ("conv", "relu", "start", "gradient", "bias", "by_filter", "by_image")


def choose_slices(
    graph: Graph, device: DeviceModel, shares: Iterable[int], *, close: bool = False, chains: bool = False
) -> list[tuple[Slices, ...]]:
    return SliceChoices(graph, device, close=close).choose(shares, chains=chains)


def test_a_convolution_and_its_gradients() -> None:
    golden = Golden("slice_kernels")
    rows, of = map(int, golden.arguments)
    assert slice_kernels(golden.graph, TARGET, [Slices(IN_SLICES, rows, of)]) == 34
    golden.check()


def test_what_is_chosen() -> None:
    graph = Golden("slice_kernels").graph
    assert choose_slices(graph, DEVICE, (2, 8)) == [(Slices(IN_SLICES, 3, 5),), (Slices(IN_SLICES, 1, 5),)]
    elements = 5 * 112 * 112 * 64
    by_element = (Slices(("relu", "start", "gradient"), elements // 2, elements),)
    assert choose_slices(graph, DEVICE._replace(onednn=True), (2,)) == [by_element]
    assert choose_slices(graph, DeviceModel("gpu"), (2,)) == []
    nothing = parse_graph("%x = Placeholder() {dtype=float32} -> float32[8]\nfeeds %x\n")
    assert choose_slices(nothing, DEVICE, (2,)) == []


def test_kernels_that_are_alike_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def count(node: Node, slicing: Slicing, rows: int, of: int) -> RowSlices | None:
        judged.append(node.name)
        return slices_of(node, slicing, rows, of)

    monkeypatch.setattr(slice_choices, "slices_of", count)
    counts = []
    for layers in (3, 30):
        chain = "".join(f"%{i} = Exp(%{i - 1}) {{T=float32}} -> float32[64,64]\n" for i in range(1, layers))
        given, ends = "%0 = Placeholder() {dtype=float32} -> float32[64,64]\n", f"feeds %0\nfetches %{layers - 1}\n"
        graph = parse_graph(given + chain + ends)
        choices = SliceChoices(graph, DEVICE, close=False)
        for shares in ((2, 4, 8), (16, 32)):
            assert choices.choose(shares, chains=True) == choose_slices(graph, DEVICE, shares, chains=True) != []
        judged.clear()
        choices = SliceChoices(graph, DEVICE, close=False)
        choices.choose((), chains=True)
        assert choices._fitting[64] == {graph[str(i)] for i in range(1, layers)}
        counts.append(len(judged))
    assert counts[0] == counts[1] > 0


def test_a_name_of_an_op_is_a_line_once() -> None:
    assert len(LINES) == len({*LINES}) > 40


@pytest.mark.parametrize(
    "line",
    [
        "%y = Relu(%x) {T=float32} -> float32[?,8]",  # a size that is not known
        "%y = Relu(%x) {T=float32} -> float32[0,8]",  # an empty tensor
        "%y = Softmax(%e) {T=float32} -> float32[64,12]",  # rows of no whole packets
        "%y = MatMul(%x, %c) {T=float32, transpose_a=true, transpose_b=false} -> float32[8,1]",  # adds up few rows
        "%y = MatMul(%x, %n) {T=float32, transpose_a=false, transpose_b=false} -> float32[64,1]",  # one column
        "%y = Conv2D(%i, %f) {T=float32, data_format=b'NCHW', padding=b'SAME', strides=(1, 1)} -> float32[8,16,9,9]",
    ],
)
def test_what_stays_whole(line: str) -> None:
    kind = line.rpartition("-> ")[2].replace("[64,2]", "[64,8]") if "Relu" in line else "float32[64,8]"
    graph = parse_graph(
        f"%x = Placeholder() {{dtype=float32}} -> {kind}\n%w = Placeholder() {{dtype=float32}} -> float32[64,8]\n"
        "%n = Placeholder() {dtype=float32} -> float32[8,1]\n%c = Placeholder() {dtype=float32} -> float32[64,1]\n"
        "%i = Placeholder() {dtype=float32} -> float32[8,16,9,9]\n"
        "%e = Placeholder() {dtype=float32} -> float32[64,12]\n"
        f"%f = Placeholder() {{dtype=float32}} -> float32[3,3,16,16]\n{line}\n"
        "feeds %x, %w, %n, %c, %i, %f, %e\nfetches %y\n"
    )
    assert slicing_of(graph["y"], DEVICE, graph.small_constants) is None
    with pytest.raises(InvalidModel, match="runs 'y' in slices of 2 of 64 rows, and this graph has no such kernel"):
        slice_kernels(graph, TARGET, [Slices(("y",), 2, 64)])


def test_a_kernel_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidModel, match="runs 'z' in slices"):
        slice_kernels(Golden("slice_kernels").graph, TARGET, [Slices(("z",), 2, 5)])


def test_slices_that_the_bits_do_not_allow_are_refused() -> None:
    graph = parse_graph(
        "%x = Placeholder() {dtype=float32} -> float32[64,9]\n%y = Exp(%x) {T=float32} -> float32[64,9]\n"
        "feeds %x\nfetches %y\n"
    )
    with pytest.raises(InvalidModel, match="gives the same bits"):
        slice_kernels(graph, TARGET, [Slices(("y",), 8, 64)])


ATTENTION = """
%x = Placeholder() {dtype=float32} -> float32[64,8,16]
%y = Placeholder() {dtype=float32} -> float32[64,8,16]
%scores = Einsum(%x, %y) {N=2, T=float32, equation=b"abc,adc->abd"} -> float32[64,8,8]
%weights = Softmax(%scores) {T=float32} -> float32[64,8,8]
%bias = BiasAddGrad(%weights) {T=float32, data_format=b"NHWC"} -> float32[8]
%gradient = Einsum(%x, %weights) {N=2, T=float32, equation=b"abc,abd->cd"} -> float32[16,8]
feeds %x, %y
fetches %gradient, %bias
"""


def test_close_values_have_more_kernels_in_slices() -> None:
    graph = parse_graph(ATTENTION)
    onednn = DEVICE._replace(onednn=True)
    assert choose_slices(graph, onednn, (4,)) == []
    (groups,) = choose_slices(graph, onednn, (4,), close=True)
    assert groups == (Slices(("scores", "weights", "bias", "gradient"), 16, 64, True),)
    added = slice_kernels(graph, TARGET, groups)
    assert added > 0
    made = [node.op for node in graph]
    assert [made.count(op) for op in ("Einsum", "Softmax", "BiasAddGrad", "AddV2")] == [8, 4, 4, 6]
    assert all(node.outputs[0].shape != (64, 8, 8) for node in graph)
    with pytest.raises(InvalidModel, match="gives the same bits"):
        slice_kernels(parse_graph(ATTENTION), TARGET, [groups[0]._replace(close=False)])


@pytest.mark.parametrize(
    ("line", "terms"),
    [
        ('Einsum(%x, %x) {N=2, equation=b"abc,dbc->ad"} -> float32[64,64]', 128),
        ("Softmax(%x) {T=float32} -> float32[64,8,16]", 16),
        ("BatchMatMulV2(%x, %x) {adj_x=false, adj_y=true} -> float32[64,8,8]", 16),
        ("BiasAddGrad(%x) {T=float32} -> float32[16]", 512),
        ("Relu(%x) {T=float32} -> float32[64,8,16]", 1),
    ],
)
def test_the_terms_of_a_kernel_bound_its_difference(line: str, terms: int) -> None:
    graph = parse_graph(f"%x = Placeholder() -> float32[64,8,16]\n%y = {line}\nfeeds %x\nfetches %y\n")
    assert added_terms(graph["y"]) == terms
    assert most_difference(graph["y"]) == 2 * (terms - 1) / (1 << 24)


IMAGE = """
%x = Placeholder() {dtype=float32} -> float32[1,64,64,16]
%f = Placeholder() {dtype=float32} -> float32[3,3,16,16]
%conv = Conv2D(%x, %f) {T=float32, data_format=b'NHWC', padding=b'SAME', strides=(1, 1, 1, 1)} -> float32[1,64,64,16]
%relu = Relu(%conv) {T=float32} -> float32[1,64,64,16]
%pool = MaxPool(%relu) {T=float32, ksize=(1, 2, 2, 1), strides=(1, 2, 2, 1), data_format=b'NHWC', padding=b'VALID'} -> float32[1,32,32,16]
feeds %x, %f
fetches %pool
"""  # noqa: E501 - a node of a graph in text is one line


def test_rows_of_one_image_and_those_around_them() -> None:
    graph = parse_graph(IMAGE)
    (groups,) = choose_slices(graph, DEVICE, (4,), close=True)
    assert groups == (Slices(("conv", "relu", "pool"), 8, 32, True),)
    slice_kernels(graph, TARGET, groups)
    shapes = {op: [node.outputs[0].shape for node in graph if node.op == op] for op in ("Conv2D", "Relu", "MaxPool")}
    assert shapes["Conv2D"] == [(1, rows, 64, 16) for rows in (17, 18, 18, 17)]
    assert shapes["Relu"] == [(16, 64, 16)] * 4
    assert shapes["MaxPool"] == [(1, 8, 32, 16)] * 4


def test_a_row_is_no_slice() -> None:
    graph = parse_graph(
        "%x = Placeholder() -> float32[1,12]\n%y = Softmax(%x) {T=float32} -> float32[1,12]\nfeeds %x\n"
    )
    assert choose_slices(graph, DEVICE, (2, 4), close=True) == []


CHAIN = """
%x = Placeholder() {dtype=float32} -> float32[16,128,64]
%exp = Exp(%x) {T=float32} -> float32[16,128,64]
%tanh = Tanh(%exp) {T=float32} -> float32[16,128,64]
%sqrt = Sqrt(%tanh) {T=float32} -> float32[16,128,64]
%soft = Softmax(%sqrt) {T=float32} -> float32[16,128,64]
%product = BatchMatMulV2(%soft, %x) {T=float32, adj_x=true, adj_y=false} -> float32[16,64,64]
feeds %x
fetches %product
"""


def test_a_chain_has_rows_in_common() -> None:
    whole = ("exp", "tanh", "sqrt", "soft", "product")
    assert choose_slices(parse_graph(CHAIN), DEVICE, (4,)) == [(Slices(whole, 4, 16),)]
    (apart,) = choose_slices(parse_graph(CHAIN), DEVICE, (32,))
    assert [each.of for each in apart] == [2048, 16], "sixteen slices are too large"


NORMALISED = """
%x = Placeholder() {dtype=float32} -> float32[8,64,64]
%axes = Const() {dtype=int32} -> int32[2] = (1, 2)
%mean = Mean(%x, %axes) {T=float32, keep_dims=true} -> float32[8,1,1]
%scale = Rsqrt(%mean) {T=float32} -> float32[8,1,1]
%scaled = Mul(%x, %scale) {T=float32} -> float32[8,64,64]
%two = Const() {dtype=float32} ^scaled -> float32[]
%twice = Mul(%scaled, %two) {T=float32} -> float32[8,64,64]
%rows = Reshape(%twice, %axes) {T=float32, Tshape=int32} -> float32[512,64]
%other = Mul(%w, %two) {T=float32} -> float32[512,8]
%w = Placeholder() {dtype=float32} -> float32[512,8]
%gradient = MatMul(%rows, %other) {T=float32, transpose_a=true, transpose_b=false} -> float32[64,8]
feeds %x, %w
fetches %gradient
"""
IN_CHAIN = ("mean", "scale", "scaled", "twice", "rows", "other", "gradient")


def test_all_kernels_of_a_chain_run_slice_by_slice() -> None:
    graph = parse_graph(NORMALISED)
    assert choose_slices(graph, DEVICE, (4,)) == [(Slices(("mean", "twice", "rows", "gradient"), 2, 8),)]
    (groups,) = choose_slices(graph, DEVICE, (4,), close=True, chains=True)
    assert groups == (Slices(IN_CHAIN, 2, 8, True),)
    slice_kernels(graph, TARGET, groups)
    order = [node.name for node in graph.topological()]
    ends = [order.index(node.name) for node in graph if node.op == "MatMul"]
    begins = [order.index(node.name) for node in graph if node.op == "Mean"]
    assert all(end < begin for end, begin in zip(ends[:-1], begins[1:], strict=True)), order
    twice = [node for node in graph if node.op == "Mul" and node.controls]
    assert [len(node.controls) for node in twice] == [1] * 8, "a slice of its readers waits for a slice"


MASKED = """
%x = Placeholder() {dtype=float32} -> float32[8,8,64,64]
%random = Placeholder() {dtype=float32} -> float32[8,8,64,64]
%mask = Placeholder() {dtype=bool} -> bool[1,1,64,64]
%zero = Const() {dtype=float32} -> float32[]
%kept = GreaterEqual(%random, %zero) {T=float32} -> bool[8,8,64,64]
%first = SelectV2(%mask, %x, %zero) {T=float32} -> float32[8,8,64,64]
%scores = BatchMatMulV2(%first, %x) {T=float32, adj_x=false, adj_y=false} -> float32[8,8,64,64]
%whole = Cumsum(%scores, %axis) {T=float32, Tidx=int32} -> float32[8,8,64,64]
%axis = Const() {dtype=int32} -> int32[] = (0,)
%second = Exp(%whole) {T=float32} -> float32[8,8,64,64]
%dropped = SelectV2(%kept, %second, %zero) {T=float32} -> float32[8,8,64,64]
%soft = Softmax(%dropped) {T=float32} -> float32[8,8,64,64]
feeds %x, %random, %mask
fetches %soft
"""


def test_rows_of_several_axes_read_a_mask_together() -> None:
    graph = parse_graph(MASKED)
    (groups,) = choose_slices(graph, DEVICE, (32,))
    assert groups == (Slices(("kept", "first", "scores", "second", "dropped", "soft"), 2, 64),)
    slice_kernels(graph, TARGET, groups)
    read = {
        node.inputs[0].type.shape for node in graph if node.op == "SelectV2" and node.inputs[0].type.dtype == "bool"
    }
    assert read == {(1, 64, 64), (2, 64, 64)}


def test_what_reads_no_slices_is_made_with_its_first_reader() -> None:
    graph = parse_graph(MASKED)
    slice_kernels(graph, TARGET, [Slices(("kept", "first", "scores", "second", "dropped", "soft"), 2, 64)])
    order = [node.op for node in graph.topological()]
    assert order.index("Cumsum") < order.index("GreaterEqual")


FILTER = """
%x = Placeholder() {dtype=float32} -> float32[6,64,64,16]
%shape = Const() {dtype=int32} -> int32[4] = (3, 3, 16, 16)
%exp = Exp(%x) {T=float32} -> float32[6,64,64,16]
%filter = Conv2DBackpropFilter(%exp, %shape, %exp) {T=float32, data_format=b'NHWC', padding=b'SAME', strides=(1, 1, 1, 1)} -> float32[3,3,16,16]
feeds %x
fetches %filter
"""  # noqa: E501 - a node of a graph in text is one line


def test_columns_of_a_filters_gradient_are_held_one_part_at_a_time() -> None:
    graph = parse_graph(FILTER)
    slice_kernels(graph, TARGET, [Slices(("exp", "filter"), 4, 6, True)])
    columns = [node for node in graph.topological() if node.op == custom_ops.COLUMNS]
    assert [rows_of(node.inputs[0].type) for node in columns] == [4] * 10 + [2] * 5
    for count in (4, 2):
        parts = [node for node in columns if rows_of(node.inputs[0].type) == count]
        rows = [(node.attrs["begin"], rows_of(node.outputs[0])) for node in parts]
        assert [begin for begin, _ in rows] == [sum(each for _, each in rows[:i]) for i in range(len(rows))]
        assert sum(each for _, each in rows) == count * 64 * 64
        assert max(node.outputs[0].nbytes or 0 for node in parts) <= 1 << 20
    sums = [node for node in graph.topological() if node.op == "AddV2"]
    products = [node for node in graph.topological() if node.op == "MatMul"]
    before = [products[0], *sums]
    assert [before[-1] in node.controls or before[i] in node.controls for i, node in enumerate(columns[1:])] == [
        True
    ] * (len(columns) - 1), "a part waits for the sum of those before it"
    assert len(sums) == len(products) - 1 == len(columns) - 1


def test_slices_that_would_write_over_what_they_read_whole_are_not_chosen() -> None:
    graph = parse_graph(
        "%x = Placeholder() {dtype=float32} -> float32[64,64,16]\n%y = Exp(%x) {T=float32} -> float32[64,64,16]\n"
        "feeds %x\nfetches %y\n"
    )
    assert choose_slices(graph, DEVICE, (2, 4)) == []


def test_steps_in_too_many_slices_are_not_chosen() -> None:
    names = [f"e{number}" for number in range(20)]
    nodes = [
        f"%{name} = Exp(%{before}) {{T=float32}} -> float32[65536,64]"
        for before, name in zip(["x", *names], names, strict=False)
    ]
    graph = parse_graph(
        "\n".join(
            ["%x = Placeholder() {dtype=float32} -> float32[65536,64]", *nodes, f"feeds %x\nfetches %{names[-1]}\n"]
        )
    )
    (few,) = choose_slices(graph, DEVICE, (512, 1024))
    assert [each.of // each.rows for each in few] == [512]


UNALIGNED = """
%x = Placeholder() {dtype=float32} -> float32[1,64,63,1]
%f = Placeholder() {dtype=float32} -> float32[3,3,1,1]
%conv = Conv2D(%x, %f) {T=float32, data_format=b'NHWC', padding=b'SAME', strides=(1, 1, 1, 1)} -> float32[1,64,63,1]
feeds %x, %f
fetches %conv
"""


def test_rows_of_one_image_begin_where_kernels_need_it() -> None:
    aligned = UNALIGNED.replace("63,1]", "64,1]")
    assert choose_slices(parse_graph(aligned), DEVICE, (4,), close=True) == [(Slices(("conv",), 16, 64, True),)]
    assert choose_slices(parse_graph(UNALIGNED), DEVICE, (4,), close=True) == []


@pytest.mark.parametrize(("unit", "aligned"), [(16, True), (8, False)])
def test_units_of_a_sum_begin_where_kernels_need_it(unit: int, aligned: bool) -> None:
    graph = parse_graph(
        "%x = Placeholder() {dtype=float32} -> float32[64,1]\n"
        "%y = MatMul(%x, %x) {T=float32, transpose_a=true, transpose_b=false} -> float32[1,1]\nfeeds %x\nfetches %y\n"
    )
    slices = slices_of(graph["y"], Slicing((0, 1), Kind.SUM, unit=unit), 16, 64)
    assert slices is not None and reads_in_place(graph["y"], slices, 64, {}) == aligned


def test_a_slice_waits_in_the_stretch_of_what_it_waits_for() -> None:
    """A kernel that waits for one that needs whole slices comes after all of these."""
    graph = parse_graph(
        "%x = Placeholder() {dtype=float32} -> float32[64,64]\n%w = Placeholder() {dtype=float32} -> float32[64,64]\n"
        "%a = Exp(%x) {T=float32} -> float32[64,64]\n"
        "%sum = Cumsum(%a, %axis) {T=float32, Tidx=int32} -> float32[64,64]\n"
        "%axis = Const() {dtype=int32} -> int32[] = (0,)\n"
        "%b = Tanh(%w) {T=float32} ^sum -> float32[64,64]\n%c = Log(%b) {T=float32} -> float32[64,64]\n"
        "feeds %x, %w\nfetches %sum, %c\n"
    )
    slice_kernels(graph, TARGET, [Slices(("a", "b", "c"), 16, 64)])
    order = [node.op for node in graph.topological() if node.op in ("Exp", "Cumsum", "Tanh", "Log")]
    assert order == [*["Exp"] * 4, "Cumsum", *["Tanh", "Log"] * 4]


def test_a_slice_waits_for_all_slices_of_a_sum() -> None:
    """By its control edge alone: a kernel that waits for a sum is in a later stretch, and so is what it reads alone."""
    graph = parse_graph(
        "%x = Placeholder() {dtype=float32} -> float32[64,96]\n%w = Placeholder() {dtype=float32} -> float32[64,96]\n"
        "%a = Exp(%x) {T=float32} -> float32[64,96]\n"
        "%sum = BiasAddGrad(%a) {T=float32, data_format=b'NHWC'} -> float32[96]\n"
        "%b = Tanh(%w) {T=float32} ^sum -> float32[64,96]\n%c = Log(%b) {T=float32} -> float32[64,96]\n"
        "feeds %x, %w\nfetches %sum, %c\n"
    )
    slice_kernels(graph, TARGET, [Slices(("a", "sum", "b", "c"), 16, 64)])
    ops = ("Exp", custom_ops.ADD_ROWS, "Tanh", "Log")
    order = [node.op for node in graph.topological() if node.op in ops]
    assert order == [*["Exp", custom_ops.ADD_ROWS] * 4, *["Tanh", "Log"] * 4]
    assert {node for node in graph if node.op == custom_ops.ADD_ROWS} <= {*graph["tfswap/b/Tanh/0"].controls}
