"""Random ops of a step that is planned after some calls go on where those calls have left their sequences.

The kernel of such an op keeps its generator, and a planned step has other kernels (`passes/random_state.py`). A kernel
skips ahead by the number of elements that it draws, whatever their shape (ReserveRandomOutputs in TensorFlow's
random_op.cc). So the planned step's kernel first draws as many as all earlier calls, in pieces.

Not handled: GPUs; ops that draw as many numbers as their values need; random ops in loops, conditionals and other
functions, which may have run any number of times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from tfswap.device.placement import step_devices
from tfswap.errors import TfswapError
from tfswap.ir.custom_ops import DRAWS, KERNEL, OWN_KERNEL, STATE_OWNER, STATE_PLACE
from tfswap.ir.graph import Graph, Node
from tfswap.passes.device_carriers import FIRST

STEADY = frozenset(
    {
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "TruncatedNormal",
    }
)
"""Ops that skip ahead by the number of elements."""
PIECE = 1 << 16
"""The elements that are drawn at a time, and freed."""


class Earlier(NamedTuple):
    """Earlier calls of a step.

    Attributes:
        graph: the step, for the sizes of these calls.
        count: how many there were.
    """

    graph: Graph
    count: int


def continue_draws(
    earlier: Iterable[Earlier], owner: int, place: Callable[[str], str], names: Collection[str] | None = None
) -> bool:
    """Have the random ops of planned steps go on after earlier calls; returns whether all of them do.

    Args:
        earlier: all calls so far; none was of a planned step. It may raise TfswapError.
        owner: of the planned steps' random states.
        place: of the state of a random op, by the node's name.
        names: of the nodes; by default of all.
    """
    import tensorflow as tf

    import tfswap.ops

    if step_devices() != (FIRST,):
        return False
    elements: Counter[str] = Counter()
    nodes: dict[str, Node] = {}
    try:
        for graph, count in earlier:
            if _draws_inside(graph):
                return False
            for node in graph:
                if node.op not in DRAWS or (names is not None and node.name not in names):
                    continue
                shape = node.outputs[0].shape
                sizes = [size for size in shape or () if size is not None]
                if node.op not in STEADY or shape is None or len(sizes) < len(shape):
                    return False
                nodes[node.name] = node
                elements[node.name] += count * math.prod(sizes)
    except TfswapError:
        return False
    tfswap.ops.keep_states(owner)
    for name, node in nodes.items():
        draw = _drawing(node, owner, place(name))
        for begin in range(0, elements[name], PIECE):
            draw(tf.constant([min(PIECE, elements[name] - begin)]))
    return True


def _draws_inside(graph: Graph) -> bool:
    return any(node.op in DRAWS for body in graph.all_bodies() for node in body)


def _drawing(node: Node, owner: int, place: str) -> Callable[[Any], Any]:
    """Draws from the state of this owner and place, which is that of `node`: as many elements as it is given."""
    import tensorflow as tf

    kind = tf.as_dtype(node.outputs[0].dtype)
    made = tf.compat.v1.GraphDef()
    drawing = made.node.add(name="draw", op=node.op, input=["size"])
    for name in ("seed", "seed2"):
        drawing.attr[name].i = node.attrs.get(name, 0)
    drawing.attr["T"].type = tf.int32.as_datatype_enum
    drawing.attr[KERNEL].s = OWN_KERNEL.encode()
    drawing.attr[STATE_OWNER].i = owner
    drawing.attr[STATE_PLACE].s = place.encode()
    is_integer = node.op == "RandomUniformInt"
    drawing.attr["Tout" if is_integer else "dtype"].type = kind.as_datatype_enum
    if is_integer:
        drawing.input.extend(["least", "most"])

    @tf.function(input_signature=[tf.TensorSpec([1], tf.int32)], autograph=False)
    def draw(size: Any) -> Any:
        inputs = {"size": size}
        if is_integer:
            inputs |= {"least": tf.constant(0, kind), "most": tf.constant(1, kind)}
        found: Any = tf.graph_util.import_graph_def(made, input_map=inputs, return_elements=["draw:0"])
        return found[0]

    return draw
