"""Every graph rewrite of the road, stage by stage in the order in which they run, by the name it
has everywhere: on the command line of `opt`, in tests, as a step of a dump.

On a text a rewrite runs with plain settings (`auto_cast{type=bf16}`) in place of what it reads
besides the graph: those of the function of its name in `settings.py`, or of its own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from shardwright.compiler.diagnostics import UsageError, did_you_mean
from shardwright.compiler.driver import FUNCTION
from shardwright.compiler.ir.spelling import spelled
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.lower import rewrites as lowering
from shardwright.compiler.outline.cut import SHRINK_LIVE_RANGES, SINK_INVARIANTS
from shardwright.compiler.passes import pipeline as passes
from shardwright.compiler.rewriting.driver import Rewrite
from shardwright.orchestrator.opt.settings import ON_TEXTS
from shardwright.orchestrator.report.rates import FORWARD
from shardwright.sharding.cut import rewrites as cutting
from shardwright.sharding.explain import NUMBERED
from shardwright.sharding.prepare import rewrites as preparing
from shardwright.sharding.strategies.registry import RECIPE

Setting = int | bool | str
SPELLED = Rewrite("spelled", spelled, "functions that StableHLO does not have, in its ops")

STAGES: Mapping[str, tuple[Rewrite[Any, ..., Any], ...]] = MappingProxyType(
    {
        "the whole step": (
            preparing.REROLLED,
            passes.NARROW_DOUBLES,
            passes.UNROLL,
            passes.WORDS,
            passes.FOLD,
            passes.CANONICALISE_DOTS,
            passes.SIMPLIFY,
            passes.SPLIT_CONCATS,
            passes.CSE,
            passes.DCE,
            passes.REMATERIALISE,
            passes.SAVE_POLICY,
            passes.DOUBLES,
        ),
        "a strategy": (
            preparing.ROUNDED,
            preparing.STAGED,
            preparing.PADDED,
            preparing.WITHOUT_CONSTRAINTS,
            preparing.SORTED_ROWS,
            preparing.IOTA_DE_CSE,
            RECIPE,
            preparing.DEDUPED,
        ),
        "a partitioned step": (
            cutting.PARTITIONED,
            preparing.EXPANDED_REPEATS,
            cutting.REWRITTEN,
            preparing.REDUCE_DTYPE,
            cutting.LOCALIZED,
            cutting.MANUAL_REGIONS,
            cutting.RING,
            preparing.WITHOUT_PHANTOM,
            cutting.REDUCTIONS_LAST,
            cutting.COALESCED,
        ),
        "programs": (
            cutting.COORDINATES,
            cutting.CUT,
            cutting.DIVIDED,
            cutting.REDUCED,
            cutting.SUMMED,
            cutting.HOST,
            cutting.GROUPED,
            cutting.BUCKETED,
            cutting.SHIFTED,
            cutting.PRIORITISED,
            SINK_INVARIANTS,
            SHRINK_LIVE_RANGES,
        ),
        "a function": (
            FUNCTION,
            passes.FORMATS,
            passes.INTEGERS,
            passes.AUTO_CAST,
            passes.SATURATE,
            passes.REDUCE_STRENGTH,
            passes.ACTIVATIONS,
            passes.DROP_BARRIERS,
        ),
        "lowering": (
            *lowering.LOWERING,
            lowering.SINK_TRANSPOSES,
            lowering.MADE_ONCE,
            lowering.REMAT_ACROSS_KERNELS,
            lowering.HALVED,
        ),
        "a report": (NUMBERED, FORWARD),
        "export": (SPELLED,),
    }
)
REWRITES = MappingProxyType({one.name: one for stage in STAGES.values() for one in stage})
TEXTUAL = MappingProxyType({name: one for name, one in REWRITES.items() if not one.besides})
"""Those that a text is enough for."""

_ONE = re.compile(r"([A-Za-z_]\w*)(?:\{([^}]*)\})?")


def passes_of(text: str) -> list[passes.Pass]:
    """The rewrites of `name,name{key=value key=value}`, in order.

    Raises UsageError for what is no list of rewrites, unknown names, and unknown settings.
    """
    found: list[passes.Pass] = []
    at = 0
    while at < len(text):
        match = _ONE.match(text, at)
        end = match.end() if match else at
        if match is None or text[end : end + 1] not in ("", ","):
            raise _refused("names separated by commas, like fold,cse", text)
        found.append(_made(match[1], match[2] or ""))
        at = end + 1
    if not found or text.endswith(","):
        raise _refused("at least one name, and one behind every comma", text)
    return found


def _made(name: str, words: str) -> passes.Pass:
    if name in REWRITES and name not in TEXTUAL:
        also = f"which also reads {REWRITES[name].besides}"
        raise UsageError(
            "SW_USAGE",
            f"--pass requires a rewrite that a graph is enough for, got {name!r}, {also}",
            hint="opt --list",
        )
    rewrite = TEXTUAL.get(name)
    if rewrite is None:
        raise _refused(f"one of {', '.join(TEXTUAL)}", name, TEXTUAL)
    known = settings_of(rewrite)
    given = dict(known)
    for key, _, value in (word.partition("=") for word in words.split()):
        if key not in known:
            raise _refused(f"settings of {name}: {', '.join(known) or 'none'}", key, known)
        given[key] = _value(name, key, value, known[key])
    return replace(rewrite, run=partial(_on_graph, _function(rewrite), given), remark=None)


def _function(rewrite: Rewrite[Any, ..., Any]) -> Callable[..., Graph | None]:
    return ON_TEXTS.get(rewrite.name, rewrite.run)


def _on_graph(
    function: Callable[..., Graph | None], given: Mapping[str, Setting], graph: Graph
) -> Graph:
    """`graph` itself where there is nothing to do."""
    made = function(graph, **given)
    return graph if made is None else made


def settings_of(rewrite: Rewrite[Any, ..., Any]) -> dict[str, Setting]:
    """What may be given on a text, with defaults."""
    _, *parameters = inspect.signature(_function(rewrite)).parameters.values()
    return {p.name: p.default for p in parameters if isinstance(p.default, Setting)}


def _value(name: str, key: str, text: str, default: Setting) -> Setting:
    match default:
        case bool() if text in ("true", "false"):
            return text == "true"
        case bool():
            raise _refused(f"true or false for {key} of {name}", text)
        case int() if text.isascii() and text.isdigit():
            return int(text)
        case int():
            raise _refused(f"a number for {key} of {name}", text)
        case _:
            return text


def _refused(required: str, given: str, known: Iterable[str] = ()) -> UsageError:
    return UsageError(
        "SW_USAGE",
        f"--pass requires {required}, got {given!r}",
        hint=did_you_mean(given, known, "opt --list"),
    )


def listed() -> str:
    """A line for every rewrite of a text: name, settings with their defaults, what it does."""
    heads = {_head(rewrite): rewrite.help for rewrite in TEXTUAL.values()}
    width = max(map(len, heads))
    return "".join(f"{head:<{width}}  {text}\n" for head, text in heads.items())


def _head(rewrite: Rewrite[Any, ..., Any]) -> str:
    known = " ".join(f"{key}={_text(value)}" for key, value in settings_of(rewrite).items())
    return f"{rewrite.name}{{{known}}}" if known else rewrite.name


def _text(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
