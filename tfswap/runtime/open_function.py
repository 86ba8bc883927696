"""A ConcreteFunction with open dimensions: the result of `get_concrete_function` where plans are for some sizes only.

It accepts all sizes that its trace accepts, as an undecorated one does, and plans for each at its first call. The
rewritten function of one plan, called directly, would accept larger sizes too, and exceed its limit unnoticed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tfswap.errors import UnsupportedGraph
from tfswap.exporters.function import substitute

log = logging.getLogger("tfswap")


def has_size(tensor: Any) -> bool:
    """Whether all dimensions of an argument are known."""
    return tensor.dtype.name == "resource" or tensor.shape.is_fully_defined()


def open_function(
    name: str, base: Any, trace: Any, call: Callable[[Sequence[Any]], Any], *, carries: bool = False
) -> Any:
    """A ConcreteFunction with the signature of `base`, whose calls run `call`.

    Args:
        name: the function's name, for messages.
        base: the rewritten ConcreteFunction of one plan, or the trace where there is none yet. It runs where sizes stay
            open, as in a saved signature.
        trace: the trace that `base` was made from.
        call: runs the step on flat arguments, whose sizes are known.
        carries: whether the trace itself carries out a plan, as in a rewritten file.
    """
    made = _open_class()(base._inference_function, trace)
    made.tfswap_step = _Step(name, base, trace, call, carries)
    return made


class _Step(NamedTuple):
    """The arguments of `open_function`."""

    name: str
    base: Any
    trace: Any
    call: Callable[[Sequence[Any]], Any]
    carries: bool

    def run(self, tensor_inputs: Any, captured_inputs: Any) -> Any:
        """Run the step where all sizes are known, else the base. Raises UnsupportedGraph where that has no plan."""
        from tensorflow.python.saved_model import save_context

        saving = save_context.in_save_context()
        if all(map(has_size, tensor_inputs)) and not saving:
            return self.call(tensor_inputs)
        if self.base is self.trace and saving and not self.carries:
            log.warning(
                "tfswap: %s is saved as it was traced, without its limit: its sizes are open, and it has no plan "
                "yet. Call it once with real tensors before you save it, or rewrite the file with "
                "tfswap.optimize_graph.",
                self.name,
            )
        elif self.base is self.trace and not saving:
            pairs = zip(self.trace.inputs, tensor_inputs, strict=False)
            names = ", ".join(f"{own.op.name} {given.shape}" for own, given in pairs if not has_size(given))
            raise UnsupportedGraph(
                f"{self.name}: the arguments {names} have open dimensions, and a plan needs sizes: call the function "
                "once with real tensors before, or give get_concrete_function specs with full shapes"
            )
        return self.base._call_flat(tensor_inputs, captured_inputs)


@functools.cache
def _open_class() -> Any:
    """One class for all: TensorFlow keeps each class that its `nest` has seen (util.cc, CachedTypeCheck), and a
    class of its own for each function would keep the function's variables.
    """

    class OpenFunction(substitute()):
        tfswap_step: _Step

        def _call_flat(self, tensor_inputs: Any, captured_inputs: Any) -> Any:
            return self.tfswap_step.run(tensor_inputs, captured_inputs)

    return OpenFunction
