"""Indices out of bounds of ranks: each wrong one counts once, however what it indexes is sharded,
at both levels; what another rank holds is never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import Loc, SimulationError
from shardwright.compiler.driver import compile_graph
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import GatherAttrs, ScatterAttrs
from shardwright.compiler.isa.program import Program
from shardwright.compiler.passes import single_windows
from shardwright.compiler.passes.pipeline import PASSES
from shardwright.compiler.program import StepProgram
from shardwright.compiler.rewriting.driver import run
from shardwright.sharding.localize import localize
from shardwright.sharding.localize.coordinates import coordinate_name, hoist_coordinates
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph
from shardwright.sim_cluster.instructions.index_watch import IndexWatch
from shardwright.sim_cluster.values.run_single import Ranks, run_single
from tests.support.building import Builder
from tests.support.compiled import FIRST_TILINGS, TARGET
from tests.support.partitioned import coordinates, partitioned

ROWS, WIDTH, IDS = 8, 16, 12
LOC = Loc("model.py", 41)
MESH = make_mesh({"dp_shard": 2, "tp": 4})
N, D, T = (), ("dp_shard",), ("tp",)
LEVELS = ("L1", "L0")


@dataclass(frozen=True)
class Layout:
    """How table [ROWS, WIDTH] and ids [IDS, 1] lie."""

    table: tuple[Sequence[str], Sequence[str]]
    ids: Sequence[str]
    over: tuple[str, ...] = field(default=())  # axes whose partial results are added


LAYOUTS = {
    "rows over tp": Layout((T, N), N, T),
    "rows over tp, ids over data": Layout((T, N), D, T),
    "columns over tp": Layout((N, T), D),
    "whole": Layout((N, N), N),
}


@cache
def linked(name: str, kind: str) -> tuple[Program, dict[str, tuple[str, ...]]]:
    """The program of a rank that looks rows up, or adds to them, and its coordinates."""
    how, b = LAYOUTS[name], Builder(loc=LOC)
    table, ids = b.input((ROWS, WIDTH)), b.input((IDS, 1), DType.I32)
    dims = {table: how.table, ids: (how.ids, N)}
    if kind == "gather":
        attrs = GatherAttrs(
            offset_dims=(1,),
            collapsed_slice_dims=(0,),
            start_index_map=(0,),
            index_vector_dim=1,
            slice_sizes=(1, WIDTH),
        )
        out = b.op("gather", table, ids, attrs=attrs)
        dims[out] = (how.ids, how.table[1])
        if how.over:
            out = b.all_reduce(out, how.over)
            dims[out] = (how.ids, how.table[1])
    else:
        updates = b.input((IDS, WIDTH))
        dims[updates] = (how.ids, how.table[1])
        attrs = ScatterAttrs(
            update_window_dims=(1,),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0,),
            index_vector_dim=1,
            kind="add",
        )
        out = b.op("scatter", table, ids, updates, attrs=attrs)
        dims[out] = how.table
        if how.ids:
            out = b.all_reduce(out, how.ids)
            dims[out] = how.table
    part = partitioned(b.finish(out), MESH, dims)
    return of_a_rank(part)


def of_a_rank(part: PartitionedGraph) -> tuple[Program, dict[str, tuple[str, ...]]]:
    """The program of a rank, and the axes of its coordinates."""
    graph, axes = hoist_coordinates(localize(part).graph)
    names = [coordinate_name(a) for a in axes]
    inputs = tuple(f"arg{i}" for i in range(len(part.inputs)))
    step = StepProgram(
        name="step", graph=run(graph, PASSES), inputs=(*inputs, *names), outputs=("out",)
    )
    return compile_graph(step, TARGET, FIRST_TILINGS), dict(zip(names, axes, strict=True))


def of_ranks(array: np.ndarray, dims: Sequence[Sequence[str]]) -> np.ndarray:
    """What every rank holds of an array, [ranks, ...]."""
    held = []
    for rank in range(MESH.size(("dp_shard", "tp"))):
        part = array
        for d, axes in enumerate(dims):
            for axis in axes:
                part = np.split(part, MESH.sizes[axis], d)[coordinates(MESH, rank)[axis]]
        held.append(part)
    return np.stack(held)


def counted(name: str, kind: str, ids: np.ndarray, level: str, strict: bool = False) -> list:
    """The findings of a run; its values are those of the whole."""
    (program, axes), how = linked(name, kind), LAYOUTS[name]
    rng = np.random.default_rng(0)
    table = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    updates = rng.standard_normal((IDS, WIDTH)).astype(np.float32)
    watch = IndexWatch(strict)
    given_ = {"arg0": of_ranks(table, how.table), "arg1": of_ranks(ids[:, None], (how.ids, N))}
    if kind == "scatter":
        given_["arg2"] = of_ranks(updates, (how.ids, how.table[1]))
    out = run_single(program, given_, level, watch, Ranks(MESH.sizes, axes))["out"]
    if kind == "gather":
        wanted = of_ranks(table[np.clip(ids, 0, ROWS - 1)], (how.ids, how.table[1]))
    else:
        inside, wanted = (ids >= 0) & (ids < ROWS), table.copy()
        np.add.at(wanted, ids[inside], updates[inside])
        wanted = of_ranks(wanted, how.table)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
    return watch.findings


@pytest.mark.parametrize("kind", ["gather", "scatter"])
@pytest.mark.parametrize("name", LAYOUTS)
@given(ids=st.lists(st.integers(-3, ROWS + 2), min_size=IDS, max_size=IDS))
@settings(max_examples=6, deadline=None)
def test_every_wrong_index_counts_once(name: str, kind: str, ids: list[int]) -> None:
    given_ = np.array(ids, np.int32)
    wrong = int(((given_ < 0) | (given_ >= ROWS)).sum())
    for level in LEVELS:
        found = counted(name, kind, given_, level)
        assert len(found) == (wrong > 0)
        for finding in found:
            said = "1 index lies" if wrong == 1 else f"{wrong} indices lie"
            assert finding.message.startswith(f"{kind}: {said} out of bounds")
            assert finding.loc == LOC


@pytest.mark.parametrize("kind", ["gather", "scatter"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_strict_watch_passes_what_other_ranks_hold_and_ends_at_what_nobody_does(
    name: str, kind: str
) -> None:
    right = np.arange(IDS, dtype=np.int32) % ROWS
    wrong = np.where(np.arange(IDS) == 7, ROWS, right).astype(np.int32)
    for level in LEVELS:
        assert not counted(name, kind, right, level, strict=True)
        with pytest.raises(SimulationError, match=f"{kind} requires indices inside") as caught:
            counted(name, kind, wrong, level, strict=True)
        assert caught.value.code == "SW_SIM_INDEX" and caught.value.loc == LOC


@pytest.mark.parametrize("over_tp", [False, True])
@pytest.mark.parametrize("row", [-1, 0, ROWS - 1, ROWS, 900])
def test_a_window_that_is_read_in_place_is_watched(
    row: int, over_tp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single window of 64 KiB or more is a slice, and its index the address in a register; of
    rows that are split over ranks it is copied."""
    monkeypatch.setattr(single_windows, "LEAST_BYTES", 0)
    b = Builder(loc=LOC)
    table, ids = b.input((ROWS, WIDTH)), b.input((1, 1), DType.I32)
    attrs = GatherAttrs(
        offset_dims=(1,),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
        index_vector_dim=1,
        slice_sizes=(1, WIDTH),
    )
    found = b.op("gather", table, ids, attrs=attrs)
    out = b.op("tanh", b.all_reduce(found, T) if over_tp else found)
    dims = {table: (T, N)} if over_tp else {}
    program, axes = of_a_rank(partitioned(b.finish(out), MESH, dims))
    kinds = {k.program.kind for f in program.functions for k in f.kernels}
    assert ("register_load" in kinds) is not over_tp
    rows = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    loaded = {"arg0": of_ranks(rows, (T if over_tp else N, N)), "arg1": np.full((1, 1), row)}
    wanted = np.tanh(rows[np.clip([row], 0, ROWS - 1)])
    for level in LEVELS:
        watch = IndexWatch()
        have = run_single(program, loaded, level, watch, Ranks(MESH.sizes, axes))["out"]
        np.testing.assert_allclose(have, np.broadcast_to(wanted, have.shape), rtol=1e-5, atol=1e-5)
        told = [f.message.partition(" out of")[0] for f in watch.findings]
        assert told == ([] if 0 <= row < ROWS else ["gather: 1 index lies"])
        assert all(f.loc == LOC for f in watch.findings)
