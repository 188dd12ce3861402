"""A plan with what is worth trying next, tried or known from before.

What tries say is an entry of its own beside the plan's: it also depends on the price, by which they
are judged, and on how many were asked for.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.orchestrator.cache import About, open_cache
from shardwright.orchestrator.config.config import TRIES, JobConfig
from shardwright.orchestrator.report.shape import check_whatif
from shardwright.orchestrator.road.plan_cache import plan, plan_name, stored
from shardwright.orchestrator.service.units import KeyParts, parts_digest
from shardwright.sharding.settings import AUTO

if TYPE_CHECKING:
    from shardwright.orchestrator.service.progress import Progress

KIND = "whatif"  # of entries


def with_tries(
    job: JobConfig,
    trace: Path | None = None,
    progress: Progress | None = None,
    dump_dir: Path | None = None,
) -> dict[str, Any]:
    """As `plan`, with the section `whatif` (`tries.py`); what is stored loads no compiler."""
    start = time.perf_counter()
    report = plan(job, trace, progress, dump_dir=dump_dir)
    if not job.run.tries:
        return report
    cache = open_cache(job.cache)
    plan_key, wanted = report["provenance"]["plan_key"], job.run.tries
    for tries in (TRIES, AUTO) if wanted == AUTO else (wanted,):
        key = parts_digest(KIND, key_parts(job, plan_key, tries))
        found, stored_s = stored(cache, KIND, key, check_whatif)
        if found is not None:
            return report | {"whatif": {**found, "stored_s": stored_s}}
    from shardwright.orchestrator.whatif.tries import FAILED, advice, affordable

    count, begun = affordable(wanted, report, start), time.perf_counter()
    section = advice(job, report, count, progress)
    report["provenance"]["stages_s"]["tries"] = round(time.perf_counter() - begun, 3)
    if not any(row["status"] == FAILED for row in section["tried"]):
        parts = key_parts(job, plan_key, count if count == TRIES else wanted)
        about = About(f"tries of {plan_name(job)}", parts)
        cache.put(KIND, parts_digest(KIND, parts), json.dumps(section).encode(), about)
    return report | {"whatif": section}


def key_parts(job: JobConfig, plan_key: str, tries: int) -> KeyParts:
    """What tries depend on, by name."""
    price = json.dumps(job.as_dict()["price"])
    return {"plan": plan_key, "tries": str(tries), "price": price}
