"""Model files that are the program of one rank of many, as XLA's partitioner and torch-xla hand
them to the compiler: compiled as they are, run on all ranks, equal to XLA and to the whole
model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.compiler.neff.bundle import read_program
from shardwright.compiler.neff.reader import Container
from tests.support.model_files import compile_line, meta_of, run_neff, write_model
from tests.support.xla import run_ranks

RANKS = 8
SUM = """({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
  })"""
X = "tensor<8x8xf32>"
INNER, OUTER = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]
WIDE = PartitionSpec("data", "model")
MIDDLE = [[0, 2], [1, 3], [4, 6], [5, 7]]
OTHER_ORDER = [[0, 4, 2, 6], [1, 5, 3, 7]]  # the middle digit of the rank is major to the outer


def groups(rows: Sequence[Sequence[int]]) -> str:
    return f"replica_groups = dense<{rows}> : tensor<{len(rows)}x{len(rows[0])}xi64>"


def gather(rows: Sequence[Sequence[int]]) -> tuple[str, str]:
    out = f"tensor<8x{8 * len(rows[0])}xf32>"
    given = f"all_gather_dim = 1 : i64, {groups(rows)}"
    return f'"stablehlo.all_gather"(%x) <{{{given}}}> : ({X}) -> {out}', out


def scatter(rows: Sequence[Sequence[int]]) -> tuple[str, str]:
    out = f"tensor<{8 // len(rows[0])}x8xf32>"
    given = f"scatter_dimension = 0 : i64, {groups(rows)}"
    return f'"stablehlo.reduce_scatter"(%x) <{{{given}}}> {SUM} : ({X}) -> {out}', out


def add(rows: Sequence[Sequence[int]]) -> tuple[str, str]:
    return f'"stablehlo.all_reduce"(%x) <{{{groups(rows)}}}> {SUM} : ({X}) -> {X}', X


def exchange(rows: Sequence[Sequence[int]]) -> tuple[str, str]:
    size = len(rows[0])
    out = f"tensor<{8 // size}x{8 * size}xf32>"
    given = (
        "split_dimension = 0 : i64, concat_dimension = 1 : i64,"
        f" split_count = {size} : i64, {groups(rows)}"
    )
    return f'"stablehlo.all_to_all"(%x) <{{{given}}}> : ({X}) -> {out}', out


def permute(pairs: Sequence[Sequence[int]]) -> tuple[str, str]:
    given = f"source_target_pairs = dense<{pairs}> : tensor<{len(pairs)}x2xi64>"
    return f'"stablehlo.collective_permute"(%x) <{{{given}}}> : ({X}) -> {X}', X


LINES = {
    "gather the inner digit": gather(INNER),
    "gather in another order": gather(OTHER_ORDER),
    "gather all": gather([[*range(8)]]),
    "scatter over the outer digit": scatter(OUTER),
    "scatter in another order": scatter(OTHER_ORDER),
    "add over the middle digit": add(MIDDLE),
    "add in any order": add([[3, 1, 0, 2], [7, 4, 5, 6]]),
    "exchange": exchange(OUTER),
    "ring": permute([[r, (r + 1) % 8] for r in range(8)]),
    "some send": permute([[0, 4], [1, 5], [2, 6], [3, 7]]),
    "few send": permute([[2, 1], [5, 6]]),
    "which rank": ("stablehlo.replica_id : tensor<ui32>", "tensor<ui32>"),
}


def module(lines: Sequence[tuple[str, str]], ranks: str = "mhlo.num_replicas = 8 : i32") -> str:
    body = "\n".join(
        f'    %y{k} = {line} loc("net.py":{k + 1}:1)' for k, (line, _) in enumerate(lines)
    )
    results = ", ".join(out for _, out in lines)
    values = ", ".join(f"%y{k}" for k in range(len(lines)))
    return f"""module @m attributes {{{ranks}}} {{
  func.func @main(%x: {X}) -> ({results}) {{
{body}
    return {values} : {results}
  }}
}}"""


def parts(array: np.ndarray, where: NamedSharding) -> np.ndarray:
    """What each device of a mesh has, [devices, ...]."""
    shards = jax.device_put(array, where).addressable_shards
    return np.stack([np.asarray(s.data) for s in sorted(shards, key=lambda s: s.device.id)])


def compiled(tmp_path: Path, name: str, data: str | bytes) -> Path:
    """The NEFF of a model file."""
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    line = f"neuronx-cc compile {path} --framework XLA --target trn1 --output {path}.neff"
    assert compile_line(line) == 0
    return Path(f"{path}.neff")


def test_collectives_of_a_module_are_those_of_xla(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = module(list(LINES.values()))
    neff = compiled(tmp_path, "all.mlir", text)
    assert meta_of(neff)["mesh"] == [["rank_0", 2], ["rank_1", 2], ["rank_2", 2]]
    parts = np.random.default_rng(0).normal(size=(RANKS, 8, 8)).astype(np.float32)
    wanted = [
        np.stack(out) for out in zip(*run_ranks(text, [[part] for part in parts]), strict=True)
    ]
    for level in ("L1", "L0"):
        found = run_neff(neff, [parts], level)
        for name, have, want in zip(LINES, found, wanted, strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-6, atol=1e-6, err_msg=f"{level} {name}")


@pytest.mark.parametrize(("release", "count"), [("", 2), ("2.24.5133", 4)])
def test_small_reductions_that_follow_each_other_are_one_from_sdk_2_30(
    release: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the values of one by one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.mlir").write_text(module([scatter([[*range(8)]])] * 2 + [scatter(OUTER)] * 2))
    profile = f"--compiler-version-profile {release}" if release else ""
    assert compile_line(f"neuronx-cc compile m.mlir --target trn1 {profile} --output m.neff") == 0
    program = read_program(Container.open(tmp_path / "m.neff", "program"))
    calls = [call for f in program.functions for call in f.collectives]
    parts = np.random.default_rng(6).normal(size=(RANKS, 8, 8)).astype(np.float32)
    found = run_neff(tmp_path / "m.neff", [parts])
    every, _, pairs, _ = found
    np.testing.assert_allclose(every[:, 0], parts.sum(axis=0), rtol=1e-5)
    both = parts[:4] + parts[4:]
    np.testing.assert_allclose(pairs, np.concatenate([both[:, :4], both[:, 4:]]), rtol=1e-6)
    np.testing.assert_array_equal(every, found[1])
    assert len(calls) == count, [call.name for call in calls]


@pytest.mark.parametrize(("dim", "groups_of"), [(0, 4), (1, 2)])
def test_a_collective_matmul_is_the_product_of_what_it_gathers(
    dim: int, groups_of: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vendor's call of neuronx-distributed-inference, over groups of neighbouring ranks."""
    monkeypatch.chdir(tmp_path)
    rhs = "16x5" if dim == 0 else "5x16"
    config = f"rhs_contracting_dim={dim},tp_degree={groups_of},num_groups={4 // groups_of}"
    out = f"tensor<{3 * groups_of}x5xf32>"
    text = f"""func.func @main(%w: tensor<3x16xf32>, %x: tensor<{rhs}xf32>) -> {out} {{
      %y = stablehlo.custom_call @AwsNeuronCollectiveMatmul(%w, %x)
        {{backend_config = "{config},use_sb_to_sb=0"}}
        : (tensor<3x16xf32>, tensor<{rhs}xf32>) -> {out}
      return %y : {out}
    }}"""
    neff = compiled(tmp_path, "joined.mlir", text)
    rng = np.random.default_rng(2)
    w = rng.normal(size=(4, 3, 16)).astype(np.float32)
    x = rng.normal(size=(4, *map(int, rhs.split("x")))).astype(np.float32)
    whole = w.reshape(4 // groups_of, 3 * groups_of, 16).repeat(groups_of, axis=0)
    wanted = whole @ (x if dim == 0 else x.swapaxes(1, 2))
    for level in ("L1", "L0"):
        (found,) = run_neff(neff, [w, x], level)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_replicas_of_partitions_are_ranks_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    handle = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"
    to_next = permute([[p, (p + 1) % 4] for p in range(4)])[0].replace("}>", f", {handle}}}>")
    ids = [
        (f"stablehlo.{kind}_id : tensor<ui32>", "tensor<ui32>") for kind in ("replica", "partition")
    ]
    lines = [add([[0, 1]]), (to_next, X), *ids]
    counts = "mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 4 : i32"
    neff = compiled(tmp_path, "grid.mlir", module(lines, counts))
    parts = np.random.default_rng(4).normal(size=(2, 4, 8, 8)).astype(np.float32)
    sums, moved, replicas, partitions = run_neff(neff, [parts.reshape(RANKS, 8, 8)])
    wanted = np.broadcast_to(parts.sum(axis=0), parts.shape)
    np.testing.assert_allclose(sums.reshape(parts.shape), wanted, rtol=1e-6)
    np.testing.assert_array_equal(moved.reshape(parts.shape), np.roll(parts, 1, axis=1))
    assert replicas.tolist() == [0] * 4 + [1] * 4 and partitions.tolist() == [0, 1, 2, 3] * 2


OLD_HLO = """HloModule SyncTensors

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(f32[] %a, f32[] %b)
}

ENTRY %main (x: f32[4,8], w: f32[8]) -> (f32[4,8], f32[8], f32[4,8]) {
  %x = f32[4,8] parameter(0)
  %w = f32[8] parameter(1)
  %both = (f32[4,8], f32[8]) all-reduce(%x, %w), replica_groups={{0,1},{2,3}}, to_apply=%add
  %p = f32[4,8] get-tuple-element(%both), index=0
  %q = f32[8] get-tuple-element(%both), index=1
  %y = f32[4,8] multiply(f32[4,8] %x, f32[4,8] %p)
  %top = f32[4,8] slice(%y), slice={[0:4], [0:8]}
  %low = f32[4,8] copy(%x)
  %swap = (f32[4,8], f32[4,8]) all-to-all(%top, %low), replica_groups={{0,2},{1,3}}
  %z = f32[4,8] get-tuple-element(%swap), index=1
  ROOT %out = (f32[4,8], f32[8], f32[4,8]) tuple(%p, %q, %z)
}
"""


def test_hlo_of_torch_xla_with_tuples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    neff = compiled(tmp_path, "old.hlo", OLD_HLO)
    rng = np.random.default_rng(1)
    x, w = (rng.normal(size=(4, *shape)).astype(np.float32) for shape in ((4, 8), (8,)))
    p, q, z = run_neff(neff, [x, w])
    sums = x + x[[1, 0, 3, 2]]
    np.testing.assert_allclose(p, sums, rtol=1e-6)
    np.testing.assert_allclose(q, w + w[[1, 0, 3, 2]], rtol=1e-6)
    # Rank r of a pair receives operand r of both; index 1 is from the second of the pair.
    y = x * sums
    np.testing.assert_allclose(z, np.stack([y[2], y[3], x[2], x[3]]), rtol=1e-6)


def test_what_xla_partitioned_gives_the_gradients_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mesh = Mesh(np.array(jax.devices("cpu")[:RANKS]).reshape(2, 4), ("data", "model"))
    specs = [PartitionSpec("data", "model"), PartitionSpec("model", "data"), PartitionSpec("data")]

    def loss(first: jax.Array, second: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ first) @ second) ** 2)

    rng = np.random.default_rng(2)
    shapes = ((32, 64), (64, 32), (16, 32))
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    step = jax.value_and_grad(loss, argnums=(0, 1))
    placed = [NamedSharding(mesh, spec) for spec in specs]
    lowered = jax.jit(step, in_shardings=placed, out_shardings=(None, tuple(placed[:2]))).lower(
        *arrays
    )
    dump = {"xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_proto": True}
    lowered.compile(compiler_options={"xla_dump_to": str(tmp_path / "xla"), **dump})
    (proto,) = (tmp_path / "xla").glob("*after_spmd-partitioning*.hlo.pb")
    neff = compiled(tmp_path, "step.hlo.pb", proto.read_bytes())
    assert "SW_SHARDING_UNUSED" not in capsys.readouterr().err

    value, gradients = jax.jit(step)(*arrays)
    found = run_neff(neff, [parts(a, s) for a, s in zip(arrays, placed, strict=True)])
    np.testing.assert_allclose(found[0], np.full(RANKS, value), rtol=1e-5)
    for have, whole, where in zip(found[1:], gradients, placed, strict=False):
        np.testing.assert_allclose(have, parts(np.asarray(whole), where), rtol=1e-4, atol=1e-6)


OURS, VERIFIER = "SW_REPLICA_GROUPS", "NCC_EVRF064"
REFUSED = {
    "a rank is missing": (add([[0, 1], [2, 3]]), OURS, "each of 8 replicas once"),
    "a rank twice": (add([[0, 1, 2, 3], [3, 4, 5, 6]]), VERIFIER, "once"),
    "no regular distances": (gather([[0, 1, 3, 2], [4, 5, 6, 7]]), OURS, "regular distances"),
    "unequal": (add([[0, 1, 2, 3, 4, 5], [6, 7, -1, -1, -1, -1]]), OURS, "equal sizes"),
    "an exchange out of order": (exchange(OTHER_ORDER), OURS, "in the order of"),
    "two to one": (permute([[0, 1], [2, 1]]), VERIFIER, "duplicate"),
    "a rank that is not": (permute([[0, 9]]), OURS, "replicas below 8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_cannot_be_are_refused_at_their_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line, code, why = REFUSED[name]
    Path("m.mlir").write_text(module([line]))
    assert compile_line("neuronx-cc compile m.mlir --framework XLA --target trn1") == 70
    shown = capsys.readouterr().err
    assert code in shown and why in shown and "net.py:1" in shown, shown


def test_a_file_is_partitioned_by_its_own_shardings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module nobody has partitioned yet, as JAX writes it for a mesh: columns, then rows, and a
    donated sum of gradients; each rank has what JAX's own devices have.
    """
    monkeypatch.chdir(tmp_path)
    mesh = Mesh(np.array(jax.devices("cpu")[:RANKS]).reshape(2, 4), ("data", "model"))
    specs = (("data",), (None, "model"), ("model",), ("model",))
    placed = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]

    def step(x: jax.Array, up: jax.Array, down: jax.Array, total: jax.Array) -> tuple:
        hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ up), NamedSharding(mesh, WIDE))
        return hidden @ down, total + hidden.T @ (hidden @ down)

    rng = np.random.default_rng(5)
    shapes = ((8, 6), (6, 12), (12, 4), (12, 4))
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    results = (placed[0], placed[3])
    jitted = jax.jit(step, in_shardings=placed, out_shardings=results, donate_argnums=3)
    Path("m.mlir").write_text(jitted.lower(*arrays).as_text())
    line = "neuronx-cc compile m.mlir --framework XLA --target trn1 --output m.neff"
    assert compile_line(line) == 0
    assert "SW_SHARDING_UNUSED" not in capsys.readouterr().err
    assert meta_of(Path("m.neff"))["mesh"] == [["data", 2], ["model", 4]]
    given = [parts(a, where) for a, where in zip(arrays, placed, strict=True)]
    for level in ("L1", "L0"):
        found = run_neff(Path("m.neff"), given, level)
        for have, whole, where in zip(found, step(*map(jnp.asarray, arrays)), results, strict=True):
            np.testing.assert_allclose(have, parts(np.asarray(whole), where), atol=1e-4)


def test_a_file_whose_axes_do_not_divide_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.mlir").write_text(
        """module attributes {mhlo.num_partitions = 8 : i32} {
  sdy.mesh @mesh = <["x"=8]>
  func.func public @main(%a: tensor<12xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>})
      -> tensor<12xf32> {
    %b = stablehlo.tanh %a : tensor<12xf32>
    return %b : tensor<12xf32>
  }
}"""
    )
    assert compile_line("neuronx-cc compile m.mlir --framework XLA --target trn1") == 70
    shown = capsys.readouterr().err
    assert "SW_MANUAL_DIVIDE" in shown and "arg0" in shown and "pad the dim to 16" in shown


@pytest.mark.parametrize("form", ["hlo", "hlo.pb"])
def test_shardings_that_are_not_applied_are_said(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    split = NamedSharding(mesh, PartitionSpec("data", "model"))

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(jnp.tanh(x), split) @ x

    x = np.random.default_rng(3).normal(size=(8, 8)).astype(np.float32)
    path = write_model(tmp_path / f"m.{form}", step, [x])
    line = f"neuronx-cc compile {path} --framework XLA --target trn1 --output m.neff"
    assert compile_line(line) == 0
    shown = capsys.readouterr().err
    assert "SW_SHARDING_UNUSED" in shown and "1 sharding splits a value" in shown
    assert ("sharding_constraint" if form == "hlo" else "test_partitioned_files.py:") in shown
    (have,) = run_neff(Path("m.neff"), [x])
    np.testing.assert_allclose(have, np.tanh(x) @ x, rtol=1e-5, atol=1e-5)


def test_shardings_that_split_nothing_are_not_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = NamedSharding(jax.sharding.AbstractMesh((2,), ("data",)), PartitionSpec())
    x = np.ones((8, 8), np.float32)
    write_model(tmp_path / "m.mlir", lambda x: jax.lax.with_sharding_constraint(x + 1, whole), [x])
    assert compile_line("neuronx-cc compile m.mlir --framework XLA --target trn1") == 0
    assert "SW_SHARDING_UNUSED" not in capsys.readouterr().err


def test_a_manual_region_says_what_to_compile_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    over = PartitionSpec("data")
    step = jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=over, out_specs=over)
    write_model(tmp_path / "m.mlir", step, [np.ones((8, 8), np.float32)])
    assert compile_line("neuronx-cc compile m.mlir --framework XLA --target trn1") == 70
    shown = capsys.readouterr().err
    assert "NCC_EVRF001" in shown and "after spmd-partitioning" in shown
    assert "as many partitions as its mesh has cores, 2 (mhlo.num_partitions), got 1" in shown
