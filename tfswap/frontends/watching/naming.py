"""Names what holds memory: nodes with the user's source lines, variables, tensors that Python holds.

Python's tensors are all searched only where what a call has does not say whose nearly all bytes are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfswap.analysis.allocator_events import Allocation, AllocatorEvent, ArenaHeight
from tfswap.device.memory_owners import owners_by_address, variables_by_address
from tfswap.importers.source_lines import SourceLines
from tfswap.report.peak_owners import LEAST_SHARE, Owner, merged

GRADIENT = "gradient_tape/"
"""What the names of nodes begin with that a tape makes, before that of the node whose gradient they compute."""
_NUMBER = re.compile(r"_\d+$")
_OPTIMIZER = re.compile(r"^(ArithmeticOptimizer/[A-Za-z]+_|ConstantFolding/|LayoutOptimizer/)")
"""What TensorFlow's optimizers put in front of the name of the node that they replace."""
_CALL = re.compile(r"\b(Stateful)?PartitionedCall(_\d+)?/")
"""The name of a call in that of a node of the function that is called."""
UNOWNED = "allocated earlier: by a data pipeline, or for constants of functions"


def owners_of(height: ArenaHeight, functions: Sequence[Any], known: Mapping[int, str]) -> tuple[Owner, ...]:
    """Whose the chunks at an arena's highest moment were, which has just been.

    Args:
        functions: the traces that ran then.
        known: owners of chunks by address, from before the events.
    """
    unnamed = sum(a.nbytes for a in height.allocations if a.request is None and a.address not in known)
    earlier = {**owners_by_address(), **known} if unnamed > LEAST_SHARE * height.nbytes else known
    return _named(height, functions, earlier)


def owners_afterwards(height: ArenaHeight) -> tuple[Owner, ...]:
    """As `owners_of` without functions, some time later: of what Python holds then, only variables are the same."""
    return _named(height, (), variables_by_address())


def _named(height: ArenaHeight, functions: Sequence[Any], earlier: Mapping[int, str]) -> tuple[Owner, ...]:
    lines = [SourceLines(each) for each in functions]
    return merged(_owner(each, lines, earlier) for each in height.allocations)


def _owner(allocation: Allocation, lines: Iterable[SourceLines], earlier: Mapping[int, str]) -> Owner:
    request = allocation.request
    if request is None:
        return Owner(allocation.nbytes, earlier.get(allocation.address, UNOWNED))
    source = next(filter(None, (_line(each, request.op) for each in lines)), None)
    return Owner(allocation.nbytes, _node_text(request, has_line=source is not None), source or "")


def _node_text(request: AllocatorEvent, *, has_line: bool) -> str:
    """The node without the number that TensorFlow appends, so that nodes of one line go together; type and shape."""
    import tensorflow as tf
    from tensorflow.python.framework import op_def_registry

    name = _NUMBER.sub("", _CALL.sub("", _OPTIMIZER.sub("", request.op))) or "an unknown op"
    if request.is_temporary:
        return f"{name}, its own workspace"
    kind = f" {tf.as_dtype(request.dtype).name} {request.shape}" if request.dtype and request.shape else ""
    is_eager = not has_line and op_def_registry.get(request.op) is not None
    return f"{name}{kind}{', in eager code or a pipeline' if is_eager else ''}"


def _line(lines: SourceLines, node: str) -> str | None:
    """The line that created a node; of one that computes a gradient, the line of the node whose gradient it is."""
    node = _OPTIMIZER.sub("", node)
    scope, is_gradient, rest = node.partition(GRADIENT)
    parts = rest.split("/") if is_gradient else []
    for count in range(len(parts) - 1, 0, -1):
        if (line := lines(scope + "/".join(parts[:count]))) is not None:
            return f"{line}, its gradient"
    parts = node.split("/")
    return next(filter(None, (lines("/".join(parts[:count])) for count in range(len(parts), 0, -1))), None)
