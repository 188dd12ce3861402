"""Damaging any single instruction of a compiled step shows: in a value, in a time, or in a refusal.

The step is the small llama on four cores, every core at L0, from random state and tokens. Mutants
are drawn with a fixed seed, kind after kind; `tests/support/mutations.py` says which changes
are mutations. None is taken out afterwards.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.frontend.reference import initial_state
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.neff.bundle import Bundle
from shardwright.sim_cluster.values.run_values import LocalHosts, ValueRun
from tests.support.mutation_lab import Lab, Mutation, RecordingHost
from tests.support.mutations import VALUE_KINDS, all_mutations
from tests.support.small_job import SIZES, TARGET, build_on, bundle_of, small_llama

SEED, FEW, MANY = 2, 56, 200
RANKS, MICRO_BATCHES, TOKENS = 4, 2, 16
MAX_DEAD = 0.05
INT_MAX = 2**31 - 1


def record(bundle: Bundle, state: Mapping[str, np.ndarray], edges: bool) -> RecordingHost:
    """One step from random state. Token ids are also negative (JAX counts those from the end); on
    the `edges` one target lies outside the vocabulary, the step counter is at its end, and
    weights are small enough not to clip.
    """
    rng = np.random.default_rng(int(edges))
    host = RecordingHost(bundle)
    hosts = LocalHosts([host])
    run = ValueRun(bundle.programs, bundle.manifest, check_l0=False, hosts=hosts)
    run.load({name: _random(name, array, rng, edges) for name, array in state.items()})
    vocab = SIZES["vocab_size"]
    shape = (RANKS * MICRO_BATCHES, TOKENS)
    batch = {
        f"batch/{name}": rng.integers(-vocab, vocab, shape).astype(np.int32)
        for name in ("tokens", "targets")
    }
    if edges:
        batch["batch/targets"][:, 3] = vocab + 7
    run.step(batch)
    return host


def _random(name: str, array: np.ndarray, rng: np.random.Generator, edges: bool) -> np.ndarray:
    if np.issubdtype(array.dtype, np.integer):
        return np.full_like(array, INT_MAX if edges else 3)
    noise = rng.standard_normal(array.shape).astype(array.dtype)
    if "/nu/" in name:
        return np.abs(noise) + np.float32(1e-3)
    return noise * np.float32(0.02 if edges else 0.5)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    path = tmp_path_factory.mktemp("mutations")
    task = small_llama(seq_len=TOKENS)
    road = build_on(task, {"dp_shard": RANKS}, num_microbatches=MICRO_BATCHES)
    bundle, state = bundle_of(road, path / "bundle"), initial_state(task, 0)
    runs = [record(bundle, state, edges) for edges in (False, True)]
    return Lab(bundle, runs, load_target(TARGET))


@pytest.fixture(scope="module")
def mutations(lab: Lab) -> dict[str, list[Mutation]]:
    return all_mutations(lab)


def draw(
    lab: Lab, mutations: Mapping[str, list[Mutation]], count: int
) -> tuple[list[Mutation], list[Mutation]]:
    """(mutations, draws at instructions nobody reads), seeded, kind after kind, those
    that change values twice as often.
    """
    rng = random.Random(SEED)
    pools = {kind: rng.sample(found, len(found)) for kind, found in sorted(mutations.items())}
    drawn: list[Mutation] = []
    dead: list[Mutation] = []
    while len(drawn) < count:
        for kind in (*pools, *VALUE_KINDS):
            pool = pools[kind]
            if not pool or len(drawn) == count:
                continue
            mutation = pool.pop()
            is_value = kind in VALUE_KINDS
            alive = not is_value or lab.is_live(mutation.program, mutation.place)
            (drawn if alive else dead).append(mutation)
    return drawn, dead


def judge(lab: Lab, mutations: Mapping[str, list[Mutation]], count: int) -> None:
    drawn, dead = draw(lab, mutations, count)
    verdicts = {mutation: lab.verdict(mutation) for mutation in drawn}
    tally = Counter(verdict.how for verdict in verdicts.values())
    print(f"{count} mutants: {dict(tally)}, draws at dead instructions: {len(dead)}")
    survivors = [str(m) for m, verdict in verdicts.items() if verdict.how == "survives"]
    assert not survivors, "\n".join(survivors)
    # A refusal names what is wrong; an error of Python wrapped in a code does not.
    vague = [str(m) for m, verdict in verdicts.items() if verdict.detail == "SW_L0_EXECUTION"]
    assert not vague, "\n".join(vague)
    assert len(dead) <= MAX_DEAD * count, "\n".join(str(m) for m in dead)
    assert min(tally["value"], tally["refused"]) >= count // 10


@pytest.mark.matrix
def test_a_few_mutations_show(lab: Lab, mutations: dict[str, list[Mutation]]) -> None:
    judge(lab, mutations, FEW)


@pytest.mark.exhaustive
def test_200_mutations_show(lab: Lab, mutations: dict[str, list[Mutation]]) -> None:
    judge(lab, mutations, MANY)


def first_instruction(lab: Lab) -> tuple[int, int, int]:
    kernels = lab.programs["backward"].functions[0].kernels
    return (0, next(k for k, kernel in enumerate(kernels) if kernel.body), 0)


def test_the_unchanged_step_does_not_show(lab: Lab) -> None:
    """The laboratory itself: no change, no difference; and a refusal is a diagnosed one."""
    place = first_instruction(lab)
    same = Mutation("nothing", "backward", place, "", lambda instr: None)
    assert lab.verdict(same).how == "survives"

    def foul(instr: object) -> None:
        raise KeyError("a bug of the tool")

    with pytest.raises(KeyError):
        lab.verdict(Mutation("bug", "backward", place, "", foul))
    assert not issubclass(KeyError, DiagnosticError)


def test_every_kind_of_mutation_has_sites(mutations: dict[str, list[Mutation]]) -> None:
    counts = {kind: len(found) for kind, found in mutations.items()}
    print(counts)
    assert len(counts) == 14
    assert min(counts.values()) >= 20, counts
