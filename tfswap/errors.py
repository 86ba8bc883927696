"""The errors that tfswap raises on purpose.

Every message says what went wrong, where (the node, and the user's own source line where TensorFlow
has it), the values involved, and what to do next.
"""

from __future__ import annotations

from tfswap.support.printable import one_line, printable

INSTALL_TENSORFLOW = 'Install it: pip install "tfswap[tensorflow]", or "tfswap[cpu]" for a machine without a GPU.'


class TfswapError(Exception):
    """Base of every error that tfswap raises on purpose. Its message has no control characters, whatever it names.

    Attributes:
        has_lines: whether messages of the class have several lines. Those of others have one.
    """

    has_lines = False

    def __init__(self, *details: object):
        shown = printable if self.has_lines else one_line
        super().__init__(*(shown(detail) if isinstance(detail, str) else detail for detail in details))

    # AutoGraph replaces errors that are raised while it traces a caller, except those with this attribute. A caller
    # that catches a refusal, for its floor, must get the error itself.
    ag_pass_through = True


class InfeasibleMemoryLimit(TfswapError):
    """The limit is below what the planner can reach. Raised before anything runs.

    Attributes:
        floor_bytes: the smallest limit, in bytes, that the planner reaches for this step.
        limit_bytes: the given limit, in bytes.
    """

    def __init__(self, message: str, *, floor_bytes: int, limit_bytes: int):
        super().__init__(message)
        self.floor_bytes = floor_bytes
        self.limit_bytes = limit_bytes

    def of(self, part: str) -> InfeasibleMemoryLimit:
        """The same refusal, whose message begins with the name of a part of the step."""
        return InfeasibleMemoryLimit(f"{part}: {self}", floor_bytes=self.floor_bytes, limit_bytes=self.limit_bytes)


class UnsupportedGraph(TfswapError):
    """The graph can't be rewritten: XLA-compiled, unknown sizes, or no backward pass."""


class InvalidModel(TfswapError):
    """A model file or an argument that names part of one is missing or malformed."""


class OpLibraryError(TfswapError):
    """tfswap's custom ops could not be built or loaded. The message may have a compiler's output."""

    has_lines = True
