"""The graph IR; importing it registers every op, so that `OPS` is complete wherever it is read."""

from __future__ import annotations

from shardwright.compiler.ir import ops as ops
