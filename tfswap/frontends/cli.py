"""The command line: `tfswap run | watch | analyze | optimize | explain | trace | simulate | fit | verify | doctor |
hook | opt`.

Exit status: 0 for success, 1 for an error, 2 for wrong arguments, 3 for a limit that can't be met. A command that a
signal ends dies of that signal and leaves no half-written files. With --json, stdout has one JSON value and nothing
else, also for an error. Messages and progress go to stderr. A user's error shows no traceback.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from tfswap.errors import InfeasibleMemoryLimit, TfswapError
from tfswap.frontends import cli_values
from tfswap.frontends.cli_flags import (
    ROWS_EXPLAINED,
    add_fit_flags,
    add_hook_flags,
    add_model_flags,
    add_run_flags,
    add_size_flags,
    add_step_flags,
    add_watch_flags,
)
from tfswap.frontends.cli_parser import Parser, UnwrittenHelp, UsageError
from tfswap.frontends.cli_signals import ended_by_signals
from tfswap.frontends.unmodified.launch import COMMANDS, launch, split
from tfswap.frontends.unmodified.settings import DEFAULTS, WATCH, Settings
from tfswap.kernels.hardware import NAMES, SYSTEMS
from tfswap.report.printed import HEADS, merged_rows
from tfswap.report.report import HTML, PNG, TRACE, require_kind
from tfswap.report.tables import listing, show, stacked
from tfswap.support import progress
from tfswap.support.files import require_new_folder
from tfswap.support.printable import as_lines, one_line
from tfswap.support.sizes import format_bytes, format_count

OK, FAILED, USAGE, INFEASIBLE = 0, 1, 2, 3


def run() -> None:
    """Entry point of the `tfswap` command."""
    if sys.stderr is None:  # closed
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 it stays open
    with ended_by_signals():
        status = _status()
    sys.exit(status)


def _status() -> int:
    """Runs the process's command; its exit status."""
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, "it is closed")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a path may not be encodable
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except OSError as error:  # of stdout: `main` reports those of the commands
        status = FAILED
        if not isinstance(error, BrokenPipeError):  # the reader has closed the pipe, as `head` does
            print(f"tfswap: stdout can't be written: {error.strerror}", file=sys.stderr)
        if sys.stdout is not None:  # Python's last flush must not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit status."""
    try:
        options = _parsed(arguments)
    except SystemExit as stop:  # --help
        return stop.code if isinstance(stop.code, int) else USAGE
    except UnwrittenHelp as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None
    except UsageError as error:
        # Nothing is parsed, so that --json is searched among the words.
        return _fail("--json" in arguments, error)
    try:
        _require_places(options)
        with progress.task(f"tfswap {arguments[0]}"):
            if options.needs_tensorflow:
                with progress.task("loading TensorFlow"):
                    _load_tensorflow()
            content, shown = options.command(options)
    except TfswapError as error:
        return _fail(options.json, error)
    except (OSError, MemoryError) as error:
        return _fail(options.json, TfswapError(f"{type(error).__name__}: {error}"))
    if options.json:
        print(json.dumps(content, indent=1, sort_keys=True))
    else:
        show(shown)
    return content.get("exit_status", OK)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options. Raises UsageError for wrong ones, also of absl's own flags and in files that these name."""
    own, program = list(arguments), []
    if own[:1] and own[0] in COMMANDS:
        options, program = split(own[1:])
        own = [own[0], *options]
    try:
        parsed = _parser().parse_args(own)
        parsed.program = program
        return parsed
    except (flags.Error, OSError, ValueError) as error:
        raise UsageError(str(error), "tfswap") from error


def _fail(as_json: bool, error: TfswapError) -> int:
    """Print the error; returns the exit status."""
    status = {InfeasibleMemoryLimit: INFEASIBLE, UsageError: USAGE}.get(type(error), FAILED)
    if as_json:
        content: dict[str, Any] = {"error": {"type": type(error).__name__, "message": str(error)}}
        if isinstance(error, InfeasibleMemoryLimit):
            content["error"]["floor_bytes"] = error.floor_bytes
            content["error"]["limit_bytes"] = error.limit_bytes
        print(json.dumps(content, indent=1, sort_keys=True))
    print(f"tfswap: {error}", file=sys.stderr)
    if isinstance(error, UsageError):
        print(f"Try: {error.command} --help", file=sys.stderr)
    return status


def _require_places(options: argparse.Namespace) -> None:
    """Raise TfswapError where a command's output can't be written, before any long work."""
    given = vars(options)
    for path in given.get("save", ()):
        require_kind(path)
    if "trace_file" in given:
        require_kind(options.trace_file, (TRACE,))
    for path, kind in ((given.get("png"), PNG), (given.get("html"), HTML)):
        if path is not None:
            require_kind(path, (kind,))
    if "output_dir" in given:
        require_new_folder(options.output_dir, options.saved_model_dir)


def _load_tensorflow() -> None:
    """Import TensorFlow without its messages on stderr, unless the user asked for its log.

    It writes some before it reads TF_CPP_MIN_LOG_LEVEL, so stderr itself is redirected.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    for name in ("tensorflow", "absl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            import tensorflow  # noqa: F401
        except ImportError:
            pass  # the command that needs it says so
        finally:
            os.dup2(kept, 2)
            os.close(kept)


# The commands. Each returns the JSON value of --json and the text for people.

Result = tuple[dict[str, Any], Any]
"""The second is text, or an object that rich prints."""


def _analyze(options: argparse.Namespace) -> Result:
    report = _plan(options, mode="analyze")
    return _analysis(report), stacked(_title(options.function, report), report, *_saved(report, options.save))


def _trace(options: argparse.Namespace) -> Result:
    report = _plan(options, mode="analyze")
    written = " ".join(_saved(report, [options.trace_file]))
    several = len(report.devices) > 1
    heads = [f"{options.function}{f' on {d}' if several else ''}: {r.headline()}" for d, r in report.devices.items()]
    lines = *heads, f"{written} https://ui.perfetto.dev shows it."
    return {**_analysis(report), "trace_file": options.trace_file}, as_lines(lines)


def _saved(report: Any, paths: Sequence[str]) -> list[str]:
    """Saves a report to each path; a line of text for each."""
    for path in progress.over("drawing", paths):
        report.save(path)
    return [f"Written to {path}." for path in paths]


def _analysis(report: Any) -> dict[str, Any]:
    """The JSON value of a report, with the exit status."""
    return {**json.loads(report.to_json()), "exit_status": OK if _keeps_limits(report) else INFEASIBLE}


def _optimize(options: argparse.Namespace) -> Result:
    report = _plan(options, mode="optimize", output_dir=options.output_dir)
    content = {**json.loads(report.to_json()), "output_dir": options.output_dir}
    rewritten = any(each.kernels for each in report.devices.values())
    changed = "" if rewritten else " (nothing had to be changed: the limit is above what the step takes)"
    text = f"Written to {options.output_dir}{changed}."
    if rewritten and not options.portable:
        text += (
            f" Load it with tfswap.load({options.output_dir!r}), which keeps the limit in the process that loads it."
        )
    return content, stacked(_title(options.function, report), report, text, *_saved(report, options.save))


def _explain(options: argparse.Namespace) -> Result:
    report = _plan(options, mode="analyze")
    if options.node:
        explained = report.explain(options.node)
        content = {"explanation": json.loads(explained.to_json()), "exit_status": _analysis(report)["exit_status"]}
        return content, str(explained)
    every = merged_rows(report.devices)
    rows = [(r, where) for r, where in every if not options.tensor or options.tensor in r.name]
    if options.tensor and not rows:
        raise TfswapError(
            f"no tensor that was considered has {options.tensor!r} in its name. They are, for example, "
            f"{', '.join(r.name for r, _ in every[:5]) or 'none'}."
        )
    content = _analysis(report)
    for each in (content, *content.get("devices", {}).values()):
        each["rows"] = [r for r in each["rows"] if not options.tensor or options.tensor in r["name"]]
    shown = rows if options.all else rows[:ROWS_EXPLAINED]
    several = len(report.devices) > 1
    lines = [(format_bytes(r.nbytes), r.tactic, r.name, r.reason, *([where] if several else [])) for r, where in shown]
    table = listing((*HEADS, "on") if several else HEADS, lines)
    left = f", {len(shown)} shown (--all shows all)" if shown != rows else ""
    title = f"{format_count(len(rows), 'tensor')} of {options.function}{left}, the swapped first:"
    return content, stacked(title, table)


def _simulate(options: argparse.Namespace) -> Result:
    from tfswap.frontends.simulate import simulate

    curve = simulate(
        options.saved_model_dir,
        limits=options.limits,
        device=options.device,
        **_of_the_step(options),
    )
    text = str(curve)
    for path, save in ((options.png, curve.save_png), (options.html, curve.save_html)):
        if path:
            save(path)
            text += "\n" + one_line(f"Written to {path}.")
    return {**json.loads(curve.to_json()), "exit_status": OK if curve.feasible else INFEASIBLE}, text


def _fit(options: argparse.Namespace) -> Result:
    from tfswap.frontends.max_batch import max_batch

    found = max_batch(
        options.saved_model_dir,
        memory_limit=options.memory_limit,
        vary=options.vary,
        multiple_of=options.multiple_of,
        device=options.device,
        **_of_the_step(options),
    )
    return json.loads(found.to_json()), str(found)


def _verify(options: argparse.Namespace) -> Result:
    from tfswap.frontends.verify_model import verify_model

    if options.other_dir is not None:
        return _compare(options)
    checked = verify_model(options.saved_model_dir)
    content = {"functions": [{"name": name, "swap_nodes": count} for name, count in checked]}
    if not checked:
        return content, f"{options.saved_model_dir}: no function of it was rewritten by tfswap."
    lines = [
        f"{options.saved_model_dir}: as planned",
        *(f"  {name}: {count} swap nodes" for name, count in checked),
        "tfswap.load keeps its limit in the process that loads it; tf.saved_model.load does in a free arena.",
    ]
    return content, as_lines(lines)


def _compare(options: argparse.Namespace) -> Result:
    from tfswap.frontends.compare_models import compare_models

    found = compare_models(
        options.saved_model_dir,
        options.other_dir,
        function=options.function,
        batch_size=options.batch_size,
        input_shapes=options.input_shapes,
        steps=options.steps,
    )
    return {**json.loads(found.to_json()), "exit_status": OK if found.same else FAILED}, str(found)


def _doctor(options: argparse.Namespace) -> Result:
    from tfswap.frontends.doctor import examine

    content, text = examine(calibrate=options.calibrate)
    return {**content, "exit_status": OK if content["ok"] else FAILED}, text


def _run(options: argparse.Namespace) -> Result:
    given = {name: value for name in DEFAULTS if (value := getattr(options, name)) is not None}
    Settings.of(given)
    launch("run", options.program, given)


def _watch(options: argparse.Namespace) -> Result:
    shown = {name: value for name in ("live", "html") if (value := getattr(options, name)) is not None}
    launch("watch", options.program, {WATCH: True, **shown})


def _hook(options: argparse.Namespace) -> Result:
    from tfswap.frontends.unmodified.installed_hook import install, remove

    said = install() if options.install else remove()
    return {"message": said}, said


def _opt(options: argparse.Namespace) -> Result:
    from tfswap.frontends.apply_passes import PASSES, apply_passes, bisect, target_of
    from tfswap.ir.text import format_graph
    from tfswap.plan.plan import Plan

    if not options.passes and options.graph_file is not None:
        raise TfswapError("no passes are given for FILE: give --passes, or leave out FILE to list the passes")
    if not options.passes:
        rows = [(done.name, done.requires or "-", done.ensures) for done in PASSES.values()]
        content = {"passes": [dict(zip(("name", "requires", "ensures"), row, strict=True)) for row in rows]}
        return content, listing(("pass", "requires", "ensures"), rows)
    target = target_of(options.device, onednn=options.onednn, portable=options.portable)
    plan = None if options.plan is None else Plan.load(options.plan)
    before, applied = apply_passes(options.graph_file or "-", options.passes, target, plan)
    changes = {done.name: done.changes for done in applied}
    if options.bisect is not None:
        failing = bisect(before, applied, options.bisect)
        said = "it holds after every pass" if failing is None else f"it fails after {failing.name}"
        return {"failing": None if failing is None else failing.name, "changes": changes}, said
    text = format_graph(applied[-1].graph)
    seconds = {done.name: done.seconds for done in applied}
    times = [f"# {done.name}: {done.changes} changes, {1e3 * done.seconds:.1f} ms" for done in applied]
    content = {"graph": text, "changes": changes, **({"seconds": seconds} if options.times else {})}
    return content, "\n".join([*(times if options.times else ()), text.rstrip("\n")])


def _plan(options: argparse.Namespace, mode: str, output_dir: str | None = None) -> Any:
    from tfswap.native.build import tensorflow_facts

    tensorflow_facts()  # one clear error when TensorFlow is missing
    from tfswap.frontends.saved_model import optimize_graph

    report = optimize_graph(
        options.saved_model_dir,
        output_dir,
        memory_limit=options.memory_limit,
        max_slowdown=options.max_slowdown,
        plan=options.plan,
        mode=mode,
        portable=options.portable,
        **_of_the_step(options),
    )
    report.baseline_peak_bytes  # noqa: B018 - computed here, where progress is shown
    report.floor_bytes  # noqa: B018 - as that
    return report


def _keeps_limits(report: Any) -> bool:
    """Whether the planned peak is within the limit on each device."""
    return all(each.keeps_limit for each in report.devices.values())


def _title(function: str, report: Any) -> str:
    if _keeps_limits(report):
        return function
    remedy = "Below is the step as it is; give the smallest limit, or a smaller batch."
    return f"{function}: THE LIMIT CAN'T BE MET. {remedy}"


def _of_the_step(options: argparse.Namespace) -> dict[str, Any]:
    """The values of the flags of `add_model_flags`."""
    names = ("function", "batch_size", "input_shapes", "tactics", "host_memory_limit", "spill_dir", "spill_limit")
    return {name: getattr(options, name) for name in (*names, "profile", "precision", "values")}


# The flags.


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tfswap", description="Train TensorFlow models that do not fit in device memory.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    help_text = "run a Python program that does not import tfswap, with its training steps under a limit"
    add_run_flags(commands, _run, help_text)
    help_text = "run a Python program as it is, and say which tensors hold the device's memory at its peak"
    add_watch_flags(commands, _watch, help_text)
    for name, command, help_text in (
        ("analyze", _analyze, "report the memory and time of a saved training step, unoptimised and under a limit"),
        ("optimize", _optimize, "rewrite a saved training step so that it keeps a limit"),
        (
            "explain",
            _explain,
            "list the tensors of a step, or one of them, with the reason why each is kept or swapped",
        ),
        ("trace", _trace, "write the simulated run of a step under a limit, for a trace viewer"),
    ):
        add_step_flags(_command(commands, name, command, help_text), name)
    help_text = "show the memory of a saved training step against its time, under limits from the smallest up"
    simulate = _command(commands, "simulate", _simulate, help_text)
    simulate.add_argument("saved_model_dir", metavar="SAVED_MODEL_DIR", help="a SavedModel's folder")
    simulate.add_argument("--limits", type=cli_values.count, default=20, help="the number of limits (20)")
    simulate.add_argument(
        "--device",
        type=cli_values.devices,
        help=f"of {', '.join(NAMES)}; a list of these, for a step on several GPUs; or a machine with several, of "
        f"{', '.join(SYSTEMS)}; by default this kind of device",
    )
    simulate.add_argument("--png", help="draw the curve to this file (needs matplotlib)")
    simulate.add_argument("--html", help="write a page that shows the curve to this file")
    add_model_flags(simulate)
    help_text = "find the largest batch, image or sequence that keeps a limit"
    add_fit_flags(_command(commands, "fit", _fit, help_text))
    help_text = "check a SavedModel that tfswap has rewritten, or whether two SavedModels train alike, to the bit"
    verify = _command(commands, "verify", _verify, help_text)
    verify.add_argument("saved_model_dir", metavar="SAVED_MODEL_DIR")
    verify.add_argument(
        "other_dir", metavar="OTHER_DIR", nargs="?", help="another, to run the same steps of and compare"
    )
    add_size_flags(verify)
    verify.add_argument("--steps", type=cli_values.batch_size, default=3, help="the number of steps of both (3)")
    opt = _command(commands, "opt", _opt, "apply passes to a graph in text form; without --passes, list them")
    opt.add_argument("graph_file", metavar="FILE", nargs="?", help='a graph in text form; "-", or none, is stdin')
    opt.add_argument("--passes", type=cli_values.names, default=[], help="names of passes, separated by commas")
    opt.add_argument("--plan", metavar="FILE", help="a saved plan, for passes that carry out its choices")
    opt.add_argument("--times", action="store_true", help="print the time of each pass")
    help_text = "print the first pass after which COMMAND, which gets the graph on standard input, fails"
    opt.add_argument("--bisect", metavar="COMMAND", help=help_text)
    opt.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="the device of the step (cpu)")
    opt.add_argument("--onednn", action="store_true", help="oneDNN's graph pass rewrites the step")
    opt.add_argument("--portable", action="store_true", help="with TensorFlow's own ops alone")
    help_text = "list which parts of this machine tfswap can use, and what is missing"
    doctor = _command(commands, "doctor", _doctor, help_text)
    doctor.add_argument("--calibrate", action="store_true", help="measure the speed of this machine's CPU again")
    help_text = "install, or remove, what makes TFSWAP_MEMORY_LIMIT=6GiB python train.py keep that limit"
    add_hook_flags(_command(commands, "hook", _hook, help_text, needs_tensorflow=False))
    return parser


def _command(
    commands: Any, name: str, command: Callable[..., Result], help_text: str, *, needs_tensorflow: bool = True
) -> argparse.ArgumentParser:
    made = commands.add_parser(name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
    made.add_argument("--json", action="store_true", help="print one JSON value on stdout")
    made.set_defaults(command=command, needs_tensorflow=needs_tensorflow)
    return made
