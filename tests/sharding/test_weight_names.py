"""Which weight a leaf of optimizer state belongs to, by its path, in the nests that libraries
make.
"""

from __future__ import annotations

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import Value, tensor_type
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.strategies.state import WeightNames
from tests.models.state_forms import FORMS
from tests.support.road import captured_graph, fsdp

SHAPE = (4, 8)


def owner(weights: tuple[str, ...], leaf: str, shape: tuple[int, ...] = SHAPE) -> str | None:
    rows = [(Slot(w, "parameter"), Value(tensor_type(SHAPE, DType.F32))) for w in weights]
    found = WeightNames(rows).owner(leaf, shape)
    return None if found is None else found[0]


DENSE = ("state/params/a/kernel", "state/params/b/kernel")
NNX = ("0/norm/bias/value", "0/norm/scale/value", "0/lin/kernel/value")
TWO = ("state/gen/params/d/kernel", "state/disc/params/d/kernel")
NESTED = ("params/a/kernel", "params/b/a/kernel")


@pytest.mark.parametrize(
    ("weights", "leaf", "expected"),
    [
        (("params/a/kernel",), "opt_state/0/mu/a/kernel", "params/a/kernel"),
        (DENSE, "state/opt_state/0/mu/b/kernel", "state/params/b/kernel"),
        (DENSE, "state/opt_state/0/count", None),
        (NNX, "1/opt_state/0/mu/lin/kernel/value", "0/lin/kernel/value"),
        (NNX, "0/norm/mean/value", None),
        (TWO, "state/disc/opt/0/nu/d/kernel", "state/disc/params/d/kernel"),
        (TWO, "state/other/0/nu/d/kernel", None),
        (NESTED, "opt_state/0/mu/a/kernel", "params/a/kernel"),
        (NESTED, "opt_state/0/mu/b/a/kernel", "params/b/a/kernel"),
    ],
)
def test_owner(weights: tuple[str, ...], leaf: str, expected: str | None) -> None:
    assert owner(weights, leaf) == expected
    assert owner(weights, leaf, (4,)) is None


@pytest.mark.parametrize("form", FORMS)
def test_states_of_libraries_are_sharded(form: str) -> None:
    graph, inputs, outputs = captured_graph(FORMS[form](), 8)
    recipe = fsdp(graph, inputs, outputs, make_mesh({"dp_shard": 4}))
    moments = [s.name for s in inputs if "/mu/" in s.name or "/nu/" in s.name]
    weights = [slot.name for slot in inputs if slot.role == "parameter"]
    assert weights and len(moments) == 2 * len(weights)
    assert all("dp_shard" in recipe.reasons[name] for name in (*weights, *moments))
