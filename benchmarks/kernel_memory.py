"""Measure what single TensorFlow kernels ask of the allocator, and compare with tfswap's model.

    python benchmarks/kernel_memory.py [--onednn] [--only REGEX] [--wrong] [--trace]

Every case runs one op alone, on the capped BFC arena, in a `tf.function` with Grappler off. The truth is
the allocator's own log (`TF_CPP_VMODULE=bfc_allocator=3`): every request and every release, in order and
to the byte, so nothing is inferred from peaks. Forwarding is seen by giving the op one fresh input at a
time (made by a copying op, so that it has no other holder): an op that takes that buffer over requests one
output less.

Prints one row per case: the op, its inputs, measured and predicted workspace, and whether the whole
sequence of events (outputs, temporaries, releases) is as predicted.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kernel_cases.case import Case

from tfswap.ir.types import TensorType
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.kernel_memory import KernelMemory, kernel_memory

_ALLOCATE = re.compile(r"\] AllocateRaw \S+  (\d+) 0x")
_RELEASE = re.compile(r"\] DeallocateRaw \S+ (\d+)")


class Measurement(NamedTuple):
    """What one case did. Events are ("+", bytes) and ("-", bytes), requested sizes, in order, per run."""

    attrs: dict[str, object]
    values: dict[int, tuple[int, ...]]
    input_types: tuple[TensorType, ...]
    output_types: tuple[TensorType, ...]
    runs: tuple[tuple[tuple[str, int], ...], ...]
    forwarded_from: tuple[int, ...]  # inputs whose buffer was forwarded

    def predicted(self, op: str, device: DeviceModel) -> KernelMemory:
        return kernel_memory(op, self.attrs, self.input_types, self.output_types, device, self.values)


# --- the measuring process ---------------------------------------------------------------------------

_REPEATS = 3
"""Runs of each case: requests that depend on how threads meet differ between them."""


def _plain_attr(value: Any) -> object:
    """An AttrValue as plain Python: dtype names, bytes, numbers, tuples; None where it is opaque."""
    import tensorflow as tf

    kind = value.WhichOneof("value")
    if kind in ("i", "f", "b", "s"):
        return getattr(value, kind)
    if kind == "type":
        return tf.dtypes.as_dtype(value.type).name
    if kind == "shape":
        return None if value.shape.unknown_rank else tuple(d.size for d in value.shape.dim)
    if kind == "list":
        for name in ("i", "f", "b", "s"):
            if getattr(value.list, name):
                return tuple(getattr(value.list, name))
        if value.list.type:
            return tuple(tf.dtypes.as_dtype(t).name for t in value.list.type)
        return ()
    return None


def _tensor(dtype: str, shape: Sequence[int], value: int | None = None) -> Any:
    """Random, unless all of it is to be `value`. Strings are lines of a few numbers."""
    import numpy as np
    import tensorflow as tf

    if dtype == "string":
        lines = [" ".join(map(str, range(i % 5 + 1))) if i % 3 else str(i) for i in range(int(np.prod(shape)))]
        return tf.reshape(tf.constant(lines), shape)
    if value is not None:
        return tf.fill(shape, tf.constant(value, dtype))
    if dtype == "bool":
        return tf.constant(_drawn(2, *shape) > 0)
    if dtype.startswith(("int", "uint")):
        return tf.constant(_drawn(3, *shape), dtype)
    return tf.cast(tf.constant(_drawn(0, *shape) + np.float32(0.25)), dtype)


@functools.lru_cache(maxsize=64)
def _drawn(below: int, *shape: int) -> Any:
    """Whole numbers below that, or for 0 numbers from 0 to 1."""
    import numpy as np

    generator = np.random.default_rng(0)
    return generator.integers(0, below, shape) if below else generator.random(shape, np.float32)


def _flatten(inputs: Mapping[str, Any]) -> list[Any]:
    """The tensor specs of a case in argument order."""
    flat: list[Any] = []
    for spec in inputs.values():
        flat.extend(spec if _is_list(spec) else [spec])
    return flat


def _is_list(spec: Any) -> bool:
    return isinstance(spec, list) and (not spec or isinstance(spec[0], (list, dict)))


def _run_events(function: Any, arguments: Sequence[Any], log: Path) -> list[tuple[str, int]]:
    """One run's requests and releases, without what the results' own death releases."""
    start = log.stat().st_size
    outputs = function(*arguments)
    with log.open("rb") as stream:
        stream.seek(start)
        text = stream.read().decode()
    del outputs
    events = []
    for line in text.splitlines():
        if found := _ALLOCATE.search(line):
            events.append(("+", int(found[1])))
        elif found := _RELEASE.search(line):
            events.append(("-", int(found[1])))
    return events


class _Program:
    """One case as a function, optionally with one input made afresh inside, so that only the op holds it."""

    def __init__(self, case: Case, fresh: int | None):
        import tensorflow as tf

        self._case = case
        self._fresh = fresh
        self.record: dict[str, Any] = {}
        self.variables: dict[int, Any] = {}
        self.arguments = []
        for position, spec in enumerate(_flatten(case.inputs)):
            if isinstance(spec, dict) and "variable" in spec:
                self.variables[position] = tf.Variable(_tensor(*spec["variable"]))
            elif not isinstance(spec, dict):
                self.arguments.append(_tensor(*spec))
        self.function = tf.function(self._body, autograph=False)

    def _take(self, position: int, spec: Any, left: list[Any]) -> Any:
        import tensorflow as tf

        if isinstance(spec, dict):
            if "variable" in spec:
                return self.variables[position].handle
            return tf.constant(spec["const"], spec["dtype"])
        tensor = left.pop(0)
        if position != self._fresh:
            return tensor
        if tensor.dtype == tf.bool:
            return tf.logical_or(tensor, False)
        if tensor.dtype == tf.string:
            return tf.strings.join([tensor, ""])
        return tf.raw_ops.AddV2(x=tensor, y=tf.zeros([], tensor.dtype))

    def _body(self, *tensors: Any) -> Any:
        import tensorflow as tf
        from tensorflow.python.framework.op_def_library import apply_op

        left = list(tensors)
        position = 0
        keywords: dict[str, Any] = {}
        for name, spec in self._case.inputs.items():
            taken = []
            for one in spec if _is_list(spec) else [spec]:
                taken.append(self._take(position, one, left))
                position += 1
            keywords[name] = taken if _is_list(spec) else taken[0]
        attrs = {k: tf.dtypes.as_dtype(v) if k in _DTYPE_ATTRS else v for k, v in self._case.attrs.items()}
        raw = getattr(tf.raw_ops, self._case.op, None)
        if raw:
            raw(**keywords, **attrs)
        else:
            apply_op(self._case.op, name="measured", **keywords, **attrs)
        node = next(o for o in tf.compat.v1.get_default_graph().get_operations() if o.type == self._case.op)
        self.record["attrs"] = {k: _plain_attr(v) for k, v in node.node_def.attr.items()}
        self.record["inputs"] = [(t.dtype.base_dtype.name, t.shape.as_list()) for t in node.inputs]
        self.record["values"] = {i: _const_values(t) for i, t in enumerate(node.inputs) if _const_values(t)}
        return tuple(node.outputs)


def _const_values(tensor: Any) -> list[int] | None:
    import tensorflow as tf

    if tensor.op.type != "Const" or not tensor.dtype.is_integer or tensor.shape.num_elements() > 64:
        return None
    return [int(v) for v in tf.get_static_value(tensor).flatten()]


def _measure_case(case: Case, log: Path) -> dict[str, Any]:
    import tensorflow as tf

    program = _Program(case, None)
    results = program.function(*program.arguments)  # builds the kernels: constants are allocated here
    record = program.record
    outputs = [t for t in tf.nest.flatten(results) if isinstance(t, tf.Tensor)]
    record["outputs"] = [(t.dtype.name, tf.TensorShape(t.shape).as_list()) for t in outputs]
    del results
    record["runs"] = [_run_events(program.function, program.arguments, log) for _ in range(_REPEATS)]
    asked = min(sum(kind == "+" for kind, _ in run) for run in record["runs"])
    del outputs
    sizes = {size for run in record["runs"] for kind, size in run if kind == "+"}
    forwarded: list[int] = []
    for position, spec in enumerate(_flatten(case.inputs)):
        if isinstance(spec, dict) or spec[0] in _CANNOT_BE_COPIED:
            continue
        if tf.dtypes.as_dtype(spec[0]).size * _product(spec[1]) not in sizes:
            continue
        fresh = _Program(case, position)
        fresh.function(*fresh.arguments)
        seen = [_run_events(fresh.function, fresh.arguments, log) for _ in range(_REPEATS)]
        if min(sum(kind == "+" for kind, _ in run) for run in seen) == asked:
            forwarded.append(position)
    return {**record, "forwarded": forwarded}


def _worker(cases: Sequence[Case], log: Path) -> list[dict[str, Any]]:
    import tensorflow as tf

    import tfswap.ops.codecs  # noqa: F401 registers its ops

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    slab = tf.raw_ops.Empty(shape=[1 << 30], dtype=tf.float32, init=False)
    del slab  # the arena is now one free region
    results = []
    # Functions of earlier cases are cycles that hold constants: collected during a run, they would be in its log.
    gc.disable()
    gc.freeze()  # TensorFlow's own objects need not be traversed before each case
    for case in cases:
        gc.collect()
        try:
            results.append(_measure_case(case, log))
        except Exception as error:  # the row says what failed; the other cases go on
            results.append({"error": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]})
    return results


_CANNOT_BE_COPIED = frozenset({"uint64"})
_DTYPE_ATTRS = frozenset({"T", "U", "dtype", "DstT", "out_type", "element_dtype", "type"})


def _product(shape: Iterable[Any]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


# --- the comparing process ---------------------------------------------------------------------------


def measure(cases: Sequence[Case], *, onednn: bool = False) -> list[Measurement | str]:
    """Run the cases in a process of their own; a case that fails gives its error message."""
    with tempfile.TemporaryDirectory() as folder:
        log, answer = Path(folder) / "log", Path(folder) / "answer"
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "TF_ENABLE_ONEDNN_OPTS": "1" if onednn else "0",
            "TF_CPU_ALLOCATOR_USE_BFC": "1",
            "TF_CPU_BFC_MEM_LIMIT_IN_MB": "16000",
            "TF_CPP_MIN_LOG_LEVEL": "0",
            "TF_CPP_VMODULE": "bfc_allocator=3",
        }
        with log.open("wb") as stream:
            completed = subprocess.run(
                [sys.executable, __file__, "--worker", str(log), str(answer)],
                input=json.dumps([list(case) for case in cases]).encode(),
                stderr=stream,
                stdout=subprocess.PIPE,
                env=environment,
            )
        if not answer.exists():
            tail = log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the measuring process ended with {completed.returncode}:\n{tail}")
        records = json.loads(answer.read_text())
    return [_measurement(record) for record in records]


def _measurement(record: dict[str, Any]) -> Measurement | str:
    if "error" in record:
        return record["error"]
    return Measurement(
        {k: _restored(v) for k, v in record["attrs"].items()},
        {int(i): tuple(v) for i, v in record["values"].items()},
        tuple(TensorType(d, tuple(s)) for d, s in record["inputs"]),
        tuple(TensorType(d, tuple(s)) for d, s in record["outputs"]),
        tuple(tuple((kind, size) for kind, size in run) for run in record["runs"]),
        tuple(record["forwarded"]),
    )


def _restored(value: Any) -> Any:
    if isinstance(value, dict) and "bytes" in value:
        return value["bytes"].encode()
    return tuple(_restored(v) for v in value) if isinstance(value, list) else value


def expected_run(memory: KernelMemory, outputs: Sequence[TensorType]) -> tuple[tuple[str, int], ...]:
    """The predicted log of one run: the kernel's events in order, then what it still holds, released."""
    run: list[tuple[str, int]] = []
    temporaries: list[int | None] = []
    for kind, value in memory.events:
        if kind == "out":
            nbytes = outputs[value].nbytes or 0
            if nbytes:
                run.append(("+", nbytes))
        elif kind == "free":
            run.append(("-", temporaries[value] or 0))
            temporaries[value] = None
        else:
            run.append(("+", value))
            if kind == "temp":
                temporaries.append(value)
    run += [("-", size) for size in reversed(temporaries) if size is not None]
    return tuple(run)


def peak(run: Sequence[tuple[str, int]]) -> int:
    """The peak of live bytes in a run, each request rounded to the allocator's granule."""
    alive = most = 0
    for kind, size in run:
        rounded = round_up(size)
        alive += rounded if kind == "+" else -rounded
        most = max(most, alive)
    return most


def predicted_forwards(memory: KernelMemory) -> tuple[int, ...]:
    return tuple(sorted({c for _, candidates in (*memory.forward, *memory.temp_forward) for c in candidates}))


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": value.decode(errors="replace")}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    if isinstance(value, dict):
        return {k: _jsonable(v) for k, v in value.items()}
    return value


def _row(case: Case, measured: Measurement, device: DeviceModel, trace: bool) -> tuple[str, bool]:
    """A line of the table, and whether the prediction is right: to the byte, or an honest upper bound."""
    memory = measured.predicted(case.op, device)
    expected = expected_run(memory, measured.output_types)
    peaks = sorted(peak(run) for run in measured.runs)
    same = all(run == expected for run in measured.runs)
    forwards = predicted_forwards(memory)
    bound = not memory.exact and peaks[-1] <= peak(expected)
    right = (same or bound) and forwards == measured.forwarded_from
    verdict = "exact" if same else "bound" if bound else "WRONG"
    if forwards != measured.forwarded_from:
        verdict += f" FORWARDS {forwards} for {measured.forwarded_from}"
    shapes = " ".join(str(t) for t in measured.input_types)
    spread = f"{peaks[0]}" if peaks[0] == peaks[-1] else f"{peaks[0]}..{peaks[-1]}"
    line = f"{case.op:34s} {verdict:6s} {spread:>22s} {peak(expected):>12d}  {shapes}"
    if trace or not right:
        line += f"\n    predicted {expected}\n    measured  {measured.runs[0]}\n    {measured.output_types}"
    return line, right


def this_device(onednn: bool = False) -> DeviceModel:
    """The CPU that the kernels run on, as they see it."""
    import tfswap.ops

    threads = len(os.sched_getaffinity(0))
    return DeviceModel("cpu", onednn, threads, threads, tfswap.ops.l3_cache_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="cases whose op matches this regular expression")
    parser.add_argument("--onednn", action="store_true", help="with oneDNN's kernels")
    parser.add_argument("--wrong", action="store_true", help="print only what the model has wrong")
    parser.add_argument("--trace", action="store_true", help="print the events too")
    arguments = parser.parse_args()
    if arguments.worker:
        log, answer = map(Path, arguments.worker)
        cases = [Case(*case) for case in json.loads(sys.stdin.buffer.read())]
        answer.write_text(json.dumps(_jsonable(_worker(cases, log))))
        return
    from kernel_cases import CASES
    from kernel_cases.plain import PLAIN_CASES

    cases = [case for case in (*CASES, *PLAIN_CASES) if re.search(arguments.only, case.op)]
    device = this_device(arguments.onednn)
    print(f"{'op':34s} {'model':6s} {'measured peak':>22s} {'predicted':>12s}  inputs (peaks with outputs)")
    wrong = 0
    for case, measured in zip(cases, measure(cases, onednn=arguments.onednn), strict=True):
        if isinstance(measured, str):
            print(f"{case.op:34s} FAILED {measured}")
            continue
        line, right = _row(case, measured, device, arguments.trace)
        wrong += not right
        if not (arguments.wrong and right):
            print(line)
    print(f"{len(cases)} cases, {wrong} wrong")


if __name__ == "__main__":
    main()
