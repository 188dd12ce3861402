"""The passes: what each is, and the lists in which the driver runs them.

A pass is a function `Graph -> Graph` and never edits the graph it is given. Where a pass changes
what later passes see, the order of the lists is the place to say so.
"""

from __future__ import annotations

from shardwright.compiler.ir.types import Graph
from shardwright.compiler.machine.target import PRODUCT_TRANSPOSES
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.compiler.passes.activations import activations
from shardwright.compiler.passes.auto_cast import auto_cast
from shardwright.compiler.passes.barriers import drop_barriers
from shardwright.compiler.passes.canonicalise_dots import canonicalise_dots
from shardwright.compiler.passes.cse import cse
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.passes.doubles import check_doubles, narrow_doubles
from shardwright.compiler.passes.fold import fold
from shardwright.compiler.passes.formats import check_formats
from shardwright.compiler.passes.integers import check_integers
from shardwright.compiler.passes.one_hot import one_hot_gathers
from shardwright.compiler.passes.reduce_strength import reduce_strength
from shardwright.compiler.passes.remat import rematerialise
from shardwright.compiler.passes.remat.save_policy import save_policy
from shardwright.compiler.passes.saturate import saturate_infinity
from shardwright.compiler.passes.simplify import simplify
from shardwright.compiler.passes.split_concats import split_concats
from shardwright.compiler.passes.unroll import unroll
from shardwright.compiler.passes.words import in_words
from shardwright.compiler.rewriting.driver import Rewrite
from shardwright.compiler.rewriting.specs import LOOP_FREE, NO_BARRIERS, NO_DOUBLES

Pass = Rewrite[Graph, ..., Graph]

UNROLL = Rewrite("unroll", unroll, "short elementwise loops become straight code")
WORDS = Rewrite("in_words", in_words, "64-bit integers that are taken apart are pairs of words")
FOLD = Rewrite("fold", fold, "constants are computed, identities and what cancels go")
CANONICALISE_DOTS = Rewrite(
    "canonicalise_dots",
    canonicalise_dots,
    "products that are only read transposed change their operands instead",
)
SIMPLIFY = Rewrite(
    "simplify",
    simplify,
    "sums over one element, sums of pieces padded apart, neighbouring slices: as views",
)
SPLIT_CONCATS = Rewrite(
    "split_concats",
    split_concats,
    "concatenations that only elementwise work and folds follow are split",
)
CSE = Rewrite("cse", cse, "equal ops become one")
DCE = Rewrite("dce", dce, "ops and loop carries that nothing reads go")
ONE_HOT = Rewrite(
    "one_hot_gathers",
    one_hot_gathers,
    "one-hot matrices times tables become gathers, where a release of neuronx-cc does it",
)
REMATERIALISE = Rewrite(
    "rematerialise",
    rematerialise,
    "quadratic values are rematerialised for far readers, across loops too",
)
SAVE_POLICY = Rewrite(
    "save_policy",
    save_policy,
    "layers save the lightest values that the rest follows from element by element",
)
NARROW_DOUBLES = Rewrite(
    "narrow_doubles",
    narrow_doubles,
    "64-bit floats become fp32, where compiler.double_precision asks for it",
    leaves=(NO_DOUBLES,),
)
DOUBLES = Rewrite(
    "doubles",
    check_doubles,
    "refuses 64-bit floats, which no engine computes; changes nothing",
    leaves=(NO_DOUBLES,),
)
FORMATS = Rewrite(
    "formats", check_formats, "refuses fp8 formats that the machine does not have; changes nothing"
)
INTEGERS = Rewrite(
    "integers", check_integers, "refuses integer operations that would lose bits; changes nothing"
)
AUTO_CAST = Rewrite(
    "auto_cast", auto_cast, "fp32 operations are computed in a shorter type", keeps=(LOOP_FREE,)
)
SATURATE = Rewrite(
    "saturate",
    saturate_infinity,
    "infinities are clamped in front of what makes NaN of them",
    keeps=(LOOP_FREE,),
)
REDUCE_STRENGTH = Rewrite(
    "reduce_strength", reduce_strength, "a sum of two equal terms is a product with two"
)
ACTIVATIONS = Rewrite(
    "activations", activations, "GELU, SiLU and their derivatives are found in any spelling"
)
DROP_BARRIERS = Rewrite(
    "drop_barriers",
    drop_barriers,
    "optimization barriers and constraints go",
    leaves=(NO_BARRIERS,),
)

# Folding and simplifying expose equal values to CSE, and all of them leave dead ops behind.
PASSES: tuple[Pass, ...] = (FOLD, SIMPLIFY, CSE, DCE)

# For the whole step, before partitioning: later, collectives stand between a contraction and its
# transpose. Simplifying makes concatenations of padded pieces, and reduces what splitting leaves.
STEP_PASSES: tuple[Pass, ...] = (
    UNROLL,
    WORDS,
    FOLD,
    CANONICALISE_DOTS,
    SIMPLIFY,
    SPLIT_CONCATS,
    SIMPLIFY,
    CSE,
    DCE,
)

# CSE first, so that one value has one name; then what is not read any more goes.
REMAT_PASSES: tuple[Pass, ...] = (REMATERIALISE, SIMPLIFY, CSE, DCE)

# CSE finds rows that a loop reads already.
SAVE_PASSES: tuple[Pass, ...] = (SAVE_POLICY, CSE, DCE)

# For the graph a function is compiled from; barriers go last, because CSE must not run after that.
LOCAL_PASSES: tuple[Pass, ...] = (*PASSES, REDUCE_STRENGTH, DCE, ACTIVATIONS, DROP_BARRIERS)


def unit_passes(options: CompileOptions, generation: str = "v2") -> tuple[Pass, ...]:
    """The passes of one compile unit on a NeuronCore generation: precision rules first, since
    folding and CSE then see the conversions they add.
    """
    precision: list[Pass] = [
        FORMATS.given(options, generation),
        INTEGERS.given(options, generation),
        AUTO_CAST.given(options),
    ]
    if options.saturate_infinity and generation in PRODUCT_TRANSPOSES:
        precision.append(SATURATE.given(before=options.saturate_before))
    return (*precision, *LOCAL_PASSES)


def step_passes(
    options: CompileOptions = DEFAULTS, samples: int = 0, save_rows: bool = False
) -> tuple[Pass, ...]:
    """The passes of a whole step. With attention `flash`, quadratic values are rematerialised for
    far readers, so that no score tensor waits for the backward pass; in every form, layers save the
    lightest values that the rest follows from element by element. A step captured with one sample
    keeps its sums over it. With `save_rows` maxima of rows are saved: to rematerialise them would
    take another turn of a ring.
    """
    remat = REMAT_PASSES if options.attention == "flash" else ()
    if remat and save_rows:
        remat = (REMATERIALISE.given(short_row=0), *remat[1:])
    narrow = (NARROW_DOUBLES,) if options.double_precision == "f32" else ()
    passes = narrow + STEP_PASSES + remat + SAVE_PASSES
    if samples != 1:
        return passes
    keeping = SIMPLIFY.given(keep_sums=True)
    return tuple(keeping if one is SIMPLIFY else one for one in passes)
