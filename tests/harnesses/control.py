"""Harness rows of control ops, and those no single row can show."""

from __future__ import annotations

from shardwright.compiler.dtypes import DType
from tests.harnesses.case import OpCase

CASES: tuple[OpCase, ...] = (
    OpCase("optimization_barrier", (((3, 4), DType.F32), ((), DType.I32), ((2,), DType.BF16))),
)

# Ops without a row: what checks them instead.
GAPS: dict[str, str] = {
    "loop": "has a region: tests/compiler/ir/test_printer.py runs whole loops",
    "manual_region": "needs a mesh: tests/system/test_manual_files.py",
    "move_to": "names a memory: tests/compiler/frontend/test_placements.py",
    "host_empty": "is never read: tests/sharding/test_host_residuals.py",
    "host_load": "needs host memory: tests/sharding/test_host_residuals.py",
    "host_store": "needs host memory: tests/sharding/test_host_residuals.py",
    "sharding_constraint": "needs a mesh: tests/compiler/ir/test_printer.py",
    "all_gather": "needs ranks: tests/compiler/ir/test_collective_export.py",
    "all_reduce": "needs ranks: tests/compiler/ir/test_collective_export.py",
    "all_slice": "needs ranks: tests/compiler/ir/test_collective_export.py",
    "all_to_all": "needs ranks: tests/compiler/ir/test_collective_export.py",
    "axis_index": "needs ranks: tests/compiler/ir/test_collective_export.py",
    "collective_permute": "needs ranks: tests/compiler/ir/test_collective_export.py",
    "reduce_scatter": "needs ranks: tests/compiler/ir/test_collective_export.py",
}
