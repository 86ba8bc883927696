"""What TensorFlow ran, held against what was planned."""

from __future__ import annotations

import pytest
from processes import on_arena

pytest.importorskip("tensorflow")

from nets import Net, batch, called

from tfswap.frontends.audit import audit
from tfswap.oplib import names
from tfswap.passes.verify import VerificationError


@pytest.fixture(scope="module")
def planned():
    """A rewritten step's graph."""
    return called(Net()).get_concrete_function(batch()).graph.as_graph_def()


def changed(graph, change):
    copy = type(graph).FromString(graph.SerializeToString())
    change(copy, next(node for node in copy.node if node.op == names.RELEASE))
    return copy


def test_the_planned_graph_passes(planned):
    assert audit(planned, [planned]) > 0


def test_a_swap_node_that_is_gone_is_named(planned):
    executed = changed(planned, lambda graph, node: graph.node.remove(node))
    with pytest.raises(VerificationError, match="removed the planned node '.*release"):
        audit(planned, [executed])


def test_an_edge_of_the_order_that_is_gone_is_named(planned):
    executed = changed(planned, lambda _, node: node.input.remove(next(i for i in node.input if i.startswith("^"))))
    with pytest.raises(VerificationError, match="removed the planned edge '.*' -> '.*release"):
        audit(planned, [executed])


COLLECTED = """
import json
import tensorflow as tf
from nets import Net, batch, called
from tensorflow.python.eager import context

context.enable_run_metadata()
tf.function(Net().step)(batch())
{after}
step = called(Net())
step(batch())
print(json.dumps(len(step.plan().absences)))
"""


@pytest.mark.parametrize("after", ["context.disable_run_metadata()", ""], ids=["ended", "going_on"])
def test_graphs_that_the_user_collects_are_not_taken_for_the_step_s(after):
    """In an arena the step's own graph is there, and exported, before its first run: the user's alone would be left."""
    assert on_arena(COLLECTED.format(after=after)) > 0
