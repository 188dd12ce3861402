"""A `Distribution` from a table (TOML, JSON, a dict), for people without code at hand.

```toml
[mesh]                                  # outermost first
dp_shard = 16
tp = 2

[[fully_shard]]
modules = "layers.*"                    # every match is a unit; group = 2: every two
param_dtype = "bfloat16"                # reduce_dtype, output_dtype, reshard_after_forward,
mesh = ["dp_shard"]                     # offload = "cpu" as well
[[fully_shard]]
modules = ""                            # the model, with what is left

[parallelize]                           # "RowwiseParallel Embedding" of what is no Linear
"layers.*.attention.wq" = "ColwiseParallel"

[checkpoint]
modules = ["layers.*"]                  # mode = "selective", "offload"

[pipeline]
split = ["layers.8"]                    # in front of; schedule = "1F1B", micro_batches = 8

[ddp]                                   # instead of fully_shard; bucket_mb = 25
modules = ""
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.diagnostics import Loc, UsageError, did_you_mean
from shardwright.compiler.frontend.pytorch.distribution import (
    SPLIT_KINDS,
    Axis,
    Checkpointed,
    Cut,
    Distribution,
    Parallel,
    Pipeline,
    Precision,
    Recompute,
    Replicated,
    Style,
    Unit,
    axis_named,
    split_weights,
)

DTYPES = ("", "float32", "bfloat16", "float16")
_TABLES = ("mesh", "fully_shard", "parallelize", "checkpoint", "pipeline", "ddp")
_PRECISION = ("param_dtype", "reduce_dtype", "output_dtype")


Line = Callable[[str, int], int]
"""The line of a name, or of row `n` of a list of tables; 0 where it is not known."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """Values of a table by name; `line` finds where the file has a name."""

    file: str
    line: Line

    def at(self, name: str, row: int = 0) -> Loc:
        """Where a name stands, or a row of a list of tables."""
        return Loc(self.file, self.line(name, row))

    def refuse(self, name: str, required: str, got: object, hint: str = "") -> UsageError:
        """The refusal of a value."""
        text = f"{name} requires {required}, got {got!r}"
        return UsageError("SW_TORCH_TABLE", text, self.at(name), hint)

    def table(self, name: str, value: Any, keys: Sequence[str] = ()) -> Mapping[str, Any]:
        """A table with some keys alone."""
        if not isinstance(value, Mapping):
            raise self.refuse(name, "a table", value)
        for key in value if keys else ():
            if key not in keys:
                hint = did_you_mean(key, keys, f"keys are {', '.join(keys)}")
                raise self.refuse(name, f"keys among {', '.join(keys)}", key, hint)
        return value

    def words(self, name: str, value: Any) -> tuple[str, ...]:
        """A text, or a list of texts."""
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list | tuple) or not all(isinstance(w, str) for w in found):
            raise self.refuse(name, "a text or a list of texts", value)
        return tuple(found)

    def whole(self, name: str, value: Any, low: int = 0) -> int:
        """A whole number."""
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.refuse(name, f"a whole number of at least {low}", value)
        return value

    def one_of(self, name: str, value: Any, known: Sequence[str]) -> str:
        """A word of some."""
        if not isinstance(value, str) or value not in known:
            listed = ", ".join(w for w in known if w)
            hint = did_you_mean(str(value), known)
            raise self.refuse(name, f"one of {listed}", value, hint)
        return value

    def precision(self, name: str, row: Mapping[str, Any]) -> Precision:
        """The types of a row."""
        return Precision(
            **{key: self.one_of(f"{name}.{key}", row.get(key, ""), DTYPES) for key in _PRECISION}
        )


def distribution_of(
    table: Mapping[str, Any], file: str = "", line: Line = lambda *_: 0
) -> Distribution:
    """The distribution that a table says. Raises UsageError (SW_TORCH_TABLE)."""
    reader = _Reader(file, line)
    found = reader.table("a distribution", table, _TABLES)
    mesh = reader.table("mesh", found.get("mesh", {}))
    axes = tuple(
        Axis(name=name, size=reader.whole(f"mesh.{name}", size, 1)) for name, size in mesh.items()
    )
    names = tuple(axis.name for axis in axes)
    units = tuple(_units(reader, found.get("fully_shard", ()), names))
    replicated = tuple(_replicated(reader, found["ddp"], names)) if "ddp" in found else ()
    if units and replicated:
        raise reader.refuse("ddp", "a distribution without fully_shard", "both")
    return Distribution(
        axes=axes,
        units=units,
        parallel=tuple(_parallel(reader, found.get("parallelize", {}), names)),
        checkpointed=tuple(_checkpointed(reader, found.get("checkpoint", {}))),
        pipeline=_pipeline(reader, found["pipeline"], names) if "pipeline" in found else None,
        replicated=replicated,
        mesh_loc=reader.at("mesh"),
    )


def _axes(reader: _Reader, name: str, value: Any, names: Sequence[str]) -> tuple[str, ...]:
    found = reader.words(name, value)
    for axis in found:
        reader.one_of(name, axis, names)
    return found


def _data_axes(names: Sequence[str]) -> tuple[str, ...]:
    """The axes of data parallelism, which are taken where a row does not say."""
    return tuple(n for n in names if axis_named(n) in ("dp_replicate", "dp_shard", ""))


def _units(reader: _Reader, rows: Any, names: Sequence[str]) -> Iterator[Unit]:
    keys = ("modules", "group", "mesh", "offload", "reshard_after_forward", *_PRECISION)
    several = rows if isinstance(rows, list | tuple) else [rows]
    for number, given in enumerate(several):
        row = reader.table("fully_shard", given, keys)
        modules = reader.words("fully_shard.modules", row.get("modules", ""))
        reshard = row.get("reshard_after_forward")
        if reshard is not None and not isinstance(reshard, bool | int):
            raise reader.refuse(
                "fully_shard.reshard_after_forward", "true, false or ranks", reshard
            )
        axes = _axes(reader, "fully_shard.mesh", row.get("mesh", _data_axes(names)), names)
        copies = tuple(n for n in axes if axis_named(n) == "dp_replicate") if axes[1:] else ()
        is_pattern = any("*" in module for module in modules)
        yield Unit(
            modules=modules,
            group=reader.whole("fully_shard.group", row.get("group", 1), 1) if is_pattern else 0,
            reshard=reshard,
            precision=reader.precision("fully_shard", row),
            axes=tuple(n for n in axes if n not in copies),
            replicas=copies,
            offload=reader.one_of("fully_shard.offload", row.get("offload", ""), ("", "cpu")),
            loc=reader.at("fully_shard", number),
        )


def _replicated(reader: _Reader, given: Any, names: Sequence[str]) -> Iterator[Replicated]:
    row = reader.table("ddp", given, ("modules", "mesh", "bucket_mb"))
    for module in reader.words("ddp.modules", row.get("modules", "")):
        yield Replicated(
            module=module,
            axes=_axes(reader, "ddp.mesh", row.get("mesh", _data_axes(names)), names),
            bucket_mb=reader.whole("ddp.bucket_mb", row.get("bucket_mb", 0)),
            loc=reader.at("ddp"),
        )


def _parallel(reader: _Reader, given: Any, names: Sequence[str]) -> Iterator[Parallel]:
    axes = ("tp",) if "tp" in names else tuple(names[-1:])
    for pattern, value in reader.table("parallelize", given).items():
        name = f"parallelize.{pattern}"
        words = value.split() if isinstance(value, str) else [value]
        style = Style(reader.one_of(name, words[0] if words else "", [*Style]))
        kind = words[1] if len(words) > 1 else SPLIT_KINDS[0]
        reader.one_of(name, kind, SPLIT_KINDS)
        yield Parallel(
            module=pattern,
            style=style,
            weights=split_weights(style, kind, has_bias=False),
            axes=axes,
            loc=reader.at(name),
        )


def _checkpointed(reader: _Reader, given: Any) -> Iterator[Checkpointed]:
    row = reader.table("checkpoint", given, ("modules", "mode"))
    mode = reader.one_of("checkpoint.mode", row.get("mode", "full"), [*Recompute])
    for module in reader.words("checkpoint.modules", row.get("modules", ())):
        yield Checkpointed(
            module=module, keeps=Recompute(mode), loc=reader.at("checkpoint.modules")
        )


def _pipeline(reader: _Reader, given: Any, names: Sequence[str]) -> Pipeline:
    row = reader.table("pipeline", given, ("split", "mesh", "schedule", "micro_batches"))
    loc = reader.at("pipeline.split")
    split = reader.words("pipeline.split", row.get("split", ()))
    axes = row.get("mesh", [name for name in names if name == "pp"])
    schedule = "".join(reader.words("pipeline.schedule", row.get("schedule", "")))
    return Pipeline(
        cuts=tuple(Cut(module=module, loc=loc) for module in split),
        axes=_axes(reader, "pipeline.mesh", axes, names),
        schedule=f"Schedule{schedule}" if schedule else "",
        micro_batches=reader.whole("pipeline.micro_batches", row.get("micro_batches", 0)),
        loc=loc,
    )
