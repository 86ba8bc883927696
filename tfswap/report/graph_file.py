"""The planned graph as a file for graph viewers: every node, every tensor, and the plan's decision about it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from tfswap.errors import TfswapError
from tfswap.ir.graph import Graph

if TYPE_CHECKING:
    from tfswap.report.report import Report


def graphml(report: Report, graph: Graph) -> bytes:
    """The graph as GraphML, for yEd, Gephi, Cytoscape and `networkx.read_graphml`."""
    import networkx

    written = io.BytesIO()
    networkx.write_graphml_xml(annotated(report, graph), written, encoding="utf-8", prettyprint=True)
    return written.getvalue()


def dot(report: Report, graph: Graph) -> str:
    """The graph in Graphviz's language. Raises TfswapError where pydot is missing."""
    import networkx

    try:
        import pydot  # noqa: F401
    except ImportError as error:
        raise TfswapError("a .dot file is written by pydot: pip install pydot; .graphml needs nothing more") from error
    made = annotated(report, graph)
    for _, facts in made.nodes(data=True):
        facts["label"] = f"{facts['label']}\\n{facts['op']}"
    return networkx.nx_pydot.to_pydot(made).to_string()


def annotated(report: Report, graph: Graph) -> Any:
    """A networkx.MultiDiGraph of a graph and its bodies.

    Nodes are numbered, since names may have any characters. `label` is the name, with the body's name as a prefix.
    Edges of tensors with a row in the report have its `tactic` and `reason`.
    """
    import networkx

    rows = {row.name: row for row in (*report.rows, *report.others)}
    made = networkx.MultiDiGraph()
    for within, part in {"": graph, **graph.named_bodies()}.items():
        prefix = f"{within}/" if within else ""
        found = part.to_networkx()
        number = {name: f"n{len(made) + n}" for n, name in enumerate(found)}
        for name, facts in found.nodes(data=True):
            made.add_node(number[name], label=f"{prefix}{name}", **facts)
        for source, target, key, facts in found.edges(keys=True, data=True):
            row = rows.get(f"{prefix}{facts['tensor']}") if "tensor" in facts else None
            decided = {} if row is None else {"tactic": row.tactic, "reason": row.reason}
            made.add_edge(number[source], number[target], key=str(key), **facts, **decided)
    return made
