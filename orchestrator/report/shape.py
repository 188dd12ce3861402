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


def _open(
    names: Mapping[Any, str], optional: Mapping[str, Shape] | None = None, /, **required: Shape
) -> Table:
    """A map that has the entries of `names`, which are by their shape, and those of `required`."""
    own = {name: shape for shape, words in names.items() for name in words.split()}
    return Table(own | required, optional or {}, is_open=True)


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
FINDING = _open({TEXT: "code severity message hint"}, loc=_maybe("a place or null", _PLACE))


class _Parts:
    """Times by category, `bubble` among them."""

    def require(self, value: Any, where: str) -> None:
        """Raises ValueError when `value` is something else."""
        _AMOUNTS.require(value, where)
        if "bubble" not in value:
            raise ValueError(f"{where} requires bubble")


PARTS = _Parts()
_JOB = _open(
    {},
    cluster=_open({TEXT: "target", SIZE: "instances"}),
    strategy=_open({TEXT: "name"}),
    compiler=_open(
        {TEXT: "model_type attention auto_cast"},
        optlevel=Rule("a level", lambda v: type(v) in (int, str)),
    ),
)
_MEMORY = _open(
    {
        SIZE: "limit_bytes",
        NUMBER: "reserve_bytes peak_bytes",
        TEXT: "peak_program",
        FLAG: "fits",
        _AMOUNTS: "categories argument_bytes arena_bytes",
    },
    {"host": _open({SIZE: "per_core_bytes bytes limit_bytes"})},
    estimate=_open({NUMBER: "peak_bytes", _AMOUNTS: "arena_bytes"}),
    per_stage=Items(_open({NUMBER: "stage peak_bytes", _AMOUNTS: "categories"})),
    timeline=Items(
        _open({TEXT: "program what", NUMBER: "position repeats live_bytes", _AMOUNTS: "categories"})
    ),
    largest=Items(_open({TEXT: "name category loc", NUMBER: "bytes"})),
)
_PUBLISHED = _open(
    {
        POSITIVE: "mfu",
        AMOUNT: "times",
        TEXT: "id model release source",
        _TEXTS: "machines",
        SIZE: "cores",
    }
)


_TIMING = _open(
    {
        TEXT: "profile confidence confidence_why",
        SIZE: "step_time_ps",
        POSITIVE: "step_time_s peak_flops_per_s tokens_per_s",
        PARTS: "breakdown_ps",
        AMOUNT: "mfu hfu",
    },
    {
        "mfu_causal": AMOUNT,
        "attention": one_of("causal", "full", "none"),
        "flops": _open({AMOUNT: "model causal captured executed"}),
        "published": _maybe("a published run or null", _PUBLISHED),
    },
    band_s=several(POSITIVE, 2, 2),
    hidden_ps=Entries(FIGURE),
    engines=Entries(_open({AMOUNT: "busy_ps share"})),
    per_stage=Items(_open({NUMBER: "stage step_time_ps", PARTS: "breakdown_ps"})),
)
_KERNEL = _open({TEXT: "name loc", AMOUNT: "time_ps flops hbm_bytes", _AMOUNTS: "busy_ps"})
_FUNCTION = _open(
    {
        TEXT: "program function loc",
        NUMBER: "calls",
        AMOUNT: "time_ps flops hbm_bytes",
        _AMOUNTS: "breakdown_ps",
    },
    kernels=Items(_KERNEL),
)


def _cells(*kinds: type) -> Rule:
    """A short list of texts and numbers, in this order."""

    def holds(value: Any) -> bool:
        is_row = type(value) is list and tuple(map(type, value)) == kinds
        return is_row and all(type(v) is str or 0 <= v <= _LARGEST for v in value)

    return Rule(f"[{', '.join(kind.__name__ for kind in kinds)}]", holds)


_TIMELINE = _open(
    {TEXT: "program function", NUMBER: "duration_ps left_out"},
    tracks=Items(_open({TEXT: "name"}, slices=Items(_cells(str, int, int)))),
)
_COLLECTIVE = _open(
    {
        TEXT: "kind axis algorithm why",
        NUMBER: "group_size count parts bytes time_ps exposed_ps",
        _NO_LESS: "stream",
    }
)
_STREAM = _open({NUMBER: "stream packet_bytes count time_ps exposed_ps", _TEXTS: "collectives"})
_PIPELINE = _open(
    {TEXT: "schedule balance", NUMBER: "num_microbatches", AMOUNT: "bubble_of_equal_stages"},
    stages=Items(_open({NUMBER: "stage", AMOUNT: "cost_share"}, layers=Items(NUMBER))),
)
_UNIT = _open(
    {
        TEXT: "kind key name worker cache error",
        FIGURE: "started_s",
        AMOUNT: "seconds",
        NUMBER: "attempts",
    },
    {"stored_s": TIME},
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
    {NUMBER: "steps", MAYBE: "worst_loss_error", FIGURE: "bound", FLAG: "passed"},
    losses=several(MAYBE, 1),
    reference_losses=Items(MAYBE),
    worst_loss=_apart("a step, its error and what is allowed, or null", "step"),
    worst_param_error=_apart("a leaf, its error and what is allowed, or null", "leaf"),
    worst_l0=_apart(
        "a value of a program, its error and what is allowed, or null", "program", "value"
    ),
    parts=_maybe(
        "micro-batches that are no mean, or null",
        _open({_INTEGER: "count", TEXT: "place"}, {"loss": MAYBE, "mean_loss": MAYBE}),
    ),
    rounding=_maybe(
        "draws and what an effect is multiplied by, or null", _open({_INTEGER: "samples times"})
    ),
    l0=Entries(MAYBE),
    undecided=several(TEXT),
)
WHATIF = _open(
    {_TEXTS: "left"}, {"stored_s": TIME}, tried=Items(_open({TEXT: "change status", FLAG: "helps"}))
)
_REFUSED = _open({TEXT: "code message"})
_TRIED = _open(
    {
        NUMBER: "peak_bytes",
        SIZE: "global_batch",
        FLAG: "same_batch",
        POSITIVE: "step_time_s",
        MAYBE: "usd_per_1e6_tokens cost_change",
    },
    {"refused": _TEXTS},
    time_change=Rule("a change above -1", lambda v: _is_figure(v) and v > -1),
)


_SECTIONS: dict[str, Shape] = {
    "schema": one_of(1),
    "job": _JOB,
    "provenance": _open(
        {_AMOUNTS: "stages_s"}, {"stored_s": TIME, "answered_s": AMOUNT, "again": TEXT}
    ),
    "graph": _open(
        {TEXT: "name", _TEXTS: "repeats", NUMBER: "params", AMOUNT: "flops_per_step"},
        {"product_types": _AMOUNTS, "trained": NUMBER, "told": _TEXTS},
    ),
    "mesh": Entries(SIZE),
    "cores": SIZE,
    "neffs": NUMBER,
    "batch": _open({SIZE: "global_batch micro_batch num_microbatches tokens_per_sample"}),
    "logical_cores": _open(
        {
            SIZE: "lnc per_instance hbm_bytes",
            FLAG: "hypothetical",
            NUMBER: "kernels_cut kernels_alone alone_ps",
        }
    ),
    "placement": _open(
        {TEXT: "name why", _TEXTS: "order"}, {"kind": one_of(TORUS, LINEAR)}, axes=Entries(TEXT)
    ),
    "context": TEXT,
    "pipeline": _open({}),
    "findings": Items(FINDING),
    "units": Items(_UNIT),
    "programs": Items(
        _open(
            {
                TEXT: "name",
                NUMBER: "stage instructions_static instructions_dynamic neff_bytes",
                _TEXTS: "functions",
            }
        )
    ),
    "memory": _MEMORY,
    "timing": _TIMING,
    "functions": Items(_FUNCTION),
    "step_chart": Items(_open({NUMBER: "stage"}, runs=Items(_cells(str, int, int, int, int)))),
    "timelines": Items(_TIMELINE),
    "collectives": Items(_COLLECTIVE),
    "streams": _open({NUMBER: "compute_packet_bytes"}, streams=Items(_STREAM)),
    "cost": _open({MAYBE: "usd_per_hour usd_per_step usd_per_1e6_tokens"}),
    "limits": _open(
        {},
        cannot_tell=Items(_open({TEXT: "short text"})),
        assumed=Items(_open({TEXT: "name status source", _FIGURES: "value"})),
    ),
    "bottleneck": _open({TEXT: "kind category text", FIGURE: "share"}),
}
_PRICE = _open(
    {TEXT: "machine date region status source", FLAG: "given", _NO_LESS: "usd_per_hour"},
    kind=one_of("on-demand", "capacity-block", "own"),
    published=Items(one_of("on-demand", "capacity-block")),
)
_GOAL = _open(
    {
        SIZE: "tokens steps",
        _NO_LESS: "deadline_s budget_usd days usd",
        AMOUNT: "goodput",
        MAYBE: "slack_days slack_usd",
        FLAG: "fits",
    },
    met=_maybe("true, false or null", FLAG),
    needs=_maybe(
        "what would meet a goal, or null",
        _open(
            {AMOUNT: "speedup tokens"}, {"instances": _NO_LESS, "usd_per_instance_hour": _NO_LESS}
        ),
    ),
)
_FAULTS = _open({AMOUNT: "healthy_step_time_ps slowdown", NUMBER: "rank_classes"})
_AUTO = _open(
    {_TEXTS: "keys", TEXT: "remat why_one_size", SIZE: "micro_batch samples_per_rank"},
    tried=Items(
        _open(
            {TEXT: "remat", SIZE: "micro_batch"}, status=one_of("fits", "does not fit", "refused")
        )
    ),
)
_CANDIDATE = _open(
    {NUMBER: "peak_bytes", FLAG: "compiled", _TEXTS: "refused"}, {"step_time_s": POSITIVE}
)
_RESOLVED = Entries(_open({TEXT: "why"}, value=either(FIGURE, TEXT)))
_GOODPUT = _open(
    {
        POSITIVE: "mtbf_s",
        AMOUNT: "checkpoint_s interval_s tokens_per_s",
        NUMBER: "interval_steps",
        FIGURE: "goodput",
    }
)
_INFERENCE = _open(
    {
        SIZE: "sequences context weight_bytes cache_bytes cache_bytes_per_sequence",
        POSITIVE: "hbm_bytes_per_s mbu tokens_per_s tokens_per_s_per_sequence",
        MAYBE: "time_to_first_token_s time_per_output_token_s",
    },
    mode=one_of("prefill", "decode"),
)
_NOT_ALWAYS: dict[str, Shape] = {
    "goodput": _GOODPUT,  # of training
    "inference": _INFERENCE,
    "resolved": _RESOLVED,  # reports of older releases do not have it
    "auto": _AUTO,
    "faults": _FAULTS,
    "numerics": _NUMERICS,
    "whatif": WHATIF,
    "price": _PRICE,
    "goal": _GOAL,
}
REPORT = _open({}, _NOT_ALWAYS, **_SECTIONS)
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
    if ("goodput" in report) == ("inference" in report):
        raise ValueError("report: goodput of training, or inference, and not both")
    prices = {value is None for value in report["cost"].values()}
    if len(prices) > 1:
        raise ValueError("report: all prices are known, or none")
