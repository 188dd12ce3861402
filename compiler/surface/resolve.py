"""From flags as given to options that compile: defaults of the release, right-most wins, notices.

Everything a user should know about what they typed becomes a notice (a diagnostic of severity
warning or info); what cannot be done is a UsageError. The order of flags does not matter except
that the last of several competing ones counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.compiler.diagnostics import Diagnostic, UsageError, did_you_mean
from shardwright.compiler.machine.target import (
    NEURON_CC,
    NEURONX_CC,
    PRODUCT_TRANSPOSES,
    Target,
    family_of,
    hypothetical_text,
    load_target,
    logical,
    machine_name,
    target_names,
)
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.surface import releases
from shardwright.compiler.surface.flags import (
    DOWNCASTS,
    FLAGS,
    LEVEL_NAMES,
    LEVELS,
    TARGETS,
    Effect,
    Flag,
    Kind,
    find,
)
from shardwright.compiler.surface.neuron_cc import cast_options
from shardwright.compiler.surface.releases import OWN, Profile
from shardwright.compiler.surface.timeline import Row, Subject, row_of

PAGE_STEP_MB, PAGE_END_MB = 512, 4096
"""documented: page sizes are multiples of 512 MB below 4096 (runtime's device memory page)."""

CAST_NOTHING = row_of(Subject.DEFAULT, "auto-cast", "none")


@dataclass(frozen=True, slots=True)
class Given:
    """One flag as the user gave it; `value` is its text, empty for a switch."""

    flag: Flag
    value: str
    spelling: str


MOST_JOBS = 64
"""Processes of one compilation (our choice)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What the command does around compilation."""

    target: Target  # as logical cores
    hypothetical: bool
    profile: Profile
    output: str
    logfile: str
    verbose: int
    strategy: str
    save_temps: bool
    dump_dir: str
    framework: str
    input_shape: str
    fast_loading: bool
    fast_context_switch: bool
    scratchpad_page_mb: int
    cache_dir: str  # empty: as a job's
    no_cache: bool
    retry_failed_compilation: bool
    pipeline_cores: int
    num_parallel_jobs: int  # processes that compile functions
    minimum_segment_size: int
    io_config: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """Options, the command's settings, flags that are only recorded, and what to tell the user."""

    options: CompileOptions
    command: Command
    recorded: dict[str, str]
    notices: tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of flags before a machine is known: `given` those that were typed, `defaults` the
    release's, both by field; `effective` are the flags with deprecated ones replaced.
    """

    profile: Profile
    effective: tuple[Given, ...]
    given: dict[str, Any]
    defaults: dict[str, Any]
    recorded: dict[str, str]
    notices: tuple[Diagnostic, ...]

    @property
    def values(self) -> dict[str, Any]:
        """Every field with a value."""
        return self.defaults | self.given

    @property
    def options(self) -> CompileOptions:
        """The fields that are compile options."""
        names = CompileOptions.__dataclass_fields__
        options = CompileOptions(**{k: v for k, v in self.values.items() if k in names})
        narrow = not (self.profile.is_own or self.profile.has("saturate_any_operation"))
        return replace(options, saturate_before="transposes") if narrow else options


def settings_of(flags: Sequence[Given]) -> Settings:
    """The values of flags. Raises UsageError (SW_USAGE) for one that is not understood."""
    named = [item.value for item in flags if item.flag.field == "profile"]
    profile = releases.profile(named[-1] if named else "own")
    notices: list[Diagnostic] = []
    effective = tuple(_effective(item, profile, notices) for item in flags)
    defaults: dict[str, Any] = {}
    for flag in FLAGS:
        if flag.field and flag.default(profile) is not None:
            defaults.setdefault(flag.field, flag.default(profile))
    given: dict[str, Any] = {}
    recorded: dict[str, str] = {}
    for item in effective:
        value = _value(item, profile, notices)  # what has no effect is still held to its form
        if item.flag.effect is Effect.RECORDED:
            recorded[item.flag.name] = item.value or "on"
        elif item.flag.field:
            given[item.flag.field] = value
    notices += _taken_defaults(profile, given)
    return Settings(profile, effective, given, defaults, recorded, tuple(notices))


def resolve(flags: Sequence[Given]) -> Resolved:
    """What the flags mean.

    Raises: UsageError with SW_USAGE for a value, flag or combination that is not understood,
    NCC_EARG001 for a target or a logical core size the target does not have.
    """
    settings = settings_of(flags)
    compiler = find_target(settings.values.get("target", "")).core.compiler
    known = [_known_as(item, compiler) for item in flags]
    if known != list(flags):
        settings = settings_of(known)
    foreign = [item for item in known if item.flag.compiler not in ("", compiler)]
    notices = [*settings.notices, *foreign_notices(foreign, compiler)]
    values = _of_compiler(settings, compiler, {item.flag.field for item in foreign})
    command = _command(values, settings.profile)
    options = replace(settings.options, lnc=command.target.lnc)
    if compiler == NEURON_CC:
        casts: Any = cast_options(values["fast_math"], values.get("fp32_cast", ""))
        options = replace(options, **casts)
        notices.append(_casts_notice(options))
    notices += _ineffective(settings.effective, options, command)
    notices += _without_effect(settings.recorded)
    recorded = settings.recorded | {item.flag.name: item.value or "on" for item in foreign}
    return Resolved(options, command, recorded, tuple(notices))


def _known_as(item: Given, compiler: str) -> Given:
    """The flag as the compiler of the machine calls it."""
    renamed = find(f"--{item.flag.renamed}") if compiler == NEURON_CC else None
    return item if renamed is None else replace(item, flag=renamed)


def foreign_notices(flags: Sequence[Given], compiler: str) -> list[Diagnostic]:
    """What is said of flags of another compiler that are taken all the same. Raises UsageError
    (SW_USAGE) for one that is not."""
    found = []
    for item in flags:
        flag = item.flag
        if flag.compiler in ("", compiler):
            continue
        if flag.foreign is None:
            raise UsageError(
                "SW_USAGE",
                f"{item.spelling} requires a --target of {flag.compiler}, got one of {compiler}",
                hint=f"use {flag.instead}" if flag.instead else f"leave {item.spelling} out",
            )
        found.append(_notice("info", f"{item.spelling}: {flag.foreign.value} ({flag.source})"))
    return found


def _of_compiler(settings: Settings, compiler: str, foreign: Collection[str]) -> dict[str, Any]:
    """Every field with a value: those that were typed, the compiler's defaults, the release's."""
    own = {
        flag.field: value
        for flag in FLAGS
        for name, value in flag.compiler_defaults
        if name == compiler
    }
    given = {field: value for field, value in settings.given.items() if field not in foreign}
    return settings.defaults | own | given


def _casts_notice(options: CompileOptions) -> Diagnostic:
    what = "fp32 operations" if options.auto_cast == "all" else "fp32 products"
    moved = "byte by byte" if options.relayout == "exact" else f"in {options.relayout}"
    text = f"--fast-math, --fp32-cast: {what} are computed in {options.auto_cast_type}, fp32 values"
    return _notice("info", f"{text} are transposed {moved}")


def _without_effect(recorded: Mapping[str, str]) -> list[Diagnostic]:
    """One line about all flags that the file records and nothing reads."""
    if not recorded:
        return []
    shown = ", ".join(f"--{name}" + ("" if v == "on" else f" {v}") for name, v in recorded.items())
    return [_notice("warning", f"recorded in the file, without effect here: {shown}")]


def _effective(item: Given, profile: Profile, notices: list[Diagnostic]) -> Given:
    """The flag that counts in place of a deprecated one; refuses what the release does not have."""
    flag = item.flag
    if not _has(profile, flag.released):
        raise _absent(item.spelling, flag.released, profile, "drop the flag")
    if flag.effect is Effect.WRAPPER:
        notices.append(_notice("info", f"{item.spelling} is {flag.effect.value}"))
    if flag.effect is Effect.RECORDED:
        notices.append(_notice("info", f"{item.spelling}: {flag.effect.value} ({flag.help})"))
    released = flag.released
    if flag.effect is not Effect.REPLACED:
        if profile.deprecates(released):
            notices.append(_notice("warning", f"{item.spelling}: {released.text}"))
        return item
    name, value = flag.replaces
    if profile.deprecates(released) or not released.deprecated:  # neuron-cc's have no release here
        text = f"{item.spelling} is deprecated and will be removed, use --{name}"
        text += f" {value or item.value}"
        notices.append(_notice("warning", text))
    target = find(f"--{name}")
    assert target is not None, name
    return replace(item, flag=target, value=value or item.value)


def _notice(severity: str, message: str) -> Diagnostic:
    return Diagnostic("SW_FLAG", message, severity=severity)


def _has(profile: Profile, row: Row) -> bool:
    """Whether a release has what a row is about; the own profile has all that ever was there."""
    return profile.is_own or profile.holds(row)


def _absent(what: str, row: Row, profile: Profile, instead: str) -> UsageError:
    """The refusal of something that the release of a profile does not have yet, or no more."""
    if profile.at_least(row.since):
        when = f"a release from {row.since} up to, not including, {row.until}"
        cure = f"name --compiler-version-profile {row.since}"
    else:
        when = f"release {row.since} or newer"
        cure = f"name --compiler-version-profile {row.since} or newer"
    return UsageError(
        "SW_USAGE",
        f"{what} requires {when}, the profile is {profile}",
        hint=f"{instead}, or {cure}; `own`, the default, has all of them",
    )


def _check_released(item: Given, value: str, profile: Profile) -> None:
    """Refuse a value that the release does not have. Raises UsageError."""
    flag, row = item.flag, item.flag.value_released(value)
    if _has(profile, row):
        return
    among: Sequence[str] = flag.values
    if flag.name == "target":  # releases are of neuronx-cc
        among = [f for f, n in TARGETS.items() if load_target(n).core.compiler == NEURONX_CC]
    others = [v for v in among if v != value and profile.holds(flag.value_released(v))]
    instead = f"give {' or '.join(others)}" if others else "drop the flag"
    raise _absent(f"{item.spelling} {item.value}", row, profile, instead)


def _taken_defaults(profile: Profile, given: Mapping[str, Any]) -> list[Diagnostic]:
    """Which default was taken of every flag whose default depends on the release, and why: a
    warning where the release's is not today's, as numbers differ."""
    found = []
    for flag in FLAGS:
        if flag.field in given or not flag.defaults:
            continue
        held = next(row for row in flag.defaults if profile.holds(row))
        others = [row for row in flag.defaults if row is not held]
        of = "the newest releases" if profile.is_own else f"release {profile}"
        text = f"{_setting(flag, held)}, the default of {of}: {held.text}"
        for other in others:
            when = f"from {other.since} on" if other.since else f"before {other.until}"
            text += f" ({when} {_setting(flag, other)}: {other.text})"
        is_todays = flag.default(profile) == flag.default(OWN)
        found.append(_notice("info" if is_todays else "warning", text))
    return found


def _setting(flag: Flag, row: Row) -> str:
    """A default as it would be typed."""
    if flag.kind is not Kind.SWITCH:
        return f"--{flag.name} {row.value}"
    name = flag.name if row.value is flag.constant else f"no --{flag.name}"
    return name if name.startswith("no ") else f"--{name}"


def _value(item: Given, profile: Profile, notices: list[Diagnostic]) -> Any:
    """The value of a flag, checked and in canonical form. Raises UsageError for one that is not
    understood, or that the release does not have."""
    flag, text = item.flag, item.value.strip()
    if flag.name == "target" and not profile.is_own:
        _check_released(item, family_of(find_target(text).name), profile)
    match flag.kind:
        case Kind.SWITCH:
            return flag.constant
        case Kind.CHOICE:
            return _choice(item, text, profile, notices)
        case Kind.INTEGER:
            return _integer(item, text)
        case Kind.NAMES:
            return _names(item, text)
    return text


def _choice(item: Given, text: str, profile: Profile, notices: list[Diagnostic]) -> str:
    word, old = text.lower(), dict(item.flag.old_values)
    candidates = {v.replace("_", "-"): v for v in (*item.flag.values, *old)}
    found = candidates.get(word.replace("_", "-"))
    if found is None:
        raise _refused(item, f"one of {', '.join(item.flag.values)}")
    row = item.flag.value_released(found)
    _check_released(item, found, profile)
    if found in old and (profile.deprecates(row) or not row.deprecated):
        why = f": {row.text}" if row.text else ""
        text = f"{item.spelling} {found} is deprecated, it means {old[found]}{why}"
        notices.append(_notice("warning", text))
    return old.get(found, found)


def _integer(item: Given, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise _refused(item, "a whole number")
    if item.flag.values and str(int(text)) not in item.flag.values:
        raise _refused(item, f"one of {', '.join(item.flag.values)}")
    return int(text)


def _names(item: Given, text: str) -> str:
    names = [n.strip().lower().replace("-", "_") for n in text.split(",") if n.strip()]
    alone = set(names) - set(DOWNCASTS)
    if not names or not set(names) <= set(item.flag.values) or (alone and len(names) > 1):
        raise _refused(item, f"default, all, none or a comma list of {', '.join(DOWNCASTS)}")
    return ",".join(n for n in item.flag.values if n in names)


def _refused(item: Given, required: str) -> UsageError:
    return UsageError(
        "SW_USAGE",
        f"{item.spelling} requires {required}, got {item.value!r}",
        hint=did_you_mean(item.value, item.flag.values),
    )


_AS_GIVEN = (
    *("hypothetical", "output", "logfile", "strategy", "fast_loading", "fast_context_switch"),
    *("framework", "no_cache", "retry_failed_compilation", "pipeline_cores"),
    "minimum_segment_size",
)
"""Settings of the command that need no reading, by field."""


def _command(settings: dict[str, Any], profile: Profile) -> Command:
    target = find_target(settings.get("target", ""))
    page = settings.get("scratchpad_page_mb", 0)
    if page % PAGE_STEP_MB or not 0 <= page < PAGE_END_MB:
        required = f"a multiple of {PAGE_STEP_MB} below {PAGE_END_MB}"
        text = f"--hbm-scratchpad-page-size requires {required}, got {page}"
        raise UsageError("SW_USAGE", text)
    lnc, hypothetical = settings.get("lnc", 0), settings["hypothetical"]
    if not 1 <= (jobs := settings["num_parallel_jobs"]) <= MOST_JOBS:
        text = f"--num-parallel-jobs requires 1 to {MOST_JOBS}, got {jobs}"
        raise UsageError("SW_USAGE", text)
    return Command(
        num_parallel_jobs=jobs,
        target=logical(target, lnc, hypothetical, "--logical-nc-config"),
        profile=profile,
        verbose=_level(settings["verbose"]),
        save_temps="savetemps" in settings.get("pipeline", "").lower(),
        dump_dir=settings.get("dump_dir", ""),
        input_shape=settings.get("input_shape", ""),
        scratchpad_page_mb=page,
        cache_dir=settings.get("cache_dir", ""),
        io_config=settings.get("io_config", ""),
        **{name: settings[name] for name in _AS_GIVEN},
    )


def find_target(text: str) -> Target:
    """The machine of an instance family (`trn1`) or type (`trn1n.32xlarge`), in any case, or of a
    JSON file.

    Raises UsageError: SW_USAGE when none is given, NCC_EARG001 for an unknown one.
    """
    name = machine_name(text)
    if not name:
        raise UsageError("SW_USAGE", f"compile requires --target, one of {', '.join(TARGETS)}")
    if not name.endswith(".json") and name not in target_names():
        names = (*TARGETS, *sorted(set(target_names()) - set(TARGETS.values())))
        raise UsageError(
            "NCC_EARG001",
            f"--target requires one of {', '.join(names)}, got {text!r}",
            hint=did_you_mean(name, names),
        )
    return load_target(name)


def _level(text: str) -> int:
    word = LEVEL_NAMES.get(text.lower(), text.lower())
    if word in LEVELS:
        return LEVELS[word]
    if word.isascii() and word.isdigit():
        return int(word)
    allowed = f"one of {', '.join(LEVELS)} or a number"
    raise UsageError("SW_USAGE", f"--verbose requires {allowed}, got {text!r}")


def _ineffective(
    given: Sequence[Given], options: CompileOptions, command: Command
) -> list[Diagnostic]:
    """Warnings for flags that change nothing in this combination."""
    names = {item.flag.name for item in given}
    generation = command.target.core.generation
    found = []
    if "auto-cast-type" in names and options.auto_cast == "none":
        text = "--auto-cast-type has no effect while --auto-cast is none (the default since"
        found.append(f"{text} {CAST_NOTHING.since}); add --auto-cast matmult")
    if options.native_int64 == "enabled" and generation == "v2":
        found.append(f"--native-int64 enabled has no effect on {command.target.name}")
    if options.saturate_infinity and generation not in PRODUCT_TRANSPOSES:
        found.append(f"--enable-saturate-infinity has no effect on {command.target.name}")
    if command.target.is_hypothetical:
        found.append(hypothetical_text(command.target))
    return [_notice("warning", text) for text in found]
