"""Adds the nodes that more than one pass adds, one function for each kind of op of `ir/custom_ops.py`. A node's name is
a stem, which names its tensor or node, and its role. Nodes that follow a copy to the host are on that copy's device.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node, Opaque, Output
from tfswap.ir.op_traits import may_wait, stateful_form
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel

PRESERVE = "_grappler_do_not_remove"
"""Makes Grappler keep a node (grappler_item.cc, NodesToPreserve)."""
COLOCATED = "_class"
"""The attribute of colocation, with names of nodes."""

_TENSOR_PROTO_TYPES = {
    "bfloat16": 14,
    "bool": 10,
    "complex64": 8,
    "complex128": 18,
    "float16": 19,
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "int64": 9,
}
"""Numbers of types in a TensorProto (types.proto)."""

RECEIVED = "received"
"""The ending of the name of a tensor that another device has sent. Reports show it."""

VARIANT = TensorType("variant", ())
"""The type of handles and tickets."""


def followers(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """By node, the nodes that wait for it, in the order of `nodes`."""
    found: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node in nodes:
        for source in {*(tensor.node for tensor in node.inputs), *node.controls}:
            found[source].append(node)
    return found


def without_colocation(attrs: Mapping[str, object]) -> Mapping[str, object]:
    """`attrs` without the names of nodes that the node must be on one device with: those of another graph."""
    return {key: value for key, value in attrs.items() if key != COLOCATED} if COLOCATED in attrs else attrs


def add_slice(
    graph: Graph,
    like: Node,
    op: str,
    inputs: Iterable[Output],
    attrs: Mapping[str, object],
    *,
    outputs: Sequence[TensorType],
    begin: int,
    controls: Iterable[Node] = (),
    device: str = "",
) -> Node:
    """A node of a slice, named after the node that it is like, and on its device unless one is given.

    Args:
        begin: the slice's first row.
    """
    stem = f"tfswap/{like.name.removeprefix('tfswap/')}/{op.rpartition('>')[2]}/{begin}"
    return graph.add(
        op,
        graph.unique_name(stem),
        inputs,
        controls=dict.fromkeys(controls),
        attrs=attrs,
        outputs=outputs,
        device=device or like.device,
    )


def restrict_like(graph: Graph, tensor: Output, made: Output) -> None:
    """Give a tensor the user's permit of another."""
    if (permit := graph.permits.get(tensor)) is not None:
        graph.restrict(made, permit)


def add_gate(graph: Graph, gate: int, device: str = "") -> Node:
    """A gate by its number."""
    attrs = {"gate": gate, **({"waits": True} if waits_for_others(graph) else {})}
    return graph.add(custom_ops.GATE, graph.unique_name("tfswap/gate"), attrs=attrs, device=device)


def waits_for_others(graph: Graph) -> bool:
    """Whether kernels of a step, in its bodies too, may wait for other steps."""
    return any(may_wait(node.op) for part in (graph, *graph.all_bodies()) for node in part)


def add_swap_out(
    graph: Graph, stem: str, tensor: Output, device: str, disk: bool = False, lent: int | None = None
) -> Node:
    """A node that starts the copy of `tensor` to the host, to disk, or to a place in the memory that another device
    lends; its output is the handle of that copy.
    """
    where: dict[str, object] = {"disk": True} if disk else {}
    if lent is not None:
        where["lent_place"] = lent
    return graph.add(
        custom_ops.SWAP_OUT,
        graph.unique_name(f"{stem}/out"),
        (tensor,),
        attrs={"T": Dtype(tensor.type.dtype), **where},
        outputs=(VARIANT,),
        device=device,
    )


def add_release(graph: Graph, stem: str, handle: Output) -> Node:
    """A node that waits for the copy to the host and releases the tensor."""
    return graph.add(custom_ops.RELEASE, graph.unique_name(f"{stem}/release"), (handle,), device=handle.node.device)


def add_swap_in(graph: Graph, stem: str, handle: Output, kind: TensorType) -> Node:
    """A node that allocates the tensor of `handle` again and starts the copy back."""
    return graph.add(
        custom_ops.SWAP_IN,
        graph.unique_name(f"{stem}/in"),
        (handle,),
        # No shape: TensorFlow takes it from the handle, and planned sizes may be of one batch among many.
        attrs={"T": Dtype(kind.dtype), "shape": None},
        outputs=(kind, VARIANT),
        device=handle.node.device,
    )


def add_prefetch(graph: Graph, stem: str, handles: Output, kind: TensorType) -> Node:
    """A node that does a SwapIn's work for the last handle of a list, and passes the list on.

    Args:
        kind: of the tensor behind the handle.
    """
    return graph.add(
        custom_ops.PREFETCH,
        graph.unique_name(f"{stem}/prefetch"),
        (handles,),
        attrs={"nbytes": kind.nbytes or 0},
        outputs=(VARIANT,),
        device=handles.node.device,
    )


def add_shape(graph: Graph, name: str, tensor: Output, device: str) -> Node:
    """A node that gives the shape of `tensor` when the step runs."""
    return graph.add(
        "Shape",
        graph.unique_name(name),
        (tensor,),
        attrs={"T": Dtype(tensor.type.dtype), "out_type": Dtype("int32")},
        outputs=(TensorType("int32", (len(tensor.type.shape or ()),)),),
        device=device,
    )


def add_scalar(graph: Graph, name: str, dtype: str, device: str, content: bytes = b"") -> Node:
    """A constant scalar of these bytes; zero where none are given."""
    # Of a TensorProto the type (field 1), the shape of a scalar (2), and the content (4).
    proto = bytes([0x08, _TENSOR_PROTO_TYPES[dtype]]) + _field(2, b"")
    if content:
        proto += _field(4, content)
    return graph.add(
        "Const",
        graph.unique_name(name),
        attrs={"dtype": Dtype(dtype), "value": Opaque("tensor", proto)},
        outputs=(TensorType(dtype, ()),),
        device=device,
    )


def add_integers(graph: Graph, name: str, values: Sequence[int], device: str) -> Node:
    """A constant vector of these int32."""
    shape = _field(2, _field(2, bytes([0x08, len(values)])))
    proto = bytes([0x08, _TENSOR_PROTO_TYPES["int32"]]) + shape + _field(4, struct.pack(f"<{len(values)}i", *values))
    made = graph.add(
        "Const",
        graph.unique_name(name),
        attrs={"dtype": Dtype("int32"), "value": Opaque("tensor", proto)},
        outputs=(TensorType("int32", (len(values),)),),
        device=device,
    )
    graph.small_constants[made] = tuple(values)
    return made


def _field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message, of fewer than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


def add_identity(graph: Graph, name: str, tensor: Output, device: str) -> Node:
    """An Identity that TensorFlow's optimizers do not remove."""
    return graph.add(
        "Identity",
        graph.unique_name(name),
        (tensor,),
        attrs={"T": Dtype(tensor.type.dtype), PRESERVE: True},
        outputs=(tensor.type,),
        device=device,
    )


def add_split(graph: Graph, node: Node, nbytes: tuple[int, ...]) -> Node:
    """A node that splits the chunks that requests of `node` would get, so that they fit exactly."""
    name = graph.unique_name(f"tfswap/{node.name}/split")
    return graph.add(custom_ops.SPLIT_CHUNK, name, attrs={"nbytes": nbytes}, outputs=(VARIANT,), device=node.device)


def add_exact_chunks(graph: Graph, device: str) -> Node:
    """A node after which the arena gives each request an exact chunk, until `add_free_rest`."""
    return graph.add(custom_ops.EXACT_CHUNKS, graph.unique_name("tfswap/exact"), outputs=(VARIANT,), device=device)


def add_free_rest(graph: Graph, node: Node, split: Node) -> Node:
    """A node after `node` that frees the separators of `split`, or ends its effect."""
    name = graph.unique_name(f"tfswap/{node.name}/free_rest")
    return graph.add(custom_ops.FREE_REST, name, (split.out(),), device=node.device)


def add_await(graph: Graph, stem: str, loaded: Node) -> Node:
    """A node that waits for the copy back started by `loaded`, a SwapIn; its output is the tensor."""
    kind, _ = loaded.outputs
    return graph.add(
        custom_ops.AWAIT,
        graph.unique_name(f"{stem}/await"),
        (loaded.out(0), loaded.out(1)),
        attrs={"T": Dtype(kind.dtype)},
        outputs=(kind,),
        device=loaded.device,
    )


def await_copy(graph: Graph, node: Node, starts: str) -> Node:
    """Turn `node`, in place, into the wait for a copy; returns a new node, of the op `starts`, that starts it.

    Readers of `node` wait for the copy, and what the node waited for is before its start.
    """
    (kind,) = node.outputs
    started = graph.add(
        starts,
        graph.unique_name(f"tfswap/{node.name}/start"),
        node.inputs,
        controls=node.controls,
        attrs=node.attrs,
        outputs=(kind, VARIANT),
        device=node.device,
    )
    node.op, node.attrs = custom_ops.AWAIT, {"T": Dtype(kind.dtype)}
    node.inputs, node.controls = (started.out(0), started.out(1)), ()
    return started


def use_own_kernel(graph: Graph, device: DeviceModel, chosen: Callable[[Node], bool]) -> int:
    """Have nodes of TensorFlow's ops, in bodies too, run tfswap's own kernels, in place; returns how many.

    Where there are none, TensorFlow's run.
    """
    if not device.has_own_kernels:
        return 0
    found = [node for part in (graph, *graph.all_bodies()) for node in part if chosen(node)]
    for node in found:
        node.attrs = {**node.attrs, custom_ops.KERNEL: custom_ops.OWN_KERNEL.encode()}
    return len(found)


def mark_effects(graph: Graph, edited: Collection[Graph]) -> bool:
    """Mark loops and conditionals whose bodies, those in `edited`, have copies as having effects, in place.

    Returns whether there are any in `graph`.
    """
    effects = graph in edited
    for node, bodies in graph.bodies.items():
        inner = [mark_effects(body, edited) for body in bodies]
        if any(inner):
            node.op = stateful_form(node.op)
            effects = True
    return effects


def add_device_copy(
    graph: Graph, op: str, role: str, tensor: Output, device: str, *, stem: str = "", **attrs: object
) -> Node:
    """A copy of a tensor between a GPU and the host, by the op of that direction.

    Args:
        stem: the beginning of its name; by default from the tensor's.
    """
    name = graph.unique_name(f"{stem or f'tfswap/{tensor.node.name}_{tensor.index}'}/{role}")
    attrs["T"] = Dtype(tensor.type.dtype)
    return graph.add(op, name, (tensor,), attrs=attrs, outputs=(tensor.type,), device=device)


def move_behind_sources(graph: Graph, copies: Iterable[Node]) -> None:
    """Put copies right behind the nodes whose tensors they copy."""
    followers: dict[Node, list[Node]] = {}
    for copy in copies:
        followers.setdefault(copy.inputs[0].node, []).append(copy)
    graph.move_behind(followers)


def add_signal(graph: Graph, stem: str, controls: Iterable[Node], device: str) -> Node:
    """A number in host memory, made after these nodes."""
    kind = TensorType("int32", ())
    return graph.add(custom_ops.SIGNAL, graph.unique_name(stem), controls=controls, outputs=(kind,), device=device)


def add_wait(graph: Graph, node: Node, source: Node) -> None:
    """Make a node wait for one of another device. A control edge would request memory on both (graph_partition.cc)."""
    stem = f"tfswap/{source.name}"
    signal = add_signal(graph, f"{stem}/signal", (source,), source.device)
    name = graph.unique_name(f"{stem}/signalled")
    attrs = {"T": Dtype("int32")}
    graph.add_control(
        node, graph.add("Identity", name, (signal.out(),), attrs=attrs, outputs=signal.outputs, device=node.device)
    )
