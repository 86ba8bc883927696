"""Programs that build or load tfswap's ops. This module imports neither them nor TensorFlow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def import_and_swap() -> list[Any]:
    """The number of copies out, the library's path, and whether it is loaded."""
    import tensorflow as tf

    import tfswap.ops as ops

    handle = ops.swap_out(tf.ones([10]))
    ops.release(handle)
    return [ops.stats().out_copies, str(ops.status().library), ops.status().loaded]


def swap_after_codecs() -> list[Any]:
    import tfswap.ops.codecs  # noqa: F401 which loads both libraries

    return import_and_swap()


def fail_to_import() -> None:
    """Prints the error of an import that must fail."""
    from tfswap.errors import OpLibraryError

    try:
        import tfswap.ops  # noqa: F401
    except OpLibraryError as error:
        print(error)
    else:
        raise SystemExit("it loaded")


def fail_without_tensorflow() -> None:
    sys.modules["tensorflow"] = None  # its import fails, as if it were not installed
    fail_to_import()


def with_shipped(folder: Path, program: Callable[[], Any]) -> Callable[[], Any]:
    """The program, where the installation's libraries are in `folder`."""

    def run() -> Any:
        from tfswap.native import build

        build.SHIPPED_DIR = folder
        return program()

    return run


def examine() -> list[Any]:
    from tfswap.frontends import doctor

    content, text = doctor.examine()
    return [content["ok"], content["advice"], "All found." in text]


def status_and_names() -> list[Any]:
    from tfswap.ir import custom_ops
    from tfswap.native import load

    assert "tensorflow" not in sys.modules
    status = load.status()
    return [custom_ops.SWAP_OUT, status.built, status.loaded, status.error]


def encode_and_free() -> list[Any]:
    """Whether the codecs were built before and after their import, bytes of the pool, and the libraries mapped."""
    import tensorflow as tf

    import tfswap.ops as ops
    from tfswap.native import build, load

    built = [load.status(build.CODECS).built]
    import tfswap.ops.codecs as codecs

    built.append(load.status(build.CODECS).built)
    before = ops.stats().pool_in_use_bytes
    encoded, spill = codecs.encode_sparse(tf.ones([1000]), 0)
    held = ops.stats().pool_in_use_bytes - before
    del encoded, spill
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libtfswap" in line}
    return [built, held, ops.stats().pool_in_use_bytes, sorted(mapped)]


def copies_throttle() -> list[float]:
    import tfswap.ops as ops

    now = ops.configuration()
    return [now.bandwidth_bytes_per_s, now.latency_us]
