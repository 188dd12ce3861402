"""Meshes: order, products, what users may write, and what is refused with which numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.collectives.ops import ReplicaGroups
from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import Value, tensor_type
from shardwright.sharding.localize.context import Localizer
from shardwright.sharding.partition.mesh import AXES, DATA_AXES, make_mesh, parse_mesh
from shardwright.sharding.partition.spec import ShardingSpec, replicated, sharded
from tests.support.partitioned import coordinates


def test_axes_are_ordered_major_to_minor_whatever_the_user_wrote() -> None:
    mesh = parse_mesh("tp=2,dp_shard=4,pp=4", 32)
    assert mesh.axes == (("pp", 4), ("dp_shard", 4), ("tp", 2))
    assert str(mesh) == "pp=4,dp_shard=4,tp=2"


def test_no_axis_takes_every_core() -> None:
    assert parse_mesh("", 32).sizes == {"dp_shard": 32}
    assert parse_mesh({}, 64, auto="dp_replicate").sizes == {"dp_replicate": 64}


def test_auto_takes_what_is_left() -> None:
    assert parse_mesh("dp_shard=auto,tp=8", 32).sizes == {"dp_shard": 4, "tp": 8}
    assert parse_mesh({"dp_replicate": 2, "dp_shard": "auto"}, 32).sizes["dp_shard"] == 16


def test_a_wrong_product_is_printed() -> None:
    with pytest.raises(ShardingError, match=r"needs 7 \* 4 = 28 cores, target has 32") as caught:
        parse_mesh("dp_shard=7,tp=4", 32)
    assert caught.value.code == "SW_MESH_PRODUCT"
    assert caught.value.diagnostic.hint == (
        "choose sizes whose product is 32, or set one axis to auto"
    )


@pytest.mark.parametrize(
    ("text", "instances"),
    [
        ("dp_shard=64,tp=4", "--instances 8 has 256 cores; or choose sizes"),
        ("dp_shard=32", "--instances 1 has 32 cores; or choose sizes"),
        ("dp_shard=80", "choose sizes"),
        ("dp_shard=auto,tp=128", "--instances 4 has 128 cores; or choose axes"),
        ("dp_shard=auto,tp=3", "--instances 3 has 96 cores; or choose axes"),
    ],
)
def test_a_wrong_product_says_with_how_many_instances_it_is_right(
    text: str, instances: str
) -> None:
    """Of 32 cores each, of which there are two."""
    with pytest.raises(ShardingError) as caught:
        parse_mesh(text, 64, per_instance=32)
    assert caught.value.diagnostic.hint.startswith(instances)
    if "instances" in instances:
        cores = int(instances.split()[3])
        assert parse_mesh(text, cores, per_instance=32).num_cores == cores


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("data=4", "SW_MESH_AXIS"),
        ("dp_shard=0", "SW_MESH_SIZE"),
        ("dp_shard=four", "SW_MESH_SIZE"),
        ("dp_shard", "SW_MESH_TEXT"),
        ("dp_shard=2,dp_shard=2", "SW_MESH_TEXT"),
        ("dp_shard=auto,tp=auto", "SW_MESH_AUTO"),
        ("dp_shard=auto,tp=3", "SW_MESH_PRODUCT"),
    ],
)
def test_refusals(text: str, code: str) -> None:
    with pytest.raises(ShardingError) as caught:
        parse_mesh(text, 4)
    assert caught.value.code == code


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.sampled_from(AXES), st.integers(1, 4), min_size=1))
def test_coordinates_and_groups_cover_the_ranks(sizes: dict[str, int]) -> None:
    mesh = make_mesh(sizes)
    ranks = range(mesh.num_cores)
    assert len({tuple(coordinates(mesh, r).items()) for r in ranks}) == len(ranks)
    for axis in mesh.names:
        groups = ReplicaGroups.from_axes(mesh.sizes, [axis]).groups
        assert sorted(r for g in groups for r in g) == list(ranks)
        for group in groups:
            assert [coordinates(mesh, r)[axis] for r in group] == list(range(sizes[axis]))


def test_specs_say_local_shapes_and_refuse_what_does_not_divide() -> None:
    spec = sharded(2, 1, ("dp_replicate", "dp_shard"))
    sizes = {"dp_replicate": 2, "dp_shard": 4}
    assert spec.local_shape((3, 16), sizes) == (3, 2)
    assert str(spec) == "[-, dp_replicate+dp_shard]"
    assert spec.axes == ("dp_replicate", "dp_shard") and not replicated(2).axes
    assert str(ShardingSpec(((),), ("tp",))) == "[-] partial over tp"
    with pytest.raises(ValueError, match="dim 1 requires a multiple of 8, got 12"):
        spec.local_shape((3, 12), sizes)


@pytest.mark.parametrize("spec", [replicated(1), replicated(3), sharded(2, 1, ("tp",))])
def test_a_spec_of_another_rank_or_mesh_is_refused(spec: ShardingSpec) -> None:
    context = Localizer(make_mesh({"dp_shard": 4}), {})
    value = Value(tensor_type((8, 16), DType.F32))
    context.specs = {value: spec}
    with pytest.raises(ShardingError, match="requires a spec of 2 dims over the axes"):
        context.local_type(value)


def test_experts_are_the_inner_part_of_the_shard_axis() -> None:
    mesh = parse_mesh("dp_shard=8,ep=4,tp=2", 16)
    assert mesh.axes == (("dp_shard", 2), ("ep", 4), ("tp", 2))
    assert mesh.size(DATA_AXES) == 8
    with pytest.raises(ShardingError, match=r"mesh\.ep requires a divisor of dp_shard=8, got 3"):
        parse_mesh("dp_shard=8,ep=3", 8)
