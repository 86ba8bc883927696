"""Parses values of the command line's flags. Malformed text is a usage error."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from typing import Any

from tfswap.errors import TfswapError
from tfswap.kernels.hardware import THIS, described, described_devices
from tfswap.support.limit_file import PREFIX, watched
from tfswap.support.sizes import check_limit, check_limits, parse_limit

_SHAPE = re.compile(r"[^=]+=([0-9]{1,18}(,[0-9]{1,18})*,?)?")


def shapes(text: str) -> dict[str, tuple[int, ...]]:
    """Shapes from "x=64,224,224,3;y=64"."""
    result: dict[str, tuple[int, ...]] = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        name, _, dims = (p.strip() for p in part.partition("="))
        if not _SHAPE.fullmatch(part.replace(" ", "")):
            raise argparse.ArgumentTypeError(f"{part!r} is not a shape: write x=64,224,224,3;y=64")
        if name in result:
            raise argparse.ArgumentTypeError(f"{name!r} has two shapes: give one")
        result[name] = tuple(int(d) for d in dims.split(",") if d.strip())
    return result


def limit(text: str) -> str:
    return checked(text, lambda: check_limit(text))


def host_limit(text: str) -> str:
    return checked(text, lambda: parse_limit(text, name="host_memory_limit"))


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 2 or more")
    return int(text)


def size(text: str) -> str:
    return checked(text, lambda: parse_limit(text))


def axes(text: str) -> dict[str, tuple[int, ...]]:
    """Axes from "images:1,2;labels:0"."""
    result: dict[str, tuple[int, ...]] = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        name, _, axes = part.rpartition(":")
        if not name or not all(a.strip().isdecimal() for a in axes.split(",")):
            raise argparse.ArgumentTypeError(f"{part!r} does not say what is searched: write images:1,2;labels:0")
        result[name] = tuple(int(a) for a in axes.split(","))
    return result


def device(text: str) -> str:
    return checked(text, lambda: text.lower() == THIS or described(text))


def devices(text: str) -> str:
    return checked(text, lambda: text.lower() == THIS or described_devices(text))


def watched_limits(text: str) -> Any:
    """As `limits`, or "file:PATH", the file that a running program reads its limit from."""
    return checked(text, lambda: watched(text)) if text.startswith(PREFIX) else limits(text)


def limits(text: str) -> Any:
    """A limit, or one for each device from "GPU:0=6GiB,GPU:1=4GiB"."""
    if text.startswith(PREFIX):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a file with a limit, and a command plans for one limit: give that. tfswap.load takes a file"
        )
    if "=" not in text:
        return limit(text)
    pairs = [tuple(s.strip() for s in part.split("=", 1)) for part in text.split(",") if part.strip()]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} has no limit for each device: write GPU:0=6GiB,GPU:1=4GiB")
    if len({*(pair[0].lower() for pair in pairs)}) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} has two limits for a device: give one")
    found = {pair[0]: pair[1] for pair in pairs}
    return checked(found, lambda: check_limits(found))


def batch_size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return size


def tactics(text: str) -> tuple[str, ...]:
    from tfswap.compiler.options import Options

    tactics = tuple(filter(None, (t.strip() for t in text.split(","))))
    return checked(tactics, lambda: Options(tactics))


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def spill_limit(text: str) -> str:
    return checked(text, lambda: parse_limit(text, name="spill_limit"))


def page_path(text: str) -> str:
    """The path of a page, absolute."""
    from tfswap.report.report import HTML, require_kind

    return checked(os.path.abspath(text), lambda: require_kind(text, (HTML,)))


def slowdown(text: str) -> Any:
    from tfswap.compiler.request import as_slowdown

    try:
        number: Any = float(text)
    except ValueError:
        number = text
    return checked(number, lambda: as_slowdown(number, None))


def precision(text: str) -> Any:
    """One precision for all tensors, or pairs from "head/*=exact;*=fp8"."""
    from tfswap.compiler.options import Options
    from tfswap.compiler.request import as_rules

    rules = text
    if "=" in text:
        rules = tuple(tuple(s.strip() for s in part.split("=", 1)) for part in text.split(";") if part.strip())
    return checked(rules, lambda: Options(precision=as_rules(rules)))


def checked(value: Any, check: Callable[[], object]) -> Any:
    """`value`; a usage error where the check refuses it."""
    try:
        check()
    except TfswapError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return value
