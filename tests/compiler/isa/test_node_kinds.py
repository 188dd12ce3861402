"""Kinds of nodes (`compiler/isa/attributes.py`): what they are, against the ops of the graph."""

from __future__ import annotations

import pytest

from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.isa.attributes import NODE_FORMS, NodeKind, nodes_of

READS = {NodeKind.CURVED: 1, NodeKind.UNARY: 1, NodeKind.BINARY: 2, NodeKind.CHOICE: 3}


@pytest.mark.parametrize("kind", READS)
def test_a_node_has_one_kind_of_reading_and_may_have_that_many_inputs(kind: NodeKind) -> None:
    others = nodes_of(*(other for other in READS if other is not kind))
    for op in nodes_of(kind):
        assert op not in others
        assert READS[kind] in NODE_FORMS[op].inputs, op


def test_elementwise_nodes_are_elementwise_ops() -> None:
    named = nodes_of(*READS) & OPS.keys()
    assert all(OPS[op].elementwise for op in named)


def test_what_is_said_of_nodes() -> None:
    assert nodes_of(NodeKind.LINEAR) == {"add", "subtract", "multiply", "divide"}
    assert nodes_of(NodeKind.EXTREME) <= nodes_of(NodeKind.STEADY) & nodes_of(NodeKind.BINARY)
    assert not nodes_of(NodeKind.STEADY) & nodes_of(NodeKind.LINEAR, NodeKind.CURVED)
    assert nodes_of(NodeKind.LONG) <= nodes_of(NodeKind.BINARY)
