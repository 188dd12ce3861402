"""What is worth trying next, tried: ideas for a planned job, each planned as a job of its own.

A try is the whole road with the shared cache and workers, and its plan is stored, so that asking
for it afterwards is answered at once. By default as many are begun as will be over when a cold
answer is due; `--tries N` makes it N, however long they take.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.orchestrator.changes.change import Change, changed
from shardwright.orchestrator.changes.rules import Idea, ideas, saving
from shardwright.orchestrator.changes.situation import Situation, given_sizes, situation_of
from shardwright.orchestrator.config.config import TRIES, JobConfig, Keys
from shardwright.orchestrator.report.text import Facts, Report
from shardwright.orchestrator.report.tried import WORTHWHILE, auto_values, gain
from shardwright.orchestrator.report.verdict import refusals
from shardwright.orchestrator.road.fitting import estimates
from shardwright.orchestrator.service.progress import Progress
from shardwright.orchestrator.service.unit_errors import may_pass
from shardwright.orchestrator.whatif.many import plans, refusal
from shardwright.sharding.settings import AUTO

FAILED = "failed"  # the status of a try that may come to something else next time
DUE_S = 11.5  # of the 12 s that a cold answer of a 70B step may take (our choice)
TRY_SHARE = 0.7
"""Of what the job took without its capture, what a try is expected to take: it shares units.
Measured: tries of Llama-2 70B on 1024 cores take 5 to 8 CPU seconds, the job itself 10."""
STACKED = 3  # changes that are put on top of each other to make a job fit (our choice)
NEAR = 1.5
"""Times the limit, expected, with which other recomputation is planned all the same: an estimate
before compiling says least of that (our choice; of Llama-3 8B at 8,192 positions, `full` instead of
`selective`, it says 19.0 GiB of 13.7)."""


def advice(job: JobConfig, report: Report, count: int, progress: Progress | None = None) -> Facts:
    """The section `whatif` of a planned job: `tried`, at most `count`, the best first, and what is
    `left`.
    """
    changes = iter(_changes(job, report, count))
    chosen = list(islice(changes, count))
    if progress is not None and chosen:
        progress.say(f"trying {'; '.join(change.text for change in chosen)}")
    tried = _tried(chosen, job, report)
    left = [change.text for change in islice(changes, max(0, TRIES - len(tried)))]
    return {"tried": sorted(tried, key=_rank), "left": left}


def affordable(tries: int, report: Report, started: float) -> int:
    """How many tries there may be. auto: `TRIES`, as far as they are expected to be over in time;
    two in any case where the job does not fit, one where the vendor's compiler would refuse it,
    since the cure decides.

    `started` is when the answer was asked for (`time.perf_counter()`).
    """
    if tries != AUTO:
        return tries
    least = (1 if refusals(report) else 0) if report["memory"]["fits"] else 2
    provenance = report["provenance"]
    took = provenance.get("computed_in_s", sum(provenance["stages_s"].values()))
    once = sum(provenance["stages_s"].get(stage, 0.0) for stage in ("capture", "import"))
    spare = DUE_S - (time.perf_counter() - started)
    return max(least, min(TRIES, int(spare / max(TRY_SHARE * (took - once), 0.1))))


def _changes(job: JobConfig, report: Report, count: int) -> Iterator[Change]:
    now = situation_of(job, report)
    if report["memory"]["fits"] or not count:
        return (changed(job, idea.keys) for idea in ideas(now, report))
    return islice(_fitting(job, now, report["memory"]), count)


def _fitting(job: JobConfig, now: Situation, memory: Facts) -> Iterator[Change]:
    """Changes with which a job is expected to fit: single ones, and where there are none, other
    recomputation, if it is near, and several on top of each other, what saves most first, on the
    machine that was asked for.
    """
    stacked: dict[str, Any] = {}
    with estimates(now.job, memory) as expected:
        for _ in range(STACKED):
            best, least, fits = Idea({}), float("inf"), False
            near: list[Change] = []
            for idea in saving(now):
                change = changed(job, {**stacked, **idea.keys})
                needs, limit = expected(change.job)
                filled = needs / limit
                if filled <= 1:
                    fits = True
                    yield change
                    continue
                if idea.keys.keys() == {"strategy.remat"} and filled <= NEAR:
                    near.append(change)
                if filled < least and "cluster.target" not in idea.keys:
                    best, least = idea, filled
            if fits or not best.keys:
                return
            yield from near if not stacked else ()
            stacked |= best.keys
            now = _after(now, stacked)


def _after(now: Situation, keys: Keys) -> Situation:
    """The situation of a job after changes, whose number of micro-batches follows from the mesh."""
    job = changed(now.job, keys).job
    mesh = {key.removeprefix("mesh."): n for key, n in keys.items() if key.startswith("mesh.")}
    sizes = given_sizes({a: n for a, n in (mesh or now.mesh).items() if a != "ep"})
    ways = sizes["dp_shard"] * sizes.get("dp_replicate", 1)
    samples = job.strategy.global_batch or now.global_batch
    count = max(1, samples // (ways * job.strategy.micro_batch))
    return Situation(job=job, mesh=mesh or now.mesh, global_batch=samples, num_microbatches=count)


def _tried(chosen: Sequence[Change], host: JobConfig, base: Report) -> list[Facts]:
    """What became of changes, measured against the job as it is; all on one executor."""
    found: dict[str, Facts] = {}
    with closing(plans({change.text: change.job for change in chosen}, host)) as answers:
        for text, answer in answers:
            error = refusal(answer)
            row = _measured(answer.result(), base) if error is None else _without_answer(error)
            found[text] = {"change": text, **row}
    return [found[change.text] for change in chosen]


def _without_answer(error: DiagnosticError) -> Facts:
    """A try that was refused, or that failed, which says nothing about the change."""
    status = FAILED if may_pass(error) else "refused"
    reason = error.diagnostic.message
    return {"status": status, "helps": False, "code": error.code, "message": reason}


def _measured(report: Report, base: Report) -> Facts:
    """A plan beside that of the job as it is; changes are per token."""
    memory, timing, samples = report["memory"], report["timing"], report["batch"]["global_batch"]
    usd, before = (r["cost"]["usd_per_1e6_tokens"] for r in (report, base))
    row = {
        "status": "fits" if memory["fits"] else "does not fit",
        "peak_bytes": memory["peak_bytes"],
        "global_batch": samples,
        "samples": "sequences" if "inference" in report else "samples",
        "same_batch": samples == base["batch"]["global_batch"],
        "step_time_s": timing["step_time_s"],
        "tokens_per_s": timing["tokens_per_s"],
        "time_change": base["timing"]["tokens_per_s"] / timing["tokens_per_s"] - 1,
        "usd_per_1e6_tokens": usd,
        "cost_change": usd / before - 1 if usd and before else None,
        "refused": list(refusals(report)),
        "unpriced": usd is None and before is not None,
        "chosen": auto_values(report["auto"]) if "auto" in report else {},
    }
    worse = len(row["refused"]) - len(refusals(base))
    cured = worse < 0 and not row["refused"]
    better = not base["memory"]["fits"] or cured or gain(row) < -WORTHWHILE
    return row | {"helps": memory["fits"] and worse <= 0 and better}


def _rank(row: Facts) -> tuple[int, int, float]:
    """What fits first, then what the vendor's compiler takes, then by the time or the cost of a
    token, whichever falls more."""
    order = ("fits", "does not fit", "refused", FAILED).index(row["status"])
    return (order, 0, 0.0) if order else (0, len(row["refused"]), gain(row))
