"""Ops whose local form depends on the rank: one file per family, named as in `compiler/ir/ops`."""

from shardwright.sharding.localize.rules import collective, control, convolution, gather, shape

__all__ = ["collective", "control", "convolution", "gather", "shape"]
