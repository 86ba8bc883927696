"""The model of kernels' memory against the allocator's own log, and the op tables against TensorFlow's."""

from __future__ import annotations

import ast
import importlib

import pytest
from folders import ROOT
from processes import last_json, on_arena, run_forked

from tfswap.ir import op_traits
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.kernel_memory import _RULES, kernel_memory

CPU = DeviceModel("cpu", onednn=False, intra_op_threads=2)
IMAGE = TensorType("float32", (16, 128, 128, 64))
POOLED = TensorType("float32", (16, 64, 64, 64))
FILTER = TensorType("float32", (3, 3, 64, 64))
INTS = TensorType("int32", (4,))


def test_backward_convolutions_buffer_one_image_of_columns():
    """Design point 11: their workspaces, at 64 MiB a tensor."""
    columns = 128 * 128 * 3 * 3 * 64 * 4
    for op, inputs, output in [
        ("Conv2DBackpropInput", (INTS, FILTER, IMAGE), IMAGE),
        ("Conv2DBackpropFilter", (IMAGE, INTS, IMAGE), FILTER),
    ]:
        memory = kernel_memory(op, {}, inputs, (output,), CPU)
        assert memory.events == (("out", 0), ("temp", columns))
        assert memory.exact


def test_max_pool_grad_pools_again_before_its_output():
    memory = kernel_memory("MaxPoolGrad", {}, (IMAGE, POOLED, POOLED), (IMAGE,), CPU)
    assert memory.events == (("temp", POOLED.nbytes), ("temp", 2 * (POOLED.nbytes or 0)), ("out", 0))
    assert memory.forward == ((0, (0,)),)
    assert memory.temp_forward == ((0, (1,)),)


def test_only_plain_max_pool_grad_writes_over_the_image():
    given = "MaxPoolGrad", {}, (IMAGE, POOLED, POOLED), (IMAGE,)
    assert kernel_memory(*given, CPU).forward == ((0, (0,)),)
    assert kernel_memory(*given, CPU._replace(onednn=True)).forward == ()


def test_forwarding_needs_the_same_dtype_and_size():
    row, flag = TensorType("float32", (64,)), TensorType("bool", IMAGE.shape)
    assert kernel_memory("AddV2", {}, (IMAGE, IMAGE), (IMAGE,), CPU).forward == ((0, (0, 1)),)
    assert kernel_memory("AddV2", {}, (row, IMAGE), (IMAGE,), CPU).forward == ((0, (1,)),)
    assert kernel_memory("Greater", {}, (IMAGE, IMAGE), (flag,), CPU).forward == ()
    unknown = TensorType("float32", (None, 64))
    assert kernel_memory("AddV2", {}, (unknown, unknown), (unknown,), CPU).forward == ()


def test_values_settle_what_shapes_leave_open():
    square = TensorType("float32", (16, 4, 128, 128))
    swapped = kernel_memory("Transpose", {}, (square, INTS), (square,), CPU, {1: (0, 1, 3, 2)})
    same = kernel_memory("Transpose", {}, (square, INTS), (square,), CPU, {1: (0, 1, 2, 3)})
    unsure = kernel_memory("Transpose", {}, (square, INTS), (square,), CPU)
    assert (swapped.alias, swapped.exact) == ((), True)
    assert (same.alias, same.exact) == (((0, 0),), True)
    assert (unsure.alias, unsure.exact) == ((), False)


def test_variables():
    handle = TensorType("resource", ())
    assert kernel_memory("AssignVariableOp", {}, (handle, IMAGE), (), CPU).retains == (1,)
    assert kernel_memory("AssignSubVariableOp", {}, (handle, IMAGE), (), CPU).updates == (0,)
    assert kernel_memory("ReadVariableOp", {}, (handle,), (IMAGE,), CPU).alias == ((0, 0),)


def test_what_is_deferred_is_passed_on():
    scalar = TensorType("float32", ())
    assert kernel_memory("Tfswap>Defer", {}, (scalar,), (scalar,), CPU).alias == ((0, 0),)
    assert not op_traits.is_folded("Tfswap>Defer")


def draws():
    import tensorflow as tf

    from tfswap.ir import op_traits

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # the executor folds, not Grappler
    size, x = [512, 1024], tf.ones([512, 1024])
    raw = tf.raw_ops

    def drawn():
        return {"shape": size, "key": tf.constant([5], tf.uint64), "counter": tf.constant([1, 2], tf.uint64), "alg": 1}

    draws = {
        "StatelessMultinomial": lambda: raw.StatelessMultinomial(
            logits=tf.ones([512, 4]), num_samples=1024, seed=[1, 2]
        ),
        "StatelessRandomGammaV3": lambda: raw.StatelessRandomGammaV3(**drawn(), alpha=2.0),
        "StatelessRandomNormal": lambda: raw.StatelessRandomNormal(shape=size, seed=[1, 2]),
        "StatelessRandomNormalV2": lambda: raw.StatelessRandomNormalV2(**drawn()),
        "StatelessRandomUniformIntV2": lambda: raw.StatelessRandomUniformIntV2(**drawn(), minval=0, maxval=9),
        "StatelessRandomUniformV2": lambda: raw.StatelessRandomUniformV2(**drawn()),
        "StatelessTruncatedNormalV2": lambda: raw.StatelessTruncatedNormalV2(**drawn()),
        "StatelessRandomGetKeyCounter": lambda: raw.StatelessRandomNormalV2(
            **drawn() | raw.StatelessRandomGetKeyCounter(seed=[1, 2])._asdict()
        ),
    }

    def held():
        return tf.config.experimental.get_memory_info("CPU:0")["current"]

    wrong = []
    for op, draw in draws.items():
        function = tf.function(lambda x, draw=draw: tf.reduce_sum(tf.cast(draw(), tf.float32) * x))
        before = held()
        function(x)
        if (held() - before > 2**20) != op_traits.is_folded(op):
            wrong.append(op)
    return wrong


def test_draws_from_constants_are_computed_once_where_tensorflow_does():
    pytest.importorskip("tensorflow")
    assert on_arena(draws) == []


def test_results_that_are_handed_over_have_slots_of_their_own():
    scalar = TensorType("float32", ())
    memory = kernel_memory("Tfswap>HandOver", {"slots": 8}, (scalar,), (scalar,), CPU)
    assert memory.held_bytes == 8 * 256
    assert not memory.events


def test_unknown_ops_allocate_their_outputs():
    memory = kernel_memory("SomebodysOp", {}, (IMAGE,), (POOLED, IMAGE), CPU)
    assert memory.events == (("out", 0), ("out", 1))
    assert memory.alias == memory.forward == ()


def test_the_answer_is_remembered_by_what_matters():
    first = kernel_memory("Relu", {"T": "float32"}, (IMAGE,), (IMAGE,), CPU)
    assert kernel_memory("Relu", {"T": "float32", "_x": object()}, [IMAGE], [IMAGE], CPU) is first
    threads = DeviceModel("cpu", intra_op_threads=64)
    narrow = TensorType("float32", (1024, 64))
    bias = TensorType("float32", (64,))
    assert kernel_memory("BiasAddGrad", {}, (narrow,), (bias,), CPU).events == (("out", 0), ("temp", 512))
    assert kernel_memory("BiasAddGrad", {}, (narrow,), (bias,), threads).events == (("out", 0), ("temp", 64 * 64 * 4))


def test_unknown_shapes_are_never_exact_nor_an_error():
    unknown = TensorType("float32", None)
    for op in sorted(_RULES):
        memory = kernel_memory(op, {}, (unknown,) * 8, (unknown,) * 7, CPU)
        assert not memory.forward, op


def _tables() -> dict[str, list[str]]:
    """The keys of each op table as they are written: a dict that repeats one would hide it.

    The rules of kernels are in several tables, which `_RULES` joins. A GPU's repeat ops of others, and are left out.
    """
    found: dict[str, list[str]] = {}
    rules = [path for path in sorted((ROOT / "tfswap/kernels").glob("*.py")) if path.stem != "gpu_temporaries"]
    for path, name in [(ROOT / "tfswap/ir/op_table.py", "TRAITS"), *((path, "RULES") for path in rules)]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                assert isinstance(node.value, ast.Dict)
                keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
                found.setdefault(name, []).extend(keys)
    return found


def test_no_op_is_listed_twice():
    tables = _tables()
    assert set(tables) == {"TRAITS", "RULES"}
    assert sorted(tables["RULES"]) == sorted(_RULES)
    for names in tables.values():
        assert len(names) == len(set(names))


def test_every_op_with_a_memory_rule_has_traits():
    assert sorted(op for op in _RULES if not op_traits.is_known(op)) == []


def test_every_listed_op_is_in_tensorflow_and_no_stateful_one_is_pure():
    # tfswap's own ops are registered by its library, not by TensorFlow.
    names = sorted({name for table in _tables().values() for name in table if not name.startswith("Tfswap>")})

    def registered():
        from tensorflow.python.framework import op_def_registry

        found = {name: op_def_registry.get(name) for name in names}
        return {name: None if op is None else op.is_stateful for name, op in found.items()}

    registry = last_json(run_forked(registered))
    assert [name for name, stateful in registry.items() if stateful is None] == []
    assert [name for name, stateful in registry.items() if stateful and op_traits.is_pure(name)] == []


def functions():
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session as session

    ops = op_def_pb2.OpList.FromString(session.TF_GetBuffer(session.TF_GetAllOpList()))
    made = {"Dataset": [], "other": []}
    for op in ops.op:
        if any("func" in attribute.type for attribute in op.attr):
            made["Dataset" if "Dataset" in op.name else "other"].append(op.name)
    return made


def test_every_op_that_makes_a_pipeline_with_functions_is_listed_and_no_other():
    """What is no pipeline runs its functions in the step, and is refused where they can't be seen."""
    made = last_json(run_forked(functions))
    assert [op for op in made["Dataset"] if not op_traits.makes_pipeline(op)] == ["ReduceDataset"]
    assert [op for op in made["other"] if op_traits.makes_pipeline(op)] == ["OneShotIterator"]


@pytest.fixture(scope="module")
def measured():
    pytest.importorskip("tensorflow")
    tool, cases = map(importlib.import_module, ("kernel_memory", "kernel_cases"))
    return tool, list(zip(cases.CASES, tool.measure(cases.CASES), strict=True))


def test_every_case_runs(measured):
    _, results = measured
    assert [(case.op, result) for case, result in results if isinstance(result, str)] == []


def test_exact_predictions_are_the_allocators_log(measured):
    """Requests and releases, sizes and order, in each of three runs."""
    tool, results = measured
    device = tool.this_device()
    wrong = []
    exact = 0
    for case, result in results:
        memory = result.predicted(case.op, device)
        expected = tool.expected_run(memory, result.output_types)
        if memory.exact:
            exact += 1
            if any(run != expected for run in result.runs):
                wrong.append((case, expected, result.runs))
        elif max(map(tool.peak, result.runs)) > tool.peak(expected):
            wrong.append((case, expected, result.runs))
    assert wrong == []
    assert exact > 0.9 * len(results)


def test_forwarding_is_as_predicted(measured):
    tool, results = measured
    wrong = []
    for case, result in results:
        forwards = tool.predicted_forwards(result.predicted(case.op, CPU))
        if forwards != result.forwarded_from:
            wrong.append((case, forwards, result.forwarded_from))
    assert wrong == []


@pytest.mark.parametrize(
    ("x", "y", "adjoint", "thread_bytes"),
    [
        ((16, 256, 32), (16, 32, 256), (False, False), 704),
        ((16, 256, 256), (16, 256, 32), (True, False), 262_912),
        ((16, 256, 256), (16, 32, 256), (True, True), 328_512),
        ((16, 32, 256), (16, 256, 256), (False, True), 66_304),
        ((4, 512, 512), (4, 512, 512), (False, False), 131_840),
        ((4, 1024, 1024), (4, 64, 1024), (True, True), 672_576),
        ((64, 64, 2048), (64, 64, 2048), (False, True), 262_912),
        ((1, 2048, 64), (1, 64, 2048), (True, True), 283_520),
        ((16, 100, 1000), (16, 77, 100), (True, True), 141_504),
    ],
)
def test_onednn_s_scratch_of_batched_products_is_bounded_by_their_shapes(x, y, adjoint, thread_bytes):
    """As measured with two threads on a CPU with AVX-512, half of each; the bound is not far from that."""
    rows, columns = x[-1 if adjoint[0] else -2], y[-2 if adjoint[1] else -1]
    made = TensorType("float32", (x[0], rows, columns))
    given = {"adj_x": adjoint[0], "adj_y": adjoint[1]}, (TensorType("float32", x), TensorType("float32", y)), (made,)
    memory = kernel_memory("BatchMatMulV2", *given, CPU._replace(onednn=True))
    (_, (kind, scratch)) = memory.events
    assert (kind, memory.exact) == ("temp", False)
    assert 2 * thread_bytes <= scratch <= max(2 * 1.4 * thread_bytes, 128 << 10)
    assert kernel_memory("BatchMatMulV2", *given, CPU).events == (("out", 0),)


@pytest.mark.parametrize(
    ("equation", "thread_bytes"),
    [(b"bij,bjk->bik", 704), (b"bji,bjk->bik", 262_912), (b"bij,bkj->bik", 66_304), (b"bji,bkj->bik", 328_512)],
)
def test_and_so_it_is_in_einsum(equation, thread_bytes):
    square = TensorType("float32", (4, 256, 256))
    device = CPU._replace(onednn=True)
    *_, (kind, scratch) = kernel_memory("Einsum", {"equation": equation}, (square, square), (square,), device).events
    assert kind == "temp"
    assert 2 * thread_bytes <= scratch <= max(2 * 1.4 * thread_bytes, 128 << 10)
