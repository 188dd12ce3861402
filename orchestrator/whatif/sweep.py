"""A sweep: the rows of its points, those that are done from the journal, the others planned.

Rows are stored as soon as they are known. A refusal follows from the point and is stored like an
answer; what died or was a defect says nothing about the point and is tried again next time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report.text import Facts
from shardwright.orchestrator.road.plan_cache import plan_key
from shardwright.orchestrator.service.unit_errors import may_pass
from shardwright.orchestrator.terminal.age import counted_text, oldest
from shardwright.orchestrator.whatif.buyer import bought, check_prices, goal_section, prices_section
from shardwright.orchestrator.whatif.journal import Journal
from shardwright.orchestrator.whatif.points import Point
from shardwright.orchestrator.whatif.rows import Row, refused_row, row_of

Note = Callable[[Row, int, int], None]
"""Told every row that was planned, how many of those to plan that makes, and of how many."""
Begin = Callable[[int, int], None]
"""Told how many rows are known, and how many points are to be planned, before the first is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """Rows of the points, in their order; of an interrupted sweep, those that are done."""

    rows: Sequence[Row]
    known: int  # of the rows: from the journal
    began_s: float = 0.0  # Unix time
    interrupted: bool = False
    prices: Sequence[Facts] = ()  # of the machines among the rows
    goal: Facts | None = None  # and which rows meet it

    def stored_text(self, command: str) -> str:
        """How many of the rows were stored before, since when, and the command that asks anew."""
        times = [row.stored_s for row in self.rows if 0 < row.stored_s < self.began_s]
        return counted_text(len(times), len(self.rows), "points", oldest(times), command)


def sweep(
    points: Sequence[Point],
    host: JobConfig,
    journal: Journal,
    note: Note,
    begin: Begin = lambda _known, _missing: None,
) -> Swept:
    """The rows of all points; `host` says where they are planned, and at which price and for which
    goal they are compared. An interrupt keeps what is done.

    Raises UsageError for a machine that is unknown, and for a price of one that is not compared.
    """
    check_prices(host, (point.job.cluster.target for point in points))
    keys = [plan_key(point.job) for point in points]
    began_s, stored = time.time(), journal.read(since_s=host.cache.since_s)
    done = {key: stored[key] for key in keys if key in stored}
    known = sum(key in done for key in keys)
    missing = {k: p for k, p in zip(keys, points, strict=True) if k not in done}
    planned, interrupted = 0, False
    begin(known, len(missing))
    try:
        with closing(_planned(missing, host)) as found:
            for key, row, is_final in found:
                done[key] = row
                if is_final:
                    journal.add(replace(row, stored_s=row.stored_s or time.time()))
                planned += 1
                note(row, planned, len(missing))
    except KeyboardInterrupt:
        interrupted = True
    rows = [
        bought(replace(done[key], values=point.values), host)
        for key, point in zip(keys, points, strict=True)
        if key in done
    ]
    return Swept(
        rows=rows,
        known=known,
        began_s=began_s,
        interrupted=interrupted,
        prices=prices_section(rows, host),
        goal=goal_section(rows, host),
    )


def _planned(
    missing: Mapping[str, Point], host: JobConfig
) -> Generator[tuple[str, Row, bool], None, None]:
    """Rows as they come, by the key they were asked for with, and whether they are what the point
    always comes to. A row has the key of its plan, which knows what the model read."""
    if not missing:
        return
    from shardwright.orchestrator.whatif.many import plans, refusal

    with closing(plans({key: point.job for key, point in missing.items()}, host)) as found:
        for key, future in found:
            point, error = missing[key], refusal(future)
            if error is None:
                report = future.result()
                yield key, row_of(report["provenance"]["plan_key"], point.values, report), True
            else:
                # What a function of the user's read before it was refused is not known.
                is_final = not (may_pass(error) or point.job.model.entry)
                yield key, refused_row(key, point.values, error), is_final
