"""A training step as a GraphDef or MetaGraphDef in memory, for a Session or for import: planned and rewritten.

The nodes that the fetches need move into a library function that one node calls. The fetched names stay: they are
identities of the call's results. Everything else in the graph (initializers, savers, other steps) keeps its nodes.
Variables stay where they are: resource handles are passed in, and TensorFlow 1's reference variables are named in the
function as they are outside.

Not handled: nodes that one Session.run fetches in addition to `fetches`. They run outside of the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tfswap.compiler.backward import require_backward
from tfswap.compiler.offline import ArenaInUse, Planned, carry_host_limit, plan_offline
from tfswap.compiler.request import Request
from tfswap.compiler.tf1_variables import REFERENCE_VARIABLES, order_writes, reference_variables, writes_reference
from tfswap.errors import InvalidModel, TfswapError
from tfswap.exporters.function_def import OutputNames
from tfswap.exporters.library_function import call_node, export_library_function
from tfswap.importers.bodies import import_with_bodies
from tfswap.importers.corrupt_files import named_as_damage
from tfswap.importers.library import drop_lost_colocations, fill_defaults
from tfswap.importers.library_function import refuse_compiled, require_known_ops
from tfswap.importers.shapes import Argument, shape_of
from tfswap.importers.validate import validate_graph
from tfswap.ir.custom_ops import DRAWS
from tfswap.ir.graph import Graph
from tfswap.ir.op_traits import is_feed, makes_handle
from tfswap.ir.types import Shape
from tfswap.kernels.target import Target
from tfswap.plan.plan import Plan
from tfswap.report.report import Report
from tfswap.support.reach import reach

VARIABLE = "VarHandleOp"
CALL = "tfswap/step"
FUNCTION = "tfswap_step"

Bind = Callable[[str, Mapping[str, tuple[Sequence[str], Shape]]], dict[str, Shape]]
"""From a step's name and its arguments (other names, shape) to full shapes."""


@dataclass(frozen=True)
class OptimizedGraph:
    """A rewritten graph.

    Attributes:
        graph_def: the GraphDef, with the same feeds and fetches as before.
        report: the report of its plan.
        plan: the plan that it carries out.
        meta_graph_def: the MetaGraphDef with that graph; None where none was given.
    """

    graph_def: Any
    report: Report
    plan: Plan
    meta_graph_def: Any = None


def optimize_meta_graph_def(
    meta_graph: Any,
    signature: str | None,
    fetches: Sequence[str],
    request: Request,
    bind: Bind,
) -> OptimizedGraph:
    """As `optimize_graph_def`, with the feeds and fetches of one of the MetaGraphDef's signatures."""
    there = sorted(meta_graph.signature_def)
    if not isinstance(signature, str) or signature not in meta_graph.signature_def:
        raise InvalidModel(f"signature is {signature!r}: the MetaGraphDef has {', '.join(map(repr, there)) or 'none'}")
    found = meta_graph.signature_def[signature]
    train = meta_graph.collection_def["train_op"].node_list.value if "train_op" in meta_graph.collection_def else []
    feeds = [found.inputs[k].name for k in sorted(found.inputs)]
    wanted = [found.outputs[k].name for k in sorted(found.outputs)]
    wanted += [n for n in (*train, *fetches) if n not in wanted]
    made = optimize_graph_def(meta_graph.graph_def, feeds, wanted, request, bind, named=_names_in(meta_graph))
    result = type(meta_graph)()
    result.CopyFrom(meta_graph)
    result.graph_def.CopyFrom(made.graph_def)
    if len(result.meta_info_def.stripped_op_list.op):
        from tensorflow.python.framework import meta_graph as meta_graph_lib

        operations = meta_graph_lib.stripped_op_list_for_graph(result.graph_def)
        result.meta_info_def.stripped_op_list.CopyFrom(operations)
    return OptimizedGraph(made.graph_def, made.report, made.plan, result)


def _names_in(meta_graph: Any) -> Iterator[str]:
    """The tensors and nodes of a graph that its MetaGraphDef names: importing code looks them up."""
    from google.protobuf.message import DecodeError
    from tensorflow.core.framework import variable_pb2

    for signature in meta_graph.signature_def.values():
        for info in (*signature.inputs.values(), *signature.outputs.values()):
            yield info.name
    saver = meta_graph.saver_def
    yield from (saver.filename_tensor_name, saver.save_tensor_name, saver.restore_op_name)
    for collection in meta_graph.collection_def.values():
        yield from collection.node_list.value
        for content in collection.bytes_list.value:
            try:
                variable = variable_pb2.VariableDef.FromString(content)
            except DecodeError:
                continue  # a collection of something else
            yield from (variable.variable_name, variable.initializer_name)
            yield from (variable.initial_value_name, variable.snapshot_name)


def optimize_graph_def(
    graph_def: Any,
    feeds: Sequence[str],
    fetches: Sequence[str],
    request: Request,
    bind: Bind,
    named: Iterable[str] = (),
) -> OptimizedGraph:
    """Plan the step that computes `fetches`, and replace it by the rewritten one.

    Args:
        feeds: names of fed nodes ("x" or "x:0").
        fetches: names of tensors ("loss:0") and ops ("train").
        bind: gives the fed nodes full shapes.
        named: tensors and nodes that the result must have too.
    """
    step = GraphStep(graph_def, feeds, fetches, named)
    planned = step.planned(", ".join(fetches), request, bind)
    result = type(graph_def)()
    if request.changes_nothing or planned.plan.changes_nothing:
        result.CopyFrom(graph_def)
    else:
        carry_host_limit([planned], request)
        result.CopyFrom(step.write(planned.graph, planned.target))
    return OptimizedGraph(result, planned.report, planned.plan)


class StepCall(NamedTuple):
    """A call of a planned step.

    Attributes:
        node: the NodeDef, whose inputs are nodes of the graph.
        functions: what it calls: the step, and its loops and conditionals.
        results: by the name of a fetched node, the types of its results, which follow each other.
    """

    node: Any
    functions: list[Any]
    results: dict[str, list[str]]


class GraphStep:
    """The part of a GraphDef that some fetches need. The `named` nodes stay in the graph, for look-ups by name.

    Raises InvalidModel and TfswapError where feeds or fetches do not name what the graph has.
    """

    def __init__(self, graph_def: Any, feeds: Sequence[str], fetches: Sequence[str], named: Iterable[str] = ()):
        self.graph_def = graph_def
        self.nodes = {n.name: n for n in graph_def.node}
        for name in self.nodes:
            unknown = next((source for source in self._sources(name) if source not in self.nodes), None)
            if unknown is not None:
                raise InvalidModel(
                    f"the graph is damaged: {name!r} reads {unknown!r}, which does not exist. Export it again."
                )
        self.feeds = [self._node_name(f, "feeds") for f in feeds]
        twice = [f for f, node in zip(feeds, self.feeds, strict=True) if self.feeds.count(node) > 1]
        if twice:
            raise TfswapError(f"feeds names {' and '.join(map(repr, twice))}, which are one node: name it once")
        self.fetches = list(fetches)
        self.named = self.nodes.keys() & {name.removeprefix("^").partition(":")[0] for name in named}
        self.fetched = list(dict.fromkeys(self._node_name(f, "fetches") for f in fetches))
        if CALL in self.nodes:
            raise InvalidModel("this graph has been rewritten by tfswap already: start from the original")

    def _node_name(self, name: str, where: str) -> str:
        node, _, index = name.removeprefix("^").partition(":")
        if node not in self.nodes:
            raise InvalidModel(
                f"{where} names {name!r}, which the graph does not have. It has, for example, "
                f"{', '.join(sorted(self.nodes)[:10])}."
            )
        if where == "feeds" and index not in ("", "0"):
            raise TfswapError(f"feeds names {name!r}: only a node's first output can be fed")
        return node

    def planned(self, name: str, request: Request, bind: Bind, arena: ArenaInUse | None = None) -> Planned:
        """The step's plan. Raises as `plan_offline`, and InvalidModel.

        Args:
            name: the step's in messages.
            bind: gives the fed nodes full shapes.
            arena: what the step finds on the device, where it runs in this process. Its random ops may then share
                their state with those of other steps, so that it always has an order, in a function of its own.
        """
        with named_as_damage("the graph"):
            graph = self.read(bind)
        if arena is None and not request.options.portable:  # which may be for serving
            require_backward(name, graph)
        writers = frozenset(n.out(0).name for n in graph if writes_reference(n.op))
        options = dataclasses.replace(request.options, keep=request.options.keep | writers)
        request = dataclasses.replace(request, options=options)
        shares_state = arena is not None and any(n.op in DRAWS for each in (graph, *graph.all_bodies()) for n in each)
        return plan_offline(
            name,
            graph,
            request,
            variables=self.variables(),
            keeps_results=False,
            arena=arena,
            ordered=shares_state,
        )

    def read(self, bind: Bind) -> Graph:
        """The step's IR. Variables and handles are its first feeds, so that the planner counts them as persistent."""
        live = self._live()
        library = {f.signature.name: f for f in self.graph_def.library.function}
        part = type(self.graph_def)()
        part.versions.CopyFrom(self.graph_def.versions)
        part.library.CopyFrom(self.graph_def.library)
        for node in self.graph_def.node:
            if node.name in live:
                part.node.add().CopyFrom(node)
        require_known_ops(part.node)
        self._require_outputs()
        self._require_feeds(part.node)
        fill_defaults(part.node)
        refuse_compiled("the graph", {}, part.node, library)
        placeholders = {}
        for node in part.node:
            if node.name in self.feeds:
                placeholders[node.name] = self._as_placeholder(node)
        validate_graph("the graph", part.node, library)
        shapes = bind(", ".join(self.fetched), {n: ((f"{n}:0",), placeholders[n][1]) for n in self.feeds if n in live})
        arguments = {n: Argument(placeholders[n][0], shapes[n], []) for n in shapes}
        self.outputs = {}
        fetches, targets = [], []
        for name in self.fetched:
            count = 0 if self._stays(name) else self._outputs(self.nodes[name])
            self.outputs[name] = count
            fetches += [f"{name}:{i}" for i in range(count)]
            if not count:
                targets.append(name)
        graph = import_with_bodies(part, arguments, list(shapes), fetches, targets)
        order_writes(graph)
        self.arguments = [n.name for n in graph.feeds] + [n.name for n in graph if makes_handle(n.op)]
        graph.feeds += reference_variables(graph)
        return graph

    def variables(self) -> list[tuple[str, Shape]]:
        """Element type and shape of the graph's resource variables; its reference variables are among the feeds."""
        from tensorflow.python.framework import dtypes

        return [
            (dtypes.as_dtype(n.attr["dtype"].type).name, shape_of(n.attr["shape"].shape))
            for n in self.graph_def.node
            if n.op == VARIABLE
        ]

    def _live(self) -> set[str]:
        """Names of the nodes that the fetches need."""
        return set(reach(self.fetched, lambda name: () if name in self.feeds else self._sources(name)))

    def _sources(self, name: str) -> list[str]:
        return [i.removeprefix("^").partition(":")[0] for i in self.nodes[name].input]

    def _require_outputs(self) -> None:
        """Refuse a fetch ("loss:7") of an output that its node does not have."""
        for fetch in self.fetches:
            name, colon, index = fetch.partition(":")
            count = self._outputs(self.nodes[name.removeprefix("^")])
            if colon and not (index.isdecimal() and int(index) < count):
                raise InvalidModel(f"fetches names {fetch!r}, and {name!r} has {count} outputs, counted from 0")

    def _require_feeds(self, nodes: Iterable[Any]) -> None:
        """Refuse a step with a placeholder that is not fed: it could not run, and has no size."""
        unfed = sorted(n.name for n in nodes if is_feed(n.op) and not n.input and n.name not in self.feeds)
        if unfed:
            raise InvalidModel(
                f"the fetches need {', '.join(map(repr, unfed))}, which feeds does not name: name all placeholders "
                f"that are fed, as in feeds={[*self.feeds, *unfed]}"
            )

    def _stays(self, name: str) -> bool:
        """Whether a fetched node stays as it is: its output exists without running the step."""
        op = self.nodes[name].op
        return name in self.feeds or makes_handle(op) or op in REFERENCE_VARIABLES

    @staticmethod
    def _outputs(node: Any) -> int:
        return len(OutputNames().of(node.op, node.attr))

    def _as_placeholder(self, node: Any) -> tuple[int, Shape]:
        """Turn a fed node into a Placeholder, in place; returns its element type and shape."""
        from tensorflow.python.framework import op_def_registry

        argument = op_def_registry.get(node.op).output_arg[0]
        dtype = argument.type or node.attr[argument.type_attr].type
        shape = shape_of(node.attr["shape"].shape) if "shape" in node.attr else None
        del node.input[:]
        node.op = "Placeholder"
        node.attr.clear()
        node.attr["dtype"].type = dtype
        return dtype, shape

    def write(self, made: Graph, target: Target) -> Any:
        """The whole graph, with the step's nodes replaced by a call of `made`, which is for `target`."""
        called = self.call(made, target, CALL, FUNCTION)
        result = type(self.graph_def)()
        result.versions.CopyFrom(self.graph_def.versions)
        result.library.CopyFrom(self.graph_def.library)
        result.library.function.extend(called.functions)
        kept = self._needed_outside(called.results, set(called.node.input))
        for node in self.graph_def.node:
            if node.name in kept:
                result.node.add().CopyFrom(node)
        result.node.add().CopyFrom(called.node)
        position = 0
        for name, types in called.results.items():
            self._hand_on(result.node.add(), name, position, types)
            position += len(types)
        drop_lost_colocations(result.node)
        return result

    def call(self, made: Graph, target: Target, name: str, function: str) -> StepCall:
        """A call of `made`, which is for `target`.

        Args:
            name, function: the call's and its function's.
        """
        made = made.copy()
        variables = {n.name for n in reference_variables(made)}
        for variable in variables:
            # Reference variables are found by name, which inside a function may become another.
            node = made[variable]
            node.attrs = {**node.attrs, "shared_name": node.attrs.get("shared_name") or variable.encode()}
        made.feeds = [made[n] for n in self.arguments if n in made]
        made.targets = [t for t in made.targets if t.name not in self.nodes or not self._stays(t.name)]
        made.fetches = list(made.fetches)
        outputs = [f"output_{i}" for i in range(len(made.fetches))]
        inner, bodies = export_library_function(made, function, outputs, target)
        types = iter([fetch.type.dtype for fetch in made.fetches])
        results = {n: [next(types) for _ in range(c)] for n, c in self.outputs.items() if not self._stays(n)}
        return StepCall(call_node(name, inner, [n.name for n in made.feeds]), [inner, *bodies], results)

    def _needed_outside(self, replaced: Iterable[str], arguments: set[str]) -> set[str]:
        """Names of the nodes that stay: those outside of the step, what these read, and the call's arguments."""
        live = self._live()
        replaced = set(replaced)
        seen = {n for n in self.nodes if n not in live or n in self.feeds or self._stays(n)} | arguments
        seen |= self.named - replaced
        needed = reach(seen, lambda name: [source for source in self._sources(name) if source not in replaced])
        return set(needed) - replaced

    def _hand_on(self, node: Any, name: str, position: int, types: Sequence[str]) -> None:
        """Make `node` an identity, under the fetched name, of the call's results from `position` on."""
        from tensorflow.python.framework import dtypes

        enums = [dtypes.as_dtype(t).as_datatype_enum for t in types]
        node.name = name
        node.device = self.nodes[name].device
        if not types:
            node.op = "NoOp"
            node.input.append(f"^{CALL}")
            return
        node.input.extend(f"{CALL}:{position + i}" for i in range(len(types)))
        if len(types) == 1:
            node.op = "Identity"
            node.attr["T"].type = enums[0]
        else:
            node.op = "IdentityN"
            node.attr["T"].list.type.extend(enums)
