"""Every graph rewrite that a text is enough for, by the name it has everywhere: on the command line
of `opt`, in tests, as a step of a dump.

A rewrite is named by its function and imported when it runs. One with settings is named by a
function that makes it of them: `auto_cast{type=bf16}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

from shardwright.compiler.diagnostics import UsageError, did_you_mean
from shardwright.compiler.ir.types import Graph

Run = Callable[[Graph], Graph]
Setting = int | bool | str


@dataclass(frozen=True, slots=True)
class Rewrite:
    """`where` is `module:function`; `defaults` are of its settings."""

    where: str
    help: str
    defaults: tuple[tuple[str, Setting], ...] = ()

    @property
    def settings(self) -> dict[str, Setting]:
        """What may be given, with defaults."""
        return dict(self.defaults)

    def made(self, given: Mapping[str, Setting]) -> Run:
        """The function `Graph -> Graph`, with settings where it has any."""
        module, _, name = self.where.partition(":")
        function: Any = getattr(import_module(module), name)
        return partial(function, **{**self.settings, **given}) if self.settings else function


_WITH = "shardwright.orchestrator.opt.settings"

REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {
        # The whole step, before it is partitioned.
        "unroll": Rewrite(
            "shardwright.compiler.passes.unroll:unroll",
            "short elementwise loops become straight code",
        ),
        "fold": Rewrite(
            "shardwright.compiler.passes.fold:fold",
            "constants are computed, identities and what cancels go",
        ),
        "orient": Rewrite(
            "shardwright.compiler.passes.orient:orient",
            "products that are only read transposed change their operands instead",
        ),
        "simplify": Rewrite(
            "shardwright.compiler.passes.simplify:simplify",
            "sums over one element, sums of pieces padded apart, neighbouring slices: as views",
            (("keep_sums", False),),
        ),
        "separate": Rewrite(
            "shardwright.compiler.passes.separate:separate",
            "concatenations that only elementwise work and folds follow are taken apart",
        ),
        "cse": Rewrite("shardwright.compiler.passes.cse:cse", "equal ops become one"),
        "dce": Rewrite(
            "shardwright.compiler.passes.dce:dce", "ops and loop carries that nothing reads go"
        ),
        "rematerialise": Rewrite(
            "shardwright.compiler.passes.remat:rematerialise",
            "quadratic values are made again for far readers, across loops too",
        ),
        "keep_less": Rewrite(
            "shardwright.compiler.passes.remat.elementwise:keep_less",
            "layers keep the lightest values that the rest follows from element by element",
        ),
        # Partitioning.
        "without_constraints": Rewrite(
            "shardwright.compiler.passes.barriers:without_constraints",
            "the step's own shardings are left out",
        ),
        "sorted_rows": Rewrite(
            f"{_WITH}:sorted_rows",
            "rows of all samples that are sorted as one list are sorted sample by sample",
            (
                ("batch", 0),
                ("by_expert", False),
            ),
        ),
        "own_counts": Rewrite(
            "shardwright.sharding.strategies.counts:own_counts",
            "every reader of a count gets a count of its own",
        ),
        "ring": Rewrite(
            f"{_WITH}:ring",
            "attention over gathered keys becomes a loop over blocks that go around a ring",
            (
                ("axis", "cp"),
                ("batch", 0),
            ),
        ),
        # Programs of a step.
        "coordinates": Rewrite(
            f"{_WITH}:coordinates", "what depends on the rank is read from inputs of its own"
        ),
        "grouped": Rewrite(
            "shardwright.sharding.cut.overlap.groups:grouped",
            "one turn of a layer loop does several layers, collectives together",
            (
                ("layers", 2),
                ("most_bytes", 2**30),
            ),
        ),
        "bucketed": Rewrite(
            "shardwright.sharding.cut.overlap.buckets:bucketed",
            "collectives that are ready together become one",
            (("most_bytes", 2**30),),
        ),
        "shifted": Rewrite(
            f"{_WITH}:shifted",
            "layer loops become software pipelines: weights are gathered early, gradients late",
            (
                ("gather", 1),
                ("reduce", 0),
            ),
        ),
        "threaded": Rewrite(
            "shardwright.sharding.cut.overlap.threads:threaded",
            "gathers of weights and reductions give way to what a layer itself waits for",
        ),
        "summed": Rewrite(
            "shardwright.sharding.cut.summed:summed",
            "gradients of several micro-batches are added up in the loop that makes them",
            (("least_bytes", 2**16),),
        ),
        "sink_invariants": Rewrite(
            "shardwright.compiler.outline.sink:sink_invariants",
            "light constants that a loop only reads are made inside of it",
        ),
        # A function, before it is lowered.
        "formats": Rewrite(
            f"{_WITH}:formats",
            "refuses fp8 formats that the machine does not have; changes nothing",
            (
                ("generation", "v2"),
                ("accept", False),
            ),
        ),
        "integers": Rewrite(
            f"{_WITH}:integers",
            "refuses integer operations that would lose bits; changes nothing",
            (
                ("generation", "v2"),
                ("downcast", "default"),
                ("native", False),
            ),
        ),
        "auto_cast": Rewrite(
            f"{_WITH}:auto_cast",
            "fp32 operations are computed in a shorter type",
            (
                ("cast", "matmult"),
                ("type", "bf16"),
            ),
        ),
        "saturate": Rewrite(
            "shardwright.compiler.passes.saturate:saturate_infinity",
            "infinities are clamped in front of transposes done as products",
        ),
        "doubled": Rewrite(
            "shardwright.compiler.passes.doubled:doubled",
            "a sum of two equal terms is a product with two",
        ),
        "activations": Rewrite(
            "shardwright.compiler.passes.activations:activations",
            "GELU, SiLU and their derivatives are found in any spelling",
        ),
        "drop_barriers": Rewrite(
            "shardwright.compiler.passes.barriers:drop_barriers",
            "optimization barriers and constraints go",
        ),
        # Lowering.
        "windows": Rewrite(
            "shardwright.compiler.lower.windows:expand_windows",
            "convolutions and windowed reductions become views of windows and ordinary ops",
        ),
        "narrow": Rewrite(
            "shardwright.compiler.lower.narrow:narrow",
            "64-bit integers are computed with their low 32 bits",
        ),
        "expand": Rewrite(
            "shardwright.compiler.lower.expand:expand",
            "composite ops in terms of those that an engine has",
        ),
        "canonical": Rewrite(
            "shardwright.compiler.lower.canonical:canonical",
            "sorts, gathers and scatters along an axis become elementwise",
        ),
        # Export.
        "spelled": Rewrite(
            "shardwright.compiler.ir.spelling:spelled",
            "functions that StableHLO does not have, in its ops",
        ),
    }
)

_ONE = re.compile(r"([A-Za-z_]\w*)(?:\{([^}]*)\})?")


def passes_of(text: str) -> list[tuple[str, Run]]:
    """The passes of `name,name{key=value key=value}`, in order.

    Raises UsageError for what is no list of passes, unknown names, and unknown settings.
    """
    found: list[tuple[str, Run]] = []
    at = 0
    while at < len(text):
        match = _ONE.match(text, at)
        end = match.end() if match else at
        if match is None or text[end : end + 1] not in ("", ","):
            raise _refused("names separated by commas, like fold,cse", text)
        found.append((match[1], _made(match[1], match[2] or "")))
        at = end + 1
    if not found or text.endswith(","):
        raise _refused("at least one name, and one behind every comma", text)
    return found


def _made(name: str, words: str) -> Run:
    rewrite = REWRITES.get(name)
    if rewrite is None:
        raise _refused(f"one of {', '.join(REWRITES)}", name, REWRITES)
    pairs = [word.partition("=") for word in words.split()]
    known = ", ".join(rewrite.settings) or "none"
    given: dict[str, Setting] = {}
    for key, _, value in pairs:
        if key not in rewrite.settings:
            raise _refused(f"settings of {name}: {known}", key, rewrite.settings)
        given[key] = _value(name, key, value, rewrite.settings[key])
    return rewrite.made(given)


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


def listed(names: Collection[str] = ()) -> str:
    """A line for every rewrite: name, settings with their defaults, what it does."""
    rows = [(name, rewrite) for name, rewrite in REWRITES.items() if not names or name in names]
    heads = [_head(name, rewrite) for name, rewrite in rows]
    width = max(map(len, heads), default=0)
    lines = zip(heads, rows, strict=True)
    return "".join(f"{head:<{width}}  {rewrite.help}\n" for head, (_, rewrite) in lines)


def _head(name: str, rewrite: Rewrite) -> str:
    settings = " ".join(f"{key}={_text(value)}" for key, value in rewrite.settings.items())
    return f"{name}{{{settings}}}" if settings else name


def _text(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def applied(graph: Graph, passes: Sequence[tuple[str, Run]]) -> Graph:
    """`graph` after passes, the verifier run before the first and behind each.

    Raises: CompileError naming the pass whose result is not valid, and what passes raise.
    """
    from shardwright.compiler.passes.pipeline import Pass, run

    return run(graph, [Pass(name, one) for name, one in passes])
