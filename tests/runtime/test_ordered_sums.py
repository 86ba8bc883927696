"""Sums add in the order of TensorFlow's executor, whatever a plan does to their terms."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from folders import GOLDEN
from processes import last_json, on_arena, run_forked

from tfswap.ir.custom_ops import FIRST, KERNEL
from tfswap.ir.op_traits import depends_on_owners
from tfswap.ir.text import format_graph, parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.prepare.ordered_sums import fix_iteration, order_sums

TWO = DeviceModel("cpu", False, 2, 2)
GPU = DeviceModel("gpu", False, 2, 2)

# m is held twice by the sum: only s can be forwarded.
STEP = """\
%x = Placeholder() {{dtype=float32}} -> float32[600,600]
%m = Exp(%x) {{T=float32}} -> float32[600,600]
{lines}
%sum = AddN(%m, %m, %s) {{N=3, T=float32}}{waits} -> float32[600,600]
feeds %x
fetches %sum, %r
"""
S = "%s = Tanh(%x) {T=float32} -> float32[600,600]\n"
READER = "%r = MatMul(%s, %x) {T=float32} -> float32[600,600]\n"


def first(lines: str, waits: str = "", device: DeviceModel = TWO) -> str:
    """What the sum of STEP begins with."""
    graph = parse_graph(STEP.format(lines=lines.rstrip(), waits=waits))
    assert order_sums(graph, Target(device)) == 1
    return graph["sum"].inputs[0].name


@pytest.mark.parametrize("device", [TWO, TWO._replace(inter_op_threads=1), GPU])
def test_readers_that_run_before_a_sum_hold_nothing_and_those_after_it_do(device: DeviceModel) -> None:
    assert first(S + READER, " ^r", device) == "s:0"
    assert first(S + "%r = MatMul(%s, %x) {T=float32} ^sum -> float32[600,600]\n", "", device) == "m:0"


def test_a_reader_that_is_ready_when_the_sum_is_holds_what_it_reads() -> None:
    assert first(S + READER) == "m:0"


def test_a_reader_that_has_ended_when_the_sum_is_ready_holds_nothing() -> None:
    late = READER.replace("%r", "%a") + "%b = MatMul(%a, %a) {T=float32} -> float32[600,600]\n"
    quick = S + "%r = Neg(%s) {T=float32} -> float32[600,600]\n"
    assert first(quick + late.replace("%s", "%x"), " ^b") == "s:0"


def test_persistent_buffers_are_never_forwarded() -> None:
    unread = "%r = Exp(%x) {T=float32} -> float32[600,600]\n"
    assert first("%s = Const() {dtype=float32, value=tensor<00>} -> float32[600,600]\n" + unread) == "m:0"
    assert first("%s = Identity(%x) {T=float32} -> float32[600,600]\n" + unread) == "m:0"
    assert first(S + "%r = Identity(%s) {T=float32} -> float32[600,600]\n") == "m:0"  # it is a result


def test_a_view_is_what_it_views() -> None:
    view = S.replace("%s", "%t") + "%s = Identity(%t) {T=float32} -> float32[600,600]\n"
    after = "%r = MatMul(%t, %x) {T=float32} ^sum -> float32[600,600]\n"
    assert first(view + after) == "m:0"
    assert first(view + after.replace("^sum ", ""), " ^r") == "s:0"


def test_equal_tensors_are_one() -> None:
    """TensorFlow merges them before anything runs."""
    equal = S + "%m2 = Exp(%x) {T=float32} -> float32[600,600]\n%r = Neg(%x) {T=float32} -> float32[600,600]\n"
    text = STEP.format(lines=equal.rstrip(), waits="").replace("AddN(%m, %m", "AddN(%m, %m2")
    graph = parse_graph(text)
    order_sums(graph, Target(TWO))
    assert graph["sum"].inputs[0].name == "s:0"


def test_equal_sums_are_one_although_both_are_results() -> None:
    """The readers of their terms are not twice as many."""
    text = STEP.format(lines=(S + READER).rstrip(), waits=" ^r")
    twin = "%twin = AddN(%m, %m, %s) {N=3, T=float32} ^r -> float32[600,600]\nfeeds"
    graph = parse_graph(text.replace("feeds", twin).replace("%sum, %r", "%sum, %twin, %r"))
    assert order_sums(graph, Target(TWO)) == 2
    assert [graph[name].inputs[0].name for name in ("sum", "twin")] == ["s:0", "s:0"]


def test_only_sums_of_three_or_more_that_are_rounded() -> None:
    graph = parse_graph(
        """\
        %x = Placeholder() {dtype=float32} -> float32[8]
        %i = Placeholder() {dtype=int32} -> int32[8]
        %two = AddN(%x, %x) {N=2, T=float32} -> float32[8]
        %whole = AddN(%i, %i, %i) {N=3, T=int32} -> int32[8]
        %three = AddN(%x, %x, %x) {N=3, T=float32} -> float32[8]
        feeds %x, %i
        fetches %two, %whole, %three
        """.replace("        ", "")
    )
    assert order_sums(graph, Target(TWO)) == 1
    assert [node.name for node in graph if KERNEL in node.attrs] == ["three"]
    assert [op for op in ("Add", "AddN", "AddV2", "Sum") if depends_on_owners(op)] == ["AddN"]


LOOP = """\
%x = Placeholder() {{dtype=float32}} -> float32[64]
%n = Const() {{dtype=int32, value=tensor<03000000>}} -> int32[]
%loop = While(%n, %x, %x) -> int32[], float32[64], float32[64]
body %loop
  %i = Placeholder() {{dtype=int32}} -> int32[]
  %a = Placeholder() {{dtype=float32}} -> float32[64]
  %b = Placeholder() {{dtype=float32}} -> float32[64]
  %zero = Const() {{dtype=int32, value=tensor<00000000>}} -> int32[]
  %more = Greater(%i, %zero) {{T=int32}} -> bool[]
  feeds %i, %a, %b
  fetches %more
body %loop
  %i = Placeholder() {{dtype=int32}} -> int32[]
  %a = Placeholder() {{dtype=float32}} -> float32[64]
  %b = Placeholder() {{dtype=float32}} -> float32[64]
  %m = Exp(%b) {{T=float32}} -> float32[64]
  %sum = AddN(%m, %m, %a) {{N=3, T=float32}} -> float32[64]
  feeds %i, %a, %b
  fetches %i, {kept}, %b
feeds %x
fetches %loop:1
"""


def test_what_the_iteration_before_has_made_is_a_bodys_own() -> None:
    def begins(kept: str, device: DeviceModel = TWO) -> tuple[str, object]:
        graph = parse_graph(LOOP.format(kept=kept))
        assert order_sums(graph, Target(device)) == 1
        body = graph.bodies[graph["loop"]][1]
        assert KERNEL in body["sum"].attrs
        return body["sum"].inputs[0].name, body["sum"].attrs.get(FIRST)

    assert begins("%sum") == ("m:0", (0, 2))  # the first iteration gets what is held outside
    assert begins("%sum", GPU) == ("a:0", None)  # as in most iterations
    assert begins("%a") == ("m:0", None)  # the next iteration gets it too


def test_equal_results_of_a_body_are_one() -> None:
    """Also where its loop carries both."""
    text = LOOP.format(kept="%sum").replace("%i, %sum, %b", "%i, %sum, %twin")
    text = text.replace("  feeds %i, %a, %b\n  fetches %i, %sum", "%s\n  feeds %i, %a, %b\n  fetches %i, %sum")
    twin = "  %twin = AddN(%m, %m, %a) {N=3, T=float32} -> float32[64]"
    graph = parse_graph(text.replace("%s\n", f"{twin}\n"))
    assert order_sums(graph, Target(TWO)) == 2
    body = graph.bodies[graph["loop"]][1]
    assert body["sum"].inputs == body["twin"].inputs


def test_each_iteration_has_its_own_order() -> None:
    """The first is given what is still held outside."""
    graph = parse_graph(LOOP.format(kept="%sum"))
    body = graph.bodies[graph["loop"]][1]
    for iteration, begins in ((0, "m:0"), (1, "a:0"), (7, "a:0")):
        order_sums(graph, Target(TWO))
        copy = body.copy()
        fix_iteration(copy, copy, iteration)
        assert copy["sum"].inputs[0].name == begins
        assert FIRST not in copy["sum"].attrs


def test_two_at_a_time_without_kernels_of_our_own() -> None:
    golden = GOLDEN / "ordered_sums.txt"
    _, before, after = golden.read_text().split("---\n")
    graph = parse_graph(before)
    assert order_sums(graph, Target(TWO, own_ops=False)) == 2
    assert format_graph(graph).strip() == after.strip()


def kernels():
    import numpy as np
    import tensorflow as tf
    from tensorflow.core.framework.attr_value_pb2 import AttrValue

    from tfswap.ir.custom_ops import FIRST, FIRST_SHAPE, KERNEL, OWN_KERNEL

    def totals(given, count, held, own, first=0):
        # Of each x and its factors, in one function.
        def total(x, factors):
            terms = [x * factors[i] for i in range(count)]
            total = tf.add_n(terms)
            if own:
                total.op._set_attr(KERNEL, AttrValue(s=OWN_KERNEL.encode()))
            if first:  # by iteration; outside of loops it is the first
                total.op._set_attr(FIRST, AttrValue(list=AttrValue.ListValue(i=[first, 1])))
                total.op._set_attr(FIRST_SHAPE, AttrValue(list=AttrValue.ListValue(i=[1, 2])))
            return total, [terms[i] for i in held]

        made = tf.function(lambda given: [total(x, factors) for x, factors in given], autograph=False)
        return [found.numpy().tobytes() for found, _ in made(given)]

    def in_order(x, factors, count, first=0):
        # The first two to nine, and each further eight by themselves.
        groups = [range((count - 2) % 8 + 2), *(range(i, i + 8) for i in range((count - 2) % 8 + 2, count, 8))]
        sums = []
        for group in groups:
            terms = [x * factors[{0: first, first: 0}.get(i, i)] for i in group]
            sums.append(terms[0])
            for term in terms[1:]:
                sums[-1] = sums[-1] + term
        whole = sums[0]
        for part in sums[1:]:
            whole = whole + part
        return whole.numpy().tobytes()

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    wrong, moved = [], 0
    dtypes = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.complex64)
    for count in (2, 3, 5, 8, 9, 10, 12, 19):
        numbers = np.random.default_rng(count)
        terms, scales = numbers.normal(size=999) * 100, 10 ** numbers.uniform(-1, 1, size=count)
        given = [(tf.cast(terms, dtype), tf.cast(scales, dtype)) for dtype in dtypes]
        right = [in_order(*each, count) for each in given]
        for held in ((), (0, 1), tuple(range(count))):
            if totals(given, count, held, True) != right:
                wrong.append((count, held))
            moved += sum(a != b for a, b in zip(totals(given, count, held, False), right, strict=True))
            last = count - 1
            if count > 2 and totals(given, count, held, True, last) != [in_order(*each, count, last) for each in given]:
                wrong.append((count, held, "swapped"))
    return [wrong, moved]


def test_the_kernel_adds_in_order_whatever_holds_them() -> None:
    pytest.importorskip("tensorflow")
    wrong, moved = on_arena(kernels)
    assert wrong == []
    assert moved >= 20, "TensorFlow's own kernel begins with a buffer that has no other holder"


# Like a sparse Gaussian process: A's gradient is AddN(m, m, s), and s is read by a product too.
def solves():
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import memory_optimizer_off

    m, n, f = 160, 1500, tf.float64

    def normal(seed, *shape):
        return tf.random.stateless_normal(shape, (seed, 7), dtype=f)

    x, start = normal(1, m, n), [normal(s, m, m) * 0.05 + 3 * tf.eye(m, dtype=f) for s in (4, 5)]
    w1, w2 = (tf.Variable(s) for s in start)

    def step(x):
        with tf.GradientTape() as tape:
            a = tf.linalg.triangular_solve(w1, x)
            b = tf.linalg.triangular_solve(tf.transpose(w2), a, lower=False)
            loss = tf.reduce_sum(tf.square(b)) + tf.reduce_sum(a * a)
        for w, g in zip((w1, w2), tape.gradient(loss, (w1, w2)), strict=True):
            w.assign_sub(tf.cast(1e-6, f) * g)
        return loss

    def run(function):
        w1.assign(start[0]), w2.assign(start[1])
        return tuple(t.numpy().tobytes() for t in (function(x), w1, w2))

    traced = tf.function(step)
    found = {run(tfswap.optimize(traced, memory_limit=limit)) for limit in ("95%", "60%", "50%")}
    with memory_optimizer_off():
        expected = {run(tf.function(step)) for _ in range(3)}
    return [len(found), found == expected]


def test_a_shared_term_is_added_last_as_tensorflow_does() -> None:
    pytest.importorskip("tensorflow")
    # With one thread for kernels nothing races, whatever else the machine does.
    assert on_arena(solves, TF_NUM_INTEROP_THREADS="1") == [1, True]


def accumulated():
    import tensorflow as tf

    import tfswap

    x, w = (tf.random.stateless_normal([300, 300], (seed, 7)) for seed in (1, 2))

    def add(terms):
        return tf.raw_ops.AccumulateNV2(inputs=terms, shape=terms[0].shape)

    add_with_gradient = tf.custom_gradient(lambda *terms: (add(list(terms)), lambda d: [d] * len(terms)))

    def chain(x, last_first=True):
        terms = [x]
        for _ in range(7):
            terms.append(tf.tanh(terms[-1] @ w * 0.1))
        return terms[:0:-1] if last_first else terms[1:]

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = add_with_gradient(*chain(x, last_first=False))
            loss = tf.reduce_sum(total**2)
        return total, tape.gradient(loss, x)

    steps = (
        lambda x: add([x * (k + 1.1) for k in range(6)]),
        lambda x: add([(x * (k + 1.1)) @ w for k in range(6)]),
        lambda x: add([x, x * 2.3, w + 0.1, tf.nn.relu(x), x / 3.0]),
        lambda x: add(chain(x)),
        lambda x: tf.add_n([add(chain(x)[:5]), x, w, tf.sin(x)]),
        step,
    )
    entries = []
    for function in steps:

        def bits(f):
            return repr([t.numpy().tobytes() for t in tf.nest.flatten(f(x))])

        expected = {bits(tf.function(function, autograph=False)) for _ in range(5)}
        planned = tfswap.optimize(tf.function(function, autograph=False), memory_limit="100%")
        entries.append([len(expected), bits(planned) in expected, planned.plan().changes_nothing])
    return entries


def test_terms_are_added_in_the_order_in_which_they_are_ready() -> None:
    """Where TensorFlow's own order is repeatable, as it is with one thread."""
    pytest.importorskip("tensorflow")
    assert on_arena(accumulated, TF_NUM_INTEROP_THREADS="1") == [[1, True, False]] * 6


def loops():
    import contextlib

    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import memory_optimizer_off

    x = tf.random.stateless_normal([64, 300], (1, 2))
    w = tf.Variable(tf.random.stateless_normal([64, 64], (3, 4)) * 0.1)

    def branches(i, a, b):  # the first iteration's `a` is the caller's
        m = tf.exp(-b * b)
        a = tf.cond(tf.equal(i % 2, 0), lambda: tf.add_n([m, m, a]) * 0.3, lambda: tf.add_n([m, m, a]) * 0.4)
        return i + 1, a, tf.sin(b)

    @tf.function
    def called(a, b, unread):
        return tf.tanh(w @ a), tf.exp(-b * b)

    def calls(i, a, b):  # the second call reads `w` before what it is given is there, so that the next iteration starts
        c, d = called(a, b, a)
        e, _ = called(c * 0.5, tf.sin(b), tf.sin(c))
        return i + 1, tf.add_n([e, e, d]), d

    @tf.function
    def block(a, b):
        c = tf.tanh(w @ a)
        return c, tf.add_n([c, a, b, c * b, a])

    def straight(x):  # Grappler sorts terms by the names that they have once calls are inlined
        a, b = block(x, x * 0.5)
        c, d = block(b * 0.2, a)
        return block(tf.add_n([d, a, c, x]), tf.add_n([c, a, b]))

    entries = []

    def looped(body, x):
        return tf.while_loop(lambda i, *_: i < 24, body, [0, x, x])[1:]

    for body in branches, calls, None:
        step = straight if body is None else functools.partial(looped, body)

        def bits(f):
            return [t.numpy().tobytes() for t in f(x)]

        planned = tfswap.optimize(tf.function(step, autograph=False), memory_limit="100%")
        found = bits(planned)
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": body is not None})
        with memory_optimizer_off() if body is None else contextlib.nullcontext():
            entries.append([found == bits(tf.function(step, autograph=False)), planned.plan().changes_nothing])
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    return entries


def test_sums_in_branches_and_calls_add_as_tensorflow_s_do() -> None:
    pytest.importorskip("tensorflow")
    assert on_arena(loops, TF_NUM_INTEROP_THREADS="1") == [[True, False]] * 3


def served(folder: Path):
    import tensorflow as tf

    import tfswap

    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable(tf.random.stateless_normal([128, 128], (1, 2)))

        @tf.function(input_signature=[tf.TensorSpec([512, 128], tf.float32)])
        def step(self, x):
            a = tf.tanh(x @ self.w)
            b, c = tf.sin(a), tf.cos(a) * 1e3
            total = tf.add_n([a, a, c, b, c])
            with tf.control_dependencies([total]):
                late = tf.sin(c)
            return tf.reduce_sum(total @ tf.transpose(late), 0)

    model, x = Model(), tf.random.stateless_normal([512, 128], (3, 4))
    tf.saved_model.save(model, str(folder / "model"), signatures=model.step)
    given = {"function": "step", "portable": True}
    try:
        tfswap.optimize_graph(folder / "model", folder / "no", memory_limit="10%", **given)
    except tfswap.InfeasibleMemoryLimit as refused:
        given["memory_limit"] = refused.floor_bytes
    tfswap.optimize_graph(folder / "model", folder / "smaller", **given)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    expected = model.step(x).numpy()
    smaller = tf.saved_model.load(str(folder / "smaller"))
    return smaller.step(x).numpy().tobytes() == expected.tobytes()


def test_a_portable_model_adds_in_the_same_order(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    assert last_json(run_forked(lambda: served(tmp_path))) is True


def calls():
    import re

    import tensorflow as tf
    from tensorflow.python.eager import context

    from tfswap.importers.function import import_function
    from tfswap.simulator.lowered_graph import lower

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    w = tf.Variable(tf.ones([8, 8]))

    @tf.function
    def twice(a):
        return tf.sin(a), tf.cos(a @ w), tf.add_n([a, a * 2.0, tf.tanh(a)])

    @tf.function
    def layers(a, b):
        c, d, e = twice(a + b)
        return tf.exp(d) * 3.0, c - 1.0, e

    def body(i, a, b):
        c, d, e = layers(a, b)
        _, f = tf.while_loop(lambda j, _: j < 2, lambda j, t: (j + 1, twice(t)[2]), [0, d], maximum_iterations=2)
        return i + 1, tf.tanh(c + f), tf.cos(e) * 5.0

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            _, a, b = tf.while_loop(lambda i, *_: i < 3, body, [0, x, x * 2.0], maximum_iterations=3)
            loss = tf.reduce_sum(a) + tf.reduce_sum(b)
        return loss, tape.gradient(loss, w)

    x = tf.ones([8, 8])
    context.enable_run_metadata()
    step(x)
    graphs = [g for f in context.export_run_metadata().function_graphs for g in f.partition_graphs]
    inlined = re.compile(r"^.*(body|cond)/_\d+/")
    theirs = [inlined.sub("", node.name) for node in max(graphs, key=lambda g: len(g.node)).node]
    traced = import_function(step.get_concrete_function(x), [x])
    ours = [item.node.name for item in lower(traced).items if item.kind == "kernel"]
    alone = {n for n in ours if ours.count(n) == theirs.count(n) == 1}
    return [[n for n in names if n in alone] for names in (ours, theirs)]


def test_functions_that_loops_call_are_numbered_as_tensorflow_numbers_them() -> None:
    """Which kernel runs first decides who holds what. The graph that TensorFlow has executed shows it."""
    pytest.importorskip("tensorflow")
    ours, theirs = on_arena(calls)
    assert ours == theirs
    assert sum("PartitionedCall/" in name for name in ours) > 20
