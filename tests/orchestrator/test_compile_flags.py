"""The flag table: every row in every spelling, what it sets, and that no text typed after `compile`
ends in anything but a meaning or a usage error."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.target import NEURON_CC
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.compiler.surface import releases
from shardwright.compiler.surface.flags import FLAGS, Effect, Flag, Kind, canonical_name
from shardwright.compiler.surface.resolve import Resolved, resolve
from shardwright.orchestrator.compile.compile_flags import parse, split_verb
from tests.support.flag_page import PAGE, page

ROWS = {flag.name: flag for flag in FLAGS}


def value_of(flag: Flag) -> str:
    """A value that is not the default, where there is a choice."""
    current = str(flag.default(releases.OWN))
    others = [v for v in flag.values if v != current]
    if others and flag.kind is not Kind.WORDS:
        return others[-1]
    texts = {
        "framework": "XLA",
        "target": "trn2",
        "hbm-scratchpad-page-size": "1024",
        "verbose": "35",
    }
    texts |= {"compiler-version-profile": "2.27.5334", "pipeline": "compile", "fast-math": "none"}
    return texts.get(flag.name, "3" if flag.kind is Kind.INTEGER else "some")


def resolved(*words: str) -> Resolved:
    return resolved_for("trn1", *words)


def resolved_for(target: str, *words: str) -> Resolved:
    files, flags = parse(["m.pb", "--target", target, *words], "compile")
    assert files == ["m.pb"]
    return resolve(flags)


def spellings(flag: Flag) -> list[list[str]]:
    name = f"--{canonical_name(flag.name)}"
    names = [name, name.replace("-", "_").replace("__", "--", 1), name.title(), *flag.aliases]
    if flag.kind is Kind.SWITCH:
        return [[n] for n in names]
    return [form for n in names for form in ([n, value_of(flag)], [f"{n}={value_of(flag)}"])]


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_spelling_of_a_flag_means_the_same(flag: Flag) -> None:
    target = "inf1" if flag.compiler == NEURON_CC else "trn1"
    first, *others = [resolved_for(target, "--hypothetical", *words) for words in spellings(flag)]
    for other in others:
        assert (other.options, other.command, other.recorded) == (
            first.options,
            first.command,
            first.recorded,
        )
    match flag.effect:
        case Effect.OPTION:
            assert getattr(first.options, flag.field) != getattr(DEFAULTS, flag.field) or (
                flag.constant == getattr(DEFAULTS, flag.field)
            )
        case Effect.RECORDED:
            assert first.recorded.keys() == {flag.name}
            assert any(flag.name in n.message for n in first.notices)
        case Effect.REPLACED | Effect.WRAPPER:
            assert first.notices and not first.recorded
        case Effect.COMMAND:
            others = ("framework", "pipeline", "fast_math", "fp32_cast")
            assert flag.field in (*dataclasses.asdict(first.command), *others)


def test_rows_are_complete_and_spellings_are_unique() -> None:
    names = [canonical_name(f.name) for f in FLAGS] + [a for f in FLAGS for a in f.aliases]
    assert len(names) == len(set(names))
    assert all(flag.help and flag.source for flag in FLAGS)
    covered = {flag.field for flag in FLAGS if flag.effect is Effect.OPTION}
    assert covered == {field.name for field in dataclasses.fields(CompileOptions)}


def test_defaults_of_the_table_are_those_of_the_options() -> None:
    assert resolved().options == DEFAULTS


def test_the_page_of_flags_is_up_to_date() -> None:
    root = Path(__file__).resolve().parents[2]
    assert (root / PAGE).read_text() == page(), "run `make docs`"


def test_the_right_most_of_competing_flags_wins() -> None:
    on, off = (f"--{word}-mixed-precision-accumulation" for word in ("enable", "disable"))
    assert resolved(on, off).options.mixed_precision_accumulation is False
    assert resolved(off, on).options.mixed_precision_accumulation is True
    assert resolved("-O3", "--enable-experimental-O1").options.optlevel == 1
    assert resolved("--enable-experimental-O1", "-O", "3").options.optlevel == 3
    assert resolved("--auto-cast", "all", "--auto_cast=NONE").options.auto_cast == "none"


@pytest.mark.parametrize("words", [["-O1"], ["-O", "1"], ["-O=1"], ["--O1"], ["--O", "1"]])
def test_forms_of_the_level(words: list[str]) -> None:
    assert resolved(*words).options.optlevel == 1


def test_an_old_flag_is_silent_in_a_release_that_had_not_deprecated_it() -> None:
    line = ["--enable-experimental-O1", "--compiler-version-profile"]
    assert not [n for n in resolved(*line, "2.9.0.16").notices if "deprecated" in n.message]
    assert [n for n in resolved(*line, "2.10.0.34").notices if "deprecated" in n.message]


def test_flags_may_stand_before_the_verb() -> None:
    words = ["--target", "trn1", "--verbose=info", "compile", "compile", "-O1"]
    assert split_verb(words, ("compile",)) == (
        "compile",
        ["--target", "trn1", "--verbose=info", "compile", "-O1"],
    )
    assert split_verb(["run", "compile"], ("compile",)) == ("", ["run", "compile"])


WORDS = st.one_of(
    st.sampled_from([spelling for flag in FLAGS for form in spellings(flag) for spelling in form]),
    st.sampled_from(
        ["compile", "-", "--", "=", "--=", "-O", "-O9", "--x=", "@file", "", "1", "-1"]
    ),
    st.text(max_size=12).filter(lambda word: not word.startswith("-h")),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(WORDS, max_size=8))
def test_any_words_have_a_meaning_or_are_a_usage_error(words: list[str]) -> None:
    try:
        _, flags = parse(words, "compile")
        resolve(flags)
    except UsageError as error:
        assert error.exit_code == 2 and error.diagnostic.message


@pytest.mark.parametrize(
    ("release", "before", "accumulates"),
    [
        ("own", "any", True),
        ("2.12.54", "any", False),
        ("2.13.66", "transposes", False),
        ("2.22.12471", "transposes", True),
    ],
)
def test_numerics_follow_the_release(release: str, before: str, accumulates: bool) -> None:
    """Infinities are clamped in front of any operation up to 2.12, then of transposes; short types
    accumulate in fp32 by default since 2.22."""
    given_ = ["--enable-saturate-infinity", "--compiler-version-profile", release]
    options = resolved(*given_).options
    assert options.saturate_infinity and options.saturate_before == before
    assert options.mixed_precision_accumulation is accumulates
    assert not resolved("--compiler-version-profile", release).options.saturate_infinity
