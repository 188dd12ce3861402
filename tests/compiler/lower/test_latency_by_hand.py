"""Orders in which code runs beside collectives, with times worked out by hand (picoseconds)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from shardwright.collectives.ops import CollectiveKind
from shardwright.compiler.dtypes import DType
from shardwright.compiler.fusion.logical_core import LogicalCore
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.isa.kernel import KernelProgram, Tensor
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.lower.function import Fixpoint, lower_to_fixpoint
from shardwright.compiler.lower.latency import Hiding, Progress, makespan_ps
from shardwright.compiler.lower.write_out import Lowered
from shardwright.compiler.machine.network import expected_ps
from shardwright.compiler.machine.target import load_target, logical, target_names
from shardwright.compiler.options import CompileOptions
from shardwright.sim_cluster.network.network import Network, larger_side_bytes
from tests.support.building import Builder

DP = ("dp_shard",)
MIB = 1 << 20


def test_a_stream_serves_one_collective_after_the_other() -> None:
    """100 from 0, then 50 behind it though it starts at 30: 150. Code at 30 waits 120 for it."""
    progress = Progress()
    progress.start(0, 100)
    progress.compute(30)
    progress.start(1, 50)
    assert progress.ends == {0: 100, 1: 150}
    assert progress.stall((0,)) == 70 and progress.stall((0, 1)) == 120 and progress.stall(()) == 0
    progress.wait((1,))
    progress.compute(5)
    assert (progress.now, progress.end) == (155, 155)


def test_transfers_to_the_host_have_a_queue_of_their_own() -> None:
    progress = Progress()
    progress.start(0, 100)
    progress.start(1, 40, "host_store")
    assert progress.ends == {0: 100, 1: 40}
    assert progress.end == 100


def test_the_time_of_a_function_is_that_of_code_and_what_it_waits_for() -> None:
    """Code 10, a gather that takes 100 from there, 30 beside it, the wait until 110, 20 behind."""
    kinds = ("compute", "collective_start", "compute", "collective_wait", "compute")
    kernels = [KernelProgram(kind, kind, attrs={"collective": 0}) for kind in kinds]
    assert makespan_ps(kernels, (10, 0, 30, 0, 20), (100,), (0,)) == 130
    assert makespan_ps(kernels, (10, 0, 30, 0, 20), (25,), (0,)) == 60


# Kernels: 0 gathers for 100, 1 needs it and takes 10; 2, 3 and 4 take 40 each, 3 behind 2.
BEFORE = {0: set[int](), 1: {0}, 2: set[int](), 3: {2}, 4: set[int]()}
TIMES = {0: 100, 1: 10, 2: 40, 3: 40, 4: 40}
HIDING = Hiding(BEFORE, BEFORE, TIMES, {0: 0})


def rank(places: Sequence[float]) -> dict[int, tuple[bool, bool, float]]:
    """Kernels by place, the collective first."""
    return {kernel: (kernel != 0, False, place) for kernel, place in enumerate(places)}


def test_what_need_not_wait_goes_first() -> None:
    """1 is next in the program and would wait for 100: 2, 3 and 4 run until 120."""
    assert HIDING.order(rank((0, 1, 2, 3, 4))) == [0, 2, 3, 4, 1]


def test_code_that_need_no_longer_wait_goes_in_its_place() -> None:
    """At 120 instead of 80 nobody waits: 1 is in front of what is last in the program, 4, when only
    2 and 3 are as long as the gather (of 80)."""
    hiding = Hiding(BEFORE, BEFORE, TIMES | {0: 80}, {0: 0})
    assert hiding.order(rank((0, 1, 2, 3, 4))) == [0, 2, 3, 1, 4]


def test_the_critical_path_behind_a_kernel() -> None:
    """Behind 0 lies 1: 100 + 10; behind 2 lies 3: 40 + 40."""
    assert HIDING.tails((0, 1, 2, 3, 4)) == {0: 110, 1: 10, 2: 80, 3: 40, 4: 40}


@dataclass(frozen=True)
class Oracle:
    """Every op of a kernel takes as much, and a gather 1000 for each column of its result."""

    times: dict[str, int] = field(default_factory=dict)
    limit_bytes: int = 1 << 34

    def __call__(self, program: KernelProgram, tensors: Sequence[Tensor]) -> int:
        return sum(self.times.get(node.op, 0) for node in program.nodes)

    searched = __call__

    def collective_ps(self, op: Op) -> int:
        return 1000 * op.result.type.shape[1]


def two_gathers() -> Graph:
    """A product with a weight that is long in flight, then one with a weight that is here at once,
    and one that needs both."""
    b = Builder()
    value = b.input((4, 16))
    late = b.dot(value, b.all_gather(b.input((8, 64)), 0, DP, group_size=2), ((1,), (0,)))
    early = b.dot(value, b.input((16, 32)), ((1,), (0,)))
    return b.finish(late, early)


def steps(lowered: Lowered) -> list[str]:
    """What runs, products by the size of their result."""
    found = []
    for kernel in lowered.kernels:
        sizes = [node.iter_dims for node in kernel.nodes if node.op == "store"]
        last = sizes[0][-1] if sizes else -1
        found.append(f"{kernel.name} {kernel.iter_dims[last]}" if last >= 0 else kernel.name)
    return found


def test_a_product_that_is_ready_runs_beside_a_gather() -> None:
    """The gather takes 64,000, the product beside it 5: without an oracle the program's order."""
    timed = lower_to_fixpoint(two_gathers(), oracle=Oracle({"contract": 5})).lowered
    gather, wait = "start.all_gather", "wait.all_gather"
    assert steps(timed) == [gather, "dot_general 32", wait, "dot_general 64"]
    assert steps(lower_to_fixpoint(two_gathers()).lowered) == [
        gather,
        wait,
        "dot_general 64",
        "dot_general 32",
    ]
    assert timed.expected_ps == 64_000 + 5
    assert timed.stalled_ps == 64_000 - 5
    assert timed.flights_ps == [64_000]


def mlp() -> Graph:
    """Two products with a gathered weight each, which may share a kernel."""
    b = Builder()
    value = b.input((128, 128), DType.BF16)
    first = b.all_gather(b.input((64, 512), DType.BF16), 0, DP, group_size=2)
    second = b.all_gather(b.input((256, 128), DType.BF16), 0, DP, group_size=2)
    hidden = b.op("tanh", b.dot(value, first, ((1,), (0,))))
    return b.finish(b.dot(hidden, second, ((1,), (0,))))


def contractions(fixpoint: Fixpoint) -> list[int]:
    """Products per kernel."""
    counts = (sum(n.op == "contract" for n in k.nodes) for k in fixpoint.lowered.kernels)
    return [count for count in counts if count]


@pytest.mark.parametrize(
    ("contract", "store", "together"),
    [(400_000, 0, [1, 1]), (400_000, 600_000, [2]), (1_000, 0, [2])],
)
def test_products_share_a_kernel_where_they_do_not_wait_for_each_others_gathers(
    contract: int, store: int, together: list[int]
) -> None:
    """Weights are here at 512,000 and 640,000. A product of 400,000 ends at 912,000 alone, and the
    other at 1,312,000; both behind 640,000 end at 1,440,000. Where a store between them takes
    600,000, that is worth more; of products of 1,000 the wait for the last gather is all there is.
    """
    fixpoint = lower_to_fixpoint(mlp(), oracle=Oracle({"contract": contract, "store": store}))
    assert contractions(fixpoint) == together


@pytest.mark.parametrize("name", ["trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_what_is_expected_is_near_what_a_run_takes(name: str, kind: str) -> None:
    """Of all cores of one instance, and of two: within a fifth of the nominal profile's time."""
    target = logical(load_target(name))
    for instances in (1, 2):
        ranks = instances * target.cores
        for size in (MIB // 4, 16 * MIB):
            source = size // ranks // 4 if kind == "all_gather" else size // 4
            call = CollectiveCall(kind, DP, DType.F32, (1, source, 1))
            nominal = Network(target, instances, {"dp_shard": ranks}, "nominal").duration(call)
            expected = expected_ps(target, kind, larger_side_bytes(call, ranks), 4, ranks)
            assert 0.8 < expected / nominal.duration_ps < 1.2, (instances, size)


@pytest.mark.parametrize("name", target_names())
def test_every_group_of_every_machine_has_a_time(name: str) -> None:
    """Sizes that do not divide an instance too; groups across instances without EFA take none."""
    target = logical(load_target(name))
    for size in (1, 2, 3, 24, 31, target.cores, 2 * target.cores, 3 * target.cores):
        for kind in CollectiveKind:
            pairs = tuple((n, (n + 1) % size) for n in range(size))
            found = expected_ps(target, kind.value, MIB, 4, size, pairs)
            far = size > target.cores and not target.efa_devices
            assert (found > 0) is (size > 1 and not far), (kind, size)


def test_a_transfer_to_the_host_is_expected_to_share_the_link_of_its_chip() -> None:
    """Two cores of a trn1 chip share 31.5 GB/s of PCIe or what the machine's file says: 15.75 MB
    take a thousandth of a second of half of it, behind the fixed time of a DMA transfer."""
    target = load_target("trn1.32xlarge")
    size = round(target.host_link_bytes_per_s / 2 / 1000)
    found = expected_ps(target, "host_store", size, 4, 1)
    assert found == pytest.approx(target.core.dma_fixed_ps + 10**9, rel=1e-6)


def test_without_latency_hiding_collectives_are_taken_for_instant() -> None:
    target, (gather,) = (
        load_target("trn1n.32xlarge"),
        (op for op in two_gathers().ops if op.name == "all_gather"),
    )
    for on in (True, False):
        oracle = LogicalCore(target, CompileOptions(latency_hiding=on))
        assert (oracle.collective_ps(gather) > 0) is on
