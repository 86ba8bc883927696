"""Calls tfswap's ops with wrong inputs and attributes, which they must refuse.

    python fuzz_ops.py SEED CALLS

Each call is one that is right but for a few arguments: tensors of other shapes, types and contents, buffers cut short,
handles of other ops, sizes that no tensor has. Says on stderr what it calls, so that the last line before a crash
names it, and prints at last how many calls were refused, and of which ops calls were made, as JSON. Out of bounds is
what AddressSanitizer sees: `make sanitize`.
"""

from __future__ import annotations

import functools
import json
import random
import resource
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2, tensor_pb2
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

from tfswap.native.load import load, load_codecs
from tfswap.ops import configure

Call = tuple[Callable[..., Any], dict[str, Any]]

FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
TYPES = (
    *FLOATS,
    tf.bool,
    tf.int8,
    tf.uint8,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.uint16,
    tf.uint32,
    tf.complex64,
    tf.string,
)
NUMBERS = (-(2**62), -(2**31), -1, 0, 1, 2, 3, 5, 8, 64, 255, 4096, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
WORDS = ("positive", "relu6", "true", "SAME", "VALID", "EXPLICIT", "float16", "bfloat16", "gist_float8", "gist_float10")
FOLDERS = ("", "/none", tempfile.gettempdir())
MOST_BYTES = 64 << 20  # of host memory and of a file, whatever a call requests
RESERVATION = {
    "owner": 7,
    "disk": False,
    "saved_on_disk": 0,
    "step_bytes": 4096,
    "step_limit": -1,
    "spill_dir": "",
    "spill_bytes": 0,
    "spill_limit": -1,
}
WINDOW = {"window": [2, 1], "strides": [1, 1], "dilations": [1, 1], "padding": [1, 0]}
POOLING = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME", "explicit_paddings": []}


@functools.cache
def called(dtype: tf.DType) -> Any:
    """A function that an op calls."""
    return tf.function(tf.tanh).get_concrete_function(tf.TensorSpec(None, dtype))


def right_calls(draw: random.Random) -> list[Call]:
    """One call of each op, with arguments that belong together."""
    dtype = draw.choice(FLOATS)
    rows, columns = draw.randint(1, 9), draw.randint(1, 70)
    x = tf.cast(tf.random.normal([rows, columns]), dtype)
    return [*_calls_of_codecs(draw, x), *_calls_of_swaps(draw, x), *_calls_of_kernels(x)]


def _calls_of_codecs(draw: random.Random, x: tf.Tensor) -> list[Call]:
    codecs, dtype, (rows, columns) = load_codecs().ops, x.dtype, x.shape
    kept = draw.choice(FLOATS[:3])
    shape = tf.constant([rows, columns], draw.choice((tf.int32, tf.int64)))
    mask = codecs.tfswap_encode_mask(tensor=x, predicate="positive")
    counts = tf.random.uniform([rows, columns], -5, 200, tf.int32)
    few = codecs.tfswap_encode_integers(tensor=counts, minimum=-5, U=tf.uint8)
    sparse = tf.nn.relu(x)
    capacity = draw.randint(0, rows * columns)
    encoded, spill = codecs.tfswap_encode_sparse(tensor=sparse, capacity=capacity)
    small = tf.cast(x, kept)
    format = draw.choice(WORDS[-4:])
    floats = codecs.tfswap_encode_floats(tensor=small, format=format)
    groups = {"bits": draw.choice((4, 8)), "group_size": draw.choice((16, 64, 256))}
    grouped = codecs.tfswap_encode_groups(tensor=small, seed=1, **groups)
    image = tf.cast(tf.random.normal([2, rows, columns, 3]), dtype)
    positions = codecs.tfswap_encode_max_pool(image=image, **POOLING)
    pooled = tf.zeros([2, -(-rows // 2), -(-columns // 2), 3], dtype)
    return [
        (codecs.tfswap_encode_mask, {"tensor": x, "predicate": "positive"}),
        (codecs.tfswap_decode_mask, {"mask": mask, "shape": shape}),
        (codecs.tfswap_decode_mask, {"mask": mask, "shape": shape, "T": dtype}),
        (codecs.tfswap_multiply_by_mask, {"gradients": x, "mask": mask}),
        (codecs.tfswap_leaky_relu_grad_from_mask, {"gradients": x, "mask": mask, "alpha": 0.2}),
        (codecs.tfswap_select_by_mask, {"mask": mask, "then": x, "else_": x, "shape": shape}),
        (codecs.tfswap_encode_max_pool, {"image": image, **POOLING}),
        (
            codecs.tfswap_max_pool_grad_from_positions,
            {"gradients": pooled, "positions": positions, "shape": tf.shape(image), **POOLING},
        ),
        (codecs.tfswap_encode_integers, {"tensor": counts, "minimum": -5, "U": tf.uint8}),
        (codecs.tfswap_decode_integers, {"encoded": few, "minimum": -5, "T": tf.int32}),
        (codecs.tfswap_encode_sparse, {"tensor": sparse, "capacity": capacity}),
        (
            codecs.tfswap_decode_sparse,
            {"encoded": encoded, "spill": spill, "shape": shape, "capacity": capacity, "T": dtype},
        ),
        (codecs.tfswap_encode_floats, {"tensor": small, "format": format}),
        (codecs.tfswap_decode_floats, {"encoded": floats, "shape": shape, "format": format, "T": kept}),
        (codecs.tfswap_encode_groups, {"tensor": small, "seed": 1, **groups}),
        (codecs.tfswap_decode_groups, {"encoded": grouped, "shape": shape, "T": kept, **groups}),
    ]


def _calls_of_swaps(draw: random.Random, x: tf.Tensor) -> list[Call]:
    core, dtype, (rows, columns) = load().ops, x.dtype, x.shape
    handle = core.tfswap_swap_out(tensor=x)
    tensor, ticket = core.tfswap_swap_in(handle=handle, T=dtype)
    none = tf.raw_ops.EmptyTensorList(
        element_shape=tf.constant([], tf.int32), max_num_elements=-1, element_dtype=tf.variant
    )
    handles = tf.raw_ops.TensorListPushBack(input_handle=none, tensor=core.tfswap_swap_out(tensor=x))
    variable = tf.Variable(x)
    stored = core.tfswap_store_home(value=x, before=[])
    image = tf.reshape(x, [1, rows, columns, 1])
    home = core.tfswap_make_home(shape=tf.constant([2, rows, columns], tf.int64), dtype=dtype)
    half = core.tfswap_store_home(value=x, before=[], begin=0, rows=2 * rows)
    return [
        (core.tfswap_swap_out, {"tensor": x}),
        (core.tfswap_swap_out, {"tensor": x, **RESERVATION, "spill_dir": draw.choice(FOLDERS)}),
        (core.tfswap_lend_block, {"number": 1, "nbytes": 1 << 12}),
        (core.tfswap_swap_out, {"tensor": x, "lent_block": 1, "lent_place": 256}),
        (core.tfswap_swap_in, {"handle": handle, "T": dtype}),
        (core.tfswap_release, {"handle": handle}),
        (core.tfswap_prefetch, {"list": handles, "nbytes": x.dtype.size * rows * columns}),
        (core.tfswap_await, {"tensor": tensor, "ticket": ticket}),
        (core.tfswap_assign_in_place, {"resource": variable.handle, "value": x}),
        (core.tfswap_own_buffer, {"resource": variable.handle}),
        (core.tfswap_move_home, {"resource": variable.handle, "host": rows % 2 == 0, "limit": rows % 2 << 40}),
        (core.tfswap_store_home, {"value": x, "before": []}),
        (core.tfswap_store_home, {"value": x, "before": [half], "begin": rows, "rows": 2 * rows}),
        (core.tfswap_await_store, {"value": x, "stored": half}),
        (core.tfswap_commit_home, {"resource": variable.handle, "value": x, "stored": stored}),
        (core.tfswap_read_home, {"resource": variable.handle, "dtype": x.dtype, "begin": 0, "rows": rows}),
        (core.tfswap_load_home, {"resource": variable.handle, "dtype": x.dtype, "begin": rows - 1, "rows": 1}),
        (core.tfswap_rows, {"tensor": x, "begin": 0, "rows": rows}),
        (core.tfswap_store_rows, {"slice": x, "before": [], "begin": rows, "rows": 3 * rows}),
        (core.tfswap_add_rows, {"slice": x, "before": [], "begin": 0, "rows": rows, "blocks": 1}),
        (core.tfswap_add_blocks, {"sums": x}),
        (core.tfswap_columns, {"images": image, **WINDOW, "sizes": [rows, columns], "begin": 0, "rows": rows}),
        *_calls_of_gradients(rows, columns),
        (core.tfswap_make_home, {"shape": tf.constant([2, rows, columns], tf.int64), "dtype": dtype}),
        (core.tfswap_fill_home, {"home": home, "value": x, "begin": tf.constant(rows * columns, tf.int64)}),
        (core.tfswap_require_place, {"variables": [variable.handle], "place": "CPU:0"}),
        (core.tfswap_watch_variables, {"resources": [variable.handle], "step": 5, "begin": 0}),
    ]


def _calls_of_gradients(rows: int, columns: int) -> list[Call]:
    """Gradients in bounded memory, of numbers in float32."""
    core = load().ops
    image, kernel = tf.random.normal([1, rows, columns, 1]), tf.random.normal([*WINDOW["window"], 1, 2])
    gradients, sizes = tf.random.normal([1, rows, columns, 2]), [rows, columns]
    order = [rows * columns] * 4
    one = {"before": [], "begin": 0, "rows": rows * columns, "shard": order, "last_shard": order, "chunk": 1}
    given = {"images": image, "gradients": gradients, **WINDOW, "sizes": sizes, "closed": True}
    image_of = {"filter": kernel, "gradients": gradients, **WINDOW, "sizes": sizes, "image": sizes, "chunk": 1}
    return [(core.tfswap_add_products, {**one, **given}), (core.tfswap_image_gradient, image_of)]


def _calls_of_kernels(x: tf.Tensor) -> list[Call]:
    core, dtype, (rows, columns) = load().ops, x.dtype, x.shape
    return [
        (core.tfswap_inside, {"args": [x], "Tout": [dtype], "f": called(dtype), "step": 1}),
        (core.tfswap_hand_over, {"result": x, "elements": rows * columns, "slots": 2}),
        (
            core.tfswap_pair,
            {
                "inputs": [x, x, x],
                "Tout": [dtype, dtype],
                "kernels": [node("AddV2", dtype, 2), node("Tanh", dtype, 1)],
                "allocations": 1,
            },
        ),
        (
            core.tfswap_group,
            {
                "inputs": [x, x, x],
                "Tout": [dtype, dtype],
                "kernels": [node("AddV2", dtype, 2), node("Tanh", dtype, 1)],
                "sources": [0, 1, 2],
                "overwrites": [0, 0, 0],
                "chunks": [x.dtype.size * rows * columns] * 2,
                "requests": [1, 0, 0, 1, 1, 0],
                "kept": [1, 1],
                "ranks": [0, 1],
                "reserved": 256,
            },
        ),
        (core.tfswap_sum, {"terms": [x, x, x], "decisions": [tf.constant(True), tf.constant(1)]}),
        (core.tfswap_split_chunk, {"nbytes": [1000, 2000]}),
        (core.tfswap_exact_chunks, {}),
        (core.tfswap_free_rest, {"rest": core.tfswap_split_chunk(nbytes=[1000])}),
        (core.tfswap_carry, {"tensor": x}),
        (core.tfswap_deliver, {"carrier": core.tfswap_carry(tensor=x), "T": dtype}),
        (core.tfswap_defer, {"tensor": x}),
        (core.tfswap_to_device, {"tensor": x}),  # which a CPU has no kernel for, as for the next two
        (core.tfswap_to_host, {"tensor": x}),
        (core.tfswap_text, {"value": tf.make_tensor_proto(["of", "two words"]), "dtype": tf.string}),
        (core.tfswap_gate, {"gate": 5, "owner": 7}),
        (core.tfswap_arena_map, {}),
        (core.tfswap_signal, {}),
        # No graph that runs has one of these: they are always refused.
        (core.tfswap_outside, {"results": [x], "room": 1}),
        (core.tfswap_send, {"tensor": x}),
        (core.tfswap_receive, {"T": tf.float32, "shape": [4]}),
    ]


def node(op: str, dtype: tf.DType, inputs: int) -> bytes:
    """A node with the one attribute T, serialized."""
    made = node_def_pb2.NodeDef(name=op, op=op, input=[f"input{i}" for i in range(inputs)])
    made.attr["T"].type = dtype.as_datatype_enum
    return made.SerializeToString()


def wrong(draw: random.Random, value: Any, others: list[Any]) -> Any:
    """Something in the place of `value`; `others` are tensors that other calls have."""
    if isinstance(value, (bool, float, int)):
        return draw.choice(NUMBERS)
    if isinstance(value, str):
        return draw.choice(FOLDERS if value in FOLDERS else WORDS)
    if isinstance(value, tf.DType):
        return draw.choice(TYPES)
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        others = [node("Softmax", draw.choice(TYPES), 1), node("NoSuchOp", tf.int32, 1), draw.randbytes(30)]
        return [draw.choice((kernel, kernel[: draw.randint(0, len(kernel))], *others)) for kernel in value]
    if isinstance(value, list) and value and isinstance(value[0], tf.DType):
        return [draw.choice(TYPES) for _ in range(draw.choice((0, 1, 2, 2, 3)))]
    if isinstance(value, list) and value and isinstance(value[0], tf.Tensor):
        return [wrong(draw, value[0], others), *value[1:]]
    if isinstance(value, list):
        return [draw.choice((*value, draw.choice(NUMBERS))) for _ in range(draw.choice((0, 3, 4, 4, 4, 5, 8)))]
    if isinstance(value, ConcreteFunction):
        return called(draw.choice(FLOATS))
    if isinstance(value, tensor_pb2.TensorProto):
        return draw.choice((tensor_pb2.TensorProto(), tf.make_tensor_proto(draw.choice(NUMBERS))))
    if value.dtype in (tf.variant, tf.resource):
        alike = [other for other in others if other.dtype == value.dtype]
        return draw.choice(
            (draw.choice(alike), tf.reshape(value, [1, 1]), tf.reshape(value, [1])[:0], tf.stack([value, value]))
        )
    if draw.random() < 0.2:
        return draw.choice(others)
    return wrong_tensor(draw, value)


def wrong_tensor(draw: random.Random, value: Any) -> Any:
    flat = tf.reshape(value, [-1])
    size = int(tf.size(flat))
    kind = draw.choice(("cut", "longer", "empty", "scalar", "rank", "type", "bits", "numbers"))
    if kind == "cut":
        return flat[: draw.randint(0, max(size - 1, 0))]
    if kind == "longer":
        return tf.concat([flat, flat[:1]] * draw.choice((1, 3)), 0)
    if kind == "empty":
        return tf.zeros([draw.choice((0, 3)), 0], value.dtype)
    if kind == "scalar":
        return tf.zeros([], value.dtype)
    if kind == "rank":
        return tf.reshape(value, [1, *value.shape, 1, 1])
    if kind == "type":
        dtype = draw.choice(TYPES)
        return tf.constant("text") if dtype == tf.string else tf.cast(value, dtype)
    if kind == "numbers" and value.dtype in (tf.int32, tf.int64):
        bound = np.iinfo(value.dtype.as_numpy_dtype)
        return tf.constant(
            [n for n in (draw.choice(NUMBERS) for _ in range(size)) if bound.min <= n <= bound.max], value.dtype
        )
    if value.dtype == tf.bool:
        return tf.logical_not(value)
    noise = tf.io.decode_raw(tf.constant(draw.randbytes(size * value.dtype.size)), tf.uint8)
    return tf.reshape(
        tf.bitcast(tf.reshape(noise, [size, -1]) if value.dtype.size > 1 else noise, value.dtype), value.shape
    )


def main(seed: int, calls: int) -> dict[str, Any]:
    draw = random.Random(seed)
    tf.random.set_seed(seed)
    configure(host_memory_limit=MOST_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, resource.RLIM_INFINITY))
    done: dict[str, Any] = {"calls": 0, "refused": 0, "ops": set()}
    foreign = [
        tf.raw_ops.TensorListReserve(element_shape=tf.constant([], tf.int32), num_elements=1, element_dtype=tf.float32),
        tf.raw_ops.OptionalNone(),
        tf.raw_ops.StackV2(max_size=1, elem_type=tf.float32),
    ]
    before: list[Any] = []  # of other types and sizes
    while done["calls"] < calls:
        made = right_calls(draw)
        own = [a for _, arguments in made for a in arguments.values() if isinstance(a, tf.Tensor)]
        others, before = own + before + foreign, own
        for op, arguments in draw.sample(made, len(made)):
            for name in draw.sample(sorted(arguments), draw.randint(0, min(3, len(arguments)))):
                arguments[name] = wrong(draw, arguments[name], others)
            print(op.__name__, {n: described(a) for n, a in arguments.items()}, file=sys.stderr, flush=True)
            done["calls"] += 1
            done["ops"].add(op.__name__)
            try:
                op(**arguments)
            except (tf.errors.OpError, ValueError, TypeError):
                done["refused"] += 1
    return {**done, "ops": sorted(done["ops"])}


def registered() -> list[str]:
    """All of tfswap's ops."""
    names = {name for library in (load(), load_codecs()) for name in dir(library.ops)}
    return sorted(name for name in names if name.startswith("tfswap_") and not name.endswith("_eager_fallback"))


def described(value: Any) -> str:
    return f"{value.dtype.name}{value.shape}" if isinstance(value, tf.Tensor) else str(value)


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
