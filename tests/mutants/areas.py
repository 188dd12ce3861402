"""Which sources are damaged, by area: what decides a time, a key, a verdict, a figure or a cut."""

from __future__ import annotations

from pathlib import Path

AREAS: dict[str, tuple[str, ...]] = {
    "instruction costs": ("compiler/isa/costs.py", "compiler/isa/limits.py"),
    "timing": (
        "compiler/timing/evaluate.py",
        "compiler/timing/max_plus.py",
        "compiler/timing/core_timeline.py",
        "sim_cluster/instructions/physical_cores.py",
        "sim_cluster/timing/step_parts.py",
        "sim_cluster/instructions/past.py",
    ),
    "targets": (
        "compiler/machine/targets/*.json",
        "compiler/machine/target.py",
        "compiler/machine/custom_target.py",
    ),
    "calibration": (
        "sim_cluster/calibration.py",
        "sim_cluster/calibration.toml",
        "sim_cluster/profiles.py",
        "orchestrator/validation/calibrate.py",
        "orchestrator/validation/predict.py",
        "orchestrator/validation/tasks.py",
        "orchestrator/validation/kernel_times.py",
    ),
    "collectives": (
        "collectives/**/*.py",
        "sim_cluster/network/collective_costs.py",
    ),
    "cluster loop": (
        "sim_cluster/timing/actors.py",
        "sim_cluster/timing/classes.py",
        "sim_cluster/timing/contention.py",
        "sim_cluster/timing/degraded.py",
        "sim_cluster/timing/faults.py",
        "sim_cluster/timing/loop_state.py",
        "sim_cluster/timing/macro.py",
        "sim_cluster/network/network.py",
        "sim_cluster/timing/run_timing.py",
        "sim_cluster/timing/stage_order.py",
        "sim_cluster/timing/steady.py",
        "sim_cluster/timing/step_time.py",
        "sim_cluster/timing/sensitivity.py",
    ),
    "cache keys": (
        "compiler/outline/unit.py",
        "compiler/options.py",
        "orchestrator/cache/cache.py",
        "orchestrator/cache/entry.py",
        "orchestrator/cache/local.py",
        "orchestrator/road/bundling.py",
        "orchestrator/road/plan_cache.py",
        "orchestrator/whatif/advised.py",
        "orchestrator/keys/reads.py",
        "orchestrator/service/units.py",
        "orchestrator/road/timing.py",
        "orchestrator/whatif/journal.py",
        "sim_cluster/timing/memo.py",
        "sim_cluster/timing/timing_unit.py",
    ),
    "stage cut": (
        "sharding/cut/stages.py",
        "sharding/cut/gradients.py",
        "sharding/cut/residuals.py",
    ),
    "localisation": ("sharding/localize/*.py", "sharding/localize/rules/*.py"),
    "reader and loader": (
        "compiler/neff/*.py",
        "sim_cluster/instructions/checks.py",
        "sim_cluster/values/contract.py",
        "sim_cluster/values/functions.py",
        "sim_cluster/values/layout.py",
        "sim_cluster/values/load_checks.py",
        "sim_cluster/values/memory.py",
        "sim_cluster/values/programs.py",
    ),
    "numerics verdicts": (
        "orchestrator/road/numerics.py",
        "orchestrator/road/unsharded.py",
        "sim_cluster/values/result.py",
        "sim_cluster/values/rounding.py",
    ),
    "report and cost": (
        "orchestrator/report/bars.py",
        "orchestrator/report/bottleneck.py",
        "orchestrator/report/compare.py",
        "orchestrator/report/goodput.py",
        "orchestrator/report/limits.py",
        "orchestrator/report/memory_report.py",
        "orchestrator/report/report.py",
        "orchestrator/report/sections.py",
        "orchestrator/report/step_report.py",
        "orchestrator/whatif/rows.py",
        "orchestrator/whatif/table.py",
    ),
}

CONSTANTS = (
    "compiler/isa/costs.py",
    "sim_cluster/calibration.toml",
    "sim_cluster/network/collective_costs.py",
    "sim_cluster/timing/contention.py",
    "sim_cluster/timing/macro.py",
    "sim_cluster/profiles.py",
    "collectives/costs.py",
    "collectives/timing/runtimes.py",
    "collectives/timing/times.py",
)
"""Where the constants of the machine's model are, besides its data files."""


def files_of(root: Path, area: str) -> list[str]:
    """The sources of an area, sorted. A pattern that finds nothing is an error: a file that moved
    takes its line here along.
    """
    found: set[str] = set()
    for pattern in AREAS[area]:
        paths = {path.relative_to(root).as_posix() for path in root.glob(pattern)}
        if not paths:
            raise FileNotFoundError(f"area {area!r} names {pattern}, which no source is")
        found |= paths
    return sorted(found)


def area_of(root: Path) -> dict[str, str]:
    """Source -> area."""
    return {path: area for area in AREAS for path in files_of(root, area)}
