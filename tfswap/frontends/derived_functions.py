"""The functions that come from one optimized function and change their limit with it: of instances, and clones."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfswap.compiler.request import Request

if TYPE_CHECKING:
    from tfswap.frontends.function import OptimizedFunction


class DerivedFunctions:
    """The functions that come from one."""

    def __init__(self) -> None:
        self._bound: weakref.WeakKeyDictionary[Any, OptimizedFunction] = weakref.WeakKeyDictionary()
        self._clones: weakref.WeakSet[OptimizedFunction] = weakref.WeakSet()

    def bound_to(self, instance: Any, function: Any, optimized: Callable[[Any], OptimizedFunction]) -> Any:
        """The method of an instance; None where the instance is an argument like others, as a composite tensor is.

        Args:
            function: the `tf.function` of the class.
            optimized: puts that of an instance under the limit.
        """
        if instance not in self._bound:
            bound = function.__get__(instance, type(instance))
            if not hasattr(bound, "get_concrete_function"):
                return None
            self._bound[instance] = optimized(bound)
        return self._bound[instance]

    def add(self, clone: OptimizedFunction) -> None:
        """Add a clone, for as long as it exists."""
        self._clones.add(clone)

    def change_request(self, request: Request) -> None:
        """Change the request of all."""
        for each in (*self._bound.values(), *self._clones):
            each.change_request(request)
