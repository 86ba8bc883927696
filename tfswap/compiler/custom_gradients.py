"""Custom gradients of a SavedModel: functions that capture tensors inside of the bodies of other functions.

When a body is rewritten, its custom gradients refer to tensors that no longer exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from tfswap.compiler.model_file import ModelFile
from tfswap.errors import InvalidModel
from tfswap.support.reach import reach


def drop_gradients_of(file: ModelFile, functions: Collection[str]) -> None:
    """Remove the gradients that a user has defined inside of `functions`, whose bodies have been rewritten.

    Such a gradient is a function that captures tensors of the body by name. Objects of the file refer to each other by
    number, so a captured tensor stays in the list, as an object without content.
    """
    objects, library = file.meta_graph.object_graph_def, file.meta_graph.graph_def.library
    captured: dict[str, set[int]] = {}
    for i, tensor in _captured(file):
        captured.setdefault(tensor.concrete_function, set()).add(i)
    gradients = {g.gradient_func for g in library.registered_gradients} & set(objects.concrete_functions)

    def inside(function: str) -> Iterator[str]:
        tensors = captured.get(function, set())
        return (g for g in gradients if tensors.intersection(objects.concrete_functions[g].bound_inputs))

    gone = set(reach(functions, inside))
    lost = {i for function in gone for i in captured.get(function, ())}
    gone -= set(functions)
    for name in gone:
        del objects.concrete_functions[name]
    bound = {i for concrete in objects.concrete_functions.values() for i in concrete.bound_inputs}
    for i in lost - bound:
        objects.nodes[i].user_object.identifier = "_generic_user_object"
        objects.nodes[i].user_object.version.producer = objects.nodes[i].user_object.version.min_consumer = 1
    for i in reversed(range(len(library.registered_gradients))):
        if library.registered_gradients[i].gradient_func in gone:
            del library.registered_gradients[i]
    for i in reversed(range(len(library.function))):
        if library.function[i].signature.name in gone:
            del library.function[i]
    file.library = {f.signature.name: f for f in library.function}


def check_captures(file: ModelFile) -> None:
    """Raise InvalidModel where the object graph names a tensor that its function lacks: the file could not be
    loaded."""
    for _, captured in _captured(file):
        fdef = file.library.get(captured.concrete_function)
        node = captured.name.partition(":")[0]
        if fdef is None or all(n.name != node for n in (*fdef.signature.input_arg, *fdef.node_def)):
            raise InvalidModel(
                f"the SavedModel at {str(file.path)!r} can't be loaded: a custom gradient captures "
                f"{captured.name!r} of the function {captured.concrete_function!r}, which does not exist. Save the "
                "model again, or without custom gradients: "
                "tf.saved_model.SaveOptions(experimental_custom_gradients=False)."
            )


def _captured(file: ModelFile) -> Iterator[tuple[int, Any]]:
    """The tensors of function bodies that other functions capture, with their numbers among the objects."""
    for i, node in enumerate(file.meta_graph.object_graph_def.nodes):
        if node.WhichOneof("kind") == "captured_tensor":
            yield i, node.captured_tensor
