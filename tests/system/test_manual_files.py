"""Model files with code of one rank among whole values (`shard_map`): compiled as one rank of the
mesh that they name, in Shardy's spelling and in HLO's, and run on all ranks, equal to JAX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.models import manual_steps
from tests.support.cells import diagonals
from tests.support.model_files import compile_line, meta_of, run_neff
from tests.system.test_partitioned_files import parts

P = PartitionSpec
RANKS = 8
FORMS = ("mlir", "hlo", "hlo.pb")


def mesh(**sizes: int) -> Mesh:
    devices = np.array(jax.devices("cpu")[:RANKS]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes))


GRID, ROWS = mesh(data=2, model=4), P("data")


def manual(body: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
    return jax.shard_map(body, mesh=GRID, in_specs=ins, out_specs=outs, check_vma=False)


def between_products(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    """Whole values on both sides, laid out by the region; a loop around it, and one inside."""

    def body(x: jax.Array, w: jax.Array, shift: jax.Array) -> jax.Array:
        h = lax.psum(x @ w, "model") + shift
        turn = [(0, 1), (1, 0)]
        return lax.fori_loop(0, 3, lambda n, h: lax.ppermute(h * 0.5, "data", turn) + n, h)

    ins = (P("data", "model"), P("model"), P())

    def turn(x: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = manual(body, ins, P("data"))(jnp.tanh(x), w, n)
        return x + y @ w.T, jnp.sum(y)

    return lax.scan(turn, x @ (w @ w.T), jnp.arange(2.0))


def of_ranks(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    """What each rank is, of no operand; several results, one of them of all ranks."""
    rows = manual(lambda: lax.axis_index(("data", "model"))[None], (), P(("data", "model")))
    both = manual(
        lambda x: (2 * x, lax.all_gather(x, "model", axis=1, tiled=True)),
        (P("data", "model"),),
        (P("data", "model"), P("data")),
    )
    return rows(), *both(x), jnp.sum(w)


def exchanged(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    """The gradient of an exchange, over one axis and over both."""

    def body(x: jax.Array) -> jax.Array:
        x = lax.all_to_all(x, "model", 0, 1, tiled=True)
        return lax.psum_scatter(x, ("data", "model"), scatter_dimension=0, tiled=True)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        spread = jnp.tile(x, (16, 1)) @ w / 64
        return jnp.sum(jnp.sin(manual(body, (P(None, "model"),), P(("data", "model")))(spread)))

    return jax.value_and_grad(loss, argnums=(0, 1))(x, w)


STEPS = {step.__name__: step for step in (between_products, of_ranks, exchanged)}


def compiled(
    step: Callable[..., Any], on: Mesh, arrays: Any, form: str, folder: Path, **given: Any
) -> Path:
    """The NEFF of a file of the step as JAX lowers it, of whole values on every rank."""
    whole = NamedSharding(on, P())
    given = {"in_shardings": whole, "out_shardings": whole} | given
    lowered = jax.jit(step, **given).lower(*arrays)
    path = folder / f"m.{form}"
    match form:
        case "mlir":
            path.write_text(lowered.as_text(debug_info=True))
        case "hlo":
            path.write_text(lowered.as_text(dialect="hlo"))
        case _:
            path.write_bytes(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())
    line = f"neuronx-cc compile {path} --framework XLA --target trn1 --output {path}.neff"
    assert compile_line(line) == 0
    return Path(f"{path}.neff")


def check(neff: Path, arrays: Any, wanted: Any, *levels: str) -> None:
    """Every rank has what JAX computes."""
    for level in levels:
        found = run_neff(neff, [np.stack([a] * RANKS) for a in jax.tree.leaves(arrays)], level)
        for have, want in zip(found, jax.tree.leaves(wanted), strict=True):
            assert have.shape == (RANKS, *want.shape) and np.abs(want).max() > 0
            scale = np.abs(np.asarray(want)).max()
            for rank in have:
                np.testing.assert_allclose(rank / scale, want / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "form"), diagonals([(name, form) for name in STEPS for form in FORMS], 4)
)
def test_code_of_one_rank_stands_in_its_file(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((8, 16), (16, 8))]
    neff = compiled(STEPS[name], GRID, arrays, form, tmp_path)
    assert meta_of(neff)["mesh"] == [["data", 2], ["model", 4]]
    levels = ("L1", "L0") if form == "mlir" else ("L0",)
    check(neff, arrays, STEPS[name](*map(jnp.asarray, arrays)), *levels)


@pytest.mark.parametrize("name", manual_steps.SHAPES)
def test_programs_of_ranks_stand_in_their_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ring attention, experts behind exchanges, data parallel and gathered weights by hand: loss
    and gradients, each by the collectives that it is written with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(manual_steps, "mesh", lambda axis: mesh(**{axis: RANKS}))
    loss, shapes = manual_steps.SHAPES[name]
    rng = np.random.default_rng(5)
    params = {n: rng.standard_normal(s).astype(np.float32) / 4 for n, s in sorted(shapes.items())}
    batch = {n: rng.standard_normal((8, 16, 16)).astype(np.float32) for n in "xy"}
    step = jax.value_and_grad(loss)
    axis = {"ring_attention": "cp", "moe_all_to_all": "ep", "shard_map_psum_step": "data"}
    on = mesh(**{axis.get(name, "shard"): RANKS})
    neff = compiled(step, on, (params, batch), "hlo", tmp_path)
    check(neff, (params, batch), jax.jit(step)(params, batch), "L0")


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["L1", "L0"])
def test_experts_behind_exchanges_of_runs_are_all_experts(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients of compiled code on 8 cores, against every row through every expert."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(manual_steps, "mesh", lambda axis: mesh(**{axis: RANKS}))
    shapes = manual_steps.SHAPES["moe_all_to_all"][1]
    rng = np.random.default_rng(5)
    params = {n: rng.standard_normal(s).astype(np.float32) / 4 for n, s in sorted(shapes.items())}
    batch = {n: rng.standard_normal((8, 16, 16)).astype(np.float32) for n in "xy"}
    arrays = (params, batch)
    step = jax.value_and_grad(manual_steps.moe_ragged)
    neff = compiled(step, mesh(ep=RANKS), arrays, "mlir", tmp_path)
    check(neff, arrays, jax.jit(jax.value_and_grad(manual_steps.all_experts))(*arrays), level)


def test_what_is_outside_is_partitioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and outputs are a rank's: laid out as the file says, and open ones as the region."""
    monkeypatch.chdir(tmp_path)

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        y = manual(lambda x, w: lax.psum(x @ w, "model"), (P("data", "model"), P("model")), ROWS)
        return y(jnp.tanh(x), w) * 2

    rng = np.random.default_rng(4)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 16), (16, 4)))
    over = NamedSharding(GRID, P("data", "model")), NamedSharding(GRID, P("model"))
    rows = NamedSharding(GRID, ROWS)
    neff = compiled(step, GRID, (x, w), "mlir", tmp_path, in_shardings=over, out_shardings=rows)
    given = [parts(x, over[0]), parts(w, over[1])]
    assert [part.shape for part in given] == [(8, 4, 4), (8, 4, 4)]
    for level in ("L1", "L0"):
        (found,) = run_neff(neff, given, level)
        wanted = parts(np.asarray(step(jnp.asarray(x), jnp.asarray(w))), rows)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_shardings_of_hlo_text_are_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of StableHLO are, where the header says how many partitions there are; without, the
    file is one program on whole values, and that is said.
    """
    monkeypatch.chdir(tmp_path)
    open_columns = NamedSharding(GRID, P("data", P.UNCONSTRAINED))

    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = lax.with_sharding_constraint(jnp.tanh(x) @ w, open_columns)
        return y, jnp.sum(y)

    rng = np.random.default_rng(4)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 16), (16, 4)))
    over, rows = NamedSharding(GRID, P("data", "model")), NamedSharding(GRID, ROWS)
    whole = NamedSharding(GRID, P())
    given = {"in_shardings": (over, whole), "out_shardings": (rows, whole)}
    text = jax.jit(step, **given).lower(x, w).as_text(dialect="hlo")
    line = "neuronx-cc compile m.hlo --framework XLA --target trn1 --output m.neff"
    Path("m.hlo").write_text(text)
    assert compile_line(line) == 0
    assert "SW_SHARDING_UNUSED" in capsys.readouterr().err
    Path("m.hlo").write_text(text.replace("HloModule jit_step,", "HloModule m, num_partitions=8,"))
    assert compile_line(line) == 0
    assert "SW_SHARDING_UNUSED" not in capsys.readouterr().err
    found = run_neff(Path("m.neff"), [parts(x, over), parts(w, whole)])
    for have, want, where in zip(
        found, step(*map(jnp.asarray, (x, w))), (rows, whole), strict=True
    ):
        np.testing.assert_allclose(have, parts(np.asarray(want), where), rtol=1e-5, atol=1e-5)


REFUSED = {
    "some axes are automatic": (
        {"axis_names": frozenset(["data"]), "in_specs": ROWS, "out_specs": ROWS},
        "requires all axes of its mesh",
        "model left to the partitioner",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_code_of_one_rank_that_cannot_be_taken_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given, required, got = REFUSED[name]
    step = jax.shard_map(lambda x: x * 2, mesh=GRID, check_vma=False, **given)
    Path("m.mlir").write_text(jax.jit(step).lower(jnp.ones((8, 8))).as_text(debug_info=True))
    assert compile_line("neuronx-cc compile m.mlir --framework XLA --target trn1") == 70
    shown = " ".join(capsys.readouterr().err.split())
    assert "NCC_EVRF001" in shown and required in shown and got in shown, shown
    assert "test_manual_files.py:" in shown
