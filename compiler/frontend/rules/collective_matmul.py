"""The vendor's CollectiveMatmul, spelled as the collective and the product that it joins.

Two operands, [m, k] of this rank and one that has k along `rhs_contracting_dim`; the result is that
of every rank's m rows, gathered over `num_groups` groups of `tp_degree` neighbouring ranks.
Source: the call that neuronx-distributed-inference writes (`looped_einsum`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright.compiler.frontend.mlir import all_ops, call_target, text_of

COLLECTIVE_MATMUL = "AwsNeuronCollectiveMatmul"
_DIM, _RANKS, _GROUPS = "rhs_contracting_dim", "tp_degree", "num_groups"


def spell_out(module: Any) -> None:
    """Put all-gathers and products in the place of well-formed calls in `module`; the rest is left
    for the import to refuse. Its context must be entered."""
    for op in all_ops(module):
        if call_target(op) == COLLECTIVE_MATMUL:
            settings = _settings(text_of(op, "backend_config"))
            if settings is not None and _fits(op, settings):
                _replace(op, settings)


def _settings(text: str) -> dict[str, int] | None:
    """Whole numbers by name of `name=number,...`; None where one that is needed is no number."""
    pairs = (item.partition("=") for item in text.split(","))
    found = {name.strip(): value.strip() for name, _, value in pairs}
    found = {_DIM: "0", _GROUPS: "1"} | found
    needed = (_DIM, _RANKS, _GROUPS)
    if not all(found.get(name, "").isdigit() for name in needed):
        return None
    return {name: int(found[name]) for name in needed}


def _fits(op: Any, settings: dict[str, int]) -> bool:
    """Whether the types are those of such a product."""
    if len(op.operands) != 2 or len(op.results) != 1 or settings[_DIM] > 1:
        return False
    shapes = [list(v.type.shape) for v in (*op.operands, *op.results)]
    if [len(shape) for shape in shapes] != [2, 2, 2] or not settings[_RANKS] * settings[_GROUPS]:
        return False
    (rows, depth), rhs, result = shapes
    free = rhs[1 - settings[_DIM]]
    return rhs[settings[_DIM]] == depth and result == [rows * settings[_RANKS], free]


def _replace(op: Any, settings: dict[str, int]) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    lhs, rhs = op.operands
    ranks, groups = settings[_RANKS], settings[_GROUPS]
    rows, depth = lhs.type.shape
    ids = np.arange(ranks * groups, dtype=np.int64).reshape(groups, ranks)
    with op.location, ir.InsertionPoint(op):
        gathered = ir.RankedTensorType.get([rows * ranks, depth], lhs.type.element_type)
        whole = stablehlo.AllGatherOp([gathered], [lhs], 0, ir.DenseIntElementsAttr.get(ids))
        numbers = stablehlo.DotDimensionNumbers.get([], [], [1], [settings[_DIM]])
        made = stablehlo.DotGeneralOp(op.result.type, whole.results[0], rhs, numbers)
    op.result.replace_all_uses_with(made.result)
    op.erase()
