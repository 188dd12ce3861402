"""Behaviour by release: every row of the time line is a gate, before its release, in it and after,
and a default that differs is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import CompileError, ImportRuleError, UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.detect import import_file
from shardwright.compiler.frontend.rules.restrictions import check_types, checks_for
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.surface import releases
from shardwright.compiler.surface.flags import BY_SPELLING, FLAGS, TARGETS
from shardwright.compiler.surface.operators import OPERATORS
from shardwright.compiler.surface.releases import RELEASES
from shardwright.compiler.surface.resolve import Resolved, resolve
from shardwright.compiler.surface.timeline import ROWS, Row, Subject
from shardwright.orchestrator.compile.compile_flags import parse
from tests.support.model_files import compile_line, meta_of, write_model
from tests.support.timeline_page import PAGE, page

GATED = [row for row in ROWS if row.subject in (Subject.FLAG, Subject.VALUE)]


def resolved(version: str, *words: str) -> Resolved:
    _, flags = parse(["m.pb", "--target", "trn1", *words], "compile")
    (profile,) = parse(["m", f"--compiler-version-profile={version}"], "compile")[1]
    return resolve([*flags, profile])


def words_of(row: Row) -> list[str]:
    """The flag of a row as a user types it, in another case."""
    flag, value = BY_SPELLING[row.name], row.value
    if row.subject is Subject.VALUE:
        return [f"--{row.name}", value.upper()]
    values = {"optlevel": "1", "logical-nc-config": "1", "distribution-strategy": "generic"}
    takes = flag.kind.value != "switch"
    return [
        f"--{row.name}",
        *([values.get(row.name, flag.values[0] if flag.values else "2")] * takes),
    ]


def before(version: str) -> str:
    return RELEASES[RELEASES.index(version) - 1]


def test_the_table_names_what_there_is_and_releases_in_order() -> None:
    names = {flag.name: flag for flag in FLAGS}
    for row in ROWS:
        assert row.source and {row.since, row.until, row.deprecated} <= {"", *RELEASES}
        marks = [RELEASES.index(v) for v in (row.since, row.deprecated, row.until) if v]
        assert marks == sorted(marks)
        if row.subject in (Subject.FLAG, Subject.VALUE, Subject.DEFAULT):
            assert row.name in names
        if row.subject is Subject.VALUE:
            flag = names[row.name]
            values = {*flag.values, *dict(flag.old_values), *TARGETS} if row.value else set()
            assert row.value in values
    keys = [(row.subject, row.name, row.value) for row in ROWS]
    assert len(set(keys)) == len(keys)
    operators = {row.name for row in ROWS if row.subject is Subject.OPERATOR}
    assert operators == {row.name for row in OPERATORS if row.since}


@pytest.mark.parametrize("row", GATED, ids=lambda row: f"{row.name} {row.value}".strip())
def test_a_flag_or_value_is_refused_before_its_release_and_taken_from_it_on(row: Row) -> None:
    words = words_of(row)
    resolved("own", *words)
    if row.since:
        first = row.since
        resolved(first, *words)
        with pytest.raises(UsageError) as refused:
            resolved(before(first), *words)
        d = refused.value.diagnostic
        assert d.code == "SW_USAGE" and f"the profile is {before(first)}" in d.message
        found = row.since if row.name in d.message else d.message
        assert found in d.message  # since which release; an older flag may come first
        assert "--compiler-version-profile" in d.hint
    if row.until:
        resolved(before(row.until), *words)
        for version in (row.until, "latest"):
            with pytest.raises(UsageError, match=f"up to, not including, {row.until}"):
                resolved(version, *words)
    if row.deprecated:
        told = [
            n.message for n in resolved(row.deprecated, *words).notices if words[0] in n.message
        ]
        assert any("deprecated" in text or row.text in text for text in told)
        if row.deprecated != row.since and RELEASES.index(row.deprecated):
            quiet = resolved(before(row.deprecated), *words).notices
            assert not [n for n in quiet if "deprecated" in n.message and words[0] in n.message]


def test_a_refusal_says_which_values_the_release_has() -> None:
    with pytest.raises(UsageError) as refused:
        resolved("2.4.0.21", "--target", "TRN1N.32xlarge")
    d = refused.value.diagnostic
    assert d.message == (
        "--target TRN1N.32xlarge requires release 2.5.0.28 or newer, the profile is 2.4.0.21"
    )
    assert d.hint.startswith("give inf2 or trn1, or name --compiler-version-profile 2.5.0.28")


def test_an_own_machine_is_of_every_release(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"base": "trn2.48xlarge", "facts": {"efa_gbps": 800}}')
    assert resolved("2.2.0.73", "--target", str(file)).command.target.name == str(file)
    with pytest.raises(UsageError, match="trn2 requires release"):
        resolved("2.2.0.73", "--target", "trn2")


def test_the_short_name_of_the_first_release_is_the_same() -> None:
    assert releases.profile("2.1.76") == releases.profile("2.1.0.76")
    assert str(releases.profile("2.1.76")) == releases.OLDEST == "2.1.0.76"


def test_a_default_that_is_not_todays_is_a_warning_and_todays_is_not() -> None:
    def told(version: str, *words: str) -> dict[str, str]:
        found = resolved(version, *words).notices
        return {n.message: n.severity for n in found if "the default of" in n.message}

    old = told("2.13.68")
    (cast,) = [text for text in old if "--auto-cast matmult" in text]
    assert cast.startswith("--auto-cast matmult, the default of release 2.13.68: operands of fp32")
    assert "(from 2.22.12471 on --auto-cast none" in cast
    assert set(old.values()) == {"warning"} and len(old) == 2
    assert set(told("own").values()) == set(told("latest").values()) == {"info"}
    given = told("2.13.68", "--auto-cast", "none", "--enable-mixed-precision-accumulation")
    assert given == {}


def test_what_is_told_is_printed_and_what_is_printed_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "m.mlir", lambda x: x @ x, [np.zeros((4, 4), np.float32)])
    line = "neuronx-cc compile m.mlir --target trn1 --compiler-version-profile"
    for version, cast, is_printed in (("2.12.54", "matmult", True), ("own", "none", False)):
        capsys.readouterr()
        assert compile_line(f"{line} {version}") == 0
        assert ("WARNING: --auto-cast matmult" in capsys.readouterr().err) is is_printed
        assert f"--auto-cast {cast}, the default of" in (tmp_path / "log-neuron-cc.txt").read_text()
        assert meta_of(tmp_path / "file.neff")["options"]["auto_cast"] == cast


def test_top_k_came_with_its_release() -> None:
    shape = jax.ShapeDtypeStruct((4, 6), jnp.float32)

    def imported(version: str, function: Callable[..., Any]) -> Any:
        text = jax.jit(function).lower(shape).as_text(debug_info=True).encode()
        here = str(Path(__file__).parent)
        return import_file(text, here, checks_for(releases.profile(version)))[0]

    for function in (lambda x: jax.lax.top_k(x, 2), lambda x: jax.lax.approx_max_k(x, 2)):
        with pytest.raises(ImportRuleError, match=r"TopK requires release 2\.6\.0\.19") as refused:
            imported("2.5.0.28", function)
        assert refused.value.loc is not None
        assert Path(refused.value.loc.file).name == Path(__file__).name
        for version in ("2.6.0.19", "own"):
            assert len(imported(version, function).outputs) == 2


def test_a_type_is_refused_before_its_release_where_it_is_made() -> None:
    b = Builder()
    x = b.input((4, 4), DType.F32)
    graph = b.finish(b.convert(b.convert(x, DType.F8E4M3), DType.F32))
    with pytest.raises(CompileError, match=r"f8E4M3 require release 2\.5\.0\.28") as refused:
        check_types(graph, releases.profile("2.4.0.21"))
    assert refused.value.code == "NCC_ESPP047"
    for version in ("2.5.0.28", "latest", "own"):
        check_types(graph, releases.profile(version))


def test_the_page_of_releases_is_up_to_date() -> None:
    root = Path(__file__).resolve().parents[2]
    assert (root / PAGE).read_text() == page(), "run `make docs`"
