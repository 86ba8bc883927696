"""Messages on a limit that can't be kept, or was exceeded: by how much, the cause, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfswap.errors import InfeasibleMemoryLimit
from tfswap.kernels.alignment import ALIGNMENT_BYTES
from tfswap.planner.promise import promised
from tfswap.support.sizes import format_bytes

if TYPE_CHECKING:
    from tfswap.device.lent_block import LentBlock
    from tfswap.report.report import ConvolutionRow


CONCURRENT_STEPS = (
    "another optimized step ran at the same time, and each is planned as if it were alone: one of them calls Python, "
    "waits for a queue or an iterator, or takes part in a collective, and may have waited for the other. Call them one "
    "after another."
)
"""The cause where a step did not run alone."""


def borrows(device: str, block: LentBlock) -> str:
    """Of a report: tensors wait in another device's memory."""
    return f"swapped tensors of {device} take {format_bytes(block.nbytes)} of {block.lender}'s memory"


def lends(device: str, nbytes: int) -> str:
    """Of a report: a device lends memory."""
    return f"of {device}'s persistent bytes, {format_bytes(nbytes)} are lent to other devices, for swapped tensors"


def refused_by_another(step: str, rank: int, floor_bytes: int) -> str:
    """A step fits here, but not in another worker's arena."""
    return (
        f"{step}: worker {rank} needs at least {floor_bytes} bytes ({format_bytes(floor_bytes)}) in its arena, more "
        "than its memory_limit, and no worker trains without the others. Ask for "
        f"memory_limit={floor_bytes} or more, or make the batch smaller."
    )


def refused_by_the_arena(refusal: InfeasibleMemoryLimit, device: str, arena_bytes: int, regions: int) -> str:
    """`refusal`, where a higher limit does not help: the arena may not have as much, or not in one region."""
    message = f"{refusal} {device}'s allocator may have {arena_bytes} bytes ({format_bytes(arena_bytes)}) in all"
    if refusal.floor_bytes > arena_bytes and regions > 1:
        message += (
            f", in {regions} regions so far, and tensors do not fit across regions. One region holds more: allocate "
            "one tensor of about that size when the program starts, and free it"
        )
    elif arena_bytes < refusal.floor_bytes <= promised(arena_bytes + ALIGNMENT_BYTES):
        message += (
            ". Fewer bytes are live at the same time, but under no plan that was found does each tensor lie in one "
            "piece there: the figure is the least that is more than there is. A smaller batch "
            "helps, or a larger device"
        )
    return f"{message}."


def exceeded(step: str, peak_bytes: int, limit_bytes: int, cause: str, *, again: bool) -> str:
    """Of a step that ran.

    Args:
        cause: a sentence.
        again: whether the next call is planned again.
    """
    message = f"{step} peaked at {format_bytes(peak_bytes)}, {format_bytes(peak_bytes - limit_bytes)} over its limit: "
    message += cause
    return f"{message} The next call is planned again with room for that." if again else message


def exceeded_while_made(step: str, peak_bytes: int, limit_bytes: int) -> str:
    """Of a step that has not run yet."""
    return (
        f"{step} peaked at {format_bytes(peak_bytes)} while TensorFlow made it, "
        f"{format_bytes(peak_bytes - limit_bytes)} over its limit. TensorFlow evaluates constant subgraphs while it "
        "builds the step. Move large constants outside the function."
    )


def device_is_full(step: str, arena_bytes: int, planned_bytes: int, limit_bytes: int) -> str:
    """A device gave its allocator less than the step takes, which is within its limit.

    Args:
        arena_bytes: what the allocator has of the device.
    """
    return (
        f"{step} takes up to {format_bytes(planned_bytes)} within its limit of {format_bytes(limit_bytes)}, and the "
        f"device has given its allocator {format_bytes(arena_bytes)} and no more: another process, or another library "
        f"in this one, has the rest. Free it there, or ask for a memory_limit below {arena_bytes} bytes."
    )


def allocated_by_others(nbytes: int, held: str) -> str:
    """The cause where bytes that others allocated during the step are still in use.

    Args:
        held: as of `MemoryOwners.largest_of_others`.
    """
    return f"others allocated {format_bytes(nbytes)} during the step and still hold them{held}."


def what_may_have_taken_it(tightest: ConvolutionRow | None, unmodelled: Sequence[str]) -> str:
    """The cause where no bytes of others are still in use.

    Args:
        tightest: the convolution to whose workspace the plan leaves the fewest bytes, where cuDNN chooses it.
        unmodelled: kernels whose memory is known by a bound only, worst first.
    """
    suspect = ""
    if tightest is not None:
        suspect = (
            f", such as cuDNN's workspace for {tightest.name}, to which the plan leaves "
            f"{format_bytes(tightest.free_bytes)} (limit_workspaces=True keeps all of them within that)"
        )
    elif unmodelled:
        suspect = f", such as {unmodelled[0]}"
    return (
        "something else took memory of the device while it ran, and has freed it again, or a kernel took more than "
        f"is modelled{suspect}."
    )


def not_kept(step: str, refusal: Exception, copied_bytes: int) -> str:
    """A step has no plan that fits the arena, and runs with its present one.

    Args:
        copied_bytes: bytes of variables that share their buffers with other tensors.
    """
    message = f"{step}: the limit can no longer be kept: {refusal}"
    if not copied_bytes:
        return message
    return (
        f"{message} {format_bytes(copied_bytes)} of its variables share their buffers with tensors that are still held "
        "(tf.identity(w), w.read_value(), another variable that w was assigned to), and an update takes as much again: "
        "delete those before the step, or keep w.numpy(), which lies in host memory."
    )


def no_room_for_batches(step: str, element_bytes: int) -> str:
    """A step takes its batches from pipelines, and no plan has room for one of theirs.

    Args:
        element_bytes: bytes of one element of each.
    """
    return (
        f"{step}: the pipeline that it takes its batches from makes others while the first steps run, "
        f"{format_bytes(element_bytes)} each, and no plan leaves room for one under this limit: they exceed the "
        "plan until the pipeline's buffers are full. Raise memory_limit=, or pass each batch to the step: "
        "step(next(iterator))."
    )


def no_room(step: str, enough_bytes: int) -> str:
    """A step exceeded its limit, and will again if others allocate as much again."""
    return f"{step}: no plan leaves room for that; if it happens again, memory_limit={enough_bytes} is enough."
