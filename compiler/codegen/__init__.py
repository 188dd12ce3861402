"""Tile code generation: `generate` turns a `RegionProgram` into a `Region` with tiles and
instructions.
"""

from shardwright.compiler.codegen.generate import Generated, generate

__all__ = ["Generated", "generate"]
