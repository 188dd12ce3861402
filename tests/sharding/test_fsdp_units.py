"""Units of PyTorch's fully_shard: collectives per unit and pass, as its documentation counts them.

One all-gather per unit in forward, one again in backward where the unit was resharded, one
reduce-scatter per unit, and under HSDP one all-reduce of copies; the root is not resharded unless
that is asked for (torch.distributed.fsdp.fully_shard, `reshard_after_forward`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.frontend.pytorch.distribution_table import distribution_of
from shardwright.orchestrator.config.importers.distributed_terms import tables_of, terms_of
from shardwright.sharding.cut.pipeline.balance import REST, stage_sizes
from shardwright.sharding.plan import Plan
from tests.support.road import worst
from tests.support.staged_runs import plan_of, step_errors
from tests.support.strategy_cells import Distribution, deep_flax, deep_gqa, distribution

LAYERS = 5
BOUND = 1e-5
BLOCKS = {"modules": "layers.*"}
ROOT = {"modules": ""}


def mapped(table: Mapping[str, object]) -> Distribution:
    """The distribution here of one that is said in PyTorch's terms."""
    tables = tables_of(terms_of(distribution_of(table)))
    strategy = {**tables["strategy"]}
    strategy.pop("remat")
    return distribution(strategy.pop("name"), **strategy, **tables["mesh"])


def counted(plan: Plan) -> Counter[tuple[str, str]]:
    """Collectives of weights and gradients: those of scalars are no unit's."""
    rows = (row for row in plan.traffic if row.program in ("forward", "backward"))
    return Counter({(r.program, r.kind): r.count for r in rows if r.total_bytes > 8 * r.count})


CASES = {
    "blocks, then the model": ([BLOCKS, ROOT], {"dp_shard": 4}, (6, 5, 6, 0)),
    "hybrid": ([BLOCKS, ROOT], {"dp_replicate": 2, "dp_shard": 2}, (6, 5, 6, 6)),
    "the root resharded": (
        [BLOCKS, ROOT | {"reshard_after_forward": True}],
        {"dp_shard": 4},
        (6, 6, 6, 0),
    ),
    "nothing resharded": (
        [
            BLOCKS | {"reshard_after_forward": False},
            ROOT | {"reshard_after_forward": False},
        ],
        {"dp_shard": 4},
        (6, 0, 6, 0),
    ),
    "lists of two blocks": ([BLOCKS | {"group": 2}, ROOT], {"dp_shard": 4}, (4, 3, 4, 0)),
    "embedding, blocks, norm with head": (
        [
            {"modules": "tok_embeddings"},
            BLOCKS,
            {"modules": ["norm", "output"], "reshard_after_forward": False},
            ROOT,
        ],
        {"dp_shard": 4},
        # The embedding's own gather in backward is left out: its gradient needs no weight.
        (7, 5, 7, 0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_collectives_per_unit_and_pass(name: str) -> None:
    units, mesh, (forward, again, scattered, copies) = CASES[name]
    how = mapped({"mesh": mesh, "fully_shard": units})
    plan = plan_of(deep_gqa, how, 1)
    wanted = {
        ("forward", "all_gather"): forward,
        ("backward", "all_gather"): again,
        ("backward", "reduce_scatter"): scattered,
        ("backward", "all_reduce"): copies,
    }
    assert counted(plan) == {key: count for key, count in wanted.items() if count}
    assert not [f for f in plan.findings if f.code in ("SW_OVERLAP_IDLE", "SW_RESHARD")]


@pytest.mark.matrix
def test_micro_batches_repeat_them() -> None:
    how = mapped({"mesh": {"dp_shard": 4}, "fully_shard": [BLOCKS, ROOT]})
    once, twice = (counted(plan_of(deep_gqa, how, number)) for number in (1, 2))
    assert twice == {key: 2 * count for key, count in once.items()}


def test_kept_weights_are_the_roots_alone() -> None:
    """Bytes that stay between the passes: those of the root's weights that backward reads."""
    held = {}
    for keeps in (False, True):
        root = ROOT | {"reshard_after_forward": not keeps}
        how = mapped({"mesh": {"dp_shard": 4}, "fully_shard": [BLOCKS, root]})
        step = plan_of(deep_gqa, how, 1).step
        held[keeps] = sum(
            b.local_type.num_bytes for b in step.buffers.values() if b.role == "gathered"
        )
    width, vocab = 32, 48
    assert held == {False: 0, True: 4 * (vocab * width + width)}  # head and last norm, fp32


@pytest.mark.parametrize(
    "name",
    ["hybrid", pytest.param("embedding, blocks, norm with head", marks=pytest.mark.matrix)],
)
def test_values_stay(name: str) -> None:
    units, mesh, _ = CASES[name]
    how = mapped({"mesh": mesh, "fully_shard": units})
    leaf, error = worst(step_errors(deep_gqa, how, 1))
    assert error <= BOUND, leaf


@pytest.mark.matrix
def test_a_ring_parts_no_unit() -> None:
    """Loops inside of a layer are part of its unit; state is sharded over `cp` too."""
    table = {
        "mesh": {"dp_shard": 2, "cp": 2},
        "fully_shard": [BLOCKS | {"mesh": ["dp_shard", "cp"]}, ROOT | {"mesh": ["dp_shard", "cp"]}],
    }
    how = mapped(table)
    ring = replace(how, settings=replace(how.settings, context="ring"))
    found = {
        (row.program, row.kind): row.count
        for row in plan_of(deep_gqa, ring, 1).traffic
        if row.axes == ("dp_shard", "cp") and row.total_bytes > 8 * row.count
    }
    assert found == {
        ("forward", "all_gather"): 6,
        ("backward", "all_gather"): 5,
        ("backward", "reduce_scatter"): 6,
    }


@pytest.mark.matrix
def test_layers_that_are_no_loop_are_not_the_root() -> None:
    how = mapped({"mesh": {"dp_shard": 2}, "fully_shard": [BLOCKS, ROOT]})
    plain = distribution("fsdp", dp_shard=2)
    plan, alone = (plan_of(deep_flax, one, 1) for one in (how, plain))
    assert counted(plan) == counted(alone)
    assert {f.code for f in plan.findings} == {"SW_OVERLAP_IDLE", "SW_RESHARD"}


def test_cut_points_are_layers_of_stages() -> None:
    table = {
        "mesh": {"pp": 2, "dp_shard": 2},
        "fully_shard": [BLOCKS, ROOT],
        "pipeline": {"split": ["layers.4"]},
    }
    how = mapped(table)
    assert how.settings.stage_layers == "4, *"
    plan = plan_of(deep_gqa, how, 2)
    assert [part.layers for part in plan.parts] == [4, 1]
    shared = plan_of(deep_gqa, distribution("fsdp", pp=2, dp_shard=2), 2)
    assert [part.layers for part in shared.parts] != [4, 1]


@pytest.mark.parametrize("text", ["4, 2", "4", "5, *", "1, 1, *"])
def test_stages_of_other_layers_are_refused(text: str) -> None:
    how = distribution("fsdp", pp=2, dp_shard=2, stage_layers=text)
    with pytest.raises(ShardingError, match="2 parts of 5 layers") as caught:
        plan_of(deep_gqa, how, 2)
    assert caught.value.code == "SW_PIPELINE_LAYERS" and text in str(caught.value)


def test_sizes_of_stages_are_read() -> None:
    assert stage_sizes("") == ()
    assert stage_sizes("8, 8,9 ,*") == (8, 8, 9, REST)
    for wrong in ("8, x", "0, 8", "*, 8", "8;8"):
        with pytest.raises(ShardingError, match="numbers of layers"):
            stage_sizes(wrong)
