"""Ranks on several hosts: bits are those of the run on one, wherever hosts are cut, for every kind
of collective, over stages and between them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.reference import batch_leaves, initial_state, task_batches
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.neff.bundle import Bundle
from shardwright.sharding.settings import StrategySettings
from shardwright.sim_cluster.values.exchange import Exchange, exchange, ring_schedules
from shardwright.sim_cluster.values.functions import CollectiveRequest
from shardwright.sim_cluster.values.rank_host import RankHost, packed_host, spans_of
from shardwright.sim_cluster.values.run_values import Hosts, LocalHosts, ValueRun
from tests.support.cells import long_in_matrix
from tests.support.small_job import build_on, bundle_of, small_llama

STEPS = 2
MESHES = {
    "fsdp": {"dp_shard": 4},
    "hsdp and tensor": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "pipeline": {"pp": 2, "dp_shard": 2, "tp": 2},
}


@pytest.fixture(
    scope="module", params=long_in_matrix(MESHES, ("pipeline",), ("hsdp and tensor", "fsdp"))
)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The small llama in bf16 on a mesh: sums that depend on their order."""
    path, mesh = tmp_path_factory.mktemp("hosts"), MESHES[request.param]
    name = "fsdp" if request.param == "fsdp" else "llm-training"
    settings = StrategySettings(name=name)
    road = build_on(small_llama("bf16"), mesh, settings=settings)
    return bundle_of(road, path / "bundle")


def unpacked_hosts(bundle: Bundle, count: int, **settings: object) -> LocalHosts:
    """Hosts in this process that were made of bytes."""
    spans = spans_of(bundle.manifest.num_cores, count)
    programs, manifest = bundle.programs, bundle.manifest
    packed = [packed_host(programs, manifest, spans, n, **settings) for n in range(count)]
    return LocalHosts([RankHost.unpacked(data) for data in packed])


def outcome(
    bundle: Bundle, hosts: Hosts | None = None, check_l0: bool = False
) -> tuple[list[bytes], dict[str, bytes]]:
    """Metrics of every step, and the state after them, as bytes."""
    task = small_llama("bf16")
    run = ValueRun(bundle.programs, bundle.manifest, hosts=hosts, check_l0=check_l0)
    state = initial_state(task, 0)
    batches = task_batches(task, 0, global_batch(bundle))
    run.load(state)
    metrics = [run.step(batch_leaves(next(batches))) for _ in range(STEPS)]
    after = run.gather(state)
    assert not check_l0 or set(run.result.l0) == set(bundle.programs)
    run.close()
    told = [value.tobytes() for step in metrics for value in step.values()]
    return told, {name: array.tobytes() for name, array in after.items()}


def global_batch(bundle: Bundle) -> int:
    """Samples of a step: one per data rank and micro-batch."""
    mesh = bundle.manifest.mesh
    return bundle.manifest.num_microbatches * mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)


def test_bits_do_not_depend_on_the_hosts(bundle: Bundle) -> None:
    alone = outcome(bundle)
    for count in (2, 3):
        hosts = unpacked_hosts(bundle, count, threads=count)
        assert outcome(bundle, hosts, check_l0="tp" not in bundle.manifest.mesh) == alone
    ranks = bundle.manifest.num_cores
    for host, span in zip(unpacked_hosts(bundle, 3).hosts, spans_of(ranks, 3), strict=True):
        assert list(host.cores) == list(span)  # no host holds ranks of others


def test_wrong_tokens_count_once_on_every_mesh(bundle: Bundle) -> None:
    """By the gather, and by the scatter of its gradient, at the user's line; right ones never do,
    whichever rank holds their rows."""
    task, found = small_llama("bf16"), []
    for count in (1, 2):
        hosts = unpacked_hosts(bundle, count)
        run = ValueRun(bundle.programs, bundle.manifest, hosts=hosts, check_l0=False)
        run.load(initial_state(task, 0))
        batch = batch_leaves(next(task_batches(task, 0, global_batch(bundle))))
        run.step(batch)
        assert not run.findings()
        tokens = batch["batch/tokens"].copy()
        tokens[0, 3], tokens[-1, 0], tokens[-1, 7] = 256, 10**6, -(10**6)
        run.step({**batch, "batch/tokens": tokens})
        found.append([(f.message.partition(" out of")[0], f.loc) for f in run.findings()])
        run.close()
    (first, where), (second, same) = found[0]
    assert (first, second) == ("gather: 3 indices lie", "scatter: 3 indices lie")
    assert where is not None and where.file.endswith("orchestrator/models/decoder.py")
    assert same is not None and same.line == where.line
    assert found[0] == found[1]


def test_replicas_are_compared_across_hosts(small_bundle: Bundle) -> None:
    hosts = unpacked_hosts(small_bundle, 2)
    run = ValueRun(small_bundle.programs, small_bundle.manifest, hosts=hosts)
    run.load(initial_state(small_llama(), 0))
    buffers = small_bundle.manifest.buffers.values()
    kept = [b for b in buffers if b.initial == "given" and b.role not in ("batch", "coordinate")]
    name = next(b.name for b in kept if not any(b.axes))
    run.gather([name])
    hosts.hosts[1].cores[3].named[name][0] += 1
    with pytest.raises(SimulationError, match=r"ranks [02] and 3"):
        run.gather([name])


@pytest.mark.matrix
def test_an_index_out_of_bounds_is_told_by_every_host(small_bundle: Bundle) -> None:
    found = []
    for count in (1, 2):
        hosts = unpacked_hosts(small_bundle, count)
        run = ValueRun(small_bundle.programs, small_bundle.manifest, hosts=hosts)
        run.load(initial_state(small_llama(), 0))
        batch = batch_leaves(next(task_batches(small_llama(), 0, 8)))
        run.step({name: np.full_like(array, 10**6) for name, array in batch.items()})
        found.append([(f.code, f.message) for f in run.findings()])
    assert found[0] == found[1] != []
    strict = unpacked_hosts(small_bundle, 2, strict_indices=True)
    run = ValueRun(small_bundle.programs, small_bundle.manifest, hosts=strict)
    run.load(initial_state(small_llama(), 0))
    with pytest.raises(SimulationError, match="requires indices inside"):
        run.step({name: np.full_like(array, 10**6) for name, array in batch.items()})


MESH = {"a": 3, "b": 2, "c": 2}
CALLS = {
    "all_gather": CollectiveCall("all_gather", ("a",), DType.F32, (2, 3, 5)),
    "all_reduce": CollectiveCall("all_reduce", ("a", "c"), DType.BF16, (1, 37, 1), "add"),
    "reduce_scatter": CollectiveCall("reduce_scatter", ("a", "b"), DType.BF16, (3, 12, 2), "add"),
    "large reduce_scatter": CollectiveCall(
        "reduce_scatter", ("a",), DType.F32, (2, 6, 3000), "add"
    ),
    "bucket": CollectiveCall(
        "reduce_scatter",
        ("a", "c"),
        DType.F32,
        (1, 84, 1),
        "add",
        parts=((2, 6, 3), (1, 12, 4)),
    ),
    "all_to_all": CollectiveCall("all_to_all", ("b", "a"), DType.F32, (2, 12, 3)),
    "permute": CollectiveCall(
        "collective_permute", ("a",), DType.F32, (1, 7, 1), pairs=((0, 1), (1, 2))
    ),
    "max": CollectiveCall("all_reduce", ("b",), DType.F32, (1, 5, 1), "max"),
}


def requests_of(
    call: CollectiveCall, sources: Sequence[np.ndarray], got: dict[int, bytes]
) -> dict[int, CollectiveRequest]:
    def keeper(rank: int) -> CollectiveRequest:
        def keep(result: np.ndarray) -> None:
            got[rank] = result.tobytes()

        return CollectiveRequest(call, sources[rank], keep)

    return {rank: keeper(rank) for rank in range(len(sources))}


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("hosts", [2, 5, 12])
def test_every_kind_of_collective(name: str, hosts: int) -> None:
    call, rng = CALLS[name], np.random.default_rng(1)
    count = 12
    size = int(np.prod(call.source_shape))
    sources = [rng.standard_normal(size).astype(call.dtype.numpy) for _ in range(count)]
    alone: dict[int, bytes] = {}
    exchange(list(requests_of(call, sources, alone).values()), MESH)
    got: dict[int, bytes] = {}
    requests, spans = requests_of(call, sources, got), spans_of(count, hosts)
    each = [Exchange(spans, number, ring_schedules) for number in range(hosts)]
    own = [{rank: requests[rank] for rank in span} for span in spans]
    sent = [host.sent(mine, range(count), MESH) for host, mine in zip(each, own, strict=True)]
    for number, host in enumerate(each):
        host.finish(own[number], range(count), MESH, [row[number] for row in sent])
    assert got == alone and len(got) == count
    assert not any(sent[number][number] for number in range(hosts))


@pytest.mark.parametrize("name", ["reduce_scatter", "all_to_all", "bucket"])
def test_a_host_is_sent_only_what_its_ranks_depend_on(name: str) -> None:
    call = CALLS[name]
    size = int(np.prod(call.source_shape))
    sources = [np.zeros(size, call.dtype.numpy) for _ in range(12)]
    spans = spans_of(12, 12)
    sent = [
        Exchange(spans, r, ring_schedules).sent({r: request}, range(12), MESH)
        for r, request in requests_of(call, sources, {}).items()
    ]
    group = math.prod(MESH[axis] for axis in call.axes)
    for row in sent:
        sizes = [array.size for payload in row for array in payload]
        assert sizes == [size // group] * (group - 1)
