"""Training steps of a few layers as graphs, made without TensorFlow: for measurements of solvers, and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.types import TensorType

RESOURCE = TensorType("resource", ())
FLOAT = Dtype("float32")


@dataclass
class Step:
    """A training step under construction. Rows are the batch; every tensor is [rows, width] float32."""

    rows: int
    width: int
    graph: Graph = field(default_factory=Graph)

    @property
    def map_type(self) -> TensorType:
        return TensorType("float32", (self.rows, self.width))

    @property
    def weight_type(self) -> TensorType:
        return TensorType("float32", (self.width, self.width))

    def node(self, op: str, *inputs: Output, out: TensorType | None = None, name: str = "", **attrs: object) -> Output:
        graph = self.graph
        attrs = attrs or {"T": FLOAT}
        made = graph.add(
            op, graph.unique_name(name or op.lower()), inputs, attrs=attrs, outputs=(out or self.map_type,)
        )
        return made.out()

    def feed(self, kind: TensorType, name: str) -> Output:
        tensor = self.node("Placeholder", out=kind, name=name, dtype=Dtype(kind.dtype))
        self.graph.feeds.append(tensor.node)
        return tensor

    def update(self, op: str, variable: Output, value: Output) -> Node:
        made = self.graph.add(op, self.graph.unique_name(op.lower()), (variable, value), attrs={"dtype": FLOAT})
        self.graph.targets.append(made)
        return made


@dataclass(frozen=True)
class Layer:
    """`kind` of "dense", "relu", "scale" or "add"; "add" and "scale" combine with the output of `skip`."""

    kind: str
    skip: int = 0


def training_step(layers: Sequence[Layer], rows: int, width: int, assign: bool = False) -> Graph:
    """A step: `layers` forward, the mirrored backward half, and an update of each dense layer's weight.

    Args:
        assign: update by assigning a new value, which the variable adopts, instead of in place.
    """
    step = Step(rows, width)
    x = step.feed(step.map_type, "x")
    variables = [step.feed(RESOURCE, f"w{i}") if layer.kind == "dense" else None for i, layer in enumerate(layers)]
    made = [x]  # the output of each layer, the input first
    reads: dict[int, Output] = {}
    for i, layer in enumerate(layers):
        current, other = made[-1], made[min(layer.skip, len(made) - 1)]
        variable = variables[i]
        if variable is not None:
            reads[i] = step.node("ReadVariableOp", variable, out=step.weight_type, name=f"read{i}", dtype=FLOAT)
            made.append(step.node("MatMul", current, reads[i], name=f"dense{i}"))
        elif layer.kind == "relu":
            made.append(step.node("Relu", current, name=f"relu{i}"))
        else:
            made.append(step.node("Mul" if layer.kind == "scale" else "AddV2", current, other, name=f"mix{i}"))
    loss = step.node("L2Loss", made[-1], out=TensorType("float32", ()), name="loss")
    step.graph.fetches.append(loss)
    gradients: dict[int, list[Output]] = {len(layers): [made[-1]]}
    for i in reversed(range(len(layers))):
        arrived = gradients.pop(i + 1, [])
        if not arrived:
            continue
        gradient = arrived[0]
        if len(arrived) > 1:
            gradient = step.node("AddN", *arrived, name=f"sum{i}", N=len(arrived), T=FLOAT)
        _backward(step, layers[i], i, gradient, made, reads, variables, gradients, assign)
    return step.graph


def _backward(
    step: Step,
    layer: Layer,
    i: int,
    gradient: Output,
    made: list[Output],
    reads: dict[int, Output],
    variables: list[Output | None],
    gradients: dict[int, list[Output]],
    assign: bool,
) -> None:
    def give(index: int, value: Output) -> None:
        if index:  # the gradient of the argument is not needed
            gradients.setdefault(index, []).append(value)

    skip = min(layer.skip, i)
    variable = variables[i]
    if variable is not None:
        change = step.node(
            "MatMul", made[i], gradient, out=step.weight_type, name=f"change{i}", T=FLOAT, transpose_a=True
        )
        if i:
            give(i, step.node("MatMul", gradient, reads[i], name=f"back{i}", T=FLOAT, transpose_b=True))
        if assign:
            fresh = step.node("Sub", reads[i], change, out=step.weight_type, name=f"fresh{i}")
            step.update("AssignVariableOp", variable, fresh)
        else:
            step.update("AssignSubVariableOp", variable, change)
    elif layer.kind == "relu":
        give(i, step.node("ReluGrad", gradient, made[i + 1], name=f"back{i}"))
    elif layer.kind == "scale":
        give(i, step.node("Mul", gradient, made[skip], name=f"back{i}"))
        give(skip, step.node("Mul", gradient, made[i], name=f"skip{i}"))
    else:
        give(i, gradient)
        give(skip, gradient)
