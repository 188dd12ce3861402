"""Sharding annotations of GSPMD in HLO and StableHLO: identities on one core, else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.stablehlo import import_module
from tests.support.compiled import run_levels
from tests.support.model_files import compile_line, run_neff

MODULE = """
func.func @main(%a: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %0 = stablehlo.custom_call @TARGET(%a) {backend_config = "", mhlo.sharding = "TEXT"}
    : (tensor<8x4xf32>) -> tensor<8x4xf32> loc("net.py":7:1)
  %1 = stablehlo.tanh %0 : tensor<8x4xf32>
  return %1 : tensor<8x4xf32>
}"""
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
WHOLE = (
    "{replicated}",
    "{maximal device=0}",
    "{manual}",
    "{devices=[1,1]<=[1]}",
    "{devices=[1,1,4]<=[4] last_tile_dim_replicate}",
    "{devices=[1,1,2,2]<=[4] last_tile_dims={manual, replicated}}",
)


def module(text: str, target: str = "Sharding") -> str:
    return MODULE.replace("TARGET", target).replace("TEXT", text)


@pytest.mark.parametrize("target", ["Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"])
@pytest.mark.parametrize("text", WHOLE)
def test_whole_values_pass(text: str, target: str) -> None:
    graph = import_module(module(text, target))
    assert [op.name for op in graph.ops] == ["tanh"]


@pytest.mark.parametrize("text", ["{devices=[2,1]<=[2]}", "{devices=[1,4,2]<=[8]}"])
def test_split_values_are_refused_with_the_sharding_and_the_line(text: str) -> None:
    with pytest.raises(ImportRuleError) as caught:
        import_module(module(text))
    error = caught.value
    assert error.code == "NCC_EVRF001" and text in error.diagnostic.message
    assert "unpartitioned" in error.diagnostic.hint
    assert str(error.loc) == "net.py:7"


def test_a_shard_of_another_shape_is_refused() -> None:
    text = module("{manual}", "SPMDFullToShardShape").replace("tensor<8x4xf32>", "tensor<2x4xf32>")
    text = text.replace("%a: tensor<2x4xf32>", "%a: tensor<8x4xf32>")
    text = text.replace("(tensor<2x4xf32>) ->", "(tensor<8x4xf32>) ->")
    with pytest.raises(ImportRuleError, match=r"NCC_EVRF001.*stays whole"):
        import_module(text)


def annotated(x: Any) -> Any:
    """What jax of the GSPMD days wrote: constraints, and a region of manual code."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    sharded, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), ()))
    y = jax.lax.with_sharding_constraint(jnp.sin(x), sharded)
    spec = PartitionSpec("x")
    y = jax.shard_map(lambda a: a + 1, mesh=mesh, in_specs=spec, out_specs=spec)(y)
    return jax.lax.with_sharding_constraint(y * 2, whole)


def test_an_hlo_proto_of_jax_with_gspmd_compiles_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        lowered = jax.jit(annotated).lower(X)
        assert "@Sharding" in lowered.as_text()
        proto = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    (tmp_path / "m.hlo.pb").write_bytes(proto)
    assert compile_line("neuronx-cc compile m.hlo.pb --target trn1") == 0
    (found,) = run_neff(tmp_path / "file.neff", [X])
    np.testing.assert_allclose(found, (np.sin(X) + 1) * 2, rtol=1e-6)


def test_annotated_values_run_at_both_levels() -> None:
    for (have,) in run_levels(import_module(module("{replicated}")), [X]):
        np.testing.assert_allclose(have, np.tanh(X), rtol=1e-6)
