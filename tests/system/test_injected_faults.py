"""A run with one fault fails, by the verdict that lets every correct run pass: what rounding
explains is far from what a fault does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.frontend.reference import batch_leaves, initial_state, task_batches
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.neff.bundle import Bundle
from shardwright.compiler.neff.manifest import NamedBuffer
from shardwright.orchestrator.config.config import JobConfig, load
from shardwright.orchestrator.road.numerics import (
    Difference,
    Reference,
    Rounding,
    differences,
    measure_rounding,
    run_unsharded,
)
from shardwright.sim_cluster.values.run_values import LocalHosts, ValueRun
from tests.models import flax_decoder, prime_model
from tests.support.cells import long_in_matrix
from tests.support.faulty_host import FaultyHost, Tamper
from tests.support.small_job import build_on, bundle_of, small_llama
from tests.system import attention_with_biases
from tests.system.test_whole_road import sorted_experts

RANKS, MICRO_BATCHES, STEPS = 4, 2, 2
BATCH = RANKS * MICRO_BATCHES
FAULTS = 4 * 4 + MICRO_BATCHES + 2

MODELS: dict[str, Callable[[], TrainTask]] = {
    "attention with biases": attention_with_biases.make_task,
    "llama": small_llama,
    "flax": partial(flax_decoder.train_task, width=32, num_layers=2, seq_len=8),
    "prime": partial(prime_model.train_task, seq_len=7),
    "experts": sorted_experts,
}
IN_MATRIX = ("prime",)


@dataclass(frozen=True)
class Model:
    """A step in files, and what its values may be."""

    task: TrainTask
    bundle: Bundle
    reference: Reference
    rounding: Rounding
    calls: list[tuple[str, int]]


def summed(rank: int, result: np.ndarray, results: Mapping[int, np.ndarray]) -> np.ndarray:
    """The sum of the ranks where their mean belongs."""
    return result * np.float32(RANKS)


def scaled(rank: int, result: np.ndarray, results: Mapping[int, np.ndarray]) -> np.ndarray:
    return result * np.float32(1.1) if rank == 1 else result


def swapped(rank: int, result: np.ndarray, results: Mapping[int, np.ndarray]) -> np.ndarray:
    """Ranks 0 and 1 get each other's part; of what all get, its parts change places."""
    if all(np.array_equal(result, other) for other in results.values()):
        return np.roll(result, result.size // RANKS)
    return results[{0: 1, 1: 0}.get(rank, rank)]


def lost(rank: int, result: np.ndarray, results: Mapping[int, np.ndarray]) -> np.ndarray:
    return np.zeros_like(result) if rank == 2 else result


REDUCES: dict[str, Tamper] = {"summed": summed, "scaled": scaled}
MOVES: dict[str, Tamper] = {"swapped": swapped, "lost": lost}


class OtherBatches(ValueRun):
    """Takes the first micro-batch twice, or the last one, and none of the other."""

    taken = 0

    def _micro_batch(
        self, program: str, number: int
    ) -> Iterator[tuple[str, tuple[NamedBuffer, np.ndarray]]]:
        return super()._micro_batch(program, self.taken)


def trained(
    model: Model | tuple[TrainTask, Bundle],
    faults: Mapping[int, Tamper] | None = None,
    kind: type[ValueRun] = ValueRun,
) -> tuple[dict[str, np.ndarray], list[float], FaultyHost]:
    """The state after one step, the losses, and the host."""
    task, bundle = (model.task, model.bundle) if isinstance(model, Model) else model
    host = FaultyHost(bundle, faults)
    run = kind(bundle.programs, bundle.manifest, check_l0=False, hosts=LocalHosts([host]))
    state, batches = initial_state(task, 0), task_batches(task, 0, BATCH)
    run.load(state)
    losses, after_one = [], {}
    for number in range(STEPS):
        losses.append(float(run.step(batch_leaves(next(batches)))["metrics/loss"]))
        if number == 0:
            after_one = dict(run.gather(state))
            host.faults = {}
    return after_one, losses, host


def built(name: str, folder: Path) -> Model:
    task = MODELS[name]()
    road = build_on(task, {"dp_shard": RANKS}, num_microbatches=MICRO_BATCHES)
    bundle = bundle_of(road, folder / "bundle")
    job: JobConfig = load(None, [f"run.steps={STEPS}"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwright.orchestrator.road.numerics.resolve_task", lambda _: task)
        reference = run_unsharded(job, BATCH)
        rounding = measure_rounding(job, BATCH, reference, 1)
    *_, host = trained((task, bundle))
    return Model(task, bundle, reference, rounding, host.calls[: len(host.calls) // STEPS])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in made:
            made[name] = built(name, tmp_path_factory.mktemp("faults"))
        return made[name]

    return model


@pytest.mark.matrix
def test_one_micro_batch_is_the_whole_batch(models: Callable[[str], Model]) -> None:
    """So that nothing is said of the mean over several."""
    assert models(IN_MATRIX[0]).rounding.parts is None


def judged(
    model: Model, values: Mapping[str, np.ndarray], losses: list[float]
) -> tuple[Difference, Difference]:
    return differences(values, losses, model.reference, model.rounding)


def spread(places: list[int], count: int) -> list[list[int]]:
    """The places in so many stretches, each from its middle on."""
    ends = np.linspace(0, len(places), count + 1).astype(int)
    parts = [places[a:b] for a, b in pairwise(ends)]
    return [part[len(part) // 2 :] + part[: len(part) // 2] for part in parts]


Worst = tuple[Difference, Difference]


def faults_of(model: Model) -> Iterator[tuple[str, Worst]]:
    """Twenty faults, and what a run with each is judged to be."""
    reduces = [n for n, (kind, _) in enumerate(model.calls) if "reduce" in kind]
    moves = [n for n, (kind, _) in enumerate(model.calls) if kind != "all_reduce"] or reduces
    for places, tampers in ((reduces, REDUCES), (moves, MOVES)):
        for name, tamper in tampers.items():
            for stretch in spread(places, 4):
                number, worst = of_collective(model, stretch, tamper)
                yield f"{name} {number} {model.calls[number][0]}", worst
    for taken in range(MICRO_BATCHES):
        kind = type("Taken", (OtherBatches,), {"taken": taken})
        values, losses, _ = trained(model, kind=kind)
        yield f"micro-batch {taken} only", judged(model, values, losses)
    sizes = {n: -leaf.size for n, leaf in model.reference.after_one.items() if "params/" in n}
    for leaf in sorted(sizes, key=lambda n: (sizes[n], n))[:2]:
        yield f"stale {leaf}", with_stale(model, leaf)


def of_collective(model: Model, numbers: list[int], tamper: Tamper) -> tuple[int, Worst]:
    """The first of some collectives whose result tampering changes: zeros stay what they are."""
    for number in numbers:
        try:
            values, losses, host = trained(model, {number: tamper})
        except SimulationError as error:  # copies of a leaf that differ are refused
            assert error.code == "SW_SIM_REPLICAS"
            return number, (Difference(error.code, np.inf, 1e-5),) * 2
        if host.changed:
            return number, judged(model, values, losses)
    raise AssertionError(f"no collective of {numbers} carries anything")


def with_stale(model: Model, leaf: str) -> Worst:
    """Rank 1 keeps its part of a leaf as it was."""
    values, losses, _ = trained(model)
    old, kept = initial_state(model.task, 0)[leaf].reshape(-1), values[leaf].reshape(-1).copy()
    part = slice(kept.size // RANKS, 2 * kept.size // RANKS)
    kept[part] = old[part]
    return judged(model, values | {leaf: kept.reshape(values[leaf].shape)}, losses)


@pytest.mark.parametrize(
    "name", long_in_matrix(MODELS, IN_MATRIX, [n for n in MODELS if n not in IN_MATRIX])
)
def test_every_fault_fails_and_no_fault_passes(name: str, models: Callable[[str], Model]) -> None:
    model = models(name)
    values, losses, _ = trained(model)
    leaf, loss = judged(model, values, losses)
    assert leaf.share <= 1 and loss.share <= 1, (leaf, loss)
    found = {what: max(d.share for d in worst) for what, worst in faults_of(model)}
    assert len(found) == FAULTS
    unseen = {what: share for what, share in found.items() if share <= 1}
    assert not unseen, (unseen, leaf, loss)
