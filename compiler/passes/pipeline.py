"""The pass pipeline: named passes in order, each verified, and a step that can be seen.

A pass is a function `Graph -> Graph` and never edits the graph it is given. Where a pass changes
what later passes see, the order in `PASSES` is the place to say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.ir.verify import verify
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.compiler.passes.activations import activations
from shardwright.compiler.passes.auto_cast import auto_cast
from shardwright.compiler.passes.barriers import drop_barriers
from shardwright.compiler.passes.cse import cse
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.passes.doubled import doubled
from shardwright.compiler.passes.fold import fold
from shardwright.compiler.passes.formats import check_formats
from shardwright.compiler.passes.integers import check_integers
from shardwright.compiler.passes.orient import orient
from shardwright.compiler.passes.remat import rematerialise
from shardwright.compiler.passes.remat.elementwise import keep_less
from shardwright.compiler.passes.saturate import saturate_infinity
from shardwright.compiler.passes.separate import separate
from shardwright.compiler.passes.simplify import simplify
from shardwright.compiler.passes.unroll import unroll
from shardwright.compiler.steps import step


@dataclass(frozen=True, slots=True)
class Pass:
    """A graph rewrite and the name of its step."""

    name: str
    run: Callable[[Graph], Graph]


# Folding and simplifying expose equal values to CSE, and all of them leave dead ops behind.
PASSES: tuple[Pass, ...] = (
    Pass("fold", fold),
    Pass("simplify", simplify),
    Pass("cse", cse),
    Pass("dce", dce),
)

# For the whole step, before partitioning: later, collectives stand between a contraction and its
# transpose. Simplifying makes concatenations of padded pieces, and reduces what separating leaves.
STEP_PASSES: tuple[Pass, ...] = (
    Pass("unroll", unroll),
    PASSES[0],
    Pass("orient", orient),
    PASSES[1],
    Pass("separate", separate),
    *PASSES[1:],
)

# CSE first, so that one value has one name; then what is not read any more goes.
REMAKE_PASSES: tuple[Pass, ...] = (Pass("rematerialise", rematerialise), *PASSES[1:])

# CSE finds rows that a loop reads already.
KEEP_PASSES: tuple[Pass, ...] = (Pass("keep_less", keep_less), *PASSES[2:])

# For the graph a function is compiled from; barriers go last, because CSE must not run after that.
LOCAL_PASSES: tuple[Pass, ...] = (
    *PASSES,
    Pass("doubled", doubled),
    PASSES[-1],
    Pass("activations", activations),
    Pass("drop_barriers", drop_barriers),
)


def unit_passes(options: CompileOptions, generation: str = "v2") -> tuple[Pass, ...]:
    """The passes of one compile unit on a NeuronCore generation: precision rules first, since
    folding and CSE then see the conversions they add.
    """
    precision = [
        Pass("formats", check_formats(options, generation)),
        Pass("integers", check_integers(options, generation)),
        Pass("auto_cast", auto_cast(options)),
    ]
    if options.saturate_infinity and generation == "v2":
        precision.append(Pass("saturate", saturate_infinity))
    return (*precision, *LOCAL_PASSES)


def step_passes(
    options: CompileOptions = DEFAULTS, samples: int = 0, keep_rows: bool = False
) -> tuple[Pass, ...]:
    """The passes of a whole step. With attention `flash`, quadratic values are made again for far
    readers, so that no score tensor waits for the backward pass; in every form, layers keep the
    lightest values that the rest follows from element by element. A step captured with one sample
    keeps its sums over it. With `keep_rows` maxima of rows are kept: to make them again would
    take another turn of a ring.
    """
    remade = REMAKE_PASSES if options.attention == "flash" else ()
    if remade and keep_rows:
        keeping_rows = Pass("rematerialise", partial(rematerialise, short_row=0))
        remade = (keeping_rows, *remade[1:])
    passes = STEP_PASSES + remade + KEEP_PASSES
    if samples != 1:
        return passes
    keeping = Pass("simplify", partial(simplify, keep_sums=True))
    return tuple(keeping if one.run is simplify else one for one in passes)


def run(graph: Graph, passes: Sequence[Pass] = PASSES) -> Graph:
    """`graph` after all `passes`, each a step. Raises: CompileError naming the pass whose result is
    not valid.
    """
    typed: set[Op] = set()
    verify(graph, typed)
    for one in passes:
        before, graph = graph, one.run(graph)
        step(one.name, graph)
        if graph is not before:
            _verify_after(one, graph, typed)
    return graph


def _verify_after(one: Pass, graph: Graph, typed: set[Op]) -> None:
    try:
        verify(graph, typed)
    except ValueError as error:
        error.add_note(f"after pass {one.name}")
        raise
