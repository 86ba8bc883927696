"""SavedModels whose step is on several GPUs: a plan for each, which holds where the model is loaded.

Each program has a process of its own, as a model that is saved in one and loaded in another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import saved_on_gpus
from slow import slow

import tfswap
from tfswap.errors import InfeasibleMemoryLimit, TfswapError, UnsupportedGraph

pytestmark = pytest.mark.emulated_gpu(count=2)


def trained(on_gpus: Any, path: str, by: str, **options: Any) -> dict[str, Any]:
    return on_gpus(lambda: saved_on_gpus.train(path, by, **options))


def test_a_loaded_model_takes_another_limit_for_each_device(on_gpus: Any, tmp_path: Path):
    made = on_gpus(lambda: saved_on_gpus.save("pipeline", str(tmp_path)))
    smaller = str(tmp_path / "smaller")
    limits = {device: int(1.1 * limit) for device, limit in made["limits"].items()} | {"GPU:1": "70%"}
    found = trained(on_gpus, smaller, "tfswap", memory_limit=limits)
    assert found["planned"] == found["peaks"]
    assert found["limits"]["GPU:0"] == limits["GPU:0"] and found["limits"]["GPU:1"] < made["limits"]["GPU:1"]
    assert all(found["peaks"][device] <= limit for device, limit in found["limits"].items())
    for wrong in ({"GPU:0": "1MiB", "GPU:3": "1MiB"}, {"GPU:0": "1MiB"}, {}):
        with pytest.raises(AssertionError, match="memory_limit"):  # of the process
            trained(on_gpus, smaller, "tfswap", memory_limit=wrong)


@pytest.mark.parametrize("kind", ["pipeline", "replicas", *slow("without_devices")])
def test_a_rewritten_model_keeps_the_limit_of_each_device_where_it_is_loaded(on_gpus: Any, tmp_path: Path, kind: str):
    made = on_gpus(lambda: saved_on_gpus.save(kind, str(tmp_path)))
    assert all(made["moves"].values())
    smaller = str(tmp_path / "smaller")
    unnamed = kind == "without_devices"
    expected = trained(on_gpus, str(tmp_path / "model"), "tensorflow")
    found = {by: trained(on_gpus, smaller, by) for by in ("tensorflow", "tfswap")}
    for each in found.values():
        assert each["bits"] == expected["bits"]
        assert each["devices"] == ["GPU:0", "GPU:1"] and (expected["devices"] == ["GPU:0"]) == unnamed
        for device, limit in made["limits"].items():
            assert each["peaks"][device] <= limit
    assert found["tfswap"]["planned"] == found["tfswap"]["peaks"]
    moved = on_gpus(lambda: saved_on_gpus.load_without_devices(smaller))
    assert "on GPU:1, and it is on /job:localhost" in moved["said"] and "LoadOptions" in moved["said"], moved
    assert moved["same"]
    with pytest.raises(UnsupportedGraph, match=r"is planned for GPU:0, GPU:1, and this process has no GPU:0"):
        tfswap.load(smaller)
    for device, name in (("GPU:0", "tfswap_plan.json"), ("GPU:1", "tfswap_plan.GPU_1.json")):
        plan = tfswap.Plan.load(tmp_path / "smaller" / name)
        assert found["tfswap"]["orders"][device] == list(plan.order)  # the file's own plans
        assert plan.limit_bytes == made["limits"][device]


@pytest.mark.emulated_gpu(count=1)
def test_a_part_on_the_cpu_runs_there_and_the_models_train_alike(on_gpus: Any, tmp_path: Path):
    made = on_gpus(lambda: saved_on_gpus.save("with_the_host", str(tmp_path)))
    assert made["moves"] == {"GPU:0": True}
    model, smaller = str(tmp_path / "model"), str(tmp_path / "smaller")
    expected = trained(on_gpus, model, "tensorflow", tokens=True)
    found = {by: trained(on_gpus, smaller, by, tokens=True) for by in ("tensorflow", "tfswap")}
    for each in found.values():
        assert each["bits"] == expected["bits"] and each["devices"] == ["CPU:0", "GPU:0"]
        assert each["peaks"]["GPU:0"] <= made["limits"]["GPU:0"]
    assert found["tfswap"]["planned"] == found["tfswap"]["peaks"]
    moved = on_gpus(lambda: saved_on_gpus.load_without_devices(smaller, tokens=True))
    assert "on CPU:0, and it is on /job:localhost" in moved["said"] and moved["same"], moved

    def verified() -> list[int]:
        from tfswap.frontends import cli

        return [
            cli.main(["verify", smaller]),
            cli.main(["verify", model, smaller, f"--batch_size={saved_on_gpus.ROWS}"]),
        ]

    assert on_gpus(lambda: {"status": verified()})["status"] == [0, 0]


def test_limits_and_devices_that_can_not_be_planned_are_refused(on_gpus: Any, tmp_path: Path):
    def program() -> dict[str, Any]:
        made = saved_on_gpus.save("pipeline", str(tmp_path), {"GPU:0": "75%", "GPU:1": "80%"})
        refused = {}
        for name, options in {
            "missing": {"memory_limit": {"GPU:0": "1GiB"}},
            "unknown": {"memory_limit": {"GPU:0": "1GiB", "GPU:1": "1GiB", "GPU:7": "1GiB"}},
            "host": {"memory_limit": {"GPU:0": "1GiB", "GPU:1": "1GiB", "CPU:0": "1GiB"}},
            "small": {"memory_limit": {"GPU:0": "1GiB", "GPU:1": "4KiB"}},
            "portable": {"memory_limit": "75%", "portable": True},
        }.items():
            with pytest.raises(TfswapError) as error:
                tfswap.optimize_graph(tmp_path / "model", tmp_path / name, batch_size=saved_on_gpus.ROWS, **options)
            refused[name] = [type(error.value).__name__, str(error.value), (tmp_path / name).exists()]
        return {**made, "refused": refused}

    found = on_gpus(program)
    missing, unknown, host, small, portable = found["refused"].values()
    assert missing[1].startswith("memory_limit has GPU:0, and the step also runs on GPU:1")
    assert unknown[1].startswith("memory_limit has GPU:7, and this process has no such device")
    assert host[1].startswith("memory_limit has CPU:0, and a file's step is planned for its GPUs alone")
    assert small[0] == InfeasibleMemoryLimit.__name__ and small[1].startswith("on GPU:1: memory_limit is 4096 bytes")
    assert portable[0] == UnsupportedGraph.__name__ and "GPU:0, GPU:1, and portable=True is for" in portable[1]
    assert not any(written for *_, written in found["refused"].values())


@pytest.mark.slow
def test_the_command_line_shows_each_device(on_gpus: Any, tmp_path: Path):
    smaller, trace = str(tmp_path / "again"), str(tmp_path / "step.trace.json")

    def program() -> dict[str, Any]:
        import contextlib
        import io

        from tfswap.frontends import cli

        saved_on_gpus.save("pipeline", str(tmp_path))
        flags = ("--batch_size=1024", "--memory_limit=GPU:0=75%,gpu:1=80%")
        found = {}
        for name, *words in (
            ("json", "analyze", "--json"),
            ("text", "analyze", f"--save={tmp_path}/page.html"),
            ("explain", "explain", "--tensor=Sin"),
            ("trace", "trace", trace),
            ("optimize", "optimize", smaller),
            ("refused", "analyze", "--memory_limit=GPU:0=75%,GPU:1=1KiB"),
            ("host", "analyze", "--memory_limit=GPU:0=75%,GPU:1=75%,CPU:0=1MiB"),
        ):
            command, *rest = words
            out, complaint = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(complaint):
                status = cli.main([command, str(tmp_path / "model"), *flags, *rest])
            found[name] = [status, out.getvalue() or complaint.getvalue()]
        return found

    found = on_gpus(program)
    assert [status for status, _ in found.values()] == [0, 0, 0, 0, 0, 3, 1]
    figures = json.loads(found["json"][1])["devices"]
    assert list(figures) == ["GPU:0", "GPU:1"]
    assert all(each["planned_peak_bytes"] <= each["memory_limit_bytes"] for each in figures.values())
    rows = [line.split()[0] for line in found["text"][1].splitlines()[1:4]]
    assert rows == ["device", "GPU:0", "GPU:1"]
    assert (tmp_path / "page.html").read_text().count("<details class=device") == 2
    assert found["explain"][1].splitlines()[1].split() == ["bytes", "tactic", "tensor", "why", "on"]
    assert "train_step on GPU:1: peak" in found["trace"][1]
    events = json.loads(Path(trace).read_text())["traceEvents"]
    assert "<lambda> on GPU:1, planned" in [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert "THE LIMIT CAN'T BE MET" in found["refused"][1]
    assert "memory_limit has CPU:0, and a file's step is planned for its GPUs alone" in found["host"][1]
    assert Path(smaller, "tfswap_plan.GPU_1.json").exists()
