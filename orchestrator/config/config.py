"""The job's configuration: one frozen dataclass per table of `job.toml`, every key also `--set
table.key=value`.

Unknown tables and keys, values of the wrong type and values outside a closed set are usage errors
that name the key, the file, what is allowed and what was given. The resolved configuration is plain
data: it is printed, stored with the report, and hashed into the plan key.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.collectives.ops import LINEAR, TORUS
from shardwright.collectives.timing.runtimes import CURRENT, RUNTIMES
from shardwright.compiler.diagnostics import UsageError, did_you_mean
from shardwright.compiler.machine.target import FIRST_TARGET, machine_name, target_names
from shardwright.compiler.options import DEFAULTS, CompileOptions, choice
from shardwright.compiler.support.documents import parse_toml, read_text
from shardwright.orchestrator.config.goodput_keys import USUAL, GoodputConfig, check_interval
from shardwright.orchestrator.config.model_keys import NO_MODEL, ModelConfig, named
from shardwright.orchestrator.config.purchase import LISTED, NO_GOAL, GoalConfig, PriceConfig
from shardwright.orchestrator.host import inside_ray_job
from shardwright.orchestrator.validation.recipes import Tables, recipe_tables
from shardwright.sharding import settings as strategy_settings
from shardwright.sharding.settings import AUTO, MOST, StrategySettings, limited

MOST_INSTANCES = 2**16
"""Our choice: thirty times the largest cluster that was ever planned; laying out more takes longer
than planning on them."""
TRIES, MOST_TRIES = 2, 64  # of a screen, our choice; of `--tries`, our choice


def _read_machine(value: Any) -> str | None:
    return machine_name(value) if isinstance(value, str) else None


def axis() -> Any:
    """A mesh axis: its size, or "auto" for all remaining cores; 0 leaves the axis out."""
    return field(default=0, metadata={"words": {"auto": AUTO}})


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes, major to minor; one may be "auto". With none given the strategy takes
    all cores."""

    pp: int = axis()
    dp_replicate: int = axis()
    dp_shard: int = axis()
    cp: int = axis()
    tp: int = axis()
    ep: int = 0
    """Cores that share the experts of a layer; a divisor of `dp_shard`, not a factor of the
    cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The simulated machines."""

    target: str = named(FIRST_TARGET, target_names, read=_read_machine)
    """An instance type, a family for the machine that stands for it (`trn1`), or a JSON file."""
    instances: int = limited(1, 1, MOST_INSTANCES)
    lnc: int = choice(0, 0, 1, 2)
    """Physical cores per logical NeuronCore; 0 is the machine's default: 2 on trn2 and trn3."""

    hypothetical: bool = False
    """Allow logical NeuronCores that the machine cannot have; every report says so."""

    placement: str = named(TORUS, lambda: (TORUS, LINEAR))
    """Where mesh axes lie: `torus` (neighbouring chips along every axis), `linear` (cores in order
    of number), or the axes from the outermost to the innermost, `tp,dp_shard`."""

    collectives: str = ""
    """Thresholds of the choice of an algorithm, `mesh_max_bytes=2mb,kangaring=false`; those of the
    machine where nothing is given (docs/network.md)."""

    runtime: str = choice(CURRENT.name, *(runtime.name for runtime in RUNTIMES))
    """What launches collectives: that of a date, or of today (docs/network.md)."""

    host_us: int = limited(0, 0, MOST * 1000)
    """Of a step, in which cores wait for the host, which traces the next micro-batch: scripts that
    read the loss of every step cannot trace ahead of it."""

    inflight_requests: int = limited(0, 0, 64)
    """Executions that the host may queue ahead (NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS): with
    any, cores wait for it only as far as `host_us` is longer than the step; 0: for all of it."""

    profile: str = choice("nominal", "conservative", "nominal", "peak")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    """What is wrong with the cluster; it changes times, never values."""

    slow_cores: str = ""
    """Stragglers: `5:1.3, 64-95:1.1`: core 5 takes 1.3 times as long, instance 2 of a trn1n 1.1
    times."""

    dead_cores: str = ""
    """Cores that never answer: `17`. The run fails and says which ranks hang, and where."""

    hardware: str = ""
    """Cores whose hardware fails, by class: `17:hbm, 20:collectives` (sram, hbm, hbm-repairable,
    dma, collectives, compute). The run fails with the runtime's status."""

    late_cores: str = ""
    """Cores that are loaded seconds after the others: `5:300`. Those wait, and say so every 120 s;
    the first step begins when all have met."""

    slow_links: str = ""
    """`0/3-7:0.5, 2/efa1:0`: on instance 0 the link between chips 3 and 7 has half of its
    bandwidth left, on instance 2 EFA device 1 is dead."""

    jitter: float = limited(0.0, 0.0, 10.0)
    """Mean random delay of code between collectives, as a part of its time."""

    seed: int = 0
    """Of the jitter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The value run."""

    steps: int = 1
    seed: int = 0
    data: str = "pydoc"
    """A text file, or `pydoc` for the text of the standard library's help topics."""

    strict_indices: bool = False
    """An index out of bounds ends the run; else it is a warning and reads the nearest row."""

    executor: str = choice("auto", "auto", "inline", "process", "ray")
    """Where units run. auto: several at a time on processes, a single one in this process."""

    workers: int = 0
    """Processes or Ray actors that run units; 0 takes one per CPU (at most 8 processes)."""

    hosts: int = 0
    """Processes (executor `ray`: actors) that hold the simulated cores in the value run; 0: this
    process."""

    host_timeout_s: float = limited(3600.0, 0.0, 1e9)
    """A host that does not answer for so long counts as lost; 0: it is waited for as long as it
    lives. Our choice: what a host does between two collectives takes seconds to minutes."""

    checkpoint_every: int = 0
    """Steps between checkpoints of the value run, in `checkpoints` of the output directory; 0:
    none."""

    compare: bool = True
    """Compare with the unsharded JAX step, which needs the whole model in one process. Without, the
    first state is drawn in parts as well, so that no process but the hosts holds much."""

    resume: bool = False
    """Go on from the last checkpoint in the output directory."""

    unit_timeout_s: float = limited(0.0, 0.0, 1e9)
    """A unit that runs longer is ended, with its worker, and reported; 0 is no limit."""

    unit_memory_gib: float = limited(0.0, 0.0, 1e6)
    """What one unit may add to the memory of its worker; 0 is no limit."""

    tries: int = field(default=AUTO, metadata={"words": {"auto": AUTO}, "range": (0, MOST_TRIES)})
    """Changes of the job that `plan` tries and reports. auto: two, as far as the answer is not
    later than 12 s for it, or they are known."""

    progress: str = choice("auto", "auto", "bar", "plain", "json", "quiet")
    """Progress on stderr. auto: a bar on a terminal, plain lines elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The two caches."""

    dir: str = ""
    """A directory, or s3://bucket/prefix. Empty: `--cache_dir` of NEURON_CC_FLAGS, else
    NEURON_COMPILE_CACHE_URL, else ~/.cache/shardwright (docs/cache.md)."""

    local_dir: str = ""
    """The directory in front of an s3:// cache, empty for ~/.cache/shardwright."""

    max_gib: float = limited(10.0, 0.0, 1e6)
    """What the directory may hold; beyond it entries that were used longest ago go. 0: no bound."""

    miss: str = choice("compile", "compile", "refuse")
    """What becomes of code that the cache does not have: it is compiled, or the job ends with
    SW_CACHE_MISS (VLLM_NEURON_DISABLE_WARMUP_COMPILE)."""

    fresh: bool = False
    """Ask anew: what was stored before the question counts as absent, and is replaced."""

    since_s: float = field(default=0.0, compare=False, metadata={"key": "cache.fresh"})
    """When a question that is asked anew was asked (Unix time); 0: stored answers are good."""

    failed_since_s: float = field(default=0.0, compare=False, metadata={"key": "cache.fresh"})
    """The same of remembered failures alone (`--retry_failed_compilation`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """Where results go."""

    dir: str = "out"

    events: str = ""
    """File to which JSON lines about units are appended (docs/orchestration.md); empty:
    events.jsonl of `dir` for `run`, none for others."""


Keys = Mapping[str, Any]
"""Values of some `table.key`s of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """A resolved job."""

    model: ModelConfig = NO_MODEL
    strategy: StrategySettings = strategy_settings.DEFAULTS
    mesh: MeshConfig = MeshConfig()
    cluster: ClusterConfig = ClusterConfig()
    faults: FaultsConfig = FaultsConfig()
    goodput: GoodputConfig = USUAL
    goal: GoalConfig = NO_GOAL
    price: PriceConfig = LISTED
    compiler: CompileOptions = DEFAULTS
    run: RunConfig = RunConfig()
    cache: CacheConfig = CacheConfig()
    output: OutputConfig = OutputConfig()
    base: str = "."
    """Directory that relative paths of the job start from."""
    given: frozenset[str] = frozenset()
    """Keys that the job says something about; no part of the resolved job."""
    renamed: tuple[str, ...] = ()
    """What it says by an older name, in a sentence each; no part of the resolved job either."""

    def value(self, key: str) -> Any:
        """The value of a `table.key`."""
        table, _, name = key.partition(".")
        return getattr(getattr(self, table), name)

    def but(self, values: Keys) -> JobConfig:
        """The job with other values of some `table.key`s."""
        job = self
        for key, value in values.items():
            table, _, name = key.partition(".")
            changed = dataclasses.replace(getattr(job, table), **{name: value})
            job = dataclasses.replace(job, **{table: changed})
        return job

    def as_dict(self) -> dict[str, Any]:
        """Plain data, in the order of the tables."""
        tables = dataclasses.asdict(self)
        del tables["given"], tables["renamed"]
        tables["price"]["usd_per_hour"] = dict(self.price.usd_per_hour)
        for name, kind in TABLES.items():
            found = {key: tables[name][key] for key in _keys(kind)}
            tables[name] = {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}
        return tables


TABLES: dict[str, type[Any]] = {
    name: kind
    for name, kind in typing.get_type_hints(JobConfig).items()
    if dataclasses.is_dataclass(kind) and isinstance(kind, type)
}


def _keys(kind: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """The keys of a table."""
    return {f.name: f for f in dataclasses.fields(kind) if "key" not in f.metadata}


KEYS: Mapping[str, dataclasses.Field[Any]] = {
    f"{table}.{name}": spec for table, kind in TABLES.items() for name, spec in _keys(kind).items()
}
"""Every key of a job, as `--set` takes it."""


def words_of(key: str) -> tuple[str, ...]:
    """The values that a key has names for."""
    about = KEYS[key].metadata
    names = about["names"]() if "names" in about else ()
    return tuple(map(str, (*names, *about.get("words", ()), *about.get("choices", ()))))


def load(
    path: Path | None,
    overrides: Iterable[str] = (),
    flags: Keys | None = None,
    below: Tables | None = None,
    changes: Keys | None = None,
) -> JobConfig:
    """The job of `path` (or the defaults), changed by flags, then by `table.key=value` overrides
    (the table may be left out where one alone has the key), so that what is advised can be put
    behind any command, and last by `changes`; `below` are tables for what nothing else says. Raises
    UsageError (SW_USAGE) for a file, table, key or value that is not understood."""
    data = _read_toml(path) if path else {}
    _put_all(data, flags or {})
    for text in overrides:
        key, separator, value = text.partition("=")
        key = key.strip().replace("-", "_")
        found = _of_any_table(key)
        table, dot, name = (found[0] if len(found) == 1 else key).partition(".")
        if not separator or not dot:
            hint = _meant_key(table, ())
            raise UsageError("SW_USAGE", f"--set requires table.key=value, got {text!r}", hint=hint)
        _put(data, table, name, value.strip())
    _put_all(data, changes or {})
    _put_below(data, below or {})
    _put_below(data, _of_recipe(data))
    _put_below(data, _of_mode(data))
    source = str(path) if path else "the command line"
    unknown = sorted(set(data) - set(TABLES))
    if unknown:
        raise UsageError(
            "SW_USAGE",
            f"{source}: unknown table [{unknown[0]}]",
            hint=f"{did_you_mean(unknown[0], TABLES)} Tables are {', '.join(TABLES)}".lstrip(),
        )
    tables = {name: _table(kind, name, data.get(name, {}), source) for name, kind in TABLES.items()}
    given = frozenset(f"{table}.{key}" for table, keys in data.items() for key in keys)
    base = str(path.resolve().parent if path else Path.cwd())
    job = JobConfig(**tables, base=base, given=given, renamed=tuple(_renamed(data)))
    check_interval(job.goodput)
    return asked_now(_bought(job))


def _put_below(data: dict[str, Any], tables: Tables) -> None:
    """Put the values of tables where nothing else is said."""
    for table, values in tables.items():
        if isinstance(given := data.setdefault(table, {}), dict):
            data[table] = {**values, **given}


def _put_all(data: dict[str, Any], values: Keys) -> None:
    """Put values by `table.key` into tables; None says nothing."""
    for key, value in values.items():
        if value is not None:
            table, _, name = key.partition(".")
            _put(data, table, name, value)


def _of_recipe(data: Mapping[str, Any]) -> Tables:
    """The tables of the recipe that a job names, those of its settings that it may change."""
    model = data.get("model")
    name = model.get("recipe") if isinstance(model, dict) else None
    return recipe_tables(name) if isinstance(name, str) and name else {}


_SERVED: Tables = {"strategy": {"name": "generic", "remat": "none"}}


def _of_mode(data: Mapping[str, Any]) -> Tables:
    """What inference takes where nothing else is said: weights lie where they are used, and nothing
    is computed twice."""
    model = data.get("model")
    mode = model.get("mode", "train") if isinstance(model, dict) else "train"
    return {} if mode == "train" else _SERVED


def recipe_job(name: str) -> JobConfig:
    """The job of a recipe, with nothing else said. Raises UsageError for an unknown one."""
    return load(None, flags={"model.recipe": name})


def _bought(job: JobConfig) -> JobConfig:
    """The job with its price under the name of its machine. Raises UsageError for a deadline or a
    budget of nothing, and for prices of machines that are unknown."""
    if (job.goal.deadline or job.goal.budget) and not job.goal.tokens:
        raise UsageError(
            "SW_GOAL",
            "a deadline or a budget requires goal.tokens, got none",
            hint="say how much is to be trained: --tokens 1T",
        )
    own = tuple((name or job.cluster.target, usd) for name, usd in job.price.usd_per_hour)
    known = (*target_names(), job.cluster.target)
    if unknown := [name for name, _ in own if name not in known and not name.endswith(".json")]:
        raise UsageError(
            "SW_PRICE",
            f"price.usd_per_hour requires machines that are known, got {unknown[0]}",
            hint=f"machines are {', '.join(target_names())}, or a JSON file",
        )
    return job.but({"price.usd_per_hour": own})


def asked_now(job: JobConfig) -> JobConfig:
    """The job as a question of this moment: with `cache.fresh` nothing older answers it."""
    return job.but({"cache.since_s": time.time() if job.cache.fresh else 0.0})


def from_store(job: JobConfig) -> JobConfig:
    """The job as one that stored answers are good for: of a question about the store."""
    return job.but({"cache.fresh": False, "cache.since_s": 0.0})


def _put(data: dict[str, Any], table: str, name: str, value: Any) -> None:
    """Set a key; where the file has something else than a table, that is refused later."""
    if isinstance(given := data.setdefault(table, {}), dict):
        given[name] = value


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_text(path, named_by_user=True))
    except OSError as error:
        text = error.strerror or error
        raise UsageError("SW_USAGE", f"cannot read {path}: {text}") from error
    except ValueError as error:  # of TOML, or no text at all
        raise UsageError("SW_USAGE", f"{path}: not valid TOML: {error}") from error


def _table(kind: type[Any], table: str, values: Any, source: str) -> Any:
    if not isinstance(values, dict):
        raise UsageError("SW_USAGE", f"{source}: [{table}] must be a table, got {values!r}")
    fields = _keys(kind)
    hints = typing.get_type_hints(kind)
    resolved = {}
    for key, value in values.items():
        if key not in fields:
            known = ", ".join(fields)
            raise UsageError(
                "SW_USAGE",
                f"{source}: unknown key {table}.{key}",
                hint=f"{_meant_key(key, fields)} Keys of [{table}]: {known}".lstrip(),
            )
        resolved[key] = _value(f"{table}.{key}", value, hints[key], fields[key], source)
    return kind(**resolved)


def _of_any_table(name: str) -> list[str]:
    """The keys of that name in all tables."""
    return [key for key in KEYS if key.partition(".")[2] == name]


def _meant_key(name: str, own: Iterable[str]) -> str:
    """The hint about a name that is no key of its table: the key of another, or one like it."""
    elsewhere = _of_any_table(name)
    return f"did you mean {' or '.join(elsewhere)}?" if elsewhere else did_you_mean(name, own)


def _value(
    key: str,
    value: Any,
    hint: type[Any] | types.UnionType,
    spec: dataclasses.Field[Any],
    source: str,
) -> Any:
    word, read = value if isinstance(value, str) else None, spec.metadata.get("read")
    converted = read(value) if read else _convert(value, hint)
    words = spec.metadata.get("words", {})
    if word in words:
        return words[word]
    if converted is None:
        name = spec.metadata.get("form") or getattr(hint, "__name__", str(hint))
        text = f"{source}: {key} requires {name}, got {value!r}"
        raise UsageError("SW_USAGE", text, hint=_other_key(value))
    choices = spec.metadata.get("choices")
    if choices and converted not in choices:
        converted = _respelled(converted, choices, spec.metadata.get("old_names", {}))
    if choices and converted not in choices:
        allowed = ", ".join(map(str, choices))
        raise UsageError(
            "SW_USAGE",
            f"{source}: {key} requires one of {allowed}, got {value!r}",
            hint=did_you_mean(str(value), words_of(key), _other_key(value)),
        )
    low, high = spec.metadata.get("range", (converted, converted))
    if not low <= converted <= high:
        raise UsageError("SW_USAGE", f"{source}: {key} requires {low} to {high}, got {value!r}")
    return converted


def _respelled(value: Any, choices: Iterable[Any], old_names: Mapping[str, str]) -> Any:
    """The choice that a text means: in any case, with `-` or `_`, by its name or an older one; any
    other value as it is."""
    if not isinstance(value, str):
        return value
    names = {_spelling(name): name for name in choices if isinstance(name, str)}
    names |= {_spelling(old): name for old, name in old_names.items()}
    return names.get(_spelling(value), value)


def _renamed(data: Mapping[str, Any]) -> Iterator[str]:
    """Values of a job that have another name today, and that name."""
    for key, spec in KEYS.items():
        table, _, name = key.partition(".")
        said = data.get(table, {}).get(name)
        old = {_spelling(text): new for text, new in spec.metadata.get("old_names", {}).items()}
        if isinstance(said, str) and (new := old.get(_spelling(said))):
            yield f"{key} = {said} is deprecated, it means {new}"


def _spelling(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _other_key(value: Any) -> str:
    """The hint about the name of something else; about one that several keys take there is none."""
    others = [key for key in KEYS if isinstance(value, str) and value in words_of(key)]
    return f"{value} is a value of {others[0]}" if len(others) == 1 else ""


_BOOLS = {"true": True, "false": False, "1": True, "0": False}


def _convert(value: Any, hint: Any) -> Any:
    """`value` as `hint`, from TOML or from text; None when it is not one."""
    if hint is bool:
        return value if isinstance(value, bool) else _BOOLS.get(str(value).lower())
    if isinstance(value, bool):
        return None
    if hint is str:
        return value if isinstance(value, str) else None
    try:
        number = hint(value)
    except (TypeError, ValueError, OverflowError):
        return None
    is_changed = hint is int and isinstance(value, float) and number != value
    return None if is_changed or not math.isfinite(number) else number


_LOST_IN_A_JOB = {
    "output.dir": "--out /absolute/path",
    "output.events": "--events /absolute/path",
    "cache.dir": "--set cache.dir=/absolute/path",
}
"""Keys that name what outlives a job, and how to set them."""


def with_absolute_paths(job: JobConfig) -> JobConfig:
    """The job with the paths of what outlives it made absolute: they lie beside where the command
    was given, wherever the job file is; `~` is the home directory.

    Inside a Ray job nothing lies there (`check_lasting`); its `output.dir` is looked at by those
    who write to it. Raises UsageError for a relative event log or cache there."""
    if inside_ray_job():
        check_lasting(job, "output.events", "cache.dir")
    for key in _LOST_IN_A_JOB:
        path = os.path.expanduser(job.value(key))
        if is_relative(path) and not inside_ray_job():
            path = str(Path(path).resolve())
        job = job.but({key: path})
    return job


def output_folder(job: JobConfig) -> Path:
    """Where the job's results go. Raises UsageError for a relative path inside a Ray job."""
    if inside_ray_job():
        check_lasting(job, "output.dir")
    return Path(job.output.dir)


def check_lasting(job: JobConfig, *keys: str) -> None:
    """Refuse relative paths of a Ray job: its working directory is Ray's private copy, so what it
    writes there is lost. Without `keys`, all of them. Raises UsageError."""
    for key in keys or _LOST_IN_A_JOB:
        if is_relative(path := job.value(key)):
            raise UsageError(
                "SW_RELATIVE_OUTPUT",
                f"{key} requires an absolute path inside a Ray job, got {path}",
                hint=f"pass {_LOST_IN_A_JOB[key]}, of a folder that outlives the job",
            )


def is_relative(path: str) -> bool:
    """Of a path; a URL is none."""
    return bool(path) and "://" not in path and not os.path.isabs(os.path.expanduser(path))
