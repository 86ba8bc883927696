"""The facts of small graphs: values, kernels and dependencies, made without TensorFlow."""

from __future__ import annotations

from planner_problems import VARIABLE, facts, kernels

from tfswap.planner import ordering


def test_a_write_waits_for_the_readers_of_the_version_that_it_ends():
    flow = facts(VARIABLE)
    (update,) = flow.updates[flow.place["write"]]
    assert flow.value_of[flow.nodes[flow.place["read"]], 0] == update.old
    assert flow.value_of[flow.nodes[flow.place["reread"]], 0] == update.new
    assert flow.place["use"] in flow.deps[flow.place["write"]]
    assert flow.place["use"] not in flow.own_deps[flow.place["write"]]
    assert flow.place["late"] not in flow.deps[flow.place["write"]]
    order = [i for i in ordering.traced_order(flow) if flow.is_kernel[i]]
    assert order.index(flow.place["use"]) < order.index(flow.place["write"]) < order.index(flow.place["late"])
    assert flow.persistent_bytes == 2 * 256  # v once, whatever its versions, and x


def test_a_reader_that_depends_on_the_write_does_not_make_a_cycle():
    flow = facts(VARIABLE.replace("%use = Mul(%read, %x)", "%use = Mul(%read, %late)"))
    assert flow.place["use"] not in flow.deps[flow.place["write"]]
    assert len(ordering.traced_order(flow)) == len(flow.nodes)


def test_a_list_that_a_loop_fills_with_what_it_reads_of_a_variable_is_such_a_reader():
    """As a backward loop pops weights that the forward loop has read in each iteration."""
    flow = facts(
        "%v = Placeholder() -> resource[]\n%x = Placeholder() -> float32[64]\n%i = Const() -> int32[] = (0,)\n"
        "%most = Const() -> int32[] = (9,)\n%shape = Const() -> int32[1] = (64,)\n"
        "%empty = EmptyTensorList(%shape, %most) -> variant[]\n"
        "%loop = While(%i, %empty, %v) -> int32[], variant[], resource[]\n"
        "%write = AssignSubVariableOp(%v, %x) {dtype=float32} ^loop\n"
        "%last = TensorListPopBack(%loop:1, %shape) -> variant[], float32[64]\n"
        "feeds %v, %x\nfetches %last:1\ntargets %write\n"
        "body %loop\n"
        "  %i = Placeholder() -> int32[]\n  %seen = Placeholder() -> variant[]\n  %v = Placeholder() -> resource[]\n"
        "  %n = Const() -> int32[] = (5,)\n  %less = Less(%i, %n) -> bool[]\n  feeds %i, %seen, %v\n  fetches %less\n"
        "body %loop\n"
        "  %i = Placeholder() -> int32[]\n  %seen = Placeholder() -> variant[]\n  %v = Placeholder() -> resource[]\n"
        "  %one = Const() -> int32[] = (1,)\n  %next = AddV2(%i, %one) -> int32[]\n"
        "  %read = ReadVariableOp(%v) {dtype=float32} -> float32[64]\n"
        "  %pushed = TensorListPushBack(%seen, %read) -> variant[]\n"
        "  feeds %i, %seen, %v\n  fetches %next, %pushed, %v\n"
    )
    (update,) = flow.updates[flow.place["write"]]
    assert flow.kept[flow.nodes[flow.place["loop"]], 1] == (update.old,)
    assert update.old in flow.reads[flow.place["last"]]
    assert flow.place["last"] in flow.deps[flow.place["write"]]


def test_views_and_constants_are_no_kernels_and_hold_no_bytes_of_their_own():
    flow = facts(
        "%x = Placeholder() {dtype=float32} -> float32[64]\n%c = Const() {dtype=int32} -> int32[1] = (64)\n".replace(
            "(64)", "(64,)"
        )
        + "%a = Exp(%x) -> float32[64]\n"
        "%view = Reshape(%a, %c) -> float32[64]\n"
        "%b = Neg(%view) -> float32[64]\n"
        "feeds %x\nfetches %b\n"
    )
    assert [flow.nodes[i].name for i in kernels(flow)] == ["a", "b"]
    assert flow.value_of[flow.nodes[flow.place["view"]], 0] == flow.value_of[flow.nodes[flow.place["a"]], 0]
