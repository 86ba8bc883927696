"""Questions about types of op. Passes and planners recognise ops by these only.

The facts are lines of `TRAITS` (ir/op_table.py). An op that is not in it is unknown, and counts as neither pure, nor a
view, nor safe to repeat. The memory of kernels is in kernels/kernel_memory.py.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from tfswap.ir.op_table import TRAITS
from tfswap.ir.trait import Trait


class ControlFlow(NamedTuple):
    """A loop or a conditional whose functions are graphs of their own.

    Attributes:
        is_loop: whether the second function runs while the first one returns true. Otherwise one of the functions runs.
        functions: the attributes that name the functions, in order.
        first_argument: the position of the first input that is passed to the functions.
    """

    is_loop: bool
    functions: tuple[str, ...]
    first_argument: int


_LOOP = ControlFlow(True, ("cond", "body"), 0)
_IF = ControlFlow(False, ("then_branch", "else_branch"), 1)
_CASE = ControlFlow(False, ("branches",), 1)

_CONTROL_FLOW: dict[str, ControlFlow] = {
    "Case": _CASE,
    "If": _IF,
    "StatelessCase": _CASE,
    "StatelessIf": _IF,
    "StatelessWhile": _LOOP,
    "While": _LOOP,
}

_STATEFUL_FORMS = {
    "StatelessCase": "Case",
    "StatelessIf": "If",
    "StatelessWhile": "While",
}


VARIABLE = "VarHandleOp"
"""The op of a variable in reports, and for policies: it makes its handle."""

READ_VARIABLE = "ReadVariableOp"
"""Reads a whole variable."""
SHARE_READS = "DisableCopyOnRead"
"""Turns a variable's copy-on-read mode off."""

UPDATE_ARITHMETIC = {
    "AssignAddVariableOp": "AddV2",
    "AssignSubVariableOp": "Sub",
}
"""The updates in place that are an operation on the variable and another tensor, and these operations."""

VARIABLE_SHAPE = "VariableShape"
"""The shape of a variable."""

_GATHERS = {
    "ResourceGather": "Gather",
    "ResourceGatherNd": "GatherNd",
}

_GATHERS_ROWS = frozenset(
    {
        "Gather",
        "GatherNd",
        "GatherV2",
    }
)

_GROUP_KEYS = {
    "CollectiveAllToAllV2": 2,
    "CollectiveBcastRecvV2": 1,
    "CollectiveBcastSendV2": 2,
    "CollectiveGatherV2": 2,
    "CollectiveReduceScatterV2": 2,
    "CollectiveReduceV2": 2,
}

_NONE = Trait(0)
_ONLY_GIVES = Trait.PURE | Trait.FEED | Trait.FETCH | Trait.HANDLE | Trait.READS_VARIABLE


def traits(op: str) -> Trait:
    """All facts about a type of op; none for one that is not in the table."""
    return TRAITS.get(op, _NONE)


@cache
def is_known(op: str) -> bool:
    """Whether the table has this type of op."""
    return op in TRAITS


@cache
def is_pure(op: str) -> bool:
    """Whether the op may be recomputed, moved, or dropped when unused."""
    return Trait.PURE in traits(op)


@cache
def is_view(op: str) -> bool:
    """Whether the op is pure and its output is its input's buffer (Identity, Reshape)."""
    return Trait.VIEW in traits(op)


@cache
def is_elementwise(op: str) -> bool:
    """Whether each element of the op's output depends on the elements of its inputs at the same place only."""
    return Trait.ELEMENTWISE in traits(op)


@cache
def passes_on(op: str) -> bool:
    """Whether each output of the op is the input of the same position, with its shape (Identity, EnsureShape)."""
    return Trait.SAME in traits(op)


@cache
def reads_metadata_only(op: str) -> bool:
    """Whether the op needs only shapes or dtypes of its inputs, so that these need not be in the arena."""
    return Trait.METADATA in traits(op)


@cache
def is_random(op: str) -> bool:
    """Whether the op gives a new value in each run."""
    return Trait.RANDOM in traits(op)


@cache
def encodes(op: str) -> bool:
    """Whether the op encodes its input: gives a smaller form that is kept in its place."""
    return Trait.ENCODES in traits(op)


@cache
def decodes(op: str) -> bool:
    """Whether the op decodes: gives the tensor from its smaller form."""
    return Trait.DECODES in traits(op)


@cache
def is_const(op: str) -> bool:
    """Whether the op is a constant, whose tensor is part of the graph."""
    return Trait.CONST in traits(op)


@cache
def is_feed(op: str) -> bool:
    """Whether the op is an argument of the graph."""
    return Trait.FEED in traits(op)


@cache
def makes_handle(op: str) -> bool:
    """Whether the op's output is a handle to a variable."""
    return Trait.HANDLE in traits(op)


@cache
def acts(op: str) -> bool:
    """Whether a run of the op can be observed. True for unknown ops."""
    return not traits(op) & _ONLY_GIVES


@cache
def may_wait(op: str) -> bool:
    """Whether the op's kernel may wait for other steps or processes. True for unknown ops that are not tfswap's."""
    return Trait.WAITS in traits(op) or not (is_known(op) or op.startswith("Tfswap>"))


@cache
def reads_variable(op: str) -> bool:
    """Whether the op's result depends on its place among the writes of a variable."""
    return Trait.READS_VARIABLE in traits(op)


@cache
def writes_variable(op: str) -> bool:
    """Whether the op changes a variable."""
    return Trait.WRITES_VARIABLE in traits(op)


@cache
def turns_on_copy_on_read(op: str) -> bool:
    """Whether the op makes every later read and dense update of its variable a copy."""
    return Trait.COPY_ON_READ in traits(op)


@cache
def turns_off_copy_on_read(op: str) -> bool:
    """Whether the op makes later reads of its variable share the buffer again."""
    return Trait.SHARED_READS in traits(op)


def reads_rows(op: str) -> bool:
    """Whether the op's first input is a tensor of which it reads the gathered rows only."""
    return op in _GATHERS_ROWS


def gather_of_read(op: str) -> str | None:
    """The op that gathers from a tensor what this op gathers from a variable; None for other ops."""
    return _GATHERS.get(op)


@cache
def adopts_value(op: str) -> bool:
    """Whether the op makes a variable adopt the buffer of its value."""
    return Trait.ADOPTS in traits(op)


@cache
def sized_by_value(op: str) -> bool:
    """Whether small inputs can make the op give a large output (Fill, Range)."""
    return Trait.SIZED_BY_VALUE in traits(op)


@cache
def has_small_extras(op: str) -> bool:
    """Whether outputs of unknown size are small."""
    return Trait.SMALL_EXTRAS in traits(op)


@cache
def is_one_node(op: str) -> bool:
    """Whether repeated runs of one node may differ from single runs of several nodes. True for unknown ops."""
    one = Trait.ONE_NODE | Trait.HANDLE | Trait.COLLECTIVE | Trait.RUNS_PYTHON | Trait.PIPELINE | Trait.DATASET_LOOP
    return not is_known(op) or bool(traits(op) & (one | Trait.FRAME))


@cache
def is_collective(op: str) -> bool:
    """Whether the op is one of a group on several devices or workers, none of which ends before all have begun."""
    return Trait.COLLECTIVE in traits(op)


def group_key_input(op: str) -> int | None:
    """The position of the input with a collective's group key; None where it is an attribute or in a resource."""
    return _GROUP_KEYS.get(op)


@cache
def is_joined(op: str) -> bool:
    """Whether oneDNN's graph pass may fuse the op with another one that has the same control edges."""
    return Trait.JOINED in traits(op)


@cache
def is_commutative(op: str) -> bool:
    """Whether TensorFlow's optimizers merge two nodes of the op whose inputs are the same in another order."""
    return Trait.COMMUTATIVE in traits(op)


@cache
def is_folded(op: str) -> bool:
    """Whether TensorFlow folds the op where its inputs are constant."""
    return is_pure(op) and Trait.NOT_FOLDED not in traits(op)


@cache
def calls_functions(op: str) -> bool:
    """Whether the op runs functions (While, If, Case, calls)."""
    return Trait.CALLS in traits(op)


@cache
def makes_pipeline(op: str) -> bool:
    """Whether the op makes or saves a data pipeline, whose functions run outside the step."""
    return Trait.PIPELINE in traits(op)


@cache
def loops_over_dataset(op: str) -> bool:
    """Whether the op runs a function for each element of a dataset, one after the other."""
    return Trait.DATASET_LOOP in traits(op)


@cache
def takes_from_pipeline(op: str) -> bool:
    """Whether the op gives the next element of a data pipeline that is made elsewhere."""
    return Trait.NEXT_ELEMENT in traits(op)


def control_flow(op: str) -> ControlFlow | None:
    """The functions of a functional loop or conditional; None for other ops."""
    return _CONTROL_FLOW.get(op)


def stateful_form(op: str) -> str:
    """The stateful form of a stateless loop or conditional; other ops as they are."""
    return _STATEFUL_FORMS.get(op, op)


@cache
def is_frame(op: str) -> bool:
    """Whether the op is of a lowered loop or conditional (Enter, Switch)."""
    return Trait.FRAME in traits(op)


@cache
def is_sum(op: str) -> bool:
    """Whether the op adds up any number of inputs."""
    return Trait.SUM in traits(op)


@cache
def depends_on_owners(op: str) -> bool:
    """Whether the last bits of the op's result depend on other owners of its inputs when it runs."""
    return Trait.DEPENDS_ON_OWNERS in traits(op)


@cache
def adds_when_ready(op: str) -> bool:
    """Whether the last bits of the op's result depend on the order in which its inputs are ready."""
    return Trait.ADDS_WHEN_READY in traits(op)


@cache
def runs_python(op: str) -> bool:
    """Whether the op runs Python code, whose memory is unknown."""
    return Trait.RUNS_PYTHON in traits(op)


@cache
def may_share_by_value(op: str) -> bool:
    """Whether the op's output is a view of its input or a copy, depending on values and alignment."""
    return Trait.SHARES_BY_VALUE in traits(op)


@cache
def is_loop_frame(op: str) -> bool:
    """Whether the op is of a lowered loop (Enter, NextIteration)."""
    return Trait.LOOP_FRAME in traits(op)


@cache
def is_einsum(op: str) -> bool:
    """Whether the op multiplies and sums over the labels of its `equation`."""
    return Trait.EINSUM in traits(op)


@cache
def runs_inline(op: str) -> bool:
    """Whether the executor runs the op's kernel on the thread that made it ready."""
    return Trait.INLINE in traits(op)


@cache
def uses_tensor_list(op: str) -> bool:
    """Whether the op makes or reads a tensor list."""
    return Trait.TENSOR_LIST in traits(op)


@cache
def may_run_again(op: str) -> bool:
    """Whether the op may be recomputed: it is pure, and holds no buffers of other tensors."""
    return is_pure(op) and not uses_tensor_list(op)


def empties_list(op: str) -> bool:
    """Whether the op makes a tensor list without elements, or an optional without value."""
    return Trait.EMPTY_LIST in traits(op)


@cache
def pushes_list(op: str) -> bool:
    """Whether the op adds its second input at the end of the list that is its first."""
    return Trait.PUSHES in traits(op)


@cache
def pops_list(op: str) -> bool:
    """Whether the op gives the list that is its first input without its last element, and that element."""
    return Trait.POPS in traits(op)


@cache
def wraps(op: str) -> bool:
    """Whether the op makes an optional of its inputs."""
    return Trait.WRAPS in traits(op)


@cache
def unwraps(op: str) -> bool:
    """Whether the op gives the components of the optional that is its input."""
    return Trait.UNWRAPS in traits(op)


@cache
def reads_list_length(op: str) -> bool:
    """Whether the op reads the number of a list's elements only."""
    return Trait.LENGTH in traits(op)


@cache
def only_waits(op: str) -> bool:
    """Whether the op does nothing but join control edges (NoOp)."""
    return Trait.ONLY_WAITS in traits(op)
