"""When a value run passes: against the unsharded step, and at both levels of execution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.task import Mode
from shardwright.orchestrator.config.config import JobConfig, load
from shardwright.orchestrator.road import numerics
from shardwright.orchestrator.road.job import Values, exit_code
from shardwright.orchestrator.road.numerics import (
    Parts,
    Reference,
    Rounding,
    differences,
    least_bound,
    level_bound,
    metric_findings,
    numerics_section,
    run_unsharded,
)
from shardwright.sim_cluster.values.result import L0Check, distance

LEAF = {"params/w": np.ones((2, 3), np.float32)}
REFERENCE = Reference(losses=(2.0, 1.5), after_one=LEAF, bound=1e-5)


def checks(distances: Mapping[str, float], allowed: float = 1e-5) -> dict[str, L0Check]:
    """What L0 has to say of programs that are so far from L1."""
    return {name: L0Check(name, 0, 9, far, "x", allowed) for name, far in distances.items()}


GOOD = MappingProxyType(checks({"forward": 3e-7, "update": 0.0}))


def verdict(
    losses: tuple[float, ...] = (2.0, 1.5), wrong: float = 0.0, l0: dict[str, float] | None = None
) -> int:
    state = {"params/w": LEAF["params/w"] * np.float32(1 + wrong)}
    values = Values(losses, state, checks(l0) if l0 else GOOD)
    return exit_code({"numerics": numerics_section(JobConfig(), values, REFERENCE)})


def test_the_first_place_without_a_number_is_named() -> None:
    """What is infinite, or no number, in both is where it belongs."""
    whole = {"w": np.array([np.inf, np.nan, -np.inf, 1.0, 2.0])}
    reference = replace(REFERENCE, after_one=whole)
    for given, note in (
        ([np.inf, np.nan, -np.inf, np.nan, 2.0], "nan at [3] where the unsharded step has 1"),
        ([np.inf, 7, np.inf, 1, 2], "7 at [1] where the unsharded step has nan (2 such places)"),
    ):
        leaf, _ = differences({"w": np.array(given)}, REFERENCE.losses, reference)
        assert (leaf.error, leaf.note) == (math.inf, note)


def test_equal_values_pass() -> None:
    assert verdict() == 0


@pytest.mark.parametrize("l0", [2e-5, 2.1, float("nan"), float("inf")])
def test_instructions_that_compute_something_else_fail_the_run(l0: float) -> None:
    assert verdict(l0={"forward": 0.0, "backward": l0, "update": 0.0}) == 72


def test_the_worst_program_is_the_one_that_uses_most_of_what_it_may() -> None:
    """2e-5 of 1e-3 is less than 5e-6 of 1e-5."""
    found = checks({"forward": 2e-5}, 1e-3) | checks({"backward": 5e-6, "update": 1e-9})
    values = Values((2.0, 1.5), LEAF, found)
    section = numerics_section(JobConfig(), values, REFERENCE)
    assert section["worst_l0"]["program"] == "backward"
    assert (section["worst_l0"]["error"], section["worst_l0"]["allowed"]) == (5e-6, 1e-5)
    assert section["worst_l0"]["note"] == ""
    values = Values((2.0, 1.5), LEAF, checks({"forward": math.inf, "update": 1e-9}))
    section = numerics_section(JobConfig(), values, REFERENCE)
    assert section["worst_l0"]["note"] == "no number on one side"


def test_a_wrong_leaf_or_loss_fails_the_run() -> None:
    assert verdict(wrong=1e-3) == 72
    assert verdict(wrong=float("nan")) == 72
    assert verdict(losses=(2.0, 1.6)) == 72
    assert verdict(losses=(2.0, 1.5 * (1 + 1.5e-5))) == 72  # of 1e-5
    assert verdict(losses=(2.0, 1.5 * (1 + 0.5e-5))) == 0
    assert verdict(losses=(2.0, float("nan"))) == 72


@pytest.mark.parametrize(("distance", "code"), [(3e-7, 0), (2e-5, 72)])
def test_without_an_unsharded_run_instructions_are_still_judged(distance: float, code: int) -> None:
    section = numerics_section(
        JobConfig(), Values((2.0, 1.5), {}, checks({"step": distance})), None
    )
    assert exit_code({"numerics": section}) == code
    assert section["worst_loss_error"] is section["worst_param_error"] is None


@pytest.mark.parametrize(("l0", "code"), [(1e-5, 0), (1.0000001e-5, 72)])
def test_the_bound_itself_passes(l0: float, code: int) -> None:
    assert verdict(l0={"forward": l0}) == code


@pytest.mark.parametrize(
    ("last", "loss", "passed"), [(4.625, 2.25, True), (4.75, 2.25, False), (4.625, 2.5, False)]
)
def test_a_leaf_or_loss_at_its_bound_passes(last: float, loss: float, passed: bool) -> None:
    """An eighth: 0.625 of the length 5 of (3, 4), and 0.25 of 2."""
    wanted, given = (np.array([3.0, end], np.float32) for end in (4.0, last))
    reference = Reference(losses=(2.0,), after_one={"w": wanted}, bound=0.125)
    section = numerics_section(JobConfig(), Values((loss,), {"w": given}, GOOD), reference)
    assert section["passed"] is passed


def test_the_section_names_the_worst_leaf_and_the_largest_loss_error() -> None:
    """Leaf b is off by 0.3 of 1.5 (0.2), a by 0.1 of 1 (0.1); losses by 1 and 10 %."""
    one, two = np.float32(1.0), np.float32(1.5)
    given = {"a": np.asarray(one + np.float32(0.1)), "b": np.asarray(two - np.float32(0.3))}
    reference = Reference(
        losses=(1.0, 2.0), after_one={"a": np.asarray(one), "b": np.asarray(two)}, bound=0.25
    )
    values = Values((1.01, 2.2), given, checks({"step": 0.125}, 0.25))
    found = numerics_section(load(None, ["run.steps=2"]), values, reference)
    assert found["worst_param_error"]["leaf"] == "b"
    assert found["worst_param_error"]["error"] == pytest.approx(0.2, rel=1e-6)
    assert found["worst_loss_error"] == pytest.approx(0.1, rel=1e-6)
    assert (found["losses"], found["reference_losses"]) == ([1.01, 2.2], [1.0, 2.0])
    assert (found["bound"], found["l0"], found["steps"]) == (0.25, {"step": 0.125}, 2)
    assert found["passed"]


# docs/numerics.md: ||a - b|| over ||b||, both Euclidean


@pytest.mark.parametrize(
    ("given", "wanted", "error"),
    [
        ([3.0, 5.0], [3.0, 4.0], 1 / 5),
        ([0.0, 0.0], [3.0, 4.0], 1.0),
        ([6.0, 8.0], [3.0, 4.0], 1.0),
        ([3e-13, 4e-13], [0.0, 0.0], 0.5),  # over 1e-12 at least
        ([3e-12, 0.0], [2e-12, 0.0], 0.5),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([np.inf, 3.0], [np.inf, 4.0], 0.25),
        ([np.nan, 3.0], [np.nan, 4.0], 0.25),
        ([np.inf, 4.0], [-np.inf, 4.0], np.inf),
        ([np.nan, 4.0], [4.0, 4.0], np.inf),
        ([4.0, 4.0], [np.nan, 4.0], np.inf),
        ([np.inf, 4.0], [np.nan, 4.0], np.inf),
    ],
)
def test_the_error_of_a_leaf(given: list[float], wanted: list[float], error: float) -> None:
    assert distance(np.array(given), np.array(wanted)) == pytest.approx(error, rel=1e-12)


def test_errors_are_worked_out_in_double_precision() -> None:
    """In fp32 the squares of 1e30 overflow."""
    wanted = np.array([1e30, 1e30], np.float32)
    assert distance(wanted * np.float32(1.5), wanted) == pytest.approx(0.5, rel=1e-6)


def test_the_worst_leaf_is_that_of_the_reference_with_the_largest_share() -> None:
    """Leaf c is 0.3 off and may be 4 * 0.2; b is 0.4 off, with a bound of 0.1."""
    reference = Reference(
        losses=(1.0, 2.0), after_one={n: np.array([1.0]) for n in "abc"}, bound=0.1
    )
    given = {"a": np.array([1.1]), "b": np.array([0.6]), "c": np.array([1.3])}
    more = given | {"more": np.array([9.0])}
    leaf, loss = differences(more, (1.0, 2.2), reference)
    assert (leaf.name, leaf.error, leaf.allowed) == ("b", pytest.approx(0.4), 0.1)
    assert (loss.name, loss.error) == ("step 2", pytest.approx(0.1))
    leaf, loss = differences(more, (1.0, 2.2), reference, Rounding({"b": 0.2}, (0.0, 0.05)))
    assert (leaf.name, leaf.error) == ("c", pytest.approx(0.3))
    assert (loss.name, loss.share) == ("step 2", pytest.approx(0.1 / 0.2))
    with pytest.raises(ValueError, match="longer"):
        differences(given, (1.0,), reference)


def test_a_leaf_without_digits_is_named_apart_and_is_no_worst_leaf() -> None:
    """Rounding alone changes all of c, so 4 is allowed, of which 3 uses more than b does of its
    own, 0.1. What is outside even of that has failed."""
    ones = {name: np.array([1.0]) for name in "bc"}
    reference = replace(REFERENCE, after_one=ones, bound=0.1)
    rounding = Rounding({"b": 0.0, "c": 1.0}, (0.0, 0.0))
    assert numerics.undecided(rounding) == ["c"]
    assert numerics.undecided(Rounding({"c": 0.99}, ())) == numerics.undecided(None) == []
    for given, worst in ((4.0, "b"), (5.5, "c")):
        values = {"b": np.array([1.05]), "c": np.array([given])}
        leaf, _ = differences(values, REFERENCE.losses, reference, rounding)
        assert leaf.name == worst and (leaf.share > 1) == (worst == "c")
    alone = replace(reference, after_one={"c": ones["c"]})
    leaf, _ = differences({"c": np.array([4.0])}, REFERENCE.losses, alone, rounding)
    assert (leaf.name, leaf.share) == ("c", pytest.approx(0.75))


def test_parts_are_told_where_their_mean_is_another_loss() -> None:
    """The loss is 2; rounding alone moves it by a hundredth, so a mean may be 4 % off."""
    rounding = Rounding(dict.fromkeys(LEAF, 0.0), (0.01, 0.0))

    def told(mean_loss: float) -> dict[str, Any] | None:
        parts = Parts(2, mean_loss, "m.py:7")
        values = Values((2.0, 1.5), LEAF, GOOD)
        return numerics_section(JobConfig(), values, REFERENCE, replace(rounding, parts=parts))[
            "parts"
        ]

    assert told(3.0) == {"count": 2, "mean_loss": 3.0, "loss": 2.0, "place": "m.py:7"}
    assert told(2.09) is not None and told(2.07) is None
    for none in (None, rounding):
        found = numerics_section(JobConfig(), Values((2.0, 1.5), LEAF, GOOD), REFERENCE, none)
        assert found["parts"] is None
        # Three draws, four times what they do: docs/numerics.md.
        assert found["rounding"] == (none and {"samples": 3, "times": 4})


@pytest.mark.parametrize(
    ("given", "wanted", "note"),
    [
        ([[1, np.nan]], [[1, 2]], "nan at [0, 1] where the unsharded step has 2"),
        (
            [1, np.inf, -np.inf],
            [1, -np.inf, 3],
            "inf at [1] where the unsharded step has -inf (2 such places)",
        ),
        (3.0, np.nan, "3 where the unsharded step has nan"),
    ],
)
def test_what_is_no_number_on_one_side_is_told_by_its_place(
    given: Any, wanted: Any, note: str
) -> None:
    reference = Reference(losses=(1.0,), after_one={"w": np.array(wanted)}, bound=1e-5)
    leaf, _ = differences({"w": np.array(given, float)}, (1.0,), reference)
    assert (leaf.error, leaf.note) == (np.inf, note)


def test_numbers_that_are_none_at_the_same_places_are_compared_by_the_others() -> None:
    array = np.array([np.nan, np.inf, 4.0])
    reference = Reference(losses=(1.0,), after_one={"w": array}, bound=1e-5)
    leaf, _ = differences({"w": array + np.array([0, 0, 1.0])}, (1.0,), reference)
    assert (leaf.error, leaf.note) == (0.25, "")


@pytest.mark.parametrize(
    ("keys", "dtypes", "bound"),
    [
        ([], {DType.F32, DType.I32}, 1e-5),
        ([], {DType.F32, DType.BF16}, 1e-2),
        (["compiler.auto_cast=all", "compiler.auto_cast_type=tf32"], {DType.F32}, 1e-2 / 8),
        (["strategy.reduce_dtype=bfloat16"], {DType.F32}, 1e-2),
        ([], {DType.F8E4M3, DType.F32}, 0.16),
    ],
)
def test_levels_are_as_close_as_the_shortest_type_allows(
    keys: list[str], dtypes: set[DType], bound: float
) -> None:
    """One rounding of another sum: 2^-8 is a hundredth here, so 2^-11 an eighth of it."""
    assert level_bound(load(None, keys), dtypes) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("keys", "bound"),
    [
        (["model.dtype=float32"], 1e-5),
        (["model.dtype=bfloat16"], 1e-2),
        (["model.dtype=float32", "strategy.param_dtype=bfloat16"], 1e-2),
    ],
)
def test_the_bound_without_a_reference(keys: list[str], bound: float) -> None:
    assert least_bound(load(None, keys)) == bound


def unsharded(
    monkeypatch: pytest.MonkeyPatch, keys: list[str], narrow: bool
) -> tuple[Reference, list[Mapping[str, Any]]]:
    """The reference of a job, and what was run for it."""
    full = SimpleNamespace(full_precision=None, name="full", mode=Mode.TRAIN)
    short = SimpleNamespace(name="short", mode=Mode.TRAIN)
    short.full_precision = full
    runs: list[Mapping[str, Any]] = []

    def run(task: Any, begun: object = None, **arguments: Any) -> Any:
        runs.append({"task": task.name, **arguments})
        return SimpleNamespace(losses=(5.0, 4.0), states={1: {"w": np.array([1.0])}}, metrics={})

    monkeypatch.setattr("shardwright.orchestrator.road.numerics.run_reference", run)
    monkeypatch.setattr(
        "shardwright.orchestrator.road.numerics.resolve_task",
        lambda _job: short if narrow else full,
    )
    job = load(None, ["run.steps=2", "run.seed=3", "run.data=text", *keys])
    return run_unsharded(job, 16), runs


def test_a_short_type_is_compared_with_full_precision_within_a_hundredth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, runs = unsharded(monkeypatch, ["model.dtype=bfloat16"], narrow=True)
    assert found.bound == 1e-2
    assert found.losses == (5.0, 4.0) and found.after_one == {"w": np.array([1.0])}
    assert runs == [
        {"task": "full", "steps": 2, "global_batch": 16, "seed": 3, "data": "text", "keep": (1,)}
    ]


def drawn_state(monkeypatch: pytest.MonkeyPatch, narrow: bool) -> tuple[list[str], list[Any]]:
    """Of which task the first state of a run is drawn for the job, and who is told by the run."""
    full = SimpleNamespace(full_precision=None, mode=Mode.TRAIN)
    short = SimpleNamespace(mode=Mode.TRAIN)
    short.full_precision = full
    drawn: list[str] = []
    told: list[Any] = []

    def initial_state(task: Any, seed: int) -> dict[str, np.ndarray]:
        drawn.append(f"{'short' if task is short else 'full'} {seed}")
        return {}

    def run(task: Any, **arguments: Any) -> Any:
        told.append(arguments.get("begun"))
        return SimpleNamespace(losses=(1.0,), states={1: {"w": np.ones(1)}}, metrics={})

    monkeypatch.setattr("shardwright.orchestrator.road.numerics.initial_state", initial_state)
    monkeypatch.setattr("shardwright.orchestrator.road.numerics.run_reference", run)
    monkeypatch.setattr(
        "shardwright.orchestrator.road.numerics.resolve_task",
        lambda _job: short if narrow else full,
    )
    run_unsharded(load(None, ["run.seed=3"]), 16, lambda _state: None)
    return drawn, told


def test_the_first_state_is_that_of_the_job_in_its_own_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn, told = drawn_state(monkeypatch, narrow=False)
    assert (drawn, len(told), told[0] is not None) == ([], 1, True)
    assert drawn_state(monkeypatch, narrow=True) == (["short 3"], [None])


def test_full_precision_is_bound_by_a_hundred_thousandth(monkeypatch: pytest.MonkeyPatch) -> None:
    found, runs = unsharded(monkeypatch, [], narrow=False)
    assert found.bound == 1e-5 and len(runs) == 1


def test_a_run_that_was_not_compared_has_the_bound_of_its_type() -> None:
    job = replace(JobConfig(), model=replace(JobConfig().model, dtype="bfloat16"))
    section = numerics_section(job, Values((2.0,), {}, checks({"step": 9e-3}, 1e-2)), None)
    assert section["bound"] == 1e-2 and section["passed"] and section["cast"] == "bfloat16"
    assert numerics.FP32_BOUND == 1e-5


def test_what_a_run_that_was_not_compared_has_no_figure_of_is_null() -> None:
    """The keys are those of a run that was compared."""
    values = Values((2.0, 1.5), LEAF, GOOD)
    section = numerics_section(JobConfig(), values, None)
    assert section.keys() == numerics_section(JobConfig(), values, REFERENCE).keys()
    assert {name for name, value in section.items() if value is None} == {
        "worst_loss_error",
        "worst_loss",
        "worst_param_error",
        "rounding",
        "parts",
    }


def test_instructions_in_full_precision_are_a_hundred_thousandth_off_at_most() -> None:
    """The bound of docs/numerics.md holds where nothing else is said: 9.9e-6 and 1e-5 are within
    it, 1.01e-5 is not."""
    passed = [L0Check("step", 0, 9, far, "x").passed for far in (9.9e-6, 1e-5, 1.01e-5)]
    assert passed == [True, True, False]


def test_metrics_are_the_mean_over_micro_batches_or_told_so() -> None:
    """A loss has a verdict; one micro-batch is the whole batch; a per cent may be rounding."""
    whole = {"loss": 3.0, "count": 69.0, "mean": 2.0, "rows": [4.0, 6.0], "other": 1.0}
    given = {"loss": 1.5, "count": 34.5, "mean": 2.01, "rows": [2.0, 3.0]}

    def named(numbers: Mapping[str, object]) -> dict[str, np.ndarray]:
        return {f"metrics/{name}": np.asarray(x) for name, x in numbers.items()}

    reference = Reference(losses=(3.0,), after_one=LEAF, bound=1e-5, metrics=named(whole))
    values = Values((3.0,), LEAF, GOOD, metrics=named(given))
    alone = {"metrics/alone": np.asarray(7.0)}  # of which the unsharded step says nothing
    assert metric_findings(replace(values, metrics=alone), reference, 2) == []
    found = metric_findings(values, reference, 2)
    assert [f.message.partition(" of the first step is ")[::2] for f in found] == [
        (
            "metrics/count",
            "34.5, the mean over 2 micro-batches, and 69 of the whole batch: it is no mean over"
            " its samples",
        ),
        (
            "metrics/rows",
            "2 (and 1 more), the mean over 2 micro-batches, and 4 (and 1 more) of the whole"
            " batch: it is no mean over its samples",
        ),
    ]
    assert metric_findings(values, reference, 1) == metric_findings(values, None, 2) == []
