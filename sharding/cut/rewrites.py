"""The rewrites of a partitioned step, in order: better collectives, the shapes of one core,
programs, and what moves inside of each program.
"""

from __future__ import annotations

from shardwright.compiler.rewriting.driver import Rewrite
from shardwright.compiler.rewriting.specs import HAVE_GROUPS, NO_CONSTRAINTS, NO_RANKS, without
from shardwright.sharding import shown
from shardwright.sharding.cut.host import on_host
from shardwright.sharding.cut.overlap.buckets import bucketed, coalesced
from shardwright.sharding.cut.overlap.deferred import hoisted
from shardwright.sharding.cut.overlap.ends import reduced_in_last, stored_in_first
from shardwright.sharding.cut.overlap.groups import grouped
from shardwright.sharding.cut.overlap.pipelined import shifted
from shardwright.sharding.cut.overlap.streams import prioritised
from shardwright.sharding.cut.pipeline.divide import divide
from shardwright.sharding.cut.ring import with_context
from shardwright.sharding.cut.stages import split_step
from shardwright.sharding.cut.summed import summed
from shardwright.sharding.localize import localize
from shardwright.sharding.localize.coordinates import hoist_coordinates
from shardwright.sharding.localize.regions import in_place
from shardwright.sharding.partition.rewrite import rewrite
from shardwright.sharding.partition.shardy import partition

LOCAL = (NO_CONSTRAINTS, HAVE_GROUPS)
"""What holds of the graph that every core runs."""
PROGRAM = (*LOCAL, NO_RANKS)
"""What holds of its programs: a core's position is an input."""

PARTITIONED = Rewrite(
    "partitioned",
    partition,
    "what the partitioner made: collectives, and where every value lives",
    leaves=(NO_CONSTRAINTS,),
    besides="what the strategy asks for, value by value",
    remark=shown.places,
)
REWRITTEN = Rewrite(
    "rewritten",
    rewrite,
    "better collectives in place of the partitioner's",
    besides="where every value lives",
    remark=shown.places,
)
LOCALIZED = Rewrite(
    "localized",
    localize,
    "per-core shapes; every core runs this graph",
    leaves=LOCAL,
    besides="where every value lives",
)
MANUAL_REGIONS = Rewrite(
    "manual_regions",
    in_place,
    "code of one rank stands where the step has it, as it was written",
    keeps=LOCAL,
    leaves=(without("manual region", ("manual_region",)),),
    besides="the regions, by number",
)
RING = Rewrite(
    "ring",
    with_context,
    "attention over gathered keys becomes a loop over blocks that go around a ring",
    keeps=LOCAL,
)
REDUCTIONS_LAST = Rewrite(
    "reductions_last",
    hoisted,
    "reductions of gradients stand behind their loops, to wait for the last micro-batch",
    keeps=LOCAL,
)
COORDINATES = Rewrite(
    "coordinates",
    hoist_coordinates,
    "what depends on the rank is read from inputs of its own",
    leaves=(NO_RANKS,),
)
CUT = Rewrite(
    "cut",
    split_step,
    "the part of the step that is this program, before overlap",
    needs=LOCAL,
    leaves=PROGRAM,
    besides="the role and name of every input and result",
)
DIVIDED = Rewrite(
    "divided",
    divide,
    "the part of this pipeline stage",
    keeps=PROGRAM,
    besides="which layers a stage has",
)
REDUCED = Rewrite(
    "reduced",
    reduced_in_last,
    "gradients are reduced in the last micro-batch's backward program",
    keeps=PROGRAM,
    besides="all programs of the step",
)
STORED = Rewrite(
    "stored",
    stored_in_first,
    "gradients are stored, not added, in the first micro-batch's backward program",
    keeps=PROGRAM,
    besides="all programs of the step",
)
SUMMED = Rewrite(
    "summed",
    summed,
    "gradients of several micro-batches are added up in the loop that makes them",
    keeps=PROGRAM,
)
HOST = Rewrite(
    "host",
    on_host,
    "what a step keeps in host memory moves there and back",
    keeps=PROGRAM,
    leaves=(without("move between memories that is not a transfer", ("move_to",)),),
    besides="all programs of the step",
)
GROUPED = Rewrite(
    "grouped",
    grouped,
    "one turn of a layer loop does several layers, collectives together",
    keeps=PROGRAM,
)
BUCKETED = Rewrite(
    "bucketed", bucketed, "collectives that are ready together become one", keeps=PROGRAM
)
COALESCED = Rewrite(
    "coalesced",
    coalesced,
    "small reduce_scatters of a file that follow each other become one",
    keeps=LOCAL,
)
SHIFTED = Rewrite(
    "shifted",
    shifted,
    "layer loops become software pipelines: weights are gathered early, gradients late",
    keeps=PROGRAM,
)
PRIORITISED = Rewrite(
    "prioritised",
    prioritised,
    "gathers of weights and reductions have low priority: they start behind what a layer waits for",
    keeps=PROGRAM,
)
