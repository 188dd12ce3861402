"""What a report holds, as a table that anything read from a file is held to: `docs/report.md` in
rules.

A report may come from another version, another program, or a cache that others write to. Keys may
be added within a version, so what is not named here is any plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.collectives.ops import LINEAR, TORUS
from shardwright.compiler.support.schema import (
    FLAG,
    TEXT,
    Entries,
    Items,
    Rule,
    Shape,
    Table,
    either,
    one_of,
    several,
)
from shardwright.orchestrator.report.text import Facts

_LAST_S = 1e11  # our choice: the year 5138; nothing was stored later
_LARGEST = 1e36
"""Our choice: beyond every count, rate and time of a step, and squares of it are still numbers."""


def _is_figure(value: Any) -> bool:
    return type(value) in (int, float) and -_LARGEST <= value <= _LARGEST


TIME = Rule("a Unix time", lambda v: _is_figure(v) and 0 <= v <= _LAST_S)
FIGURE = Rule("a finite number", _is_figure)
AMOUNT = Rule("a number from 0", lambda v: _is_figure(v) and v >= 0)
POSITIVE = Rule("a number above 0", lambda v: _is_figure(v) and v > 0)
NUMBER = Rule("a whole number from 0", lambda v: type(v) is int and 0 <= v <= _LARGEST)
SIZE = Rule("a whole number from 1", lambda v: type(v) is int and 1 <= v <= _LARGEST)
_INTEGER = Rule("a whole number", lambda v: type(v) is int)
MAYBE = Rule("a number or null", lambda v: v is None or _is_figure(v))
_NO_LESS = Rule("a number from 0 or null", lambda v: v is None or AMOUNT.holds(v))
_AMOUNTS = Entries(AMOUNT)
_FIGURES = either(FIGURE, FLAG, TEXT, several(FIGURE))
_TEXTS = Items(TEXT)


def _open(optional: Mapping[str, Shape] | None = None, /, **required: Shape) -> Table:
    return Table(required, optional or {}, is_open=True)


def _each(shape: Shape, names: str) -> dict[str, Shape]:
    """Entries of one shape."""
    return dict.fromkeys(names.split(), shape)


def _maybe(what: str, shape: Shape) -> Rule:
    """What has a shape, or null; `what` says both in words."""

    def holds(value: Any) -> bool:
        try:
            if value is not None:
                shape.require(value, what)
        except ValueError:
            return False
        return True

    return Rule(what, holds)


_PLACE = Table({"file": TEXT, "line": _INTEGER, "scope": TEXT})
FINDING = _open(**_each(TEXT, "code severity message hint"), loc=_maybe("a place or null", _PLACE))


class _Parts:
    """Times by category, `bubble` among them."""

    def require(self, value: Any, where: str) -> None:
        """Raises ValueError when `value` is something else."""
        _AMOUNTS.require(value, where)
        if "bubble" not in value:
            raise ValueError(f"{where} requires bubble")


PARTS = _Parts()
_JOB = _open(
    cluster=_open(target=TEXT, instances=SIZE),
    strategy=_open(name=TEXT),
    compiler=_open(
        optlevel=Rule("a level", lambda v: type(v) in (int, str)),
        **_each(TEXT, "model_type attention auto_cast"),
    ),
)
_MEMORY = _open(
    {"host": _open(**_each(SIZE, "per_core_bytes bytes limit_bytes"))},
    limit_bytes=SIZE,
    reserve_bytes=NUMBER,
    peak_bytes=NUMBER,
    peak_program=TEXT,
    fits=FLAG,
    **_each(_AMOUNTS, "categories argument_bytes arena_bytes"),
    estimate=_open(peak_bytes=NUMBER, arena_bytes=_AMOUNTS),
    per_stage=Items(_open(stage=NUMBER, peak_bytes=NUMBER, categories=_AMOUNTS)),
    timeline=Items(
        _open(
            program=TEXT,
            **_each(NUMBER, "position repeats live_bytes"),
            what=TEXT,
            categories=_AMOUNTS,
        )
    ),
    largest=Items(_open(**_each(TEXT, "name category loc"), bytes=NUMBER)),
)
_PUBLISHED = _open(
    mfu=POSITIVE,
    times=AMOUNT,
    **_each(TEXT, "id model release source"),
    machines=_TEXTS,
    cores=SIZE,
)


def _is_published(value: Any) -> bool:
    if value is not None:
        _PUBLISHED.require(value, "report.timing.published")
    return True


_TIMING = _open(
    {
        "mfu_causal": AMOUNT,
        "attention": one_of("causal", "full", "none"),
        "flops": _open(**_each(AMOUNT, "model causal captured executed")),
        "published": Rule("a published run or null", _is_published),
    },
    **_each(TEXT, "profile confidence confidence_why"),
    step_time_ps=SIZE,
    **_each(POSITIVE, "step_time_s peak_flops_per_s tokens_per_s"),
    band_s=several(POSITIVE, 2, 2),
    breakdown_ps=PARTS,
    hidden_ps=Entries(FIGURE),
    mfu=AMOUNT,
    hfu=AMOUNT,
    engines=Entries(_open(busy_ps=AMOUNT, share=AMOUNT)),
    per_stage=Items(_open(stage=NUMBER, step_time_ps=NUMBER, breakdown_ps=PARTS)),
)
_REGION = _open(name=TEXT, loc=TEXT, **_each(AMOUNT, "time_ps flops hbm_bytes"), busy_ps=_AMOUNTS)
_FUNCTION = _open(
    **_each(TEXT, "program function loc"),
    calls=NUMBER,
    **_each(AMOUNT, "time_ps flops hbm_bytes"),
    breakdown_ps=_AMOUNTS,
    regions=Items(_REGION),
)


def _cells(*kinds: type) -> Rule:
    """A short list of texts and numbers, in this order."""

    def holds(value: Any) -> bool:
        is_row = type(value) is list and tuple(map(type, value)) == kinds
        return is_row and all(type(v) is str or 0 <= v <= _LARGEST for v in value)

    return Rule(f"[{', '.join(kind.__name__ for kind in kinds)}]", holds)


_TIMELINE = _open(
    program=TEXT,
    function=TEXT,
    duration_ps=NUMBER,
    left_out=NUMBER,
    tracks=Items(_open(name=TEXT, slices=Items(_cells(str, int, int)))),
)
_COLLECTIVE = _open(
    **_each(TEXT, "kind axis algorithm why"),
    **_each(NUMBER, "group_size count parts bytes time_ps exposed_ps"),
    stream=_NO_LESS,
)
_STREAM = _open(**_each(NUMBER, "stream packet_bytes count time_ps exposed_ps"), collectives=_TEXTS)
_PIPELINE = _open(
    schedule=TEXT,
    balance=TEXT,
    num_microbatches=NUMBER,
    bubble_of_equal_stages=AMOUNT,
    stages=Items(_open(stage=NUMBER, layers=Items(NUMBER), cost_share=AMOUNT)),
)
_UNIT = _open(
    {"stored_s": TIME},
    **_each(TEXT, "kind key name worker cache error"),
    started_s=FIGURE,
    seconds=AMOUNT,
    attempts=NUMBER,
)


def _apart(what: str, *names: str) -> Rule:
    """How far something that `names` tell is from what it should be, or null: the error, null where
    it is infinite, with a note that says why; and what is allowed."""

    def holds(value: Any) -> bool:
        if type(value) is not dict:
            return value is None
        error, note = value.get("error"), value.get("note", "")
        is_told = _is_figure(error) or (error is None and bool(note))
        texts = (note, *map(value.get, names))
        return is_told and all(type(t) is str for t in texts) and _is_figure(value.get("allowed"))

    return Rule(what, holds)


_NUMERICS = _open(
    steps=NUMBER,
    losses=several(MAYBE, 1),
    reference_losses=Items(MAYBE),
    worst_loss_error=MAYBE,
    worst_loss=_apart("a step, its error and what is allowed, or null", "step"),
    worst_param_error=_apart("a leaf, its error and what is allowed, or null", "leaf"),
    worst_l0=_apart(
        "a value of a program, its error and what is allowed, or null", "program", "value"
    ),
    parts=_maybe(
        "micro-batches that are no mean, or null",
        _open({"loss": MAYBE, "mean_loss": MAYBE}, count=_INTEGER, place=TEXT),
    ),
    rounding=_maybe(
        "draws and what an effect is multiplied by, or null",
        _open(samples=_INTEGER, times=_INTEGER),
    ),
    bound=FIGURE,
    passed=FLAG,
    l0=Entries(MAYBE),
)
WHATIF = _open(
    {"stored_s": TIME}, tried=Items(_open(change=TEXT, status=TEXT, helps=FLAG)), left=_TEXTS
)
_REFUSED = _open(code=TEXT, message=TEXT)
_TRIED = _open(
    {"refused": _TEXTS},
    peak_bytes=NUMBER,
    global_batch=SIZE,
    same_batch=FLAG,
    step_time_s=POSITIVE,
    time_change=Rule("a change above -1", lambda v: _is_figure(v) and v > -1),
    usd_per_1e6_tokens=MAYBE,
    cost_change=MAYBE,
)


_SECTIONS: dict[str, Shape] = {
    "schema": one_of(1),
    "job": _JOB,
    "provenance": _open({"stored_s": TIME, "answered_s": AMOUNT, "again": TEXT}, stages_s=_AMOUNTS),
    "graph": _open(
        {"product_types": _AMOUNTS}, name=TEXT, repeats=_TEXTS, params=NUMBER, flops_per_step=AMOUNT
    ),
    "mesh": Entries(SIZE),
    "cores": SIZE,
    "neffs": NUMBER,
    "batch": _open(**_each(SIZE, "global_batch micro_batch num_microbatches tokens_per_sample")),
    "logical_cores": _open(
        **_each(SIZE, "lnc per_instance hbm_bytes"),
        hypothetical=FLAG,
        **_each(NUMBER, "regions_cut regions_alone alone_ps"),
    ),
    "placement": _open(
        {"kind": one_of(TORUS, LINEAR)}, name=TEXT, order=_TEXTS, why=TEXT, axes=Entries(TEXT)
    ),
    "context": TEXT,
    "pipeline": _open(),
    "findings": Items(FINDING),
    "units": Items(_UNIT),
    "programs": Items(
        _open(
            name=TEXT,
            **_each(NUMBER, "stage instructions_static instructions_dynamic neff_bytes"),
            functions=_TEXTS,
        )
    ),
    "memory": _MEMORY,
    "timing": _TIMING,
    "functions": Items(_FUNCTION),
    "step_chart": Items(_open(stage=NUMBER, runs=Items(_cells(str, int, int, int, int)))),
    "timelines": Items(_TIMELINE),
    "collectives": Items(_COLLECTIVE),
    "streams": _open(compute_packet_bytes=NUMBER, streams=Items(_STREAM)),
    "cost": _open(**_each(MAYBE, "usd_per_hour usd_per_step usd_per_1e6_tokens")),
    "goodput": _open(
        mtbf_s=POSITIVE,
        **_each(AMOUNT, "checkpoint_s interval_s tokens_per_s"),
        interval_steps=NUMBER,
        goodput=FIGURE,
    ),
    "limits": _open(
        cannot_tell=Items(_open(short=TEXT, text=TEXT)),
        assumed=Items(_open(**_each(TEXT, "name status source"), value=_FIGURES)),
    ),
    "bottleneck": _open(**_each(TEXT, "kind category text"), share=FIGURE),
}
_PRICE = _open(
    **_each(TEXT, "machine date region status source"),
    kind=one_of("on-demand", "capacity-block", "own"),
    given=FLAG,
    usd_per_hour=_NO_LESS,
    published=Items(one_of("on-demand", "capacity-block")),
)
_GOAL = _open(
    tokens=SIZE,
    **_each(_NO_LESS, "deadline_s budget_usd days usd"),
    steps=SIZE,
    goodput=AMOUNT,
    slack_days=MAYBE,
    slack_usd=MAYBE,
    fits=FLAG,
    met=Rule("true, false or null", lambda v: v is None or type(v) is bool),
    needs=_maybe(
        "what would meet a goal, or null",
        _open(
            {"instances": _NO_LESS, "usd_per_instance_hour": _NO_LESS},
            speedup=AMOUNT,
            tokens=AMOUNT,
        ),
    ),
)
_FAULTS = _open(healthy_step_time_ps=AMOUNT, slowdown=AMOUNT, rank_classes=NUMBER)
_AUTO = _open(
    keys=_TEXTS,
    remat=TEXT,
    micro_batch=SIZE,
    samples_per_rank=SIZE,
    why_one_size=TEXT,
    tried=Items(
        _open(remat=TEXT, micro_batch=SIZE, status=one_of("fits", "does not fit", "refused"))
    ),
)
_CANDIDATE = _open({"step_time_s": POSITIVE}, peak_bytes=NUMBER, compiled=FLAG, refused=_TEXTS)
_RESOLVED = Entries(_open(value=either(FIGURE, TEXT), why=TEXT))
_NOT_ALWAYS: dict[str, Shape] = {
    "resolved": _RESOLVED,  # reports of older releases do not have it
    "auto": _AUTO,
    "faults": _FAULTS,
    "numerics": _NUMERICS,
    "whatif": WHATIF,
    "price": _PRICE,
    "goal": _GOAL,
}
REPORT = _open(_NOT_ALWAYS, **_SECTIONS)
"""A report of `plan` or `run`."""


def _check_auto(section: Facts) -> None:
    for row in section["tried"]:
        (_REFUSED if row["status"] == "refused" else _CANDIDATE).require(row, "report.auto")
    own = {"remat": section["remat"], "micro_batch": section["micro_batch"], "compiled": True}
    if not any(own.items() <= row.items() for row in section["tried"]):
        raise ValueError("report.auto requires what was chosen among what was tried")


def check_whatif(section: Any) -> None:
    """Raises ValueError where what was tried is something else than that."""
    WHATIF.require(section, "whatif")
    for row in section["tried"]:
        (_REFUSED if row["status"] in ("refused", "failed") else _TRIED).require(row, "whatif")
        if row.get("cost_change") is not None and row["usd_per_1e6_tokens"] is None:
            raise ValueError("whatif: a change of the cost requires a cost")


def check_report(report: Any) -> None:
    """Raises ValueError where a report holds something else than reports do, and for parts that do
    not belong together."""
    REPORT.require(report, "report")
    for key in report.get("resolved", {}):
        table, _, name = key.partition(".")
        keys = report["job"].get(table)
        if not (isinstance(keys, dict) and name in keys):
            raise ValueError(f"report: resolved requires keys of the job, got {key}")
    if "auto" in report:
        _check_auto(report["auto"])
    if "whatif" in report:
        check_whatif(report["whatif"])
    sides = [report["timing"]["per_stage"], report["memory"]["per_stage"]]
    if report["pipeline"]:
        _PIPELINE.require(report["pipeline"], "report.pipeline")
        sides.append(report["pipeline"]["stages"])
    orders = [[row["stage"] for row in rows] for rows in sides]
    if any(order != list(range(len(orders[0]))) for order in orders):
        raise ValueError("report: timing, memory and pipeline require the same stages in order")
    if len(orders[0]) > 1 and not report["pipeline"]:
        raise ValueError("report: several stages require a pipeline")
    prices = {value is None for value in report["cost"].values()}
    if len(prices) > 1:
        raise ValueError("report: all prices are known, or none")
