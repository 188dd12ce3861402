"""Strategy `manual`: the user's shardings are respected and completed, whichever way JAX wrote
them, and what contradicts itself is refused.
"""

from __future__ import annotations

import functools
from collections import Counter

import jax
import pytest

from shardwright.compiler.diagnostics import ImportRuleError, ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.capture import capture
from shardwright.compiler.frontend.shardings import ModuleShardings
from shardwright.compiler.frontend.stablehlo import import_module, import_with_shardings
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import ShardingConstraintAttrs
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.sharding.partition.findings import collectives
from shardwright.sharding.partition.mesh import Mesh, make_mesh
from shardwright.sharding.partition.partitioned import Slot, slots
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import Plan
from shardwright.sharding.settings import StrategySettings
from shardwright.sharding.strategies import INPUT, OUTPUT
from shardwright.sharding.strategies.manual import data_ways, manual, user_mesh
from shardwright.sharding.strategies.registry import recipe_of
from tests.support.annotated import WAYS, annotated_task
from tests.support.partitioned import partition_here
from tests.support.road import run_and_compare, worst
from tests.support.step_plans import build_plan

MESH = Mesh((("data", 4), ("model", 2)))
SAMPLES = 8
SETTINGS = StrategySettings(name="manual")


@functools.cache
def step(way: str) -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...], ModuleShardings]:
    captured = capture(annotated_task(way), SAMPLES)
    graph, user = import_with_shardings(captured.artifact)
    return run(graph, step_passes()), slots(captured.inputs), slots(captured.outputs), user


@functools.cache
def plan(way: str, num_microbatches: int = 1) -> Plan:
    graph, inputs, outputs, user = step(way)
    return build_plan(
        graph,
        inputs,
        outputs,
        MESH,
        settings=SETTINGS,
        num_microbatches=num_microbatches,
        unit=answer_request,
        user=user,
    )


@pytest.mark.parametrize(("way", "micro_batches"), [*((way, 1) for way in WAYS), ("jit", 2)])
def test_values_equal_the_unsharded_step(way: str, micro_batches: int) -> None:
    errors, _ = run_and_compare(plan(way, micro_batches).step, annotated_task(way))
    leaf, error = worst(errors)
    assert error <= 1e-5, leaf


def test_arguments_lie_where_the_user_said() -> None:
    buffers = plan("jit").step.buffers
    assert buffers["params/up"].axes == ((), (), ("model",))
    assert buffers["params/down"].axes == ((), ("model",), ())
    assert buffers["batch/x"].axes == (("data",), ())


@pytest.mark.parametrize("way", WAYS)
def test_open_state_is_completed_and_comes_back_where_it_was(way: str) -> None:
    """Momentum is open everywhere: it follows its weight, before and after the step."""
    buffers, reasons = plan(way).step.buffers, plan(way).reasons
    for weight in ("up", "down", "shift", "head"):
        name = f"opt_state/0/trace/{weight}"
        assert buffers[name].axes == buffers[f"params/{weight}"].axes, name
        assert reasons[name].endswith("propagation")
    assert buffers["params/up"].axes[2] == ("model",), "columns, also from constraints alone"


def test_reasons_say_who_decided() -> None:
    assert plan("jit").reasons["params/up"] == "[-, -, model]: user, constraint"
    assert plan("arguments").reasons["batch/x"] == "[data, -]: user, argument"
    assert plan("arguments").reasons["params/up"] == "[-, -, model]: propagation"
    (note,) = [f for f in plan("arguments").findings if f.code == "SW_MANUAL_OPEN"]
    assert note.severity == "note" and "8 of 10 arguments" in note.message


def test_a_block_has_the_textbooks_collectives() -> None:
    """Columns then rows: one all_reduce per block and pass, and the gradients over the data."""
    graph, inputs, outputs, user = step("jit")
    recipe = recipe_of(graph, inputs, outputs, MESH, SETTINGS, user)
    part = partition_here(recipe.graph, MESH, recipe.specs, inputs, outputs, recipe.tied)
    forward, backward = (op.regions[0] for op in part.graph.ops if op.name == "loop")
    assert Counter((op.name, op.attrs.axes) for op in collectives(forward)) == {
        ("all_reduce", ("model",)): 1
    }
    assert Counter((op.name, op.attrs.axes) for op in collectives(backward)) == {
        ("all_reduce", ("model",)): 1,
        ("all_reduce", ("data",)): 3,
    }


@pytest.mark.parametrize("way", WAYS)
def test_mesh_and_samples_come_from_the_step(way: str) -> None:
    graph, inputs, _, user = step(way)
    assert user_mesh(user) == MESH
    assert data_ways(graph, inputs, user) == 4 if way != "constraints" else 1


TEXT = """
module {
  sdy.mesh @mesh = <["rows"=2, "cols"=4]>
  func.func @main(%w: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{?}, {"cols"}]>},
                  %x: tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"rows"}, {}]>})
      -> (tensor<4x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"rows"}, {"cols"}]>}) {
    %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<4x8xf32>, tensor<8x16xf32>) -> tensor<4x16xf32>
    return %y : tensor<4x16xf32>
  }
}
"""


def test_sdy_text_is_read() -> None:
    graph, user = import_with_shardings(TEXT)
    assert user.meshes == ((("rows", 2), ("cols", 4)),)
    assert user.inputs[0] == ShardingConstraintAttrs(((), ("cols",)), (0,))
    inputs = (Slot("w", "parameter"), Slot("x", "batch", 0))
    recipe = manual(graph, inputs, (Slot("y", "metric"),), user_mesh(user), user)
    assert (INPUT, 0) not in recipe.specs, "one dim is open"
    assert recipe.specs[OUTPUT, 0].dims == (("rows",), ("cols",))
    part = partition_here(recipe.graph, recipe.mesh, recipe.specs, inputs)
    assert part.specs[part.graph.inputs[0]].dims == ((), ("cols",))
    assert not list(collectives(part.graph))


def test_two_meshes_are_refused() -> None:
    second = TEXT.replace("@main", "@main", 1).replace(
        "sdy.mesh @mesh", 'sdy.mesh @other = <["z"=8]>\n  sdy.mesh @mesh'
    )
    with pytest.raises(ShardingError, match="rows=2,cols=4") as caught:
        user_mesh(import_with_shardings(second)[1])
    assert caught.value.code == "SW_MANUAL_MESH"


def one_weight(size: int = 8) -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]:
    b = Builder()
    w = b.input((size, 4), DType.F32)
    return (
        b.finish(b.op("tanh", w)),
        (Slot("params/w", "parameter"),),
        (Slot("params/w", "parameter"),),
    )


ROWS = ShardingConstraintAttrs((("data",), ()))
COLUMNS = ShardingConstraintAttrs(((), ("model",)))


def test_a_step_without_shardings_is_refused() -> None:
    graph, inputs, outputs = one_weight()
    for user in (None, ModuleShardings((), (None,), (None,))):
        with pytest.raises(ShardingError) as caught:
            recipe_of(graph, inputs, outputs, MESH, SETTINGS, user)
        assert caught.value.code == "SW_MANUAL_NONE"


def test_a_mesh_that_is_not_the_steps_is_refused() -> None:
    user = ModuleShardings((MESH.axes,), (ROWS,), (None,))
    with pytest.raises(ShardingError, match="data=4,model=2, got dp_shard=8") as caught:
        recipe_of(*one_weight(), make_mesh({"dp_shard": 8}), SETTINGS, user)
    assert caught.value.code == "SW_MANUAL_MESH"


def test_a_dim_that_does_not_divide_is_refused_with_advice() -> None:
    user = ModuleShardings((MESH.axes,), (ROWS,), (None,))
    with pytest.raises(ShardingError, match=r"multiple of 4 \(data=4\), got 6") as caught:
        recipe_of(*one_weight(6), MESH, SETTINGS, user)
    assert caught.value.code == "SW_MANUAL_DIVIDE"
    assert "pad the dim to 8" in caught.value.diagnostic.hint


def test_state_that_moves_is_refused() -> None:
    user = ModuleShardings((MESH.axes,), (ROWS,), (COLUMNS,))
    with pytest.raises(ShardingError, match=r"\[data, -\] and \[-, model\]") as caught:
        recipe_of(*one_weight(), MESH, SETTINGS, user)
    assert caught.value.code == "SW_MANUAL_STATE"


def test_a_result_alone_places_the_argument_too() -> None:
    user = ModuleShardings((MESH.axes,), (None,), (COLUMNS,))
    recipe = recipe_of(*one_weight(), MESH, SETTINGS, user)
    assert recipe.specs[INPUT, 0] == recipe.specs[OUTPUT, 0]
    assert recipe.reasons["params/w"] == "[-, model]: user, result"


def test_other_strategies_say_that_they_do_not_read_them() -> None:
    graph, inputs, outputs, user = step("constraints")
    recipe = recipe_of(graph, inputs, outputs, make_mesh({"dp_shard": 8}), StrategySettings(), user)
    assert [f.code for f in recipe.findings] == ["SW_MANUAL_UNREAD"]
    assert all(set(spec.axes) <= {"dp_shard"} for spec in recipe.specs.values())


def test_a_module_keeps_its_graph() -> None:
    assert len(import_module(TEXT).ops) == len(import_with_shardings(TEXT)[0].ops)


def test_a_shard_map_is_refused_at_its_line() -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    over = jax.sharding.PartitionSpec("data")
    own = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=over, out_specs=over)
    text = jax.jit(own).lower(jax.ShapeDtypeStruct((8, 8), jax.numpy.float32))
    with pytest.raises(ImportRuleError, match="shard_map") as caught:
        import_with_shardings(text.as_text(debug_info=True))
    assert caught.value.code == "NCC_EVRF001"
    assert caught.value.loc is not None and caught.value.loc.file.endswith("test_manual.py")
