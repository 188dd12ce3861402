"""The attention recogniser: names forward and backward instances in a graph."""

from __future__ import annotations

from shardwright.compiler.attention.recogniser import Instance, find_attention

__all__ = ["Instance", "find_attention"]
