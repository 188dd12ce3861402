"""Gathers, scatter-adds with duplicates, and plain copies."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, Node, Tensor, View
from shardwright.compiler.isa.limits import walk
from tests.compiler.codegen.kernel_harness import BF16, F32, I32, Maker, check

I8 = DType.I8


def gather(tokens: int, rows: int, d: int, mode: str, dtype=F32) -> Maker:
    m = Maker((tokens, d), "gather")
    index = m.load((0,), I32)
    m.tensors.append(Tensor("table", (rows, d), dtype, "input"))
    view = View(1, Affine(), (0, 1))
    attrs = {"view": view, "stride": d, "rows": rows, "mode": mode}
    m.store(m.node("load_indexed", index, iter_dims=(0, 1), dtype=dtype, **attrs), (0, 1))
    return m


@pytest.mark.parametrize("mode", ["clamp", "fill"])
@pytest.mark.parametrize("tokens", [1, 67, 128, 300])
def test_gather(tokens: int, mode: str) -> None:
    index = np.random.default_rng(0).integers(-3, 105, tokens).astype(np.int32)
    check(gather(tokens, 100, 131, mode), 0, {0: index})


def scatter(
    tokens: int, rows: int, d: int, dtype=F32, table=F32, kind: str = "add", unique: bool = False
) -> Maker:
    m = Maker((tokens, d), f"scatter_{kind}")
    data, index = m.load((0, 1), dtype), m.load((0,), I32)
    m.tensors.append(Tensor("table", (rows, d), table, "input"))
    m.tensors.append(Tensor("updated", (rows, d), table, "output", alias=2))
    attrs = {"view": View(3, Affine(), (0, 1)), "stride": d, "rows": rows}
    attrs |= {"kind": kind, "unique": unique, "order": (0,)}
    m.nodes.append(Node("store_indexed", (data, index), (0, 1), table, attrs))
    return m


@pytest.mark.parametrize("tokens", [1, 67, 128, 300, 520])
def test_scatter_add_merges_duplicates_in_and_across_tiles(tokens: int) -> None:
    index = np.random.default_rng(1).integers(-2, 15, tokens).astype(np.int32)
    check(scatter(tokens, 13, 67), 1e-6, {1: index})
    check(scatter(tokens, 13, 600, BF16, F32), 1e-6, {1: index})


@pytest.mark.parametrize("kind", ["replace", "max", "multiply"])
@pytest.mark.parametrize("unique", [False, True])
def test_other_scatters(kind: str, unique: bool) -> None:
    rng = np.random.default_rng(3)
    index = rng.permutation(150)[:140] if unique else rng.integers(-2, 15, 140)
    check(scatter(140, 149, 13, kind=kind, unique=unique), 1e-6, {1: index.astype(np.int32)})


def test_row_numbers_beyond_fp32_are_compared_exactly() -> None:
    rows = (1 << 24) + 8
    index = (rows - 1 - np.arange(130) % 7).astype(np.int32)
    check(scatter(130, rows, 1, I8, I8, kind="replace"), 0, {1: index})


def test_scatter_add_of_one_row_only() -> None:
    index = np.full(300, 5, np.int32)
    check(scatter(300, 7, 13), 1e-6, {1: index})


def test_scatter_tiles_are_chained_by_tokens() -> None:
    """A gather of the rows as they are must wait for the scatter of the tile before."""
    kernel = scatter(300, 13, 67).kernel()
    gathers = [i for i in walk(kernel.body) if i.opcode == "dma_gather"]
    scatters = [i for i in walk(kernel.body) if i.opcode == "dma_scatter"]
    chained = set(gathers[0].waits) & set(scatters[0].signals)
    assert chained and all(kernel.tokens[s] == 1 for s in chained)


def copy(
    source: tuple[int, ...], target: tuple[int, ...], sizes: tuple[int, ...], types=(F32, F32)
) -> Maker:
    m = Maker(sizes, "copy")
    x = m.load(source, types[0])
    if types[0] is not types[1]:
        x = m.node("convert", x, dtype=types[1])
    m.store(x, target, types[1])
    return m


def test_copies_are_single_transfers() -> None:
    for m in (
        copy((0, 1), (0, 1), (131, 67)),
        copy((0, 1), (1, 0), (131, 67)),
        copy((0, 1, 2, 3), (2, 0, 3, 1), (3, 5, 13, 67)),
        copy((0, 1), (0, 1), (131, 67), (F32, BF16)),
        copy((1,), (0, 1), (131, 67)),
    ):
        kernel = check(m, 0)
        assert [i.opcode for i in walk(kernel.body)] == ["dma"]


def test_large_copy_is_transposed_on_chip() -> None:
    """Element by element through HBM it would be one descriptor per element."""
    kernel = check(copy((0, 1), (1, 0), (300, 700)), 0)
    assert [i.opcode for i in walk(kernel.body) if i.opcode != "dma"]


def test_copy_of_many_strided_iter_dims_loops() -> None:
    sizes = (2, 3, 2, 3, 2, 3, 2)
    kernel = check(copy(tuple(range(7)), (6, 1, 3, 0, 5, 2, 4), sizes), 0)
    assert sum(i.opcode == "dma" for i in walk(kernel.body)) == 1


def test_rounding_between_equal_types_is_kept() -> None:
    m = Maker((131,), "round trip")
    x = m.node("convert", m.load((0,)), dtype=BF16)
    m.store(m.node("convert", x, dtype=F32), (0,))
    check(m, 0)


def test_concatenation_by_two_windows() -> None:
    m = Maker((67, 13), "concat")
    a, b = m.load((0, 1)), m.load((0, 1))
    out = m.tensor((0, 1), F32, "output")
    m.tensors[out] = Tensor("out", (67, 26), F32, "output")
    for value, offset in ((a, 0), (m.node("negate", b), 13)):
        attrs = {"view": View(out, Affine(offset), (26, 1))}
        m.nodes.append(Node("store", (value,), (0, 1), F32, attrs))
    check(m, 0)
