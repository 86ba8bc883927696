"""A planned step of a file, and its trace: the function that the step was rewritten from, and the file's plans."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.model_file import ConcreteStep
from tfswap.compiler.origin import Plans, SavedStep
from tfswap.compiler.request import Request
from tfswap.device.placement import place
from tfswap.errors import InvalidModel
from tfswap.ir.graph import Graph
from tfswap.plan.plan import Plan
from tfswap.runtime.captures import with_placeholders
from tfswap.runtime.shapes import Shapes
from tfswap.runtime.trace import Trace

log = logging.getLogger("tfswap")


@dataclass(frozen=True)
class FileStep:
    """A planned trace of a file: where it is in the library, how it was planned, and its plan.

    Attributes:
        decorated: whether the file has the planned function as it was traced, not the rewritten one in its place.
        plans: by device, or of one device by ""; none for other traces of a decorated function.
    """

    saved: SavedStep
    step: ConcreteStep
    plans: Plans
    request: Request
    decorated: bool = False

    def planned_for(self, inputs: int) -> Shapes:
        """The shapes that the plan is for, of the first `inputs` arguments."""
        shapes = {argument.name: argument.shape for argument in self.saved.arguments}
        return tuple(shapes.get(name) for name in [*self.step.user_names][:inputs])


class FileTrace(Trace):
    """The trace of a step of a file.

    Args:
        library: the file's functions as they were before they were rewritten, by name.
    """

    kind = "LoadedStep"

    def __init__(self, name: str, concrete: Any, file_step: FileStep, library: Mapping[str, Any]):
        super().__init__(name, concrete)
        self._file_step = file_step
        self._library = library
        self._plans = dict(file_step.plans)
        # A rewritten trace runs the file's plan as it is, so that it always has an order.
        self.always_ordered = file_step.saved.rewritten and not file_step.decorated

    def _placed(self, arguments: Sequence[Any], sizes: Any, *, keeps: Any) -> tuple[Graph, bool]:
        if self._file_step.decorated:
            return super()._placed(arguments, sizes, keeps=keeps)
        graph = self._original(arguments)
        given = [*arguments, *with_placeholders(self.concrete)]
        return graph, place(self.name, graph, given, self.device.model)

    @property
    def may_have_blocks(self) -> bool:
        return self._file_step.decorated and super().may_have_blocks

    def _original(self, arguments: Sequence[Any]) -> Graph:
        """The function that the step was rewritten from, for arguments of these shapes."""
        from tfswap.importers.library_function import import_library_function

        step = self._file_step.step
        given = zip(step.user_names, (t.shape for t in arguments), strict=False)
        shapes = {name: tuple(s.as_list()) for name, s in given if s.rank is not None and name not in step.handles}
        return import_library_function(self._library, step.name, shapes, step.handles, step.values)

    def plan_made_for(
        self, device: str, optimizer: Optimizer, limit_bytes: int | None, margin_bytes: int
    ) -> Plan | None:
        name = device if device in self._plans else ""
        plan = self._plans.get(name)
        if plan is None or plan.changes_nothing or plan.fingerprint != optimizer.fingerprint:
            return None
        optimizer.extra_margin_bytes = margin_bytes
        try:
            return optimizer.judged(plan, limit_bytes)
        except InvalidModel as error:  # another device, or another version of tfswap
            log.info("tfswap: %s: the file's plan can't be carried out here: %s", self.name, error)
            del self._plans[name]
            return None
