"""Lowered functions compute what their graphs say."""

from __future__ import annotations

import numpy as np

from compiler.dtypes import DType
from compiler.ir.build import Builder
from compiler.lower.function import Signature
from tests.support.region_reference import check_lowering

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def rms_norm(b: Builder, x, gain):
    t, d = x.type.shape
    mean = b.multiply(b.reduce(b.multiply(x, x), "add", (1,)), b.full((t,), 1 / d))
    scale = b.op("rsqrt", b.add(mean, b.full((t,), 1e-5)))
    y = b.multiply(x, b.broadcast(scale, (t, d), (0,)))
    return b.multiply(y, b.broadcast(gain, (t, d), (1,)))


def test_rms_norm_is_one_region() -> None:
    b = Builder()
    x, gain = b.input((6, 10)), b.input((10,))
    graph = b.finish(rms_norm(b, x, gain))
    lowered = check_lowering(graph, [normal(6, 10), normal(10)])
    assert len(lowered.regions) == 1
    assert len([n for n in lowered.regions[0].nodes if n.op == "load"]) == 2
    assert lowered.regions[0].atoms == (6, 10)


def test_causal_softmax_is_one_region_and_remakes_its_mask() -> None:
    b = Builder()
    s = b.input((2, 40, 40))
    rows, columns = b.iota((40, 40), 0), b.iota((40, 40), 1)
    mask = b.broadcast(b.compare(rows, columns, "GE"), (2, 40, 40), (1, 2))
    x = b.op("select", mask, s, b.full((2, 40, 40), -1e9))
    m = b.broadcast(b.reduce(x, "max", (2,)), (2, 40, 40), (0, 1))
    e = b.op("exponential", b.op("subtract", x, m))
    y = b.op("divide", e, b.broadcast(b.reduce(e, "add", (2,)), (2, 40, 40), (0, 1)))
    lowered = check_lowering(b.finish(y), [normal(2, 40, 40)])
    assert len(lowered.regions) == 1 and lowered.scratch_bytes == 0


def test_wide_softmax_is_split_at_its_reductions() -> None:
    b = Builder()
    x = b.input((64, 300))
    m = b.broadcast(b.reduce(x, "max", (1,)), (64, 300), (0,))
    e = b.op("exponential", b.op("subtract", x, m))
    y = b.op("divide", e, b.broadcast(b.reduce(e, "add", (1,)), (64, 300), (0,)))
    lowered = check_lowering(b.finish(y), [normal(64, 300)], strip_bytes=1000)
    assert len(lowered.regions) == 3


def test_contraction_reads_any_strides_and_converts_its_result() -> None:
    b = Builder()
    q, k = b.input((2, 7, 3, 5)), b.input((2, 6, 3, 5))
    scores = b.dot(
        b.transpose(q, (0, 2, 1, 3)), b.transpose(k, (0, 2, 1, 3)), ((3,), (3,)), ((0, 1), (0, 1))
    )
    graph = b.finish(b.convert(scores, DType.BF16))
    lowered = check_lowering(graph, [normal(2, 7, 3, 5), normal(2, 6, 3, 5)])
    assert len(lowered.regions) == 1 and not [t for t in lowered.tensors if t.kind == "scratch"]


def test_stack_is_updated_in_place_at_a_counter() -> None:
    b = Builder()
    stack, x, i = b.input((4, 3, 5)), b.input((3, 5)), b.input((), DType.I32)
    zero = b.constant(0, DType.I32)
    wrapped = b.op("select", b.compare(i, zero, "LT"), b.add(i, b.constant(4, DType.I32)), i)
    update = b.reshape(b.op("tanh", x), (1, 3, 5))
    graph = b.finish(b.dynamic_update_slice(stack, update, (wrapped, zero, zero)))
    signature = Signature(parameters=((2, 0, 3),), aliases=((0, 0),))
    lowered = check_lowering(graph, [normal(4, 3, 5), normal(3, 5)], signature, [2])
    assert len(lowered.regions) == 1 and lowered.scratch_bytes == 0
    (store,) = [n for n in lowered.regions[0].nodes if n.op == "store"]
    assert store.attrs["view"].offset.terms == ((0, 15),)
