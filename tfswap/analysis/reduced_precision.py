"""Finds float tensors that wait for the backward pass, and their smaller forms with reduced precision.

Gist's delayed precision reduction (Jain et al., ISCA 2018): the forward pass computes with full precision, and only the
copy for the backward pass is rounded. This changes values, and is opt-in (docs/precision.md).

Invariant: pure functions of the graph, its order and the user's rules. Only floats of the forward pass are reduced that
depend on the step's arguments and that a kernel of the backward pass reads. Variables and tensors computed from these
only, per-channel statistics and the step's results are not. Not handled: the bodies of loops.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.encodings import waits_long
from tfswap.analysis.phases import backward_nodes
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import is_const, is_feed, is_pure, is_view, reads_metadata_only, reads_variable
from tfswap.ir.views import origin
from tfswap.kernels.hardware import Rates

EVERYTHING = "*"
"""The pattern that fits any node's name."""
EXACT = "exact"
"""The precision in rules for tensors that stay unchanged."""
FLOATS = frozenset({"bfloat16", "float16", "float32"})
"""The types that the codecs reduce (csrc/codecs/lossy_ops.cc)."""
GROUP = 256
"""Neighbours that share a scale, as in ActNN."""


class Format(NamedTuple):
    """A smaller form.

    Attributes:
        encode, decode: the ops that encode and decode.
        attrs: the attributes of both.
        word_values, word_bytes: the number of values per word, and the bytes of a word.
        error: the bound of the rounding error, as text.
    """

    encode: str
    decode: str
    attrs: Mapping[str, object]
    word_values: int
    word_bytes: int
    error: str

    def nbytes(self, elements: int) -> int:
        return -(-elements // self.word_values) * self.word_bytes


def _minifloat(name: str, exponent: int, mantissa: int, largest: float, values: int = 1, nbytes: int = 1) -> Format:
    """A float with these numbers of exponent and mantissa bits, rounded to nearest even, with subnormals."""
    smallest = 2 - 2 ** (exponent - 1)
    error = (
        f"within 2^-{mantissa + 1} of its size, below 2^{smallest} within 2^{smallest - mantissa - 1}; "
        f"beyond {largest:g} it is that"
    )
    return Format(custom_ops.ENCODE_FLOATS, custom_ops.DECODE_FLOATS, {"format": name.encode()}, values, nbytes, error)


def _grouped(bits: int) -> Format:
    """Levels between the smallest and the largest value of a group, with stochastic rounding."""
    # Decoded values are rounded to the tensor's type, and are at most the largest value. TensorFlow flushes numbers
    # below 2^-126 to 0: values, the smallest or largest of a group, and decoded values.
    error = (
        f"within 1/{2**bits - 1} of the range of its {GROUP} neighbours, 1/{2**bits - 4} next to infinities and NaNs, "
        "plus a unit in the last place of the largest and 1.3e-38"
    )
    attrs = {"bits": bits, "group_size": GROUP}
    return Format(custom_ops.ENCODE_GROUPS, custom_ops.DECODE_GROUPS, attrs, GROUP, 8 + GROUP * bits // 8, error)


FORMATS: dict[str, Format] = {
    "bf16": _minifloat("bfloat16", 8, 7, 3.38953e38, nbytes=2),
    "fp10": _minifloat("gist_float10", 5, 4, 63488, values=3, nbytes=4),  # Gist's 1 + 5 + 4 bits
    "fp16": _minifloat("float16", 5, 10, 65504, nbytes=2),
    "fp8": _minifloat("gist_float8", 4, 3, 240),  # Gist's 1 + 4 + 3 bits
    "fp8_e4m3": _minifloat("float8_e4m3fn", 4, 3, 448),  # OCP's, without infinities
    "fp8_e5m2": _minifloat("float8_e5m2", 5, 2, 57344),
    "int4": _grouped(4),
    "int8": _grouped(8),
}
"""The formats, by their names in the user's rules."""
PRECISIONS = (*FORMATS, EXACT)

Rules = tuple[tuple[str, str], ...]
"""(pattern of nodes' names, precision) pairs. The first match holds."""


@dataclass(frozen=True)
class Reduction:
    """One tensor that waits for the backward pass in a smaller form.

    Attributes:
        tensor: its name ("node:0").
        precision: the name of its format, of FORMATS.
        readers: names of the kernels that read the decoded tensor, in groups that share one decoding.
    """

    tensor: str
    precision: str
    readers: tuple[tuple[str, ...], ...]


class Saved(NamedTuple):
    """A tensor of the forward pass that the backward pass reads, directly or through views.

    Attributes:
        tensor: the tensor.
        forward, backward: the kernels of each pass that read it.
    """

    tensor: Output
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]


def saved_tensors(graph: Graph) -> dict[str, Saved]:
    """Float tensors that are saved for the backward pass and may be rounded, by name."""
    backward = backward_nodes(graph)
    varying = _varying(graph)
    readers: dict[Output, tuple[dict[Node, None], dict[Node, None]]] = {}
    for node in graph:
        if is_view(node.op) or reads_metadata_only(node.op):
            continue
        for read in node.inputs:
            tensor = origin(read)
            if tensor.node in varying and tensor.node not in backward and _is_map(tensor):
                readers.setdefault(tensor, ({}, {}))[node in backward][node] = None
    fetched = {origin(fetch) for fetch in graph.fetches}
    return {
        tensor.name: Saved(tensor, tuple(forward), tuple(late))
        for tensor, (forward, late) in readers.items()
        if late and tensor not in fetched
    }


def _is_map(tensor: Output) -> bool:
    """Whether it may be a feature map. Statistics have one axis, a loss has none."""
    return tensor.type.dtype in FLOATS and len(tensor.type.shape or ()) > 1


def _varying(graph: Graph) -> set[Node]:
    """Nodes whose results depend on more than variables and constants."""
    found: set[Node] = set()
    for node in graph.topological():
        op = node.op
        if is_feed(op) or is_const(op) or reads_variable(op):
            continue
        given = any(t.type.dtype != "resource" and (is_feed(t.node.op) or t.node in found) for t in node.inputs)
        if given or not is_pure(op):
            found.add(node)
    return found


def has_rule(node: str, rules: Rules) -> bool:
    """Whether a rule other than the one for all nodes matches this node's name."""
    return any(pattern != EVERYTHING and fnmatchcase(node, pattern) for pattern, _ in rules)


def precision_of(node: str, rules: Rules) -> str:
    """The precision for a node by `rules`, of PRECISIONS."""
    return next((precision for pattern, precision in rules if fnmatchcase(node, pattern)), EXACT)


def requested_precisions(saved: Mapping[str, Saved], rules: Rules, smallest_bytes: int) -> dict[str, str]:
    """The precision of each tensor of `saved` that rules make smaller and that has at least `smallest_bytes`.

    Raises:
        InvalidModel: a pattern matches no tensor. The pattern for all may match none: it can be used for many steps.
    """
    for pattern, _ in rules:
        if pattern != EVERYTHING and not any(fnmatchcase(s.tensor.node.name, pattern) for s in saved.values()):
            known = ", ".join(s.tensor.node.name for s in list(saved.values())[:5])
            raise InvalidModel(
                f"precision has the pattern {pattern!r}, and no float that this step keeps for its backward pass is "
                f"called so. Those that it keeps are, for example, {known or 'none'}."
            )
    requested = {
        name: precision_of(s.tensor.node.name, rules) for name, s in saved.items() if _nbytes(s) >= smallest_bytes
    }
    return {
        name: precision
        for name, precision in requested.items()
        if precision != EXACT and FORMATS[precision].nbytes(_elements(saved[name])) < _nbytes(saved[name])
    }


def find_reductions(
    flow: Dataflow,
    order: Sequence[int],
    cost_s: Sequence[float],
    rates: Rates,
    saved: Mapping[str, Saved],
    requested: Mapping[str, str],
    exact: Collection[str],
) -> list[Reduction]:
    """The reductions among those in `requested`, with their readers.

    Args:
        order: the kernels of `flow` in order.
        cost_s: the seconds of each kernel.
        requested: precisions by tensor, as of `requested_precisions`.
        exact: names of kernels that read an exact encoding.
    """
    place = {flow.nodes[i].name: position for position, i in enumerate(order)}
    starts = [0.0]
    for i in order:
        starts.append(starts[-1] + cost_s[i])
    found: list[Reduction] = []
    for name, precision in requested.items():
        tensor, forward, backward = saved[name]
        last = max(place[node.name] for node in (tensor.node, *forward))
        groups: list[list[str]] = []
        for reader in sorted((node.name for node in backward if node.name not in exact), key=place.__getitem__):
            at = place[reader]
            if waits_long(starts[at] - starts[last + 1], _nbytes(saved[name]), rates):
                groups.append([])
            if groups:
                groups[-1].append(reader)
            last = at
        if groups:
            found.append(Reduction(name, precision, tuple(map(tuple, groups))))
    return found


def _nbytes(saved: Saved) -> int:
    return saved.tensor.type.nbytes or 0


def _elements(saved: Saved) -> int:
    return saved.tensor.type.num_elements or 0
