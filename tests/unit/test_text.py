"""The text form of graphs: exact both ways, readable, and strict in parsing."""

from __future__ import annotations

import pytest
from graphs import contents, graphs_with_bodies
from hypothesis import given

from tfswap.errors import InvalidModel
from tfswap.ir.graph import Dims, Dtype, Graph, Measured, Opaque
from tfswap.ir.text import format_graph, parse_graph
from tfswap.ir.types import TensorType

EXAMPLE = """\
%a = Placeholder() {dtype=float32, shape=[2,?]} -> float32[2,?]
%axis = Const() {dtype=int32, value=tensor<0803>} -> int32[2] = (0, -1)
%"odd name" = Split(%axis, %a) {"a key"=(1, true, 1.0, b"it's", [*],), num_split=2} ^a -> float32[*], float32[]
%sum = AddV2(%"odd name", %"odd name":1) {T=float32} ^axis ^a @"/device:CPU:0" -> float32[8,?] measured {seconds=0.5}
%done = NoOp()
feeds %a
fetches %sum, %"odd name":1
targets %done
library GraphDef<0a02ff>
"""


@given(graphs_with_bodies())
def test_what_is_printed_parses_to_the_same_graph(graph):
    text = format_graph(graph)
    parsed = parse_graph(text)
    assert contents(parsed) == contents(graph)
    assert format_graph(parsed) == text


def test_the_notation():
    graph = parse_graph(EXAMPLE)
    assert format_graph(graph) == EXAMPLE.replace("[*],)", "[*])")
    split = graph["odd name"]
    values = split.attrs["a key"]
    assert isinstance(values, tuple)
    assert [type(v) for v in values] == [int, bool, float, bytes, type(None)]
    assert split.controls == (graph["a"],)
    assert split.outputs == (TensorType("float32", None), TensorType("float32", ()))
    assert graph["sum"].inputs == (split.out(0), split.out(1))
    assert graph["sum"].device == "/device:CPU:0"
    assert isinstance(graph["sum"].attrs["T"], Dtype)
    assert graph["sum"].measured == Measured(seconds=0.5)
    assert graph["a"].attrs["shape"] == Dims((2, None))
    assert graph.small_constants == {graph["axis"]: (0, -1)}
    assert graph.feeds == [graph["a"]]
    assert graph.fetches == [graph["sum"].out(), split.out(1)]
    assert graph.targets == [graph["done"]]
    assert graph.library == Opaque("GraphDef", b"\x0a\x02\xff")


def test_the_order_of_attributes_does_not_show():
    texts = ["%a = NoOp() {x=1, y=2}\n", "%a = NoOp() {y=2, x=1}\n"]
    assert [format_graph(parse_graph(text)) for text in texts] == texts[:1] * 2


def test_an_input_may_come_later_and_comments_are_ignored():
    graph = parse_graph("# a comment\n\n  %b = Relu(%a)  -> float32[]\n%a = Const() -> float32[]\n")
    assert graph["b"].inputs == (graph["a"].out(),)
    assert [node.name for node in graph] == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("%a = Relu(%b)", "line 1: there is no node called 'b'"),
        ("%a = NoOp()\n%a = NoOp()", "line 2: there is another node called 'a'"),
        ("%a = Const() -> float32[]\n%b = Relu(%a:1)", "line 2: 'a' has no output 1"),
        ("%a = NoOp()\n%b = Relu(%a)", "line 2: 'a' has no output 0"),
        ("%a = NoOp()\nfetches %a", "line 2: 'a' has no output 0"),
        ("%a = Const() {value=b'é'} -> float32[]", "line 1, column 21: bytes expected"),
        ("%a = Const() {value=b'\\x'} -> float32[]", "line 1, column 21: bytes expected"),
        ("%a = Relu(", "line 1, column 11: '%' expected, found ''"),
        ("%a = NoOp() {T=}", "line 1, column 16: a value expected, found '}'"),
        ("%a = NoOp() {x=tensor<0>}", "column 23: '>' expected"),
        ("%a = NoOp() -> float32[x]", "a dimension expected, found 'x]'"),
        ("%a = NoOp() more", "the end of the line expected, found 'more'"),
        ('%"a = NoOp()', "a node's name expected"),
        ("fetch %a", "line 1, column 1: a node, feeds, fetches, targets or library expected"),
        ("%a = NoOp()\ntargets", "'%' expected"),
    ],
)
def test_what_is_not_a_graph_is_refused_with_its_place(text, message):
    with pytest.raises(InvalidModel) as error:
        parse_graph(text)
    assert message in str(error.value)


@pytest.mark.parametrize("value", [object(), [1], "text", Dtype("true")])
def test_other_attributes_are_not_printed(value):
    graph = Graph()
    graph.add("NoOp", "a", attrs={"x": value})
    with pytest.raises(TypeError):
        format_graph(graph)
