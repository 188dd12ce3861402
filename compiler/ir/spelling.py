"""Functions of the engines in terms of StableHLO and CHLO, for modules that others read.

Units have these functions as one op each (`passes/activations.py`, and the generator of random
bits); exported text must not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops.elementwise import RANDOM_ROUNDS
from shardwright.compiler.ir.rewrite import replaced
from shardwright.compiler.ir.types import Graph, Op, Value


class _Site(Builder):
    """New ops in the place of one."""

    def __init__(self, op: Op) -> None:
        super().__init__(loc=op.loc)
        self.type = op.result.type

    def emit(self, name: str, *operands: Value | float) -> Value:
        """An op whose operands may be numbers."""
        kind = self.type
        given = (
            v if isinstance(v, Value) else self.full(kind.shape, v, kind.dtype) for v in operands
        )
        return self.op(name, *given)


def _normal(site: _Site, x: Value) -> Value:
    """The normal distribution function."""
    scaled = site.emit("multiply", x, math.sqrt(0.5))
    return site.emit("multiply", site.emit("add", site.emit("erf", scaled), 1.0), 0.5)


def _gelu(site: _Site, x: Value) -> Value:
    return site.emit("multiply", x, _normal(site, x))


def _gelu_dx(site: _Site, x: Value) -> Value:
    half = site.emit("multiply", site.emit("multiply", x, x), -0.5)
    scale = 1 / math.sqrt(2 * math.pi)
    density = site.emit("multiply", site.emit("exponential", half), scale)
    return site.emit("add", _normal(site, x), site.emit("multiply", x, density))


def _gelu_apprx_tanh(site: _Site, x: Value) -> Value:
    cubic = site.emit("multiply", site.emit("multiply", x, x), 0.044715)
    inner = site.emit("multiply", site.emit("add", cubic, 1.0), x)
    curve = site.emit("tanh", site.emit("multiply", inner, math.sqrt(2 / math.pi)))
    return site.emit("multiply", site.emit("multiply", x, 0.5), site.emit("add", curve, 1.0))


def _silu(site: _Site, x: Value) -> Value:
    return site.emit("multiply", x, site.emit("logistic", x))


def _silu_dx(site: _Site, x: Value) -> Value:
    gate = site.emit("logistic", x)
    slope = site.emit("multiply", x, site.emit("subtract", 1.0, gate))
    return site.emit("multiply", gate, site.emit("add", slope, 1.0))


def _random_bits(site: _Site, counter: Value, key: Value) -> Value:
    return _mixed(site, site.emit("xor", _mixed(site, counter), key))


def _mixed(site: _Site, x: Value) -> Value:
    for shift, factor in RANDOM_ROUNDS:
        x = site.emit("xor", x, site.emit("shift_right_logical", x, shift))
        x = site.emit("multiply", x, factor)
    return site.emit("xor", x, site.emit("shift_right_logical", x, 16))


SPELLINGS: Mapping[str, Callable[..., Value]] = {
    "gelu": _gelu,
    "gelu_apprx_tanh": _gelu_apprx_tanh,
    "gelu_dx": _gelu_dx,
    "random_bits": _random_bits,
    "silu": _silu,
    "silu_dx": _silu_dx,
}


def spelled(graph: Graph, kept: Collection[str] = ()) -> Graph:
    """`graph` without functions that StableHLO and CHLO do not have, regions included; those named
    in `kept` stay.
    """
    written = SPELLINGS.keys() - set(kept)

    def rule(op: Op, _: Mapping[Value, Op]) -> list[Op]:
        if op.name not in written:
            return []
        site = _Site(op)
        SPELLINGS[op.name](site, *op.operands)
        return site.ops

    return replaced(graph, rule, lambda region: spelled(region, kept))
