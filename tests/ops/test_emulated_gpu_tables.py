"""The tables of the emulated GPUs, which are those of the GPU wheels, and the errors where there are none."""

from __future__ import annotations

import gzip

import emulated_gpu
import pytest
from emulated_gpu import EmulatedGpuError, Gpus, Link, tables
from processes import last_json, run_forked

from tfswap.ir.types import TensorType
from tfswap.kernels import device_inputs, host_memory
from tfswap.kernels.device import DeviceModel

tf = pytest.importorskip("tensorflow")


def test_tables_are_there_for_each_supported_release_and_are_read_as_written():
    assert tables.versions() == ["2.18", "2.19", "2.20", "2.21"]
    from tensorflow.core.framework import kernel_def_pb2

    path = tables.table(tf.version.VERSION)
    kernels = kernel_def_pb2.KernelList.FromString(emulated_gpu._kernels(path))
    assert sorted(tables.lines_of(kernels)) == gzip.decompress(path.read_bytes()).decode().splitlines()
    assert sum(each.op == "MatMul" for each in kernels.kernel) >= 4


def test_results_in_host_memory_are_those_of_the_gpu_wheel():
    """Those of int32, and no others; some indices of sparse tensors are there too, and counted as the device's. Ops of
    XLA and NCCL are left out, which have kernels of any type.
    """
    from tensorflow.python.framework import op_def_registry

    device, wrong, compared = DeviceModel("gpu"), [], 0
    for line in gzip.decompress(tables.table(tf.version.VERSION).read_bytes()).decode().splitlines():
        name, _, _, constraints, hosted = line.split("\t")
        op = op_def_registry.get(name)
        if op is None or "Xla" in name or "Nccl" in name or name.startswith("_Scoped"):
            continue
        allowed = dict(each.split("=") for each in constraints.split(";") if each)

        def types(argument, allowed=allowed):
            fixed = [tf.as_dtype(argument.type).name] if argument.type else []
            return fixed or allowed.get(argument.type_attr, "").split(",")

        first = TensorType(types(op.input_arg[0])[0], ()) if op.input_arg else None
        for output in op.output_arg:
            for kind in types(output):
                if kind not in ("float32", "int32", "int64", "bool", "variant", "string") or output.is_ref:
                    continue
                compared += 1
                found = host_memory.on_host(name, first, TensorType(kind, ()), device)
                # Kernels of lists have the lists in host memory without saying so (list_kernels.cc).
                registered = output.name in hosted.split(",") or kind == "variant"
                if found != registered and (found or kind == "int32"):
                    wrong.append((name, output.name, kind, found))
    assert compared > 500
    assert not wrong, sorted(set(wrong))


def _inputs(*, lists=False):
    """Op, position, types and whether it is on the host, of each input of each GPU kernel; with `lists`, of ops whose
    inputs are lists. References, and what is XLA's, NCCL's or a pipeline's are left out.
    """
    from tensorflow.python.framework import op_def_registry

    left_out = ("Xla", "Nccl", "Collective", "Dataset", "Iterator", "_Scoped", "MultiDevice")
    for line in gzip.decompress(tables.table(tf.version.VERSION).read_bytes()).decode().splitlines():
        name, _, _, constraints, hosted = line.split("\t")
        op = op_def_registry.get(name)
        if op is None or any(word in name for word in left_out):
            continue
        if any(each.type_list_attr or each.is_ref for each in op.input_arg):
            continue
        if lists != any(each.number_attr for each in op.input_arg):
            continue
        allowed = dict(each.split("=") for each in constraints.split(";") if each)
        declared = {each.name: {tf.as_dtype(t).name for t in each.allowed_values.list.type} for each in op.attr}
        for place, argument in enumerate(op.input_arg):
            of_op = {tf.as_dtype(argument.type).name} if argument.type else declared[argument.type_attr]
            of_kernel = set(allowed.get(argument.type_attr, "").split(",")) - {""}
            types = of_op & of_kernel if of_op and of_kernel else of_op or of_kernel or {"int32", "float32"}
            yield name, place, types, argument.name in hosted.split(",")


def test_integers_that_kernels_read_on_the_device_are_those_of_the_gpu_wheel():
    found = {}
    for name, place, types, hosted in _inputs():
        found.setdefault(name, set()).update({place} if "int32" in types and not hosted else ())
    wrong = {op: places for op, places in found.items() if places != set(device_inputs.READ_ON_DEVICE.get(op, ()))}
    assert len(found) > 500
    assert not wrong


def test_lists_of_integers_that_kernels_read_on_the_device_are_those_of_the_gpu_wheel():
    from tensorflow.python.framework import op_def_registry

    found = {}
    for name, place, types, hosted in _inputs(lists=True):
        if "int32" in types and not hosted:
            found.setdefault(name, set()).add(place)
    assert found == {op: {there} for op, (there, _) in device_inputs.LISTS_ON_DEVICE.items()}
    for op, (_, count) in device_inputs.LISTS_ON_DEVICE.items():
        lists = op_def_registry.get(op).input_arg
        assert len(lists) == count and len({each.number_attr for each in lists} - {""}) == 1


def test_kernels_of_integers_that_read_their_indices_on_the_host_are_those_of_the_gpu_wheel():
    found = set()
    for line in gzip.decompress(tables.table(tf.version.VERSION).read_bytes()).decode().splitlines():
        name, _, _, constraints, hosted = line.split("\t")
        if "T=int32" in constraints.split(";") and "indices" in hosted.split(","):
            found.add(name)
    assert found & device_inputs.READ_ON_DEVICE.keys() == device_inputs.HOST_SCATTERS


def test_inputs_that_kernels_read_on_the_host_are_those_of_the_gpu_wheel():
    """Inputs that all kernels of an op read there, but for those of int32. Kernels that are not the GPU's alone have no
    line: of these the table may have more.
    """
    on_host, on_device = {}, {}
    for name, place, types, hosted in _inputs():
        if types - {"int32", "string", "variant", "resource"}:
            (on_host if hosted else on_device).setdefault(name, set()).add(place)
    found = {op: places - on_device.get(op, set()) for op, places in on_host.items()}
    found = {op: places for op, places in found.items() if places}
    wrong = {op: places for op, places in found.items() if places != set(device_inputs.READ_ON_HOST.get(op, ()))}
    assert len(found) > 100
    assert not wrong
    assert all(not on_device.get(op, set()) & set(places) for op, places in device_inputs.READ_ON_HOST.items())


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"memory": 1000}, "An emulated GPU with 1000 bytes: TensorFlow's own needs are 1048576, so give it more."),
        ({"count": 0}, "0 emulated GPUs: there can be 1 to 64."),
        ({"kernel_us": float("nan")}, "times and rates are numbers from 0 on"),
        ({"to_host": Link(-1.0)}, "times and rates are numbers from 0 on"),
        ({"early_events": ("nowhere",)}, "No stream has the role 'nowhere': roles are compute, in, out, between."),
    ],
)
def test_devices_that_cannot_be_are_refused_in_one_line(wrong, reported):
    with pytest.raises(EmulatedGpuError) as raised:
        Gpus(**wrong).environment()
    assert reported in str(raised.value) and "\n" not in str(raised.value)


def test_a_release_without_a_table_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(tables, "FOLDER", tables.FOLDER / "elsewhere")
    emulated_gpu.library.cache_clear()
    with pytest.raises(EmulatedGpuError) as raised:
        emulated_gpu.library()
    assert f"No table of GPU kernels is for TensorFlow {tf.version.VERSION}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_process_that_has_gpus_is_given_no_others(on_gpus):
    def program():
        emulated_gpu.attach.cache_clear()
        try:
            emulated_gpu.attach()
        except emulated_gpu.EmulatedGpuError as error:
            return str(error)

    reported = on_gpus(program)
    assert reported.startswith("This process has GPUs already") and "\n" not in reported


@pytest.mark.skipif(bool(emulated_gpu.why_not()), reason=emulated_gpu.why_not() or "-")
def test_a_process_whose_tensorflow_has_its_devices_is_given_no_others():
    def program():
        tf.ones([1])
        try:
            emulated_gpu.attach()
        except emulated_gpu.EmulatedGpuError as error:
            return str(error)

    reported = last_json(run_forked(program, **Gpus().environment()))
    assert reported.startswith("TensorFlow has made its devices") and "\n" not in reported


def test_without_a_compiler_tests_say_why_they_skip(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in emulated_gpu.why_not() and "\n" not in emulated_gpu.why_not()
