"""Updates in slices, on graphs in text, and what keeps one whole."""

from __future__ import annotations

import pytest
from test_passes import Golden

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.home_changes import home_changes
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.tactics.sliced_updates import count_slices, slice_updates, slices_of

TARGET = Target(DeviceModel("cpu"))


@pytest.mark.parametrize(("name", "count"), [("sliced_updates", 3), ("sliced_sums_of_rows", 3)])
def test_sliced_updates(name: str, count: int) -> None:
    golden = Golden(name)
    nbytes = int(golden.arguments[0])
    assert count_slices(golden.graph, TARGET.device, nbytes) == count
    assert slice_updates(golden.graph, TARGET, nbytes) == count
    golden.check()
    assert [slices_of(node) for node in golden.graph if node.op == custom_ops.COMMIT_HOME] in ([count], [count] * 2)


VARIABLE = "%{0} = Placeholder() {{_tfswap_at_home_bytes=4096, dtype=resource}} -> resource[]"
READ = "%{0} = Tfswap>ReadHome(%{1}) {{dtype=float32, shape=[64,16]}} {2}-> float32[64,16]"
WRITE = """\
%{0}/store = Tfswap>StoreHome(%{2}) {{T=float32}} -> variant[]
%{0} = Tfswap>CommitHome(%{1}, %{2}, %{0}/store) {{T=float32}} {3}"""
"""Name, variable, value, what it waits for."""


def graph(*lines: str, fetches: str = "", targets: str = "write") -> Graph:
    """A step with variables v and w, and a gradient."""
    start = ["%gradient = Placeholder() {dtype=float32} -> float32[64,16]", VARIABLE.format("v"), VARIABLE.format("w")]
    end = ["feeds %gradient, %v, %w", *([f"fetches {fetches}"] if fetches else []), f"targets %{targets}"]
    return parse_graph("\n".join([*start, *lines, *end]) + "\n")


PLAIN = (
    READ.format("read", "v", ""),
    "%new = Sub(%read, %gradient) {T=float32} -> float32[64,16]",
    WRITE.format("write", "v", "new", ""),
)
DECAYED = (
    READ.format("read", "v", ""),
    "%decayed = Mul(%read, %read) {T=float32} -> float32[64,16]",
    WRITE.format("decay", "v", "decayed", ""),
    READ.format("again", "v", "^decay "),
    "%new = Sub(%again, %gradient) {T=float32} -> float32[64,16]",
)
"""A variable is written, and read for a second write."""


def test_the_size_of_slices() -> None:
    for nbytes, slices in ((4096, 0), (2048, 2), (1024, 4), (1023, 6), (256, 16), (1, 16)):
        step = graph(*PLAIN)
        assert count_slices(step, TARGET.device, nbytes) == slices
        assert slice_updates(step, TARGET, nbytes) == slices


def test_a_new_value_that_others_read_is_read_after_the_last_slice() -> None:
    later = READ.format("later", "v", "^write ")
    step = graph(*PLAIN, later, "%exp = Exp(%later) {T=float32} -> float32[64,16]", fetches="%exp")
    assert slice_updates(step, TARGET, 1024) == 4
    assert step["later"].op == custom_ops.READ_HOME and "rows" not in step["later"].attrs
    assert step["later"].controls == (step["write"],)


def test_the_forward_pass_reads_the_whole_variable() -> None:
    step = graph(*PLAIN, "%exp = Exp(%read) {T=float32} -> float32[64,16]", fetches="%exp")
    assert slice_updates(step, TARGET, 1024) == 4
    assert step["exp"].inputs[0].node is step["read"]
    assert step["read"] in step["write"].controls


def test_rows_are_gathered_before_the_write() -> None:
    gather = "%rows = ResourceGather(%v, %places) {dtype=float32, Tindices=int32} -> float32[3,16]"
    step = graph("%places = Const() {dtype=int32} -> int32[3] = (1, 2, 3)", gather, *PLAIN, fetches="%rows")
    assert slice_updates(step, TARGET, 1024) == 4
    assert step["rows"] in step["write"].controls


def test_of_two_writes_slices_store_the_last() -> None:
    """As of AdamW, which decays a variable before it updates it."""
    step = graph(
        *DECAYED,
        WRITE.format("write", "v", "new", "^again"),
        targets="decay, %again, %write",
    )
    assert slice_updates(step, TARGET, 1024) == 4
    commits = [node for node in step if node.op == custom_ops.COMMIT_HOME]
    assert [node.name for node in commits] == ["write"] and slices_of(commits[0]) == 4
    assert step.topological()[-1] is commits[0]
    assert sum(node.op == custom_ops.READ_HOME for node in step) == 4


def test_an_update_that_waits_for_a_norm_of_another_new_value_is_another_round() -> None:
    step = graph(
        READ.format("slot/read", "w", ""),
        "%slot/new = Sub(%slot/read, %gradient) {T=float32} -> float32[64,16]",
        WRITE.format("slot/write", "w", "slot/new", ""),
        READ.format("slot/later", "w", "^slot/write "),
        "%axes = Const() {dtype=int32} -> int32[2] = (0, 1)",
        "%norm = Sum(%slot/later, %axes) {T=float32, Tidx=int32, keep_dims=false} -> float32[]",
        "%change = Mul(%slot/later, %norm) {T=float32} -> float32[64,16]",
        READ.format("read", "v", ""),
        "%new = Sub(%read, %change) {T=float32} -> float32[64,16]",
        WRITE.format("write", "v", "new", ""),
    )
    assert count_slices(step, TARGET.device, 1024) == slice_updates(step, TARGET, 1024) == 8
    assert [slices_of(step[name]) for name in ("slot/write", "write")] == [4, 4]
    assert step["norm"].inputs[0].node is step["slot/later"]
    assert [each.op for each in step if step["slot/later"].out() in each.inputs].count(custom_ops.ROWS) == 4


def test_each_time_that_a_step_trains_its_updates_are_cut() -> None:
    step = graph(
        *PLAIN,
        READ.format("later", "v", "^write "),
        "%axis = Const() {dtype=int32} -> int32[] = (0,)",
        "%forward = Cumsum(%later, %axis) {T=float32, Tidx=int32} -> float32[64,16]",
        "%again = Sub(%later, %forward) {T=float32} -> float32[64,16]",
        WRITE.format("second", "v", "again", "^later"),
        targets="write, %second",
    )
    assert count_slices(step, TARGET.device, 1024) == slice_updates(step, TARGET, 1024) == 8
    assert [slices_of(step[name]) for name in ("write", "second")] == [4, 4]
    loads = [node for node in step if node.op == custom_ops.READ_HOME and "rows" in node.attrs]
    assert [step["write"] in load.controls for load in loads] == 4 * [False] + 4 * [True]
    assert all(load in step["second"].controls or load in loads[:-1] for load in loads)
    assert step["later"] in step["second"].controls


WHOLE = {
    "two writes, and another reads between them": graph(
        *DECAYED,
        "%exp = Exp(%again) {T=float32} -> float32[64,16]",
        WRITE.format("write", "v", "new", "^again"),
        fetches="%exp",
    ),
    "the step returns the new value": graph(*PLAIN, fetches="%new"),
    "another kernel than those of elements": graph(
        READ.format("read", "v", ""),
        "%axis = Const() {dtype=int32} -> int32[] = (0,)",
        "%new = Cumsum(%read, %axis) {T=float32, Tidx=int32} -> float32[64,16]",
        WRITE.format("write", "v", "new", ""),
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_updates_that_stay_whole(name: str) -> None:
    step = WHOLE[name].copy()
    assert count_slices(step, TARGET.device, 1024) == slice_updates(step, TARGET, 1024) == 0


def test_of_updates_that_wait_for_each_other_some_stay_whole() -> None:
    """Of each pair one waits for the first of the other pair: not all of both can come before that."""
    lines: list[str] = []
    for pair, other in (("a", "b"), ("b", "a")):
        for number, waits in (("1", ""), ("2", f"^{other}1/write")):
            name = pair + number
            lines += [
                f"{VARIABLE.format(name)}",
                READ.format(f"{name}/read", name, ""),
                f"%{name}/sum = AddV2(%{name}/read, %{pair}/change) {{T=float32}} {waits} -> float32[64,16]",
                WRITE.format(f"{name}/write", name, f"{name}/sum", ""),
            ]
    changes = [f"%{pair}/change = Placeholder() {{dtype=float32}} -> float32[64,16]" for pair in "ab"]
    text = "\n".join([*changes, *lines])
    names = ("a1", "a2", "b1", "b2")
    feeds, targets = ", ".join(f"%{n}" for n in names), ", ".join(f"%{n}/write" for n in names)
    step = parse_graph(f"{text}\nfeeds %a/change, %b/change, {feeds}\ntargets {targets}\n")
    assert slice_updates(step, TARGET, 1024) == 4
    assert len(step.topological()) == len(step)


BRANCH = """
  %gradient = Placeholder() {dtype=float32} -> float32[64,16]
  %v = Placeholder() {_tfswap_at_home_bytes=4096, dtype=resource} -> resource[]
  %w = Placeholder() {_tfswap_at_home_bytes=4096, dtype=resource} -> resource[]
"""
DECIDED = "StatelessIf(%p, {0}) {{Tcond=bool, Tin=({1}), Tout=(), then_branch=b'a', else_branch=b'b'}}"


def decided(*lines: str) -> Graph:
    """A step that updates v in a branch, where `lines` access w."""
    update = """\
  %rate = Const() {dtype=float32} -> float32[]
  %dims = Const() {dtype=int32} -> int32[2] = (64, 16)
  %ones = Fill(%dims, %rate) {T=float32, index_type=int32} -> float32[64,16]
  %scaled = Mul(%gradient, %ones) {T=float32} -> float32[64,16]
  %checked = PreventGradient(%scaled) {T=float32, message=b''} -> float32[64,16]
  %write = AssignSubVariableOp(%v, %checked) {dtype=float32}
"""
    ends = "  feeds %gradient, %v, %w\n"
    return parse_graph(
        "%p = Placeholder() {dtype=bool} -> bool[]"
        + "\n".join(line[2:] for line in BRANCH.splitlines())
        + f"\n%taken = {DECIDED.format('%gradient, %v, %w', 'float32, resource, resource')}\n"
        + f"feeds %p, %gradient, %v, %w\ntargets %taken\nbody %taken{BRANCH}{update}"
        + "".join(f"  {line}\n" for line in lines)
        + f"{ends}  targets %write\nbody %taken{BRANCH}{ends}"
    )


def test_an_update_in_a_branch_runs_in_slices_there() -> None:
    step = decided()
    (branch, _), whole = next(iter(step.bodies.values())), analyse_dataflow(decided(), TARGET.device)
    assert count_slices(step, TARGET.device, 1024) == slice_updates(step, TARGET, 1024) == 4
    (commit,) = (node for node in branch if node.op == custom_ops.COMMIT_HOME)
    assert commit.name == "write" and slices_of(commit) == 4
    assert not any(kind.shape == (64, 16) for node in branch if node not in branch.feeds for kind in node.outputs)
    flow = analyse_dataflow(step, TARGET.device)
    assert (flow.passing_bytes, flow.inner_out_bytes, flow.inner_in_bytes) == (4096, 4096, 4096)
    assert not whole.passing_bytes


def test_tensorflow_keeps_no_slices_of_one_value_as_constants() -> None:
    """It would make all of them with the step's function, of all variables together."""
    step = decided()
    (branch, _) = next(iter(step.bodies.values()))
    slice_updates(step, TARGET, 1024)
    values = [node.inputs[1].node for node in branch if node.op == "Fill"]
    assert len(values) == 4 and {node.op for node in values} == {custom_ops.DEFER} and len({*values}) == 1


def test_a_slice_in_a_branch_takes_its_turn() -> None:
    """Nothing that a slice computes of an argument alone comes before the slices before it."""
    step = decided()
    (branch, _) = next(iter(step.bodies.values()))
    slice_updates(step, TARGET, 1024)
    order = branch.topological()
    stores = [place for place, node in enumerate(order) if node.op == custom_ops.STORE_HOME]
    first = [min(i for i, node in enumerate(order) if node.name.endswith(f"/Fill/{begin}")) for begin in (16, 32, 48)]
    assert all(store < begin for store, begin in zip(stores, first, strict=False))


def test_a_variable_of_which_an_inner_body_has_the_handle_stays_whole() -> None:
    """What the inner body reads, and when, is not known here."""
    inner = DECIDED.format("%v", "resource").replace("%p", "%decides")
    step = decided("%decides = Const() {dtype=bool} -> bool[]", f"%inner = {inner} ^write")
    (branch, _) = next(iter(step.bodies.values()))
    for _ in range(2):
        body = Graph()
        body.feeds.append(body.add("Placeholder", "v", attrs={"dtype": "resource"}, outputs=branch["v"].outputs))
        branch.bodies[branch["inner"]] = (*branch.bodies.get(branch["inner"], ()), body)
    branch.targets.append(branch["inner"])
    assert count_slices(step, TARGET.device, 1024) == slice_updates(step, TARGET, 1024) == 0
    assert branch["write"].op == "AssignSubVariableOp"


def test_too_many_slices_are_refused() -> None:
    text = "\n".join(PLAIN).replace("64,16", "65536,16")
    step = parse_graph(
        "%gradient = Placeholder() {dtype=float32} -> float32[65536,16]\n"
        f"{VARIABLE.format('v')}\n{text}\nfeeds %gradient, %v\ntargets %write\n"
    )
    with pytest.raises(InvalidModel, match="16384 slices, and plans have at most 768"):
        slice_updates(step, TARGET, 1)


def test_host_memory_of_new_values_is_taken_by_the_first_slice() -> None:
    step = graph(*PLAIN)
    slice_updates(step, TARGET, 1024)
    nodes = step.topological()
    first = next(i for i, node in enumerate(nodes) if node.op == custom_ops.STORE_HOME)
    last = next(i for i, node in enumerate(nodes) if node.op == custom_ops.COMMIT_HOME)
    assert home_changes(nodes) == {first: 4096, last: -4096}


def test_rows_of_unknown_shapes_stay_whole() -> None:
    step = graph(*PLAIN)
    for node in step:
        node.outputs = tuple(kind._replace(shape=None) if kind.dtype == "float32" else kind for kind in node.outputs)
    assert slice_updates(step, TARGET, 1024) == 0


CPU = Target(DeviceModel("cpu", intra_op_threads=2, l3_cache_bytes=32 << 20, l1_l2_bytes=(32 << 10, 1 << 20)))
DENSE = """
%x = Placeholder() {{dtype=float32}} -> float32[{0},{1}]
%dy = Placeholder() {{dtype=float32}} -> float32[{0},512]
%v = Placeholder() {{_tfswap_at_home_bytes=1310720, dtype=resource}} -> resource[]
%gradient = MatMul(%x, %dy) {{T=float32, transpose_a=true, transpose_b=false}} -> float32[{1},512]
{2}
%read = Tfswap>ReadHome(%v) {{dtype=float32, shape=[{1},512]}} -> float32[{1},512]
%new = Sub(%read, %{3}) {{T=float32}} -> float32[{1},512]
%write/store = Tfswap>StoreHome(%new) {{T=float32}} -> variant[]
%write = Tfswap>CommitHome(%v, %new, %write/store) {{T=float32}}
feeds %x, %dy, %v
targets %write
"""
TIED = """\
%again = MatMul(%x, %dy) {T=float32, transpose_a=true, transpose_b=false} -> float32[640,512]
%sum = AddN(%gradient, %again) {N=2, T=float32} -> float32[640,512]"""
"""A weight that two layers share, and the sum of their gradients."""


def dense(depth: int = 32, rows: int = 640, more: str = "", gradient: str = "gradient") -> Graph:
    """The update of a dense layer's weight of `rows` by 512."""
    return parse_graph(DENSE.format(depth, rows, more, gradient))


@pytest.mark.parametrize(("depth", "onednn", "whole"), [(32, False, False), (32, True, True), (400, False, True)])
def test_the_gradient_of_a_dense_layer_is_made_slice_by_slice(depth: int, onednn: bool, whole: bool) -> None:
    """Where rows of it have the same bits, and it is larger than what all of its slices read."""
    step = dense(depth)
    target = Target(CPU.device._replace(onednn=onednn))
    assert slice_updates(step, target, 1310720 // 4) == 4
    made = [node.outputs[0].shape for node in step if node.op == "MatMul"]
    assert made == ([(640, 512)] if whole else [(160, 512)] * 4)


def test_each_slice_of_a_gradient_has_columns_of_its_own_and_waits_for_the_slice_before() -> None:
    step = dense()
    slice_updates(step, CPU, 1310720 // 4)
    columns = [node for node in step.topological() if node.op == "Slice"]
    places = [[step.small_constants[tensor.node] for tensor in node.inputs[1:]] for node in columns]
    assert places == [[(0, begin), (32, 160)] for begin in (0, 160, 320, 480)]
    stores = [node for node in step.topological() if node.op == custom_ops.STORE_HOME]
    products = [node for node in step.topological() if node.op == "MatMul"]
    for made in (columns, products):
        assert [[c for c in node.controls if c in stores] for node in made] == [[], *([each] for each in stores[:-1])]


def test_gradients_that_are_added_up_are_made_slice_by_slice() -> None:
    step = dense(more=TIED, gradient="sum")
    assert slice_updates(step, CPU, 1310720 // 4) == 4
    shapes = {op: [node.outputs[0].shape for node in step if node.op == op] for op in ("MatMul", "AddN", "Slice")}
    assert shapes == {"MatMul": [(160, 512)] * 8, "AddN": [(160, 512)] * 4, "Slice": [(32, 160)] * 8}


def test_sums_of_more_gradients_stay_whole() -> None:
    """Which of them its kernel begins with depends on who else reads them."""
    three = TIED.replace("AddN(%gradient, %again) {N=2", "AddN(%gradient, %again, %again) {N=3")
    step = dense(more=three, gradient="sum")
    slice_updates(step, CPU, 1310720 // 4)
    assert [node.outputs[0].shape for node in step if node.op == "AddN"] == [(640, 512)]


def test_a_gradient_of_which_the_last_slice_has_other_bits_stays_whole() -> None:
    step = dense(rows=641)
    assert slice_updates(step, CPU, 1310720 // 4) == 5
    assert [node.outputs[0].shape for node in step if node.op == "MatMul"] == [(641, 512)]


def test_a_product_that_adds_up_columns_stays_whole() -> None:
    text = DENSE.format(32, 640, "", "gradient").replace("640,512]", "64,4096]").replace("32,640]", "64,640]")
    text = text.replace("32,512]", "640,4096]").replace("transpose_a=true", "transpose_a=false")
    step = parse_graph(text)
    assert slice_updates(step, CPU, 1310720 // 4) == 4
    assert [node.outputs[0].shape for node in step if node.op == "MatMul"] == [(64, 4096)]
