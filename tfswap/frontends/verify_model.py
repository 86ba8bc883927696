"""Checks a rewritten SavedModel: its steps can run as planned, and are called with Grappler off and not inlined."""

from __future__ import annotations

import os
from typing import Any

from tfswap.compiler.model_file import ModelFile
from tfswap.compiler.origin import REQUEST_NAME, Origin
from tfswap.frontends.saved_model import SUFFIX
from tfswap.importers.library_function import file_shape, import_library_function
from tfswap.importers.references import called_functions
from tfswap.importers.validate import validate_functions
from tfswap.ir.custom_ops import NAMESPACE
from tfswap.ir.op_traits import control_flow
from tfswap.native.load import load_for
from tfswap.passes.verify import VerificationError, verify
from tfswap.support import progress


def verify_model(path: str | os.PathLike[str]) -> list[tuple[str, int]]:
    """Every rewritten function of the SavedModel at `path`, with the number of its swap nodes.

    Raises:
        InvalidModel: there is no SavedModel at `path`, or it, its variables or the files that `tfswap.load` plans from
            are damaged or missing.
        VerificationError: a rewritten function would not run as planned.
    """
    file = ModelFile.load(path)
    file.check_variables()
    file.check_assets()
    with file.named():
        if (file.path / REQUEST_NAME).is_file() or any(name.endswith(SUFFIX) for name in file.library):
            for origin in Origin.read(file.path):
                origin.require(file)
        return _verified(file)


def _verified(file: ModelFile) -> list[tuple[str, int]]:
    nodes = [node for function in file.library.values() for node in function.node_def]
    bodies = {name for node in nodes if control_flow(node.op) for name in called_functions(node)}
    load_for(nodes)
    # Bodies are a part of the steps that run them.
    rewritten = [
        name
        for name, function in file.library.items()
        if name not in bodies
        and (name.endswith(SUFFIX) or any(node.op.startswith(NAMESPACE) for node in function.node_def))
    ]
    checked = []
    validate_functions(file.title, file.library, file.library)
    for name in progress.over("verifying", sorted(rewritten)):
        fdef = file.library[name]
        shapes = {a.name: file_shape(fdef, a.name) for a in fdef.signature.input_arg}
        count = verify(import_library_function(file.library, name, shapes))
        if not fdef.attr["_noinline"].b:
            raise VerificationError(f"{name!r} may be inlined, and TensorFlow's optimizers would change it")
        callers = [d for f in file.library.values() for d in f.node_def if name in called_functions(d)]
        for node in callers:
            if not _keeps_grappler_off(node):
                raise VerificationError(f"{node.name!r} calls {name!r} with Grappler on, which would change it")
        if not callers:
            raise VerificationError(f"nothing calls {name!r}")
        checked.append((name, count))
    return checked


def _keeps_grappler_off(node: Any) -> bool:
    from tensorflow.core.protobuf import config_pb2

    config = config_pb2.ConfigProto.FromString(node.attr["config_proto"].s)
    return config.graph_options.rewrite_options.disable_meta_optimizer
