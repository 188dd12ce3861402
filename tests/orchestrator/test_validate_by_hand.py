"""What `validate` and `--fit` say of errors, against arithmetic that stands here; and when fitted
constants are taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.orchestrator.road.timing import Host, with_host
from shardwright.orchestrator.validation import calibrate, measured, validate
from shardwright.orchestrator.validation.calibrate import DOCUMENTED, Fit, Surface
from shardwright.orchestrator.validation.predict import Timed, shares_of
from shardwright.orchestrator.validation.published import PublishedRun
from shardwright.orchestrator.validation.validate import Prediction, Refused
from shardwright.sim_cluster.profiles import Profile
from tests.support.invented_job import timing
from tests.support.published_rows import BERT, GPT, parsed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PublishedRun:
    return parsed(tmp_path_factory.mktemp("rows"), BERT)


def measured_in(run: PublishedRun, name: str, seconds: float, group: str = "") -> PublishedRun:
    return replace(run, id=name, group=group or name, step_time_s=seconds)


def flat(run: PublishedRun, seconds: float) -> Surface:
    """A run whose predicted time does not depend on the constants."""
    return Surface(run, ((seconds, seconds), (seconds, seconds)))


# The surface of a run


def test_between_corners_the_logarithm_is_linear(run: PublishedRun) -> None:
    """Corners 8, 4 | 2, 1/2 at streaming 0.75 | 1.0 and recovery 0, 1. At (0.8, 0.25) the weights
    are 0.6, 0.2 | 0.15, 0.05: two to the power of 3 x 0.6 + 2 x 0.2 + 1 x 0.15 - 0.05 = 2.3."""
    found = Surface(measured_in(run, "R", 4.0), ((8.0, 4.0), (2.0, 0.5)))
    corners = [(0.75, 0.0), (0.75, 1.0), (1.0, 0.0), (1.0, 1.0)]
    assert [found.at(Fit(*at)) for at in corners] == pytest.approx([8.0, 4.0, 2.0, 0.5], rel=1e-12)
    assert found.at(Fit(0.8, 0.25)) == pytest.approx(2**2.3, rel=1e-12)
    assert found.error(Fit(0.8, 0.25)) == pytest.approx(2**2.3 / 4 - 1, rel=1e-12)


def test_the_loss_is_pseudo_huber_at_eight_percent(run: PublishedRun) -> None:
    """ln 1.2 / 0.08 = 2.27902 and ln 0.9 / 0.08 = -1.31701: sqrt(1 + 5.19393) - 1 = 1.48876 and
    sqrt(1 + 1.73451) - 1 = 0.65364."""
    high = flat(measured_in(run, "H", 1.0), 1.2)
    low = flat(measured_in(run, "L", 1.0), 0.9)
    assert calibrate._loss([high], DOCUMENTED) == pytest.approx(1.48876, abs=1e-5)
    assert calibrate._loss([high, low], DOCUMENTED) == pytest.approx(2.14240, abs=1e-5)


def test_documented_rates_are_all_of_them_and_nothing_filled() -> None:
    assert Fit(streaming=1.0, stall_recovery=0.0) == DOCUMENTED


def test_a_surface_is_asked_for_at_the_corners_of_the_grid(run: PublishedRun) -> None:
    asked: list[tuple[float, float]] = []

    class Recorder:
        def time(self, _: object, profile: Profile) -> Timed:
            asked.append((profile.streaming, profile.stall_recovery))
            return Timed(len(asked), {}, {})

    predictor: Any = Recorder()
    assert validate.surface(run, predictor).seconds == ((1, 2), (3, 4))
    assert asked == [(0.75, 0.0), (0.75, 1.0), (1.0, 0.0), (1.0, 1.0)]


def test_the_search_has_twenty_steps_along_each_constant(run: PublishedRun) -> None:
    """The run takes 1 / streaming^p: 0.8875 is step 11 of 20 from 0.75 to 1, 0.35 step 7."""
    corners = ((4.0, 2.0), (2.0, 1.0))  # 2^(1 - 4 (s - 0.75)) x 2^(1 - r)
    steep = ((8.0, 1.0), (1.0, 1 / 8))  # its cube
    rows = []
    for name, seconds in (("A", corners), ("B", steep)):
        exact = Surface(measured_in(run, name, 1.0), seconds)
        rows.append(Surface(measured_in(run, name, exact.at(Fit(0.8875, 0.35))), seconds))
    mixed = Surface(measured_in(run, "C", 1.0), ((3.0, 2.0), (1.5, 1.2)))
    rows.append(replace(mixed, run=measured_in(run, "C", mixed.at(Fit(0.8875, 0.35)))))
    found = calibrate.best_fit(rows)
    assert found.streaming == pytest.approx(0.8875, abs=1e-9)
    assert found.stall_recovery == pytest.approx(0.35, abs=1e-9)


def test_a_fit_stays_between_the_corners(run: PublishedRun) -> None:
    """Of a run that is faster than at (1, 1), 0.5 s, where both constants end."""
    rows = [Surface(measured_in(run, "A", 0.1), ((4.0, 2.0), (2.0, 0.5)))]
    assert calibrate.best_fit(rows) == Fit(1.0, 1.0)


# When a fit is taken


def opposed(run: PublishedRun, slow: float, first: float = 1.25) -> list[Surface]:
    """One group `first` times as long as documented rates say, one `slow` times."""
    steep = ((1.4, 1.4), (1.0, 1.0))
    return [
        Surface(measured_in(run, "A", first), steep),
        Surface(measured_in(run, "B", slow), steep),
    ]


def test_a_fit_that_helps_only_where_it_was_made_is_not_taken(run: PublishedRun) -> None:
    """A asks for slower rates, B for documented ones. In between both are fitted better than by
    documented rates, but what A asks for misses B, and the other way round."""
    both = opposed(run, 1.0)
    found = calibrate.best_fit(both)
    assert found != DOCUMENTED
    assert calibrate._loss(both, found) < calibrate._loss(both, DOCUMENTED)
    assert calibrate.chosen(both) == DOCUMENTED


@pytest.mark.parametrize(("first", "second"), [(1.25, 1.22), (1.03, 1.03)])
def test_a_fit_that_carries_over_is_taken(first: float, second: float, run: PublishedRun) -> None:
    """However little there is to gain: 3 % are a loss of 0.067 per row."""
    both = opposed(run, second, first)
    assert calibrate.chosen(both) == calibrate.best_fit(both) != DOCUMENTED


def test_one_group_proves_nothing(run: PublishedRun) -> None:
    one = [replace(s, run=replace(s.run, group="g")) for s in opposed(run, 1.22)]
    assert calibrate.chosen(one) == DOCUMENTED


def test_left_out_rows_are_predicted_by_the_other_groups(run: PublishedRun) -> None:
    """Two of three groups ask for 1.25 times the documented time, the third for 1: without it the
    fit is taken and misses it, with it in the fit of the others it is not."""
    rows = [*opposed(run, 1.25), Surface(measured_in(run, "C", 1.0), ((1.4, 1.4), (1.0, 1.0)))]
    left = calibrate.left_out(rows)
    best = calibrate.best_fit(rows[:2])
    assert left["C"] == pytest.approx(rows[2].at(best) - 1, rel=1e-12)
    assert left["C"] == pytest.approx(0.25, abs=0.01)
    assert left["A"] == left["B"] == pytest.approx(1 / 1.25 - 1, rel=1e-12)


# The summary


def predicted(run: PublishedRun, low: float, at: float, high: float, fitted: bool) -> Prediction:
    times = {"conservative": high, "nominal": at, "peak": low}
    found = {name: Timed(seconds, {"compute": 1.0}, {}) for name, seconds in times.items()}
    return Prediction(run, found, flat(run, at) if fitted else None)


@pytest.fixture(scope="module")
def summary(run: PublishedRun) -> dict[str, Any]:
    """Published 1 s each; predicted 1.3, 0.9, 1.05 and 0.8 s, the last not primary."""
    runs = [measured_in(run, name, 1.0) for name in "ABCD"]
    return validate.summary(
        [
            predicted(runs[0], 1.0, 1.3, 1.5, fitted=True),  # the band begins at what was measured
            predicted(runs[1], 0.8, 0.9, 1.0, fitted=True),  # and ends there
            predicted(runs[2], 1.01, 1.05, 1.2, fitted=True),  # above it
            predicted(runs[3], 0.7, 0.8, 0.99, fitted=False),  # below it
            Refused(measured_in(run, "E", 1.0), "not ours"),
        ]
    )


def test_errors_are_relative_and_their_median_is_of_sizes(summary: Mapping[str, Any]) -> None:
    """+30 %, -10 %, +5 %, -20 %: the middle of 5, 10, 20, 30 is 15 %; of the primary 5, 10, 30
    it is 10 %."""
    errors = [row["error"] for row in summary["rows"]]
    assert errors[:4] == pytest.approx([0.3, -0.1, 0.05, -0.2]) and errors[4] is None
    assert summary["median_error"] == pytest.approx(0.15)
    assert summary["max_error"] == pytest.approx(0.3)
    assert summary["primary"]["median_error"] == pytest.approx(0.1)
    assert summary["primary"]["max_error"] == pytest.approx(0.3)
    assert summary["primary"]["rows"] == ["A", "B", "C"] and summary["refused"] == 1
    assert set(summary["constants"]) == {"collective_touch", "streaming", "stall_recovery"}


def test_bands_cover_with_their_ends(summary: Mapping[str, Any]) -> None:
    """Two of four."""
    assert [row.get("band_covers") for row in summary["rows"]] == [True, True, False, False, None]
    assert summary["band_covers"] == 0.5
    assert summary["rows"][0]["band_s"] == [1.0, 1.5]


def test_nothing_left_out_is_better_than_what_no_constant_changes(
    summary: Mapping[str, Any],
) -> None:
    """Surfaces are flat: each row left out has its own error, 30, 10 and 5 %."""
    primary = summary["primary"]
    assert primary["leave_one_group_out_median_error"] == pytest.approx(0.1)
    assert primary["leave_one_group_out_max_error"] == pytest.approx(0.3)
    assert [row.get("left_out_error") for row in summary["rows"]][:4] == pytest.approx(
        [0.3, -0.1, 0.05, None]
    )


def test_the_baseline_is_the_geometric_mean_of_mfu(run: PublishedRun) -> None:
    """Equal work and peaks, 1, 2 and 4 s: MFUs in the ratio 4 : 2 : 1, their mean is the middle
    one; it predicts half of the first time too little, the last half too much."""
    runs = [measured_in(run, f"{seconds}", seconds) for seconds in (1.0, 2.0, 4.0)]
    fitted, errors = calibrate.baseline(runs, {r.id: 1e9 for r in runs})
    assert errors == pytest.approx([1.0, 0.0, -0.5])
    assert fitted == pytest.approx(run.model_flops / 1e9 / 2, rel=1e-12)


def test_the_baseline_divides_by_the_published_peak_of_all_cores(run: PublishedRun) -> None:
    """32 cores of trn1 at 95 TFLOPS."""
    assert validate._peak_flops_per_s(run) == pytest.approx(32 * 95e12, rel=1e-12)
    found = validate.summary([predicted(run, 0.4, 0.5, 0.6, fitted=True)])
    assert found["baseline_mfu"] == pytest.approx(run.model_flops / 3.04e15 / 0.5, rel=1e-12)
    assert found["baseline_median_error"] == found["baseline_max_error"] == pytest.approx(0.0)
    rows = [measured_in(run, name, seconds) for name, seconds in (("A", 1.0), ("B", 4.0))]
    found = validate.summary([predicted(row, 1.0, 2.0, 3.0, fitted=True) for row in rows])
    assert found["baseline_max_error"] == pytest.approx(1.0)
    assert found["baseline_median_error"] == pytest.approx(0.75)  # of 100 and 50 %


def test_model_flops_of_a_published_run(tmp_path: Path) -> None:
    """8 ranks of 4 sequences of 32 tokens: 6 x 32 x 1e5 parameters, 12 x 2 x 64 x 32^2 attention.

    Source: the definition that the published table derives its MFU column with.
    """
    found = parsed(tmp_path, GPT)
    assert found.model_flops == 8 * 4 * (19_200_000 + 1_572_864) == 664_731_648


def test_the_host_is_beside_the_step() -> None:
    """3 ms of a step and 1,000 us of the host are 4 ms."""
    step = timing(
        3_000_000_000,
        breakdown_ps={"compute": 3_000_000_000, "idle": 0},
        engines_ps={"tensor": 600_000_000, "vector": 0},
    )
    found = shares_of(with_host(step, Host(1000)))
    assert found.seconds == pytest.approx(0.004, rel=1e-12)
    assert found.shares == pytest.approx({"compute": 0.75, "host": 0.25})
    assert found.busy == pytest.approx({"tensor": 0.15})


def test_large_and_small_collectives_are_judged_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 1 MiB on by the median error, here of 10 and 30 %; below 64 KiB by the median factor,
    of 2 (twice as long) and 4 (a quarter) 3; what is between in neither."""
    path = tmp_path / "rows.csv"
    names = ("op", "ranks", "nodes", "instance", "dtype", "size_bytes", "time_us")
    path.write_text(",".join(("id", "group", *names)) + "\n" + "x,g,,,,,,,\n" * 6)
    sizes = [2**20, 2**21, 2**20 - 1, 2**16, 2**16 - 1, 8]
    errors = [0.1, -0.3, 0.9, 0.8, 1.0, -0.75]
    rows = iter([{"size_bytes": s, "error": e} for s, e in zip(sizes, errors, strict=True)])
    monkeypatch.setattr(measured, "_collective", lambda _: next(rows))
    found = measured.collectives(path)
    assert found["large_median_error"] == pytest.approx(0.2)
    assert found["small_median_factor"] == pytest.approx(3.0)
    assert found["median_error"] == pytest.approx((0.75 + 0.8) / 2)
    assert found["max_error"] == pytest.approx(1.0) and found["refused"] == 0


def test_a_written_fit_has_three_digits_and_widens_its_band(
    run: PublishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright.sim_cluster import calibration

    copy = tmp_path / "calibration.toml"
    copy.write_text(calibration.FILE.read_text())
    monkeypatch.setattr(calibration, "FILE", copy)
    try:
        calibrate.write(Fit(0.70049, 1.1), [run], "by hand")
        now = calibration.constants()
        assert now["streaming"].fitted_on == "training.csv, primary rows B1"
        assert now["streaming"].method == "by hand"
        assert now["streaming"].value == 0.7 and now["streaming"].band == (0.7, 1.0)
        assert now["stall_recovery"].band == (0.0, 1.1)
        assert math.isclose(now["streaming"].under("conservative"), 0.7)
        assert now["streaming"].under("peak") == 1.0
        assert now["stall_recovery"].under("nominal") == 1.1
    finally:
        calibration.constants.cache_clear()


def test_the_place_in_a_grid() -> None:
    """From 2 to 6; what lies outside goes on."""
    parts = {2.0: 0.0, 3.0: 0.25, 6.0: 1.0, 0.0: -0.5, 8.0: 1.5}
    assert {value: calibrate._part((2.0, 6.0), value) for value in parts} == parts
