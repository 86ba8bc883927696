"""Reads JSON from files into frozen dataclasses, and checks each field: people can edit these files.

Supported types: int, float, bool, str, "or None", tuples of one type, and dataclasses and named tuples of these. Named
tuples are lists in JSON. The caller checks that the values are consistent.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from tfswap.errors import InvalidModel

T = TypeVar("T")
WANTED = {int: "a whole number of 64 bits", float: "a finite number", bool: "true or false", str: "a text"}


def parse_json(text: str | bytes) -> object:
    """The content of JSON text. Raises InvalidModel where it is no JSON, or nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise InvalidModel("its JSON is nested too deeply") from error
    except (ValueError, TypeError) as error:
        raise InvalidModel(f"it is no JSON: {error}") from error


def decode_saved(
    kind: type[T], text: str | bytes, what: str, version: int, check: Callable[[T], None], *, remedy: str
) -> T:
    """The object of type `kind` that was saved as `text`, with a format number.

    Args:
        what: its name in messages.
        version: the supported format.
        check: raises InvalidModel where the values are inconsistent.
        remedy: the remedy for messages.

    Raises:
        InvalidModel: the text is another one. The message names the field.
    """
    try:
        content = parse_json(text)
    except InvalidModel as error:
        raise InvalidModel(f"this is not a {what} that tfswap saved: {error}") from error
    if not isinstance(content, dict) or "format" not in content:
        raise InvalidModel(f"this is not a {what} that tfswap saved: it names no format")
    fields = cast("dict[str, object]", content)
    found = fields.pop("format")
    if found != version:
        raise InvalidModel(f"this {what} has format {found!r}, and this tfswap reads {version}: {remedy}")
    try:
        made = decode(kind, fields, what)
        check(made)
    except InvalidModel as error:
        raise InvalidModel(f"this {what} is damaged: {error}. {remedy[0].upper()}{remedy[1:]}.") from error
    return made


def decode(kind: type[T], value: object, where: str) -> T:
    """`value` as a `kind`.

    Args:
        where: the value's name in messages.

    Raises:
        InvalidModel: naming the first field that is missing, unknown, or of another type.
    """
    return cast(T, _decode(kind, value, where))


def _decode(kind: Any, value: object, where: str) -> object:
    if dataclasses.is_dataclass(kind):
        return _record(cast("type[Any]", kind), value, where)
    if get_origin(kind) is types.UnionType:
        if value is None:
            return None
        (kind,) = (k for k in get_args(kind) if k is not types.NoneType)
        return _decode(kind, value, where)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise InvalidModel(f"{where} is {reprlib.repr(value)}, and must be a list")
        entries = cast("list[object]", value)
        return tuple(_decode(get_args(kind)[0], entry, f"{where}[{i}]") for i, entry in enumerate(entries))
    if isinstance(kind, type) and issubclass(kind, tuple):
        return _named_tuple(cast("type[Any]", kind), value, where)
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    unbounded = (isinstance(value, float) and not math.isfinite(value)) or (type(value) is int and abs(value) >= 2**63)
    if type(value) is not kind or unbounded:
        raise InvalidModel(f"{where} is {reprlib.repr(value)}, and must be {WANTED[kind]}")
    return value


def _named_tuple(kind: type[Any], value: object, where: str) -> object:
    names: tuple[str, ...] = kind._fields
    entries = cast("list[object]", value)
    least = len(names) - len(kind._field_defaults)  # as of a record, what has a default may be left out
    if not isinstance(value, list) or not least <= len(entries) <= len(names):
        raise InvalidModel(f"{where} is {reprlib.repr(value)}, and must be a list of {', '.join(names)}")
    types_ = get_type_hints(kind)
    pairs = zip(names, entries, strict=False)
    return kind(*(_decode(types_[name], entry, f"{where}.{name}") for name, entry in pairs))


def _record(kind: type[Any], value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise InvalidModel(f"{where} is {reprlib.repr(value)}, and must be an object with fields")
    given = cast("dict[str, object]", value)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise InvalidModel(f"{where} has the field {unknown[0]!r}, which is none of {', '.join(fields)}")
    types_ = get_type_hints(kind)
    made: dict[str, object] = {}
    for name, field in fields.items():
        if name in given:
            made[name] = _decode(types_[name], given[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InvalidModel(f"{where} has no field {name!r}")
    return kind(**made)
