"""The command line: exit statuses, pure JSON, no tracebacks, and the text for people.

More than 500 lines: these tests share a model that is traced and saved once.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import saved_models
from processes import ROOT, run_forked
from terminals import on_terminal

import tfswap
from tfswap.errors import InvalidModel
from tfswap.frontends import cli
from tfswap.support import progress
from tfswap.support.sizes import Unit

FLAGS = ("--batch_size=1024",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("cli") / "model")
    saved_models.save("plain", path)
    return path


@pytest.fixture(autouse=True)
def plans(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most commands are for one model and one limit: these tests, in all processes of a run, plan it once."""
    monkeypatch.setenv("TFSWAP_PLAN_CACHE", str(tmp_path_factory.getbasetemp().parent / "plans of the command line"))


def tfswap_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tfswap", *arguments]
    base = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    env = {**base, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_optimize_in_a_process_of_its_own(model: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    done = tfswap_command("optimize", model, out, "--memory_limit=60%", "--function=train_step", *FLAGS, "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["output_dir"] == out
    assert content["planned_peak_bytes"] <= content["memory_limit_bytes"] < content["baseline_peak_bytes"]
    assert "Traceback" not in done.stderr
    noise = [line for line in done.stderr.splitlines() if not line.startswith("tfswap: ")]
    assert noise == []


@pytest.mark.parametrize(
    ("number", "where"),
    [
        (signal.SIGINT, "pathlib.Path.mkdir"),
        (signal.SIGTERM, "tfswap.compiler.model_file.ModelFile.write"),
    ],
)
def test_a_signal_ends_it_and_leaves_nothing(model: str, tmp_path: Path, number: int, where: str) -> None:
    """Sent right after `where` has done its work, and again while what it has made is taken away."""
    module, _, name = where.rpartition(".")

    def program():
        import os
        import pkgutil
        import shutil
        import signal
        import sys

        from tfswap.frontends import cli

        def signalling(work):
            def call(*args, **kwargs):
                result = work(*args, **kwargs)
                if any("OUT" in repr(a) for a in args):
                    print("sent", flush=True)
                    os.kill(os.getpid(), number)
                return result

            return call

        signal.signal(number, signal.default_int_handler)  # as in a shell, whatever started the tests ignores
        place = pkgutil.resolve_name(module)
        setattr(place, name, signalling(getattr(place, name)))
        shutil.rmtree = signalling(shutil.rmtree)
        sys.argv = ["tfswap", "optimize", model, str(tmp_path / "OUT"), "--memory_limit=60%", *FLAGS]
        cli.run()

    done = run_forked(
        program,
        status=-number,
    )
    assert done.stdout.split() == ["sent", "sent"]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "buffered", "redirect", "says"),
    [
        ("doctor", True, ">/dev/full", "No space left"),
        ("fit --help", False, ">/dev/full", "No space left"),  # argparse ignores errors of an unbuffered output
        ("--help", True, ">&-", "it is closed"),
    ],
)
def test_where_nothing_can_be_printed_the_error_is_reported(
    words: str, buffered: bool, redirect: str, says: str
) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"} | {"PYTHONPATH": str(ROOT)}
    env["PYTHONUNBUFFERED"] = "" if buffered else "1"
    command = f'"{sys.executable}" -m tfswap {words} {redirect}'
    done = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "tfswap: stdout can't be written: " in done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_path_that_is_no_text_is_printed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(cli, "main", lambda _: print(os.fsdecode(b"m\xffd")))
    with pytest.raises(SystemExit) as stop:
        cli.run()
    assert not stop.value.code
    assert stdout.buffer.getvalue() == b"m\\udcffd\n"  # pyright: ignore[reportAttributeAccessIssue]


def test_doctor_without_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise ImportError('no TensorFlow here')\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    done = tfswap_command("doctor", "--json", PYTHONPATH=path)
    assert done.returncode == 1
    content = json.loads(done.stdout)
    assert content["tensorflow"] is None
    assert "TensorFlow" in content["advice"][0]
    assert "Traceback" not in done.stderr
    done = tfswap_command("analyze", str(tmp_path), PYTHONPATH=path)
    assert done.returncode == 1
    assert "TensorFlow" in done.stderr
    assert "Traceback" not in done.stderr


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_analyze_says_what_the_step_takes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "analyze", model, "--memory_limit=60%", *FLAGS)
    assert status == 0
    for word in ("peak before", "peak planned", "smallest limit", "why", "in host memory for"):
        assert word in out
    status, out, _ = run(capsys, "analyze", model, "--memory_limit=60%", *FLAGS, "--json")
    assert status == 0
    assert {"baseline_peak_bytes", "floor_bytes", "rows", "notes"} <= set(json.loads(out))


def test_analyze_names_the_smallest_limit_where_the_given_one_can_t_be_met(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "analyze", model, "--memory_limit=1KiB", *FLAGS)
    assert status == 3
    assert "CAN'T BE MET" in out
    status, out, _ = run(capsys, "analyze", model, "--memory_limit=1KiB", *FLAGS, "--json")
    assert status == 3
    content = json.loads(out)
    assert content["keeps_limit"] is False
    assert content["memory_limit_bytes"] == 1024
    floor = content["floor_bytes"]
    status, out, _ = run(capsys, "optimize", model, str(tmp_path / "out"), f"--memory_limit={floor}", *FLAGS, "--json")
    assert status == 0
    assert json.loads(out)["keeps_limit"] is True


def test_a_saved_plan_is_applied_or_refused(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "optimize", model, str(tmp_path / "a"), "--memory_limit=60%", *FLAGS, "--json")
    assert status == 0
    planned = json.loads(out)["planned_peak_bytes"]
    plan = tmp_path / "a" / "tfswap_plan.json"
    status, out, _ = run(capsys, "optimize", model, str(tmp_path / "b"), f"--plan={plan}", *FLAGS, "--json")
    assert status == 0
    assert json.loads(out)["planned_peak_bytes"] == planned
    flags = (f"--plan={plan}", f"--memory_limit={planned - 1}", *FLAGS)
    status, _, err = run(capsys, "optimize", model, str(tmp_path / "c"), *flags)
    assert status == 1
    assert "the given plan peaks at" in err
    content = json.loads(plan.read_text())
    content["order"][0] = "stranger"
    plan.write_text(json.dumps(content))
    for damage in (json.dumps(content), json.dumps({**content, "evictions": None}), "{"):
        plan.write_text(damage)
        status, out, err = run(capsys, "optimize", model, str(tmp_path / "c"), f"--plan={plan}", *FLAGS, "--json")
        assert status == 1
        assert json.loads(out)["error"]["type"] == "InvalidModel"
        assert "plan" in err
    assert not (tmp_path / "c").exists()


def test_analyze_says_what_is_rounded(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--memory_limit=60%", "--precision=Relu_1=exact;Relu*=fp8", *FLAGS, "--json")
    status, out, _ = run(capsys, "analyze", model, *flags)
    assert status == 0
    rows = {row["name"]: row for row in json.loads(out)["rows"]}
    rounded = {name for name, row in rows.items() if row["precision"] == "fp8"}
    assert rounded == {"Relu:0", "Relu_2:0", "Relu_3:0", "Relu_4:0"}
    assert rows["Relu:0"]["worst_error"].startswith("within 2^-4")


def test_analyze_needs_no_limit(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "analyze", model, *FLAGS)
    assert status == 0
    assert ["memory", "limit", "none"] in [line.split() for line in out.splitlines()]
    assert out.splitlines()[1].endswith("No limit was given.")


def test_explain_gives_a_reason_for_every_tensor(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "explain", model, "--memory_limit=60%", *FLAGS, "--json")
    assert status == 0
    rows = json.loads(out)["rows"]
    assert {"keep", "swap"} < {r["tactic"] for r in rows} <= {"keep", "swap", "encode", "state"}
    assert all(r["reason"] for r in rows)
    status, out, _ = run(capsys, "explain", model, "--memory_limit=60%", *FLAGS, "--tensor=Relu_2:0")
    assert status == 0
    assert len(out.splitlines()) == 3
    status, _, err = run(capsys, "explain", model, *FLAGS, "--tensor=nowhere")
    assert status == 1
    assert "nowhere" in err


def test_explain_shows_the_first_rows_unless_all_are_requested(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "ROWS_EXPLAINED", 3)
    _, out, _ = run(capsys, "explain", model, "--memory_limit=60%", *FLAGS)
    assert ", 3 shown (--all shows all)" in out
    assert len(out.splitlines()) == 2 + 3
    _, out, _ = run(capsys, "explain", model, "--memory_limit=60%", *FLAGS, "--all")
    assert "shown" not in out
    assert len(out.splitlines()) > 2 + 3


def test_explain_says_all_about_one_tensor(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "explain", model, "Relu", "--memory_limit=60%", *FLAGS)
    assert status == 0
    for word in (
        "Relu:0\n",
        "swap: in host memory for",
        "MiB, float32[1024,256]",
        "(kernel ",
        "to swap it",
        "out and",
    ):
        assert word in out
    status, out, _ = run(capsys, "explain", model, "Relu:0", "--memory_limit=60%", *FLAGS, "--json")
    assert status == 0
    reported = json.loads(out)["explanation"]
    assert reported["tensor"] == "Relu:0"
    assert reported["nbytes"] == 1024 * 256 * 4
    assert reported["made_by"] == ["Relu", "Relu"]
    first, last = reported["wait"]
    uses = [*reported["made_at"], *(position for _, position in reported["read_by"])]
    assert {first, last} <= set(uses)
    assert not [use for use in uses if first < use < last]
    assert reported["wait_s"] > 0 < min(reported["copy_s"])
    status, _, err = run(capsys, "explain", model, "Relo", "--memory_limit=60%", *FLAGS)
    assert status == 1
    assert "no tensor 'Relo'" in err
    assert "'Relu:0'" in err
    status, out, _ = run(capsys, "explain", model, "Relu", "--memory_limit=1KiB", *FLAGS)
    assert status == 3


def test_reports_and_traces_are_written(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "report.html", tmp_path / "step.trace.json"
    status, out, _ = run(capsys, "analyze", model, "--memory_limit=60%", *FLAGS, f"--save={page}", f"--save={trace}")
    assert status == 0
    assert f"Written to {page}." in out
    assert page.read_text().startswith("<!doctype html>")
    events = json.loads(trace.read_text())["traceEvents"]
    other = tmp_path / "other.trace.json"
    status, out, _ = run(capsys, "trace", model, str(other), "--memory_limit=60%", *FLAGS, "--json")
    assert status == 0
    assert json.loads(out)["trace_file"] == str(other)
    assert json.loads(other.read_text())["traceEvents"] == events
    status, out, _ = run(capsys, "trace", model, str(other), "--memory_limit=1KiB", *FLAGS)
    assert status == 3  # and what the step does as it is


def test_verify_compares_two_models_to_the_bit(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import tensorflow as tf

    out = tmp_path / "out"
    tfswap.optimize_graph(model, out, memory_limit="60%", batch_size=1024)
    status, text, _ = run(capsys, "verify", model, str(out), *FLAGS)
    assert status == 0
    assert "3 steps of train_step: 3 results and 12 variables are the same to the bit" in text
    changed = tf.saved_model.load(model)
    changed.weights[2].assign_add(tf.fill([256, 256], 1e-3))
    tf.saved_model.save(changed, str(tmp_path / "changed"))
    status, text, _ = run(capsys, "verify", model, str(tmp_path / "changed"), *FLAGS, "--json")
    assert status == 1
    reported = json.loads(text)
    assert reported["same"] is False
    assert "result 0 of step 0" in {d["name"] for d in reported["differences"]}
    status, _, err = run(capsys, "verify", model, str(out))
    assert status == 1
    assert "leaves sizes open" in err
    status, _, err = run(capsys, "verify", model, str(out), "--function=fly", *FLAGS)
    assert status == 1
    assert "no function 'fly'" in err


def test_verify_distinguishes_a_rewritten_model_from_a_damaged_one(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorflow.core.protobuf import saved_model_pb2

    out = tmp_path / "out"
    tfswap.optimize_graph(model, out, memory_limit="60%", batch_size=1024)
    status, text, _ = run(capsys, "verify", str(out))
    assert status == 0
    assert "as planned" in text
    status, text, _ = run(capsys, "verify", model)
    assert status == 0
    assert "no function" in text
    proto = saved_model_pb2.SavedModel.FromString((out / "saved_model.pb").read_bytes())
    for function in proto.meta_graphs[0].graph_def.library.function:
        for node in function.node_def:
            if node.name == "tfswap_step":
                node.attr["config_proto"].s = b""
    (out / "saved_model.pb").write_bytes(proto.SerializeToString())
    status, _, err = run(capsys, "verify", str(out))
    assert status == 1
    assert "Grappler" in err
    shutil.rmtree(out / "variables")
    status, _, err = run(capsys, "verify", str(out))
    assert status == 1
    assert "variables" in err


def test_doctor_reports_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    for word in ("Python", "TensorFlow", "compiler", "op library", "codecs", "CPU:0", "TFSWAP_CALIBRATION is off"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ((), 2, "required"),
        (("fly",), 2, "fly"),
        (("analyze",), 2, "SAVED_MODEL_DIR"),
        (("analyze", "MODEL", "--batch_size=many"), 2, "batch_size"),
        (("analyze", "MODEL", "--input_shapes=x:1"), 2, "not a shape"),
        (("analyze", "MODEL", "--colour=red"), 2, "colour"),
        (("analyze", "nowhere", *FLAGS), 1, "does not exist"),
        (("analyze", "MODEL"), 1, "leaves sizes open"),
        (("analyze", "MODEL", "--function=fit", *FLAGS), 1, "has no function 'fit'"),
        (("analyze", "MODEL", "--function=predict", *FLAGS), 1, "'predict' has no backward pass"),
        (("simulate", "MODEL", "--function=predict", *FLAGS), 1, "'train_step'"),
        (("simulate", "MODEL", "--html=OUT/x.html", *FLAGS), 1, "OUT/x.html' can't be written: there is no folder"),
        (("simulate", "MODEL", "--png=OUT/x.html", *FLAGS), 1, "end the name with .png for a picture"),
        (("simulate", "MODEL", "--html=OUT.pdf", *FLAGS), 1, "OUT.pdf' does not say what to write"),
        (("optimize", "MODEL", "", *FLAGS, "--memory_limit=60%"), 1, "output_dir is ''"),
        (("analyze", "MODEL", "--function=looping_step", *FLAGS), 1, "loop over a dataset"),
        (("simulate", "MODEL", "--function=looping_step", *FLAGS), 1, "loop over a dataset"),
        (("fit", "MODEL", "--function=looping_step", "--memory_limit=1GiB"), 1, "loop over a dataset"),
        (("analyze", "MODEL", "--function=compiled_step", *FLAGS), 1, "XLA"),
        (("analyze", "MODEL", "--plan=nowhere", *FLAGS), 1, "no plan can be read"),
        (("analyze", "MODEL", *FLAGS, "--save=OUT.svg"), 1, "OUT.svg' does not say what to write"),
        (("trace", "MODEL", "OUT.json", *FLAGS), 1, "end the name with .trace.json for a trace"),
        (("trace", "MODEL", "OUT/x.trace.json", *FLAGS), 1, "there is no folder"),
        (("verify", "MODEL", "nowhere", *FLAGS), 1, "does not exist"),
        (("optimize", "MODEL", "OUT", *FLAGS, "--memory_limit=lots"), 2, "not a size"),
        (("optimize", "MODEL", "OUT", *FLAGS, "--memory_limit=-4"), 2, "must be positive"),
        (("optimize", "MODEL", "OUT", *FLAGS, "--memory_limit", "-4"), 2, "must be positive"),
        (("optimize", "MODEL", "OUT", *FLAGS, "--memory_limit=0"), 2, "must be positive"),
        (("optimize", "MODEL", "OUT", *FLAGS, "--memory_limit=99999999TiB"), 2, "more bytes than any device has"),
        (("optimize", "MODEL", "OUT", *FLAGS, "--memory_limit=\N{SUPERSCRIPT TWO}"), 2, "not a size"),
        (("optimize", "MODEL", "OUT", *FLAGS, "--memory_limit="), 2, "not a size"),
        (("optimize", "MODEL", "OUT", *FLAGS, "--host_memory_limit=50%"), 2, "host_memory_limit"),
        (("analyze", "MODEL", *FLAGS, "--tactics=magic"), 2, "'magic'"),
        (("analyze", "MODEL", *FLAGS, "--precision=fp7"), 2, "'fp7'"),
        (("analyze", "MODEL", *FLAGS, "--precision=Relu=fp7"), 2, "'fp7'"),
        (("analyze", "MODEL", *FLAGS, "--memory_limit=60%", "--precision=Tanh=fp8"), 1, "the pattern 'Tanh'"),
        (("analyze", "MODEL", "--batch_size=0"), 2, "'0' is not a positive whole number"),
        (("analyze", "MODEL", "--batch_size=-3"), 2, "'-3' is not a positive whole number"),
        (("analyze", "MODEL", "--input_shapes=x=-1,3"), 2, "not a shape"),
        (("analyze", "MODEL", "--input_shapes=x=4,,4"), 2, "not a shape"),
        (("analyze", "MODEL", "--input_shapes==4"), 2, "not a shape"),
        (("analyze", "MODEL", "--input_shapes=x=4;x=5"), 2, "two shapes"),
        (("optimize", "MODEL", "OUT", *FLAGS, "--memory_limit=1KiB"), 3, "needs at least"),
        (("optimize", "MODEL", "MODEL", *FLAGS, "--memory_limit=60%"), 1, "exists"),
        (("optimize", "MODEL", "OUT/deeper", *FLAGS, "--memory_limit=60%"), 1, "no folder"),
    ],
)
def test_errors_have_their_exit_status(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[str],
    status: int,
    says: str,
) -> None:
    real = [a.replace("MODEL", model).replace("OUT", str(tmp_path / "out")) for a in arguments]
    got, out, err = run(capsys, *real)
    assert got == status
    assert says.replace("OUT", str(tmp_path / "out")) in err.replace("\n", " ")
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("optimize", "MODEL", "MODEL", "--memory_limit=60%"),
        ("trace", "MODEL", "OUT/x.trace.json"),
        ("simulate", "MODEL", "--png=OUT/x.png"),
        ("analyze", "MODEL", "--save=OUT/x.html"),
    ],
)
def test_what_can_t_be_written_is_reported_before_tensorflow_is_loaded(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: Sequence[str],
) -> None:
    monkeypatch.setattr(cli, "_load_tensorflow", lambda: pytest.fail("it takes seconds"))
    status, _, err = run(capsys, *(a.replace("MODEL", model).replace("OUT", str(tmp_path / "out")) for a in arguments))
    assert status == 1
    assert "the output folder" in err or "can't be written" in err


@pytest.mark.parametrize("pipe", ["saved_model.pb", "variables/variables.index", "tfswap_request.json"])
def test_a_pipe_in_a_model_is_reported(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], pipe: str
) -> None:
    """To open it would wait for ever. Each of these commands reads a SavedModel the same way."""
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    (broken / pipe).unlink(missing_ok=True)
    os.mkfifo(broken / pipe)
    for arguments in (
        ("verify",),
        ("verify", model),
        ("analyze", "--memory_limit=60%"),
        ("simulate",),
        ("fit", "--memory_limit=1GiB"),
    ):
        status, out, err = run(capsys, arguments[0], str(broken), *arguments[1:])
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert f"{pipe}' is no regular file" in err
    with pytest.raises(InvalidModel, match="no regular file"):
        tfswap.load(broken)


@pytest.mark.parametrize("option", ["plan", "profile"])
def test_a_pipe_in_place_of_a_file_is_reported(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    status, _, err = run(capsys, "analyze", model, *FLAGS, "--memory_limit=60%", f"--{option}={tmp_path / 'pipe'}")
    assert status == 1
    assert "is no regular file" in err


def test_errors_are_json_too(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--memory_limit=1KiB", *FLAGS, "--json")
    status, out, _ = run(capsys, "optimize", model, str(tmp_path / "out"), *flags)
    assert status == 3
    error = json.loads(out)["error"]
    assert error["type"] == "InfeasibleMemoryLimit"
    assert error["floor_bytes"] > error["limit_bytes"] == 1024


def test_a_command_that_is_not_understood_is_json_too(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "analyze", model, "--json", "--colour=red")
    assert status == 2
    assert json.loads(out)["error"]["type"] == "UsageError"
    assert "--colour" in json.loads(out)["error"]["message"]
    assert "Try: tfswap analyze --help" in err or "Try: tfswap --help" in err


def test_what_is_alive_at_the_peak_is_printed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "analyze", model, "--memory_limit=60%", *FLAGS, "--json")
    name, nbytes = json.loads(out)["alive_at_peak"][0]
    _, out, _ = run(capsys, "analyze", model, "--memory_limit=60%", *FLAGS)
    shown = out.partition("alive at the peak\n")[2]
    number, unit, first = shown.splitlines()[0].split()
    assert first == name and Unit.of(nbytes).text(nbytes) == f"{number} {unit}"


def test_a_terminal_sees_progress_and_stdout_has_the_result_alone(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    with on_terminal() as screen:
        status, out, _ = run(capsys, "analyze", model, "--memory_limit=60%", *FLAGS, "--json")
    assert status == 0
    assert json.loads(out)["rows"]
    assert "tfswap analyze" in screen.text
    assert "searching the smallest limit" in screen.text
    _, _, err = run(capsys, "analyze", model, "--memory_limit=60%", *FLAGS, "--json")
    assert err == ""
