"""The flags that commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from tfswap.frontends import cli_values
from tfswap.frontends.unmodified.launch import LIVE, TRAINING_ONLY
from tfswap.ir.permits import BITS, TACTICS, VALUES
from tfswap.kernels.hardware import NAMES

ROWS_EXPLAINED = 30
"""Tensors that `tfswap explain` shows."""


def add_step_flags(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("saved_model_dir", metavar="SAVED_MODEL_DIR", help="a SavedModel's folder")
    if name == "optimize":
        parser.add_argument("output_dir", metavar="OUTPUT_DIR", help="where the rewritten model goes; must not exist")
    if name == "explain":
        parser.add_argument("node", metavar="NODE", nargs="?", help="a node, or a tensor (NODE:0): all about this one")
        parser.add_argument("--tensor", help="list only tensors with this text in their name")
        parser.add_argument("--all", action="store_true", help=f"show every tensor, not the first {ROWS_EXPLAINED}")
    if name == "trace":
        parser.add_argument("trace_file", metavar="FILE.trace.json", help="the file that is written")
    parser.set_defaults(save=[])
    if name in ("analyze", "optimize"):
        help_text = "write a report too: to FILE.html, FILE.png, FILE.json or FILE.trace.json; may be repeated"
        parser.add_argument("--save", action="append", metavar="FILE", help=help_text)
        help_text = "write the graph too, with the tactic of each tensor: to FILE.graphml or FILE.dot"
        parser.add_argument("--graph", action="append", dest="save", metavar="FILE", help=help_text)
    parser.add_argument(
        "--memory_limit",
        type=cli_values.limits,
        help='bytes, a size ("6GiB"), or a share of the unoptimised peak ("60%%"); bounds the whole peak; of a step on '
        'several GPUs that of each, or "GPU:0=6GiB,GPU:1=4GiB"',
    )
    _add_slowdown_flag(parser)
    parser.add_argument("--plan", help="a plan saved before, to apply instead of making one")
    help_text = (
        "use TensorFlow's own ops alone: loads without tfswap, for serving too; the limit is then not guaranteed"
    )
    parser.add_argument("--portable", action="store_true", help=help_text)
    add_model_flags(parser)


def add_fit_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("saved_model_dir", metavar="SAVED_MODEL_DIR", help="a SavedModel's folder")
    parser.add_argument(
        "--memory_limit", type=cli_values.size, help='bytes or a size ("6GiB"); by default the device\'s memory'
    )
    parser.add_argument(
        "--vary",
        type=cli_values.axes,
        help='the axes that are searched: "images:1,2" or "x:0;y:0"; by default the batch',
    )
    parser.add_argument("--multiple_of", type=cli_values.batch_size, default=1, help="try only multiples of this")
    parser.add_argument(
        "--device", type=cli_values.device, help=f"of {', '.join(NAMES)}; by default this kind of device"
    )
    add_model_flags(parser)


def add_size_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--function", default="train_step", help="the function that trains, or a signature")
    parser.add_argument(
        "--batch_size", type=cli_values.batch_size, help="size of the leading dimension where the model leaves it open"
    )
    parser.add_argument("--input_shapes", type=cli_values.shapes, help='full shapes by argument: "x=64,224,224,3;y=64"')


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    add_size_flags(parser)
    add_planning_flags(parser)


def add_planning_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tactics",
        type=cli_values.tactics,
        default=",".join(TACTICS),
        help='of "swap,recompute,encode,state", all by default, and "slice"; "" for order alone',
    )
    parser.add_argument(
        "--host_memory_limit", type=cli_values.host_limit, help="the most host memory for swapped tensors"
    )
    parser.add_argument(
        "--spill_dir", help="a folder on disk, where the step runs, for swapped tensors beyond host_memory_limit"
    )
    parser.add_argument(
        "--spill_limit", type=cli_values.spill_limit, help="the most bytes of swapped tensors in spill_dir"
    )
    parser.add_argument("--profile", help="times that tfswap.profile measured, to plan with")
    parser.add_argument(
        "--precision",
        type=cli_values.precision,
        help="round tensors saved for the backward pass: fp16, bf16, fp10, fp8, fp8_e4m3, fp8_e5m2, int8 or int4, for "
        'all or by pattern of the names of nodes, "head/*=exact;*=fp8"; it changes gradients',
    )
    parser.add_argument(
        "--values",
        choices=VALUES,
        default=BITS,
        help='"bits" for the values of the step as it is to the bit (the default), or "close": kernels in slices may '
        "add in another order",
    )


def _add_slowdown_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max_slowdown",
        type=cli_values.slowdown,
        help="find the lowest peak of a step whose predicted time is at most this multiple of the unoptimised one's "
        "(1.1 for 10%% more), alone or within memory_limit",
    )


def add_run_flags(commands: Any, command: Callable[..., Any], help_text: str) -> None:
    """`tfswap run`, whose output is the program's."""
    parser = _program_parser(commands, "run", command, help_text)
    parser.add_argument(
        "--memory_limit",
        type=cli_values.watched_limits,
        help='of each step: bytes, a size ("6GiB"), a share of its unoptimised peak ("60%%"), one for each GPU '
        '("GPU:0=6GiB,GPU:1=4GiB"), or "file:PATH"; by default TFSWAP_MEMORY_LIMIT; '
        "without any, a step is planned once it has run out of memory",
    )
    _add_slowdown_flag(parser)
    help_text = 'what happens where a measured peak passes the limit: "warn" (the default) or "raise"'
    parser.add_argument("--on_exceeded", choices=("warn", "raise"), help=help_text)
    help_text = "leave evaluate, predict, forward functions and loaded models as they are"
    parser.add_argument(TRAINING_ONLY, action="store_true", default=None, help=help_text)
    add_planning_flags(parser)


def add_watch_flags(commands: Any, command: Callable[..., Any], help_text: str) -> None:
    """`tfswap watch`, whose output is the program's."""
    parser = _program_parser(commands, "watch", command, help_text)
    help_text = "show it on the terminal while the program runs"
    parser.add_argument(LIVE, action="store_true", default=None, help=help_text)
    help_text = "write it to this page, while the program runs and at its end"
    parser.add_argument("--html", type=cli_values.page_path, metavar="FILE", help=help_text)


def _program_parser(commands: Any, name: str, command: Callable[..., Any], help_text: str) -> argparse.ArgumentParser:
    """The parser of a command that becomes a program."""
    usage = f"tfswap {name} [options] PROGRAM [arguments], or: tfswap {name} [options] -m MODULE [arguments]"
    description = f"{help_text[0].upper()}{help_text[1:]}."
    parser = commands.add_parser(name, help=help_text, description=description, usage=usage)
    parser.set_defaults(command=command, needs_tensorflow=False, json=False)
    return parser


def add_hook_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `tfswap hook`."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--install", action="store_true", help="write it among this Python's packages")
    which.add_argument("--remove", action="store_true", help="delete it")
