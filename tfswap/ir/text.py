"""A text form of Graph that people can read and that parses back to the same graph: for tests, bug reports.

One node a line, in insertion order. An input may name a node that comes later:

    %sum = AddV2(%a, %b:1) {T=float32} ^before @"/device:CPU:0" -> float32[8,?]
    %axis = Const() {dtype=int32, value=tensor<0803>} -> int32[2] = (0, 1)
    feeds %a, %b
    fetches %sum
    targets %before
    library GraphDef<0a02>
    body %loop
      %i = Placeholder() -> int32[]
      feeds %i
      fetches %i

After `measured` stand the fields of `Node.measured` that are known (`measured {temporary_bytes=4096}`), after `tape`
stands `Node.tape` (`tape b'pyfunc_0'`), and after the last `=` stand the values of a small constant. The bodies of
loops and conditionals follow their graph, one `body` after the other, indented by two blanks. Empty parts are left out.
Blank lines and lines that start with `#` are ignored. Attributes are written as

    float32  a Dtype          [2,?]  a Dims          b'SAME'       bytes
    true     a bool           [*]    None            (1, 2)        a tuple
    1        an int           1.0    a float         tensor<0803>  an Opaque, its data in hexadecimal

Invariant: `parse_graph(format_graph(g))` equals `g`, with the types of attributes, and `format_graph` of it gives the
same text. Serialised tensors are written whole: a graph with large constants has a long text.

Not handled: attributes of other types than those above (TypeError), the payloads of NaNs, and the fields of Graph that
have no line here (permits, calls, a body's order).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from tfswap.errors import InvalidModel
from tfswap.ir.graph import NOT_MEASURED, Dims, Dtype, Graph, Measured, Node, Opaque, Output
from tfswap.ir.types import TensorType

T = TypeVar("T")

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_./>\\-]+")
_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_DTYPES = frozenset(("false", "inf", "nan", "true"))
_INDENT = "  "

# --- printing -------------------------------------------------------------------------------------------


def format_graph(graph: Graph) -> str:
    """`graph` as text, one line per node and one per list of its feeds, fetches, targets, and its library."""
    lines = [_format_node(node, graph.small_constants.get(node)) for node in graph]
    for label, names in (
        ("feeds", [_name(node) for node in graph.feeds]),
        ("fetches", [_tensor(tensor) for tensor in graph.fetches]),
        ("targets", [_name(node) for node in graph.targets]),
    ):
        if names:
            lines.append(f"{label} {', '.join(names)}")
    if graph.library is not None:
        lines.append(f"library {_value(graph.library)}")
    for node, bodies in graph.bodies.items():
        for body in bodies:
            lines.append(f"body {_name(node)}")
            lines += [_INDENT + line for line in format_graph(body).splitlines()]
    return "".join(line + "\n" for line in lines)


def _format_node(node: Node, constant: tuple[int, ...] | None) -> str:
    parts = [f"{_name(node)} = {node.op}({', '.join(map(_tensor, node.inputs))})"]
    if node.attrs:
        pairs = (f"{_quoted(key, _PLAIN_WORD)}={_value(value)}" for key, value in sorted(node.attrs.items()))
        parts.append(f"{{{', '.join(pairs)}}}")
    parts += [f"^{_quoted(control.name, _PLAIN_NAME)}" for control in node.controls]
    if node.device:
        parts.append(f"@{json.dumps(node.device)}")
    if node.outputs:
        parts.append(f"-> {', '.join(map(str, node.outputs))}")
    if node.measured != NOT_MEASURED:
        known = (f"{key}={_value(value)}" for key, value in node.measured._asdict().items() if value is not None)
        parts.append(f"measured {{{', '.join(known)}}}")
    if node.tape is not None:
        parts.append(f"tape {_value(node.tape)}")
    if constant is not None:
        parts.append(f"= {_value(constant)}")
    return " ".join(parts)


def _quoted(text: str, plain: re.Pattern[str]) -> str:
    return text if plain.fullmatch(text) else json.dumps(text)


def _name(node: Node) -> str:
    return f"%{_quoted(node.name, _PLAIN_NAME)}"


def _tensor(tensor: Output) -> str:
    return f"{_name(tensor.node)}:{tensor.index}" if tensor.index else _name(tensor.node)


def _value(value: object) -> str:
    if value is None:
        return "[*]"
    if isinstance(value, Dims):
        return f"[{','.join('?' if d is None else str(d) for d in value)}]"
    if isinstance(value, Dtype):
        if not _PLAIN_WORD.fullmatch(value) or value in _NOT_DTYPES:
            raise TypeError(f"{str(value)!r} is not the name of an element type")
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Opaque):
        return f"{value.kind}<{value.data.hex()}>"
    if isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        return f"({', '.join(map(_value, items))}{',' if len(items) == 1 else ''})"
    if isinstance(value, (bytes, int, float)):
        return repr(value)
    raise TypeError(f"an attribute can't be a {type(value).__name__}: {value!r}")


# --- parsing --------------------------------------------------------------------------------------------


def parse_graph(text: str) -> Graph:
    """The graph that `text` describes. Raises InvalidModel, naming the line, when it describes none."""
    return _parse_lines([_Line(number, content) for number, content in enumerate(text.split("\n"), 1)])


def _parse_lines(lines: list[_Line]) -> Graph:
    graph = Graph()
    wiring: list[tuple[_Line, Node, list[_Reference], list[_Reference]]] = []
    rest: list[_Line] = []
    bodies: list[tuple[_Line, list[_Line]]] = []
    for line in lines:
        content = line.text[line.at :]
        if line.at_end() or content.lstrip().startswith("#"):
            continue
        if bodies and content.startswith(_INDENT):
            line.at = len(line.text) - len(content) + len(_INDENT)
            bodies[-1][1].append(line)
        elif content.startswith("body "):
            bodies.append((line, []))
        elif content.lstrip().startswith("%"):
            wiring.append((line, *_parse_node(graph, line)))
        else:
            rest.append(line)
    for line, node, inputs, controls in wiring:
        node.inputs = tuple(line.resolve(graph, reference, is_read=True) for reference in inputs)
        node.controls = tuple(line.resolve(graph, reference, is_read=False).node for reference in controls)
    for line in rest:
        _parse_list(graph, line)
    for line, content in bodies:
        line.expect("body")
        node = line.resolve(graph, line.reference(), is_read=False).node
        line.end()
        graph.bodies[node] = (*graph.bodies.get(node, ()), _parse_lines(content))
    return graph


_Reference = tuple[str, int]


class _Line:
    """A line and the position up to which it has been parsed."""

    def __init__(self, number: int, text: str):
        self.number = number
        self.text = text
        self.at = 0

    def fail(self, wanted: str) -> InvalidModel:
        found = self.text[self.at :][:40]
        return InvalidModel(f"line {self.number}, column {self.at + 1}: {wanted} expected, found {found!r}")

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1

    def at_end(self) -> bool:
        self.skip()
        return self.at == len(self.text)

    def end(self) -> None:
        if not self.at_end():
            raise self.fail("the end of the line")

    def accept(self, token: str) -> bool:
        self.skip()
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        return True

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.fail(repr(token))

    def match(self, pattern: re.Pattern[str], wanted: str) -> str:
        self.skip()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise self.fail(wanted)
        self.at = found.end()
        return found[0]

    def quoted(self, plain: re.Pattern[str], wanted: str) -> str:
        self.skip()
        if not self.text.startswith('"', self.at):
            return self.match(plain, wanted)
        try:
            value, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
        except ValueError:
            raise self.fail(wanted) from None
        return value

    def listed(self, item: Callable[[_Line], T], close: str) -> list[T]:
        """Items separated by commas, up to `close`; a trailing comma is allowed."""
        items: list[T] = []
        while not self.accept(close):
            items.append(item(self))
            if not self.accept(","):
                self.expect(close)
                break
        return items

    def reference(self) -> _Reference:
        self.expect("%")
        name = self.quoted(_PLAIN_NAME, "a node's name")
        return name, int(self.match(_INDEX, "an output's number")) if self.accept(":") else 0

    def resolve(self, graph: Graph, reference: _Reference, *, is_read: bool) -> Output:
        """The tensor that a reference names; its output need not exist unless `is_read`."""
        name, index = reference
        if name not in graph:
            raise InvalidModel(f"line {self.number}: there is no node called {name!r}")
        if (index or is_read) and index >= len(graph[name].outputs):
            raise InvalidModel(f"line {self.number}: {name!r} has no output {index}")
        return Output(graph[name], index)


_INDEX = re.compile(r"[0-9]+")
_LABEL = re.compile(r"(?:feeds|fetches|targets|library)\b")
_OP = re.compile(r"[A-Za-z0-9_.>]+")
_DIM = re.compile(r"\?|[0-9]+")
_NUMBER = re.compile(r"-?(?:inf|nan|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)(?![A-Za-z0-9_])")
_BYTES = re.compile(r"""b'(?:[^'\\]|\\.)*'|b"(?:[^"\\]|\\.)*\"""")
_HEX = re.compile(r"(?:[0-9a-f]{2})*")


def _parse_node(graph: Graph, line: _Line) -> tuple[Node, list[_Reference], list[_Reference]]:
    line.expect("%")
    name = line.quoted(_PLAIN_NAME, "a node's name")
    line.expect("=")
    op = line.match(_OP, "an op")
    line.expect("(")
    inputs = line.listed(_Line.reference, ")")
    attrs = dict(line.listed(_parse_attr, "}")) if line.accept("{") else {}
    controls: list[_Reference] = []
    while line.accept("^"):
        controls.append((line.quoted(_PLAIN_NAME, "a node's name"), 0))
    line.skip()
    device = line.quoted(_OP, "a device") if line.accept("@") else ""
    outputs = [_parse_type(line)] if line.accept("->") else []
    while outputs and line.accept(","):
        outputs.append(_parse_type(line))
    if name in graph:
        raise InvalidModel(f"line {line.number}: there is another node called {name!r}")
    node = graph.add(op, name, attrs=attrs, outputs=outputs, device=device)
    if line.accept("measured"):
        line.expect("{")
        node.measured = _parse_measured(line)
    if line.accept("tape"):
        node.tape = _parse_tape(line)
    if line.accept("="):
        graph.small_constants[node] = _parse_value(line)
    line.end()
    return node, inputs, controls


def _parse_list(graph: Graph, line: _Line) -> None:
    label = line.match(_LABEL, "a node, feeds, fetches, targets or library")
    if label == "library":
        graph.library = _parse_value(line)
        line.end()
        return
    is_read = label == "fetches"
    tensors = [line.resolve(graph, line.reference(), is_read=is_read)]
    while line.accept(","):
        tensors.append(line.resolve(graph, line.reference(), is_read=is_read))
    line.end()
    if label == "fetches":
        graph.fetches += tensors
    elif label == "feeds":
        graph.feeds += _nodes(tensors)
    else:
        graph.targets += _nodes(tensors)


def _nodes(tensors: Iterable[Output]) -> list[Node]:
    return [tensor.node for tensor in tensors]


def _parse_attr(line: _Line) -> tuple[str, Any]:
    key = line.quoted(_PLAIN_WORD, "an attribute's name")
    line.expect("=")
    return key, _parse_value(line)


def _parse_tape(line: _Line) -> bytes:
    value = _parse_value(line)
    if not isinstance(value, bytes):
        raise line.fail("bytes")
    return value


def _parse_measured(line: _Line) -> Measured:
    fields = dict(line.listed(_parse_attr, "}"))
    if not fields.keys() <= {*Measured._fields} or not all(isinstance(v, (int, float)) for v in fields.values()):
        raise line.fail(f"numbers for {' or '.join(Measured._fields)}")
    return Measured(**fields)


def _parse_type(line: _Line) -> TensorType:
    dtype = line.match(_PLAIN_WORD, "an element type")
    bound = line.accept("<=")
    dims = _parse_dims(line)
    return TensorType(dtype, None if dims is None else tuple(dims), bound)


def _parse_dims(line: _Line) -> Dims | None:
    line.expect("[")
    if line.accept("*"):
        line.expect("]")
        return None
    texts = line.listed(lambda rest: rest.match(_DIM, "a dimension"), "]")
    return Dims(None if t == "?" else int(t) for t in texts)


def _parse_value(line: _Line) -> Any:
    line.skip()
    start = line.text[line.at : line.at + 2]
    if start.startswith("["):
        return _parse_dims(line)
    if start in ("b'", 'b"'):
        at = line.at
        try:
            return ast.literal_eval(line.match(_BYTES, "bytes"))
        except (SyntaxError, ValueError):
            line.at = at
            raise line.fail("bytes") from None
    if line.accept("("):
        return tuple(line.listed(_parse_value, ")"))
    if _NUMBER.match(line.text, line.at):
        number = line.match(_NUMBER, "a number")
        return int(number) if number.lstrip("-").isdigit() else float(number)
    word = line.match(_PLAIN_WORD, "a value")
    if line.text.startswith("<", line.at):
        line.expect("<")
        data = bytes.fromhex(line.match(_HEX, "hexadecimal digits"))
        line.expect(">")
        return Opaque(word, data)
    return {"true": True, "false": False}.get(word, Dtype(word))
