"""The rewrites of lowering, in order: what every function goes through, then the other forms of it
that `function.py` compares.
"""

from __future__ import annotations

from shardwright.compiler.ir.traits import CHEAP
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.lower.canonical import canonical
from shardwright.compiler.lower.expand import expand, rule_of
from shardwright.compiler.lower.landing import landed
from shardwright.compiler.lower.made_once import made_once
from shardwright.compiler.lower.narrow import NARROW as WIDE_INTEGERS
from shardwright.compiler.lower.narrow import narrow
from shardwright.compiler.lower.registry import maker_of
from shardwright.compiler.lower.remat_across_kernels import halved, remat_across_kernels
from shardwright.compiler.lower.sink_transposes import sink_transposes
from shardwright.compiler.lower.windows import expand_windows
from shardwright.compiler.rewriting.driver import Rewrite
from shardwright.compiler.rewriting.specs import (
    LOOP_FREE,
    NO_BARRIERS,
    NO_WINDOWS,
    every_op,
    no_results,
)

NO_COMPOSITES = every_op("only ops that an engine has", lambda op: rule_of(op) is None)
NO_WIDE_INTEGERS = no_results(WIDE_INTEGERS, but=("convert",))
LOWERABLE = every_op(
    "only views and ops with a lowering",
    lambda op: op.name in CHEAP or maker_of(op.name) is not None,
)

WINDOWS = Rewrite(
    "windows",
    expand_windows,
    "convolutions and windowed reductions become views of windows and ordinary ops",
    keeps=(LOOP_FREE,),
    leaves=(NO_WINDOWS,),
)
NARROW = Rewrite(
    "narrow",
    narrow,
    "64-bit integers are computed with their low 32 bits",
    keeps=(LOOP_FREE,),
    leaves=(NO_WIDE_INTEGERS,),
)
EXPAND = Rewrite(
    "expand",
    expand,
    "composite ops in terms of those that an engine has",
    keeps=(LOOP_FREE,),
    leaves=(NO_COMPOSITES,),
)
CANONICAL = Rewrite(
    "canonical",
    canonical,
    "sorts, gathers and scatters along an axis become elementwise",
    keeps=(LOOP_FREE,),
    leaves=(LOWERABLE,),
)

LANDED = Rewrite(
    "landed",
    landed,
    "what a collective brings is read where it is stored, and arrives there",
    keeps=(LOOP_FREE, LOWERABLE),
)

LOWERING: tuple[Rewrite[Graph, ..., Graph], ...] = (WINDOWS, NARROW, EXPAND, CANONICAL, LANDED)

NATIVE_LOWERING = tuple(rewrite for rewrite in LOWERING if rewrite is not NARROW)
"""Of machines that compute 64-bit integers where they are asked to."""

SINK_TRANSPOSES = Rewrite(
    "sink_transposes",
    sink_transposes,
    "another form: values are converted before they are transposed, once to a type",
    keeps=(LOOP_FREE,),
)
MADE_ONCE = Rewrite(
    "made_once",
    made_once,
    "another form: equal quadratic values are made once for all readers",
    keeps=(LOOP_FREE, NO_BARRIERS),
)
REMAT_ACROSS_KERNELS = Rewrite(
    "remat_across_kernels",
    remat_across_kernels,
    "another form: quadratic values that crossed HBM are rematerialised by their readers",
    keeps=(LOOP_FREE,),
    besides="the kernels of the function",
)
HALVED = Rewrite(
    "halved",
    halved,
    "another form: a reduction fusion in two, the second rematerialises what it reads of the first",
    keeps=(LOOP_FREE,),
    besides="the kernels of the function",
)
