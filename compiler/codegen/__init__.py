"""Tile code generation: `generate` turns a `KernelProgram` into a `Kernel` with tiles and
instructions.
"""

from shardwright.compiler.codegen.generate import Generated, generate

__all__ = ["Generated", "generate"]
