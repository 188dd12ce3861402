"""Collectives in a module that is compiled for one core: nothing to do, or refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.stablehlo import import_module
from tests.support.compiled import run_levels

X = np.arange(24, dtype=np.float32).reshape(4, 6)
GROUPED = {
    "all_gather": "all_gather_dim = 0 : i64",
    "all_to_all": "split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = {0} : i64",
}
MODULE = """
func.func @main(%x: tensor<4x6xf32>) -> tensor<{2}xf32> {{
  %y = "stablehlo.{0}"(%x) {{{1}}} : (tensor<4x6xf32>) -> tensor<{2}xf32> loc("net.py":9:1)
  return %y : tensor<{2}xf32>
}}"""


def _groups(size: int) -> str:
    return f"replica_groups = dense<[{list(range(size))}]> : tensor<1x{size}xi64>"


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_one_rank_pass_their_operand_on(name: str) -> None:
    attributes = f"{GROUPED[name].format(1)}, {_groups(1)}"
    for (have,) in run_levels(import_module(MODULE.format(name, attributes, "4x6")), [X]):
        np.testing.assert_array_equal(have, X)


@pytest.mark.parametrize(("name", "shape"), [("all_gather", "8x6"), ("all_to_all", "2x12")])
def test_larger_groups_are_refused(name: str, shape: str) -> None:
    attributes = f"{GROUPED[name].format(2)}, {_groups(2)}"
    _refused(MODULE.format(name, attributes, shape))


@pytest.mark.parametrize(("pairs", "taken"), [("[0, 0]", True), ("[0, 1], [1, 0]", False)])
def test_permutations(pairs: str, taken: bool) -> None:
    count = pairs.count("[")
    attributes = f"source_target_pairs = dense<[{pairs}]> : tensor<{count}x2xi64>"
    text = MODULE.format("collective_permute", attributes, "4x6")
    if not taken:
        _refused(text)
        return
    for (have,) in run_levels(import_module(text), [X]):
        np.testing.assert_array_equal(have, X)


@pytest.mark.parametrize("name", ["partition_id", "replica_id"])
def test_this_rank_is_the_first(name: str) -> None:
    text = f"""
    func.func @main() -> tensor<ui32> {{
      %y = stablehlo.{name} : tensor<ui32>
      return %y : tensor<ui32>
    }}"""
    for (have,) in run_levels(import_module(text), []):
        assert have == 0 and have.dtype == np.uint32


def _refused(text: str) -> None:
    with pytest.raises(ImportRuleError) as caught:
        import_module(text)
    assert caught.value.code == "NCC_EVRF001"
    assert caught.value.loc is not None and caught.value.loc.line == 9
