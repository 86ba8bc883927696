"""The fused cells of recurrent nets (rnn/lstm_ops.cc, rnn/gru_ops.cc of TensorFlow 2.21).

Outputs are requested first, then scratch, which is held until the kernel ends. Kernels over all time steps work on
slices of their tensors, and on copies of slices that are not aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tfswap.ir.types import ELEMENT_BYTES
from tfswap.kernels.events import free, temp
from tfswap.kernels.memory_rules import Entry, KernelMemory, candidates, outs, with_events
from tfswap.kernels.temporaries import TENSOR_ALIGN_BYTES, Event, Facts, known_shape

_Slices = Iterable[tuple[str, int, int]]
"""Slices in the order of their use: name, time step, bytes of one time step."""

_Taken = Callable[[int, int, int], _Slices]
"""Lists the slices, from the number of time steps and the bytes of one time step's input and state."""


def _matrices(facts: Facts, *positions: int) -> list[tuple[int, ...]] | None:
    found = [known_shape(facts.inputs[p]) for p in positions]
    shapes = [s for s in found if s is not None]
    return shapes if len(shapes) == len(found) else None


def _cell(
    facts: Facts, takes: Sequence[tuple[int, int]], state: int, scratch: Sequence[tuple[int, int]]
) -> KernelMemory:
    """A cell of one time step.

    Args:
        takes: (output, input) pairs: the output may be written over the input.
        state: the position of the state among the inputs.
        scratch: (inputs, states) per temporary: its width as a multiple of the input's and of the state's width.
    """
    forward = tuple(pair for output, source in takes for pair in candidates(facts, output, (source,)))
    shapes = _matrices(facts, 0, state)
    if shapes is None:
        return with_events(outs(len(facts.outputs)), forward=forward, exact=False)
    (batch, width), (_, cell) = shapes
    row = batch * ELEMENT_BYTES[facts.outputs[0].dtype]
    temps = [temp(row * (inputs * width + states * cell)) for inputs, states in scratch]
    return with_events((*outs(len(facts.outputs)), *temps), forward=forward)


def lstm_cell(facts: Facts) -> KernelMemory:
    """The concatenated input and the four gates."""
    return _cell(facts, ((0, 2), (3, 1)), 1, ((1, 1), (0, 4)))


def lstm_cell_grad(facts: Facts) -> KernelMemory:
    """The gradients of the output gate, the state, the input, the forget gate and the input gate."""
    return _cell(facts, ((0, 14), (2, 4), (3, 5), (4, 6)), 1, ((0, 1),) * 5)


def gru_cell(facts: Facts) -> KernelMemory:
    """Two concatenated inputs and the two gates."""
    return _cell(facts, ((3, 1),), 1, ((1, 1), (1, 1), (0, 2)))


def gru_cell_grad(facts: Facts) -> KernelMemory:
    """The gradients of the two gates and of the reset state, and two concatenated gradients."""
    return _cell(facts, ((0, 0), (1, 1)), 1, ((0, 1), (0, 1), (0, 1), (1, 1), (1, 1)))


def block_lstm(facts: Facts) -> KernelMemory:
    """All steps, one after the other, with the scratch of a cell."""
    return _block(facts, ((1, 1), (0, 4)), _forward_slices)


def block_lstm_grad(facts: Facts) -> KernelMemory:
    """All steps in reverse: the concatenated input and its gradient, and the gradients of the gates and states."""
    return _block(facts, ((1, 1), (1, 1), *((0, 1),) * 5, (0, 4), (0, 1), (0, 1)), _backward_slices)


def _forward_slices(steps: int, x: int, cell: int) -> _Slices:
    for t in range(steps):
        yield "x", t, x
        if t:
            yield from (("cs_prev", t - 1, cell), ("h_prev", t - 1, cell))
        for name in ("i_out", "cs_out", "f_out", "o_out", "ci_out", "co_out", "h_out"):
            yield name, t, cell


def _backward_slices(steps: int, x: int, cell: int) -> _Slices:
    for t in reversed(range(steps)):
        yield "x", t, x
        if t:
            yield from (("cs_prev", t - 1, cell), ("h_prev", t - 1, cell))
        for name in ("i_out", "cs_out", "f_out", "o_out", "ci_out", "co_out", "cs_grad", "h_grad"):
            yield name, t, cell
        yield "x_grad", t, x


def _block(facts: Facts, scratch: Sequence[tuple[int, int]], slices: _Taken) -> KernelMemory:
    outputs = outs(len(facts.outputs))
    shapes = _matrices(facts, 1, 2)
    if shapes is None:
        return with_events(outputs, exact=False)
    (steps, batch, width), (_, cell) = shapes
    row = batch * ELEMENT_BYTES[facts.outputs[0].dtype]
    events: list[Event] = [("temp", row * (inputs * width + states * cell)) for inputs, states in scratch]
    given = facts.values.get(0)
    copies: dict[str, int] = {}
    for name, step, nbytes in slices(steps if given is None else given[0], row * width, row * cell):
        if step * nbytes % TENSOR_ALIGN_BYTES and name not in copies:
            copies[name] = len(events)
            events.append(("temp", nbytes))
    # The kernel stores the copies in a map by name, and frees them from the last name to the first.
    events += [free(copies[name]) for name in sorted(copies, reverse=True)]
    return with_events((*outputs, *events), exact=given is not None or not copies)


RULES: dict[str, Entry] = {
    "BlockLSTM": Entry(block_lstm, values=(0,)),
    "BlockLSTMGrad": Entry(block_lstm_grad, values=(0,)),
    "BlockLSTMGradV2": Entry(block_lstm_grad, values=(0,)),
    "BlockLSTMV2": Entry(block_lstm, values=(0,)),
    "GRUBlockCell": Entry(gru_cell),
    "GRUBlockCellGrad": Entry(gru_cell_grad),
    "LSTMBlockCell": Entry(lstm_cell),
    "LSTMBlockCellGrad": Entry(lstm_cell_grad),
}
