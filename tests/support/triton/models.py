"""Small NEFF files to serve, made of texts of graphs, and the direct run of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from shardwright.compiler.ir.parse import parse
from shardwright.compiler.neff.bundle import program_bytes
from shardwright.orchestrator.neff.neff_files import mesh_of, open_program
from shardwright.sim_cluster.values.run_single import Ranks, run_single
from tests.support.compiled import link

DOT = "lhs_batch=[], rhs_batch=[], lhs_contract=[1], rhs_contract=[0], dtype=f32"
AFFINE = f"""main(%in0: tensor<4x8xf32>, %in1: tensor<8x3xf32>) {{
  %0 = dot_general %in0, %in1 {{{DOT}}} : tensor<4x3xf32>
  %1 = reduce %0 {{kind=add, dims=[0, 1]}} : tensor<f32>
  return %0, %1
}}
"""
"""Two arguments, of which the second may be weights; a matrix and a scalar out."""
TWICE = """main(%in0: tensor<4x2xf32>) {
  %0 = add %in0, %in0 : tensor<4x2xf32>
  return %0
}
"""
TWICE_TYPED = (
    "main(%in0: tensor<2x{0}>) {{\n  %0 = {1} %in0, %in0 : tensor<2x{0}>\n  return %0\n}}\n"
)
SUMMED = """main(%in0: tensor<2x3xf32>) {
  %0 = all_reduce %in0 {axes=[tp], group_size=2} : tensor<2x3xf32>
  return %0
}
"""
"""On two ranks."""


def write_neff(path: Path, text: str, **mesh: int) -> Path:
    """The NEFF of a graph, for the ranks of a mesh."""
    meta = {"mesh": [[axis, size] for axis, size in mesh.items()]}
    path.write_bytes(program_bytes(link(parse(text)), meta))
    return path


def run_direct(
    path: Path, arrays: Mapping[str, np.ndarray], level: str = "L1"
) -> dict[str, np.ndarray]:
    """What the simulator makes of a NEFF without a server."""
    opened = open_program(path)
    return run_single(opened.program, arrays, level, ranks=Ranks(*mesh_of(opened)))
