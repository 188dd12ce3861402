"""`shard_map` as code of whole values: against jax on as many devices as the mesh has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.capture import artifact_of, capture
from shardwright.compiler.frontend.hlo import hlo_to_stablehlo
from shardwright.compiler.frontend.programs import check_groups, check_nested
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.reference import evaluate
from tests.models import manual_steps
from tests.models.manual_steps import SHAPES, make_task

P = PartitionSpec
X = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
AXES = {"d": 4, "m": 2}
ROUND = [(r, (r + 1) % 4) for r in range(4)]


def devices(axes: dict[str, int]) -> Mesh:
    count = int(np.prod(list(axes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(*axes.values()), tuple(axes))


def every_collective(x: jax.Array) -> jax.Array:
    y = lax.psum(jnp.sin(x), "m") + lax.axis_index("d")
    y = lax.ppermute(y, "d", ROUND) * lax.pmax(lax.stop_gradient(x.sum()), ("d", "m"))
    whole = lax.all_gather(y, "d", tiled=True)
    part = lax.psum_scatter(whole, "d", tiled=True)
    moved = lax.all_to_all(part, "d", 1, 0, tiled=True)
    return lax.all_to_all(moved, "d", 0, 1, tiled=True) + lax.pmin(lax.stop_gradient(x), "m")


def sent_to_some(x: jax.Array) -> jax.Array:
    return lax.ppermute(x, "d", [(0, 2), (3, 1)])


def in_a_loop(x: jax.Array) -> jax.Array:
    def turn(carry: Any, _: Any) -> Any:
        return jax.checkpoint(lambda c: lax.ppermute(jnp.tanh(c), "d", ROUND))(carry), carry.sum()

    out, sums = lax.scan(turn, x, None, length=3)
    out = lax.fori_loop(0, 2, lambda i, c: c + lax.psum(c * i, "m") / 8, out)
    return lax.cond(lax.axis_index("d") > 1, lambda: out * 2, lambda: out) + sums.sum()


@jax.custom_vjp
def halved(x: jax.Array) -> jax.Array:
    return x / 2


halved.defvjp(lambda x: (halved(x), x), lambda x, g: (g * jnp.cos(x),))


def with_own_gradient(x: jax.Array) -> jax.Array:
    return halved(jax.nn.relu(x)) * lax.psum(x, "d")


def random_per_rank(x: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(7), lax.axis_index("d"))
    return x + jax.random.normal(key, x.shape)


Case = tuple[Callable[..., Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "every_collective": (every_collective, {"in_specs": P("d", "m"), "out_specs": P("d", "m")}),
    "sent_to_some": (sent_to_some, {"in_specs": P("d"), "out_specs": P("d")}),
    "in_a_loop": (in_a_loop, {"in_specs": P("d", "m"), "out_specs": P("d", "m")}),
    "with_own_gradient": (with_own_gradient, {"in_specs": P("d"), "out_specs": P("d")}),
    "random_per_rank": (random_per_rank, {"in_specs": P("d"), "out_specs": P("d")}),
    "both axes of one dim": (
        lambda x: x * (2 * lax.axis_index("m") + lax.axis_index("d")),
        {"in_specs": P(None, ("m", "d")), "out_specs": P(None, ("m", "d"))},
    ),
    "another place": (
        lambda x: lax.all_gather(x, "m", axis=1, tiled=True),
        {"in_specs": P(("d", "m")), "out_specs": P("d", "m")},
    ),
    "replicated": (lambda x: lax.psum(x, ("d", "m")), {"in_specs": P("d", "m"), "out_specs": P()}),
    "claimed to be equal": (
        lambda x: lax.all_gather(x, "d", tiled=True),
        {"in_specs": P("d"), "out_specs": P(), "check_vma": False},
    ),
    "one axis of two": (
        lambda x: lax.psum(x, "d") + lax.axis_index("d"),
        {"in_specs": P("d"), "out_specs": P("d"), "axis_names": {"d"}},
    ),
}


def pair(name: str, wrap: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The case as a user has it without devices, and on devices."""
    fn, given = CASES[name]
    abstract = AbstractMesh(tuple(AXES.values()), tuple(AXES))
    meshes = (abstract, devices(AXES))
    one, other = (wrap(jax.shard_map(fn, mesh=mesh, **given)) for mesh in meshes)
    return one, other


def check(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    graph = import_module(artifact_of(jax.jit(ours).trace(X)))
    wanted = jax.tree.leaves(jax.jit(theirs)(X))
    for have, want in zip(evaluate(graph, [X]), wanted, strict=True):
        scale = float(np.abs(want).max())
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    check(*pair(name, lambda fn: fn))


def test_a_mesh_without_axes_is_one_core() -> None:
    """As `jax.make_mesh((), ())` gives it: the code of a rank is that of the whole value."""
    fn = jax.shard_map(jnp.sin, mesh=jax.make_mesh((), ()), in_specs=P(), out_specs=P())
    check(fn, jnp.sin)


def test_axes_of_explicit_meshes() -> None:
    """What a rank computes there is the partitioner's choice as over any other mesh."""
    mesh = AbstractMesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    check(jax.shard_map(jnp.sin, mesh=mesh, in_specs=P(), out_specs=P()), jnp.sin)


@pytest.mark.parametrize("name", [n for n in CASES if n != "claimed to be equal"])
def test_gradients(name: str) -> None:
    check(*pair(name, lambda fn: jax.grad(lambda x: jnp.sum(jnp.sin(fn(x))))))


@pytest.mark.parametrize("name", SHAPES)
def test_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(name)
    graph = import_module(capture(task, 8).artifact)
    state, batch = task.init(jax.random.key(0)), next(task.batches(0, 8, None))
    have = evaluate(graph, [np.asarray(x) for x in jax.tree.leaves((*state, batch))])
    monkeypatch.setattr(manual_steps, "mesh", lambda axis: devices({axis: manual_steps.RANKS}))
    wanted = jax.tree.leaves(jax.jit(task.step)(*state, batch))
    for one, other in zip(have, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_rows_exchanged_in_runs_are_those_of_every_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:CPU has no ragged exchange to compare with."""
    task = make_task(manual_steps.RAGGED)
    graph = import_module(capture(task, 8).artifact)
    state, batch = task.init(jax.random.key(0)), next(task.batches(0, 8, None))
    have = evaluate(graph, [np.asarray(x) for x in jax.tree.leaves((*state, batch))])
    monkeypatch.setattr(manual_steps, "moe_ragged", manual_steps.all_experts)
    wanted = jax.tree.leaves(jax.jit(make_task(manual_steps.RAGGED).step)(*state, batch))
    for one, other in zip(have, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def nested(mesh: Any) -> Callable[..., Any]:
    """A region over one axis in a region over another."""
    over = P(None, "m")

    def rows(x: jax.Array) -> jax.Array:
        return lax.psum(inside(x) * (1 + lax.axis_index("d")), "d")

    given = {"in_specs": over, "out_specs": over, "axis_names": {"m"}}
    inside = jax.shard_map(lambda y: jnp.sin(y) * lax.axis_index("m"), **given)
    fn = jax.shard_map(rows, mesh=mesh, in_specs=P("d"), out_specs=P(), axis_names={"d"})
    return lambda x: fn(x) ** 2


def test_a_region_in_a_region() -> None:
    abstract = AbstractMesh(tuple(AXES.values()), tuple(AXES))
    check(nested(abstract), nested(devices(AXES)))
    check_nested(jax.jit(nested(abstract)).trace(X).jaxpr)


def test_the_gradient_of_a_region_in_a_region_is_refused_at_its_line() -> None:
    """As jax does, without a line."""
    by = jax.jit(jax.grad(lambda x: jnp.sum(nested(devices(AXES))(x))))
    with pytest.raises(ValueError, match="already bound by a parent"):
        by.lower(X)
    with pytest.raises(ImportRuleError, match="residuals over d too") as caught:
        check_nested(by.trace(X).jaxpr)
    found = caught.value.diagnostic
    assert found.code == "NCC_EVRF001" and "one over the axes of both" in found.hint
    assert found.loc is not None and found.loc.file.endswith("test_manual_regions.py")


def test_groups_within_an_axis_are_refused_at_their_line() -> None:
    def paired(x: jax.Array) -> jax.Array:
        return lax.psum(x, "d", axis_index_groups=[[0, 1], [2, 3]])

    fn = jax.shard_map(
        paired, mesh=AbstractMesh((4,), ("d",)), in_specs=P("d"), out_specs=P("d"), check_vma=False
    )
    with pytest.raises(ImportRuleError, match="requires whole axes") as caught:
        check_groups(jax.jit(fn).trace(X).jaxpr)
    found = caught.value.diagnostic
    assert found.code == "NCC_EVRF001" and "two axes" in found.hint
    assert found.loc is not None and found.loc.file.endswith("test_manual_regions.py")


def test_parts_per_rank_are_said() -> None:
    (warning,) = capture(make_task("ring_attention"), 8).findings
    assert (warning.code, warning.severity) == ("SW_SHARD_MAP", "warning")
    assert warning.loc is not None and warning.loc.file.endswith("manual_steps.py")


def test_operations_keep_the_users_lines() -> None:
    graph = import_module(capture(make_task("ring_attention"), 8).artifact)
    lines = {op.loc.file for op in graph.walk() if op.name == "dot_general"}
    assert all(line.endswith("manual_steps.py") for line in lines)


def test_a_manual_region_of_an_hlo_proto_says_what_to_compile_instead() -> None:
    fn = jax.shard_map(sent_to_some, mesh=devices({"d": 4}), in_specs=P("d"), out_specs=P("d"))
    proto = jax.jit(fn).lower(X).compiler_ir("hlo").as_serialized_hlo_module_proto()
    with pytest.raises(ImportRuleError, match="requires a file whose one rank") as caught:
        import_module(hlo_to_stablehlo(proto))
    found = caught.value.diagnostic
    assert found.code == "NCC_EVRF001" and "plan and run" in found.hint
    assert str(found.loc).startswith(__file__.rpartition("/")[2]) or "test_manual" in str(found.loc)
