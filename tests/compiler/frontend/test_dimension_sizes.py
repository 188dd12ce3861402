"""`set_dimension_size`: HLO's bounded dims whose size is known after all."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.hlo import hlo_to_stablehlo
from shardwright.compiler.frontend.stablehlo import import_module
from tests.support.compiled import run_levels

TEXT = """HloModule m
sum {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}
ENTRY e {
  a = f32[3,8]{1,0} parameter(0)
  n = SIZE
  r = f32[3,<=8]{1,0} set-dimension-size(a, n), dimensions={1}
  s = f32[3,<=8]{1,0} add(r, r)
  zero = f32[] constant(0)
  ROOT t = f32[3]{0} reduce(s, zero), dimensions={1}, to_apply=sum
}
"""
X = np.arange(24, dtype=np.float32).reshape(3, 8)


@pytest.mark.parametrize("size", [1, 5, 8])
def test_what_is_beyond_a_constant_size_takes_no_part(size: int) -> None:
    graph = import_module(hlo_to_stablehlo(TEXT.replace("SIZE", f"s32[] constant({size})")))
    for (have,) in run_levels(graph, [X]):
        np.testing.assert_array_equal(have, 2 * X[:, :size].sum(1))


@pytest.mark.parametrize("size", ["s32[] parameter(1)", "s32[] constant(9)", "s32[] constant(-1)"])
def test_other_sizes_have_a_code_and_advice(size: str) -> None:
    with pytest.raises(ImportRuleError, match="constant size from 0 up to 8") as caught:
        import_module(hlo_to_stablehlo(TEXT.replace("SIZE", size)))
    assert caught.value.code == "NCC_EMOD025" and "mask" in caught.value.diagnostic.hint


def test_a_result_of_another_size_is_refused() -> None:
    text = """func.func public @main(%a: tensor<8xf32>) -> tensor<8xf32> {
      %n = stablehlo.constant dense<5> : tensor<i32>
      %r = "stablehlo.set_dimension_size"(%a, %n) <{dimension = 0 : i64}>
        : (tensor<8xf32>, tensor<i32>) -> tensor<8xf32>
      return %r : tensor<8xf32>
    }"""
    with pytest.raises(ImportRuleError, match="NCC_EVRF064"):
        import_module(text)
