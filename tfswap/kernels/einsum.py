"""The requests of `Einsum`, in the steps of linalg/einsum_op_impl.h.

Each operand is transposed, reduced to the diagonal of repeated labels, and summed over the labels that only it has. The
two are multiplied. The product is expanded along the diagonal of repeated labels, and transposed. A step that changes
nothing is left out. An ellipsis stands for unnamed labels, which broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from tfswap.ir.types import ELEMENT_BYTES, TensorType
from tfswap.kernels.events import temp
from tfswap.kernels.memory_rules import KernelMemory, fresh
from tfswap.kernels.onednn import ONEDNN_SCRATCH_BYTES, Product, onednn_product_bytes
from tfswap.kernels.temporaries import Event, Facts, known_shape

# einsum_op_impl.h, DimensionType, in the order in which an operand's dimensions are sorted.
_BROADCAST, _BATCH, _FREE, _CONTRACT, _REDUCE = range(5)
_SWAPPED = (0, 1, 3, 2, 4)  # contracted dimensions before free ones: the product reads the operand transposed

Shape = tuple[int, ...]
Labels = list[str]


class _Tensor(NamedTuple):
    """An intermediate tensor: its shape, and the number of its allocation or of the operand that it is a view of."""

    shape: Shape
    allocation: int | None
    operand: int | None = None


class _Log:
    """The allocations and frees of one einsum, its product, and the number of elements copied."""

    def __init__(self, element_bytes: int):
        self._element_bytes = element_bytes
        self._log: list[tuple[int, int]] = []  # allocation, bytes; -1 where it is freed
        self._count = 0
        self.product: Product | None = None
        self.copied = 0

    def allocate(self, shape: Shape, *, copied: bool = True) -> _Tensor:
        """A new tensor of this shape.

        Args:
            copied: whether its elements are copied or summed from another tensor.
        """
        self.copied += prod(shape) if copied else 0
        self._log.append((self._count, self._element_bytes * prod(shape)))
        self._count += 1
        return _Tensor(shape, self._count - 1)

    def free(self, tensor: _Tensor, *kept: _Tensor) -> None:
        """Free the tensor's allocation, unless it is an operand's or that of one of `kept`."""
        if tensor.allocation is not None and all(tensor.allocation != k.allocation for k in kept):
            self._log.append((tensor.allocation, -1))

    def events(self, output: _Tensor) -> tuple[Event, ...]:
        temporaries: dict[int, int] = {}
        events: list[Event] = []
        for allocation, nbytes in self._log:
            if allocation == output.allocation:
                events.append(("out", 0))
            elif nbytes < 0:
                events.append(("free", temporaries[allocation]))
            else:
                temporaries[allocation] = len(temporaries)
                events.append(("temp", nbytes))
        return tuple(events)


def einsum(facts: Facts) -> KernelMemory:
    """Exact, but for oneDNN's scratch. Products of 16-bit floats are not widened, as those of `BatchMatMul` are."""
    shapes = [known_shape(kind) for kind in facts.inputs]
    equation = facts.attrs.get("equation")
    if not isinstance(equation, bytes) or facts.outputs[0].nbytes is None or None in shapes:
        return fresh(facts)._replace(exact=False)
    log = _Log(ELEMENT_BYTES.get(facts.outputs[0].dtype, 0))
    result = _run(equation, [s for s in shapes if s is not None], log)
    events, exact = log.events(result), True
    if not facts.device.is_gpu and facts.device.onednn:
        thread_bytes = ONEDNN_SCRATCH_BYTES if log.product is None else onednn_product_bytes(log.product)
        events, exact = (*events, temp(thread_bytes * facts.device.intra_op_threads)), False
    alias = () if result.operand is None else ((0, result.operand),)
    return KernelMemory(alias=alias, events=events, exact=exact)


def einsum_parts(equation: object, kinds: Sequence[TensorType]) -> tuple[Product | None, int] | None:
    """The product of an einsum, if it has one, and how many elements it transposes or sums; None without sizes."""
    shapes = [known_shape(kind) for kind in kinds]
    if not isinstance(equation, bytes) or None in shapes:
        return None
    log = _Log(0)
    _run(equation, [s for s in shapes if s is not None], log)
    return log.product, log.copied


def terms_of(equation: bytes) -> tuple[list[str], str]:
    """The labels of each operand, and of the result."""
    operands, _, result = equation.decode().replace(" ", "").partition("->")
    return operands.split(","), result


def _run(equation: bytes, shapes: Sequence[Shape], log: _Log) -> _Tensor:
    terms, right = terms_of(equation)
    order = list(dict.fromkeys(label for label in "".join((*terms, right)) if label != "."))
    ranks = [
        len(shape) - len(_split(term)) + 1 if "..." in term else 0 for term, shape in zip(terms, shapes, strict=True)
    ]
    unnamed = [f"...{i}" for i in range(max(ranks))]
    order += unnamed
    inputs = [_labels(term, unnamed[:rank]) for term, rank in zip(terms, ranks, strict=True)]
    output = _labels(right, unnamed)
    kinds = {label: _kind(label, inputs, output) for label in order}
    place = {label: i for i, label in enumerate(order)}
    reduced = [_reduce(i, shapes[i], labels, kinds, place, log) for i, labels in enumerate(inputs)]
    dims = {label: dim for t in reduced for label, dim in t.dims.items() if kinds[label] != _BROADCAST}
    product, batch = reduced[0].tensor, reduced[0].batch
    if len(reduced) > 1:
        batch = _broadcast(reduced[0].batch, reduced[1].batch)
        rows, columns = (prod(dims[label] for label in r.free) for r in reduced)
        inner = prod(dim for label, dim in dims.items() if kinds[label] == _CONTRACT)
        turned = reduced[0].swapped, not reduced[1].swapped
        log.product = Product(prod(batch), rows, inner, columns, turned)
        product = log.allocate((*batch, rows, columns), copied=False)
    labels = [label for kind in (_BROADCAST, _BATCH) for label in order if kinds[label] == kind]
    sizes = dict(zip(labels, batch, strict=True)) | dims
    labels += [label for r in reduced for label in r.free]
    inflated = product
    if any(output.count(label) > 1 for label in output):
        inflated = log.allocate(tuple(sizes[label] for label in labels for _ in range(output.count(label))))
        labels = [label for label in labels for _ in range(output.count(label))]
    if len(output) > 1 and labels != output:
        return log.allocate(tuple(sizes[label] for label in output))
    return inflated


class _Reduced(NamedTuple):
    """An operand of the product: its tensor, batch dimensions, free labels, the size of each label, and whether the
    contracted dimensions come before the free ones.
    """

    tensor: _Tensor
    batch: Shape
    free: Labels
    dims: Mapping[str, int]
    swapped: bool


def _reduce(
    operand: int, shape: Shape, labels: Labels, kinds: Mapping[str, int], place: Mapping[str, int], log: _Log
) -> _Reduced:
    given = transposed = _Tensor(shape, None, operand)
    dims = dict(zip(labels, shape, strict=True))
    keys = [(_SWAPPED[kinds[label]], place[label]) for label in labels]
    swapped = keys == sorted(keys)
    if not swapped:
        ordered = sorted(labels, key=lambda label: (kinds[label], place[label]))
        if ordered != labels:
            transposed = log.allocate(tuple(dims[label] for label in ordered))
        labels = ordered
    once = list(dict.fromkeys(labels))
    diagonal = transposed
    if len(once) < len(labels):
        diagonal = log.allocate(tuple(dims[label] for label in once))
    made = diagonal
    if prod(dims[label] for label in once if kinds[label] == _REDUCE) != 1:
        made = log.allocate(tuple(dims[label] for label in once if kinds[label] != _REDUCE))
    log.free(diagonal, made, given)
    log.free(transposed, diagonal, made)
    batch = tuple(dims[label] for label in once if kinds[label] in (_BROADCAST, _BATCH))
    return _Reduced(made, batch, [label for label in once if kinds[label] == _FREE], dims, swapped)


def _split(term: str) -> Labels:
    """The labels of a term, its ellipsis as one."""
    return list(term.replace("...", "."))


def _labels(term: str, unnamed: Labels) -> Labels:
    """The labels of a term, with its ellipsis replaced by the unnamed labels that it stands for."""
    return [label for one in _split(term) for label in (unnamed if one == "." else [one])]


def _kind(label: str, inputs: Sequence[Labels], output: Labels) -> int:
    if label.startswith("..."):
        return _BROADCAST
    unique = len(inputs) == 1 or any(label not in term for term in inputs)
    if label in output:
        return _FREE if unique else _BATCH
    return _REDUCE if unique else _CONTRACT


def _broadcast(one: Shape, other: Shape) -> Shape:
    rank = max(len(one), len(other))
    pairs = zip((1,) * (rank - len(one)) + one, (1,) * (rank - len(other)) + other, strict=True)
    return tuple(max(a, b) if min(a, b) else 0 for a, b in pairs)
