"""Products of one-hot matrices with tables as gathers: which are found, and equal values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.passes.one_hot import one_hot_gathers
from tests.support.compiled import graph_of
from tests.support.model_files import compile_line, write_model

TABLE = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
IDS = np.array([[0, 8, 3], [-1, 9, 2]], np.int32)  # two of them name no row


def hot(ids: Any, dtype: Any = jnp.float32) -> Any:
    return jax.nn.one_hot(ids, 9, dtype=dtype)


FOUND: dict[str, Callable[..., Any]] = {
    "rows": lambda t, i: hot(i) @ t,
    "columns": lambda t, i: t.T @ hot(i[0]).T,
    "other side": lambda t, i: jnp.einsum("vd,bsv->dbs", t, hot(i)),
    "short types": lambda t, i: hot(i, jnp.bfloat16) @ t.astype(jnp.bfloat16),
    "first dim": lambda t, i: jnp.einsum(
        "vb,vd->bd", (jnp.arange(9)[:, None] == i[0]).astype(jnp.float32), t
    ),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "every second": lambda t, i: (i[..., None] == jnp.arange(9) * 2).astype(jnp.float32) @ t,
    "a comparison": lambda t, i: (i[..., None] >= jnp.arange(9)).astype(jnp.float32) @ t,
    "its own index per column": lambda t, i: (
        (t[:, :3].astype(int) == i[1]).astype(jnp.float32).T @ t
    ),
    "batches": lambda t, i: jnp.einsum("bsv,bvd->bsd", hot(i), jnp.stack([t, t])),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_one_hot_product_is_a_gather(name: str) -> None:
    graph = graph_of(FOUND[name], TABLE, IDS)
    names = [op.name for op in one_hot_gathers(graph).ops]
    assert names.count("gather") == 1 and "dot_general" not in names
    (want,), (have,) = (evaluate(g, [TABLE, IDS]) for g in (graph, one_hot_gathers(graph)))
    assert have.dtype == want.dtype
    np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_one_hot_product_stays(name: str) -> None:
    graph = graph_of(OTHERS[name], TABLE, IDS)
    assert [op.name for op in one_hot_gathers(graph).ops] == [op.name for op in graph.ops]


def test_what_is_not_finite_in_other_rows_is_spread_by_the_product_alone() -> None:
    """Why it is not done unless a release that does it is asked for."""
    graph, table = graph_of(FOUND["rows"], TABLE, IDS), TABLE.copy()
    table[5] = np.inf  # picked by no index
    with np.errstate(invalid="ignore"):
        (product,) = evaluate(graph, [table, IDS])
        (gathered,) = evaluate(one_hot_gathers(graph), [table, IDS])
    assert np.isnan(product).all() and np.isfinite(gathered).all()


@pytest.mark.parametrize(
    ("release", "gathers"), [("", False), ("2.24.5133", False), ("2.27.5334", True)]
)
def test_it_is_done_from_a_release_on(
    release: str, gathers: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m.export"
    write_model(model, FOUND["rows"], [TABLE, IDS])
    flag = f"--compiler-version-profile {release}" if release else ""
    line = f"shardwright compile {model} --target trn1 --output {tmp_path / 'm.neff'} {flag}"
    assert compile_line(f"{line} --verbose debug --logfile {tmp_path / 'log.txt'}") == 0
    (after,) = (
        line for line in capsys.readouterr().out.splitlines() if "operators after passes" in line
    )
    assert ("gather" in after) is gathers
