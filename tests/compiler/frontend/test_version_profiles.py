"""The same graph under releases of neuronx-cc: what each refuses, at the user's line, and what the
release's defaults are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import CompileError, ImportRuleError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.detect import import_file
from shardwright.compiler.frontend.rules.restrictions import check_outputs, checks_for
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.surface import releases
from shardwright.compiler.surface.flags import FLAGS
from shardwright.compiler.surface.operators import DOCUMENTED, OPERATORS
from tests.support.operator_examples import EXAMPLES, compile_and_run

F32 = jax.ShapeDtypeStruct((4, 6), jnp.float32)
I32 = jax.ShapeDtypeStruct((), jnp.int32)
HERE = Path(__file__).name


def imported(version: str, function: Callable[..., Any], *shapes: Any) -> Any:
    text = jax.jit(function).lower(*shapes).as_text(debug_info=True).encode()
    graph, _ = import_file(text, str(Path(__file__).parent), checks_for(releases.profile(version)))
    return graph


def _power(x: Any, n: Any) -> Any:
    return jax.lax.pow(x, n)


CASES: list[tuple[str, str, str, Callable[..., Any], tuple[Any, ...], str]] = [
    ("pow", "2.2.0.73", "2.3.0.4", lambda x: jax.lax.pow(x, 2.5), (F32,), "integer exponent"),
    ("pow", "2.2.0.73", "2.3.0.4", _power, (F32, F32), "a computed value"),
    (
        "update",
        "2.13.68",
        "2.14.213",
        lambda x, i: jax.lax.dynamic_update_slice(x, x[:1], (i, 0)),
        (F32, I32),
        "constant indices",
    ),
    ("rev", "2.2.0.73", "2.3.0.4", lambda x: x[::-1], (F32,), "Rev requires release 2.3.0.4"),
    ("not", "2.1.76", "2.2.0.73", lambda x: ~(x > 0), (F32,), "LogicalNot requires"),
    (
        "bitcast",
        "2.5.0.28",
        "2.6.0.19",
        lambda x: jax.lax.bitcast_convert_type(x, jnp.int32),
        (F32,),
        "BitcastConvertType requires",
    ),
    ("any", "2.24.5133", "2.27.5334", lambda x: jnp.any(x > 0), (F32,), "Reduce requires"),
]


@pytest.mark.parametrize(
    ("old", "new", "function", "shapes", "named"),
    [pytest.param(*case[1:], id=f"{case[0]}{number}") for number, case in enumerate(CASES)],
)
def test_a_restriction_holds_up_to_its_release(
    old: str, new: str, function: Callable[..., Any], shapes: tuple[Any, ...], named: str
) -> None:
    with pytest.raises(ImportRuleError, match=named) as caught:
        imported(old, function, *shapes)
    assert caught.value.code == "NCC_EVRF001"
    assert caught.value.loc is not None and caught.value.loc.file == HERE
    for version in (new, "latest", "own"):
        assert imported(version, function, *shapes).outputs


@pytest.mark.parametrize(
    ("function", "shapes", "named"),
    [
        (lambda x: jnp.all(x > 0), (F32,), "Reduce requires one of"),
        (
            lambda x, i: jax.lax.reduce(x, i, jax.lax.add, (0,)),
            (F32, jax.ShapeDtypeStruct((), jnp.float32)),
            "constant init value",
        ),
    ],
)
def test_restrictions_the_table_still_prints_hold_in_every_release_but_the_own_profile(
    function: Callable[..., Any], shapes: tuple[Any, ...], named: str
) -> None:
    for version in ("2.1.76", "2.13.68.0", "latest"):
        with pytest.raises(ImportRuleError, match=named):
            imported(version, function, *shapes)
    assert imported("own", function, *shapes).outputs


def test_gather_of_windows_is_refused_and_gather_of_rows_is_not() -> None:
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,)
    )

    def windows(x: Any, i: Any) -> Any:
        return jax.lax.gather(x, i, numbers, (2, 6))

    indices = jax.ShapeDtypeStruct((3, 1), jnp.int32)
    with pytest.raises(ImportRuleError, match=r"disjoint, got \[0\] in both"):
        imported("latest", windows, F32, indices)
    rows = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert imported("latest", lambda x, i: x[i], F32, rows).outputs


def test_outputs_over_4_gb_are_refused_by_the_releases_that_documented_it() -> None:
    b = Builder()
    x = b.input((32768, 32768), DType.F32)
    graph = b.finish(b.add(x, x))
    with pytest.raises(CompileError, match=r"output 0 requires at most 4000000000 bytes") as caught:
        check_outputs(graph, releases.profile("2.22.12471"))
    assert caught.value.code == "NCC_EVRF024"
    for version in ("2.21.18209", "2.24.5133", "latest", "own"):
        check_outputs(graph, releases.profile(version))


def test_defaults_follow_the_release() -> None:
    flags = {flag.name: flag for flag in FLAGS}

    def default(name: str, version: str) -> Any:
        return flags[name].default(releases.profile(version))

    cast = {v: default("auto-cast", v) for v in ("2.6.0.19", "2.21.18209", "2.22.12471", "own")}
    assert cast == {"2.6.0.19": "matmult", "2.21.18209": "matmult"} | dict.fromkeys(
        ("2.22.12471", "own"), "none"
    )
    accumulate = "enable-mixed-precision-accumulation"
    assert [default(accumulate, v) for v in ("2.13.66", "2.22.12471", "own")] == [False, True, True]


def test_the_published_table_has_its_62_rows_and_its_history() -> None:
    assert len(DOCUMENTED) == 62
    assert len({row.name for row in OPERATORS}) == len(OPERATORS)
    counts = {}
    for version in ("2.1.76", "2.2.0.73", "2.3.0.4", "2.4.0.21", "2.6.0.19"):
        known = releases.profile(version)
        counts[version] = sum(known.at_least(row.since) for row in DOCUMENTED)
    assert list(counts.values()) == [56, 59, 60, 61, 62]


def test_releases_are_in_order_and_versions_between_them_are_taken() -> None:
    numbers = [releases.parse_version(version) for version in releases.RELEASES]
    assert numbers == sorted(numbers)
    between = releases.profile("2.13.68.0")
    assert between.at_least("2.13.68") and not between.at_least("2.13.72")
    assert np.all([releases.OWN.at_least(version) for version in releases.RELEASES])


def test_the_seed_of_the_bit_generator_is_used_from_2_9_on() -> None:
    def bits(version: str, seed: int) -> np.ndarray:
        example = EXAMPLES["RngBitGenerator"]
        state = np.array([seed, 0, 0, 0], np.uint32)
        checks = checks_for(releases.profile(version))
        return compile_and_run(example.text(), [state], "L1", checks)[1]

    for version, used in (("2.8.0.25", False), ("2.9.0.16", True), ("own", True)):
        assert np.array_equal(bits(version, 1), bits(version, 2)) is not used
