"""A ConcreteFunction of open dimensions: what `get_concrete_function` gives where a plan is for some sizes only.

It takes all sizes that its trace takes, as an undecorated one does, and each is planned for at its first call. Called
by itself, the rewritten function of one plan would take larger sizes too, and pass its limit unseen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from tfswap.errors import UnsupportedGraph
from tfswap.exporters.function import substitute

log = logging.getLogger("tfswap")


def has_size(tensor: Any) -> bool:
    """Whether all dimensions of an argument are known."""
    return tensor.dtype.name == "resource" or tensor.shape.is_fully_defined()


def open_function(
    name: str, base: Any, trace: Any, call: Callable[[Sequence[Any]], Any], *, carries: bool = False
) -> Any:
    """A ConcreteFunction that looks like `base`, and whose calls `call` makes.

    Args:
        name: of the function, for messages.
        base: the rewritten ConcreteFunction of one plan, or the trace where there is none yet. It stands for all sizes
            where they stay open: as a signature that is saved.
        trace: what `base` was made from.
        call: of the flat arguments, whose sizes are known.
        carries: whether the trace itself carries out a plan, as that of a rewritten file.
    """
    from tensorflow.python.saved_model import save_context

    class OpenFunction(substitute()):
        def _call_flat(self, tensor_inputs: Any, captured_inputs: Any) -> Any:
            saving = save_context.in_save_context()
            if all(map(has_size, tensor_inputs)) and not saving:
                return call(tensor_inputs)
            if base is trace and saving and not carries:
                log.warning(
                    "tfswap: %s is saved as it was traced, without its limit: its sizes are open, and it has no plan "
                    "yet. Call it once with real tensors before you save it, or rewrite the file with "
                    "tfswap.optimize_graph.",
                    name,
                )
            elif base is trace and not saving:
                pairs = zip(trace.inputs, tensor_inputs, strict=False)
                names = ", ".join(f"{own.op.name} {given.shape}" for own, given in pairs if not has_size(given))
                raise UnsupportedGraph(
                    f"{name}: the arguments {names} have open dimensions, and a plan needs sizes: call the function "
                    "once with real tensors before, or give get_concrete_function specs with full shapes"
                )
            return base._call_flat(tensor_inputs, captured_inputs)

    return OpenFunction(base._inference_function, trace)
