"""The rewrites of a step before it is partitioned, in order, and those that undo them."""

from __future__ import annotations

from shardwright.compiler.passes.barriers import without_constraints
from shardwright.compiler.rewriting.driver import Rewrite
from shardwright.compiler.rewriting.specs import NO_CONSTRAINTS, every_op
from shardwright.sharding import shown
from shardwright.sharding.cut.pipeline.unstack import stage_layers
from shardwright.sharding.prepare.dedup import dedup
from shardwright.sharding.prepare.expand import expand
from shardwright.sharding.prepare.padding import pad_indices
from shardwright.sharding.prepare.phantom_replica import PHANTOM_AXIS, without_phantom
from shardwright.sharding.prepare.precision import rounded_graph, with_reduce_dtype
from shardwright.sharding.prepare.reroll import reroll
from shardwright.sharding.prepare.sorted_rows import sorted_per_sample
from shardwright.sharding.strategies.iotas import iota_de_cse

REROLLED = Rewrite(
    "rerolled",
    reroll,
    "repeated layers are loops over stacked weights",
    besides="the role and name of every input and result",
)
ROUNDED = Rewrite("rounded", rounded_graph, "weights are used in the type of the precision policy")
STAGED = Rewrite(
    "staged",
    stage_layers,
    "layers are shared out over pipeline stages",
    besides="the role and name of every input and result",
)
PADDED = Rewrite(
    "padded",
    pad_indices,
    "indices are padded to sizes that the mesh divides",
    besides="which indices of the model grow",
)
WITHOUT_CONSTRAINTS = Rewrite(
    "without_constraints",
    without_constraints,
    "the step's own shardings are left out",
    leaves=(NO_CONSTRAINTS,),
)
SORTED_ROWS = Rewrite(
    "sorted_rows",
    sorted_per_sample,
    "rows of all samples that are sorted as one list are sorted sample by sample",
)
IOTA_DE_CSE = Rewrite("iota_de_cse", iota_de_cse, "every reader of an iota gets its own")
DEDUPED = Rewrite(
    "deduped",
    dedup,
    "one copy of repeated code, which is what the partitioner gets",
    besides="what the strategy asks for, value by value",
    remark=shown.constraints,
)

EXPANDED_REPEATS = Rewrite(
    "expanded_repeats",
    expand,
    "the partitioner's answer carried over to the whole step",
    besides="what was deduplicated, and where the partitioner placed it",
    remark=shown.places,
)
REDUCE_DTYPE = Rewrite(
    "reduce_dtype",
    with_reduce_dtype,
    "gradients are reduced in the type of the precision policy",
    besides="where every value lives",
    remark=shown.places,
)
WITHOUT_PHANTOM = Rewrite(
    "without_phantom",
    without_phantom,
    "one sample per micro-batch again, after it was proven with two",
    leaves=(
        every_op(
            f"nothing over {PHANTOM_AXIS}",
            lambda op: PHANTOM_AXIS not in getattr(op.attrs, "axes", ()),
        ),
    ),
    besides="where every value lives",
)
