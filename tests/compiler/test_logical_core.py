"""What two physical cores per logical core change in time, and how kernels are shared out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.codegen.builder import Builder
from shardwright.compiler.codegen.generate import Codes, _Placed
from shardwright.compiler.dtypes import DType
from shardwright.compiler.fusion.autotuner import Autotuner, _memo
from shardwright.compiler.fusion.logical_core import LogicalCore, Way
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Node, Tensor, View
from shardwright.compiler.isa.program import Function, Kernel
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.schedule.core_order import order_cores
from shardwright.compiler.timing.evaluate import Shares, function_segments, segments_at
from tests.compiler.codegen.kernel_harness import Maker
from tests.support.model_run import CompiledFunction, compile_function, figures

TRN2 = "trn2.48xlarge"


def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape, jnp.bfloat16)


def pair(
    f: Callable[..., jax.Array], *args: jax.Array
) -> tuple[CompiledFunction, CompiledFunction]:
    one, two = (compile_function(f, args, CompileOptions(lnc=n), TRN2) for n in (1, 2))
    return one, two


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("hqd,hkd->hqk", q, k).astype(jnp.float32) / 8
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, -1).astype(q.dtype), v)


def test_a_compute_bound_product_takes_half_the_time() -> None:
    one, two = map(figures, pair(jnp.dot, ones(2048, 2048), ones(2048, 2048)))
    assert 1.75 <= one.time_ps / two.time_ps <= 2.0
    # The same arithmetic, shared out: each tensor engine does half of it.
    assert abs(two.busy_ps["tensor"] - one.busy_ps["tensor"]) <= 0.01 * one.busy_ps["tensor"]


def test_attention_takes_half_the_time() -> None:
    heads = ones(4, 1024, 64)
    one, two = map(figures, pair(attention, heads, heads, heads))
    assert 1.85 <= one.time_ps / two.time_ps <= 2.0


def test_what_cannot_be_cut_stays_on_one_core() -> None:
    one, two = pair(lambda x: jnp.sum(x, dtype=jnp.float32), ones(64, 64))
    function = two.program.functions[-1]
    assert (function.num_kernels("compute"), function.num_kernels("idle")) == (0, 1)
    (segment,) = function_segments(function, load_target(TRN2))
    assert segment.lone_ps == segment.duration_ps > 0
    assert figures(two).time_ps <= figures(one).time_ps


def copied(tensor: int, to: int, rows: range, name: str = "copy") -> Kernel:
    """`to[rows] = tensor[rows]` of 8 columns."""
    offset, strides, iter_dims = Affine(8 * rows.start), (8, 1), (0, 1)
    load = Node("load", (), iter_dims, DType.F32, {"view": View(tensor, offset, strides)})
    store = Node("store", (0,), iter_dims, DType.F32, {"view": View(to, offset, strides)})
    return Kernel(KernelProgram("compute", name, (len(rows), 8), (load, store)))


def test_halves_of_the_same_rows_do_not_wait_and_others_do() -> None:
    low, high, every = range(8), range(8, 16), range(16)
    tensors = [Tensor(f"t{n}", (16, 8), DType.F32, "input") for n in range(4)]
    idle = Kernel(KernelProgram("idle", "idle"))
    first = [copied(0, 1, low), copied(1, 2, low), copied(2, 3, every)]
    second = [copied(0, 1, high), copied(1, 2, high), idle]
    order_cores([first, second], tensors)
    assert [r.after for r in first] == [0, 0, 2]
    assert [r.after for r in second] == [0, 0, 0]
    second[1] = copied(1, 2, every)
    order_cores([first, second], tensors)
    assert [r.after for r in second] == [0, 1, 0]


def test_a_kernel_waits_for_the_other_core_and_for_nothing_else() -> None:
    """Durations by hand: the slower core decides, a semaphore is paid per wait."""
    target = load_target(TRN2)
    view = View(0, Affine(), ())
    loads = [
        KernelProgram("register_load", f"r{n}", attrs={"register": n, "view": view}) for n in (0, 1)
    ]
    alone, semaphore = target.core.dma_fixed_ps, target.core.semaphore_ps

    def duration(after: int) -> int:
        first = [Kernel(loads[0]), Kernel(loads[1])]
        second = [Kernel(KernelProgram("idle", "i")), Kernel(loads[1], after=after)]
        tensors = [Tensor("t", (1,), DType.I32, "input")]
        function = Function("f", tensors, (0,), (), (), 2, first, [], partner=second)
        (segment,) = function_segments(function, target)
        return segment.duration_ps

    assert duration(0) == 2 * alone
    assert duration(1) == 2 * alone + semaphore


def test_every_kernel_is_on_core_zero_and_copies_of_it_nowhere() -> None:
    _, two = pair(lambda x: (x * 2, jnp.tanh(x).T), ones(512, 512))
    for function in two.program.functions:
        for mine, other in zip(*function.subgraphs, strict=True):
            assert mine.program.kind == "compute"
            points = [np.prod(k.program.iter_dims) for k in (mine, other) if k.program.iter_dims]
            assert sum(points) == 512 * 512


def test_points_timed_together_are_those_timed_alone() -> None:
    heads = ones(2, 256, 64)
    points = (Shares(), Shares(0.5, 2.0), Shares(hbm=2.0), Shares(hbm=0.05))
    target = load_target(TRN2)
    for built in pair(attention, heads, heads, heads):
        for function in built.program.functions:
            together = segments_at(function, target, points, recorded=False)
            assert together == [
                segments_at(function, target, (point,), recorded=False)[0] for point in points
            ]
            whole, half, bank, scarce = (sum(s.duration_ps for s in at) for at in together)
            assert bank <= whole < min(half, scarce)
            assert segments_at(function, target, points)[0] == function_segments(function, target)


def test_a_search_goes_on_from_the_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sketch planned and made is not made again, and the code is that of a search alone;
    behind a cut that halves the time no other one is looked at.
    """
    _memo.cache_clear()
    oracle = LogicalCore(load_target(TRN2), CompileOptions(lnc=2))
    made, sketched = Counter[int](), list[float]()
    build, sketch = Codes._place, LogicalCore._first_fit_ps

    def counted(codes: Codes, builder: Builder, unroll: int) -> _Placed:
        made[id(codes)] += 1
        return build(codes, builder, unroll)

    def noted(core: LogicalCore, way: Way, tensors: Sequence[Tensor]) -> float:
        sketched.append(sketch(core, way, tensors))
        return sketched[-1]

    monkeypatch.setattr(Codes, "_place", counted)
    monkeypatch.setattr(LogicalCore, "_first_fit_ps", noted)
    m = Maker((2048, 2048), "exponential")
    m.store(m.node("exponential", m.load((0, 1))), (0, 1))
    oracle(m.program(), m.tensors)
    assert len(sketched) == 2
    assert sketched[1] * 1.98 <= sketched[0]
    (half, *_) = oracle.way(m.program(), m.tensors).pairs[0]
    _memo.cache_clear()
    alone = Autotuner(load_target(TRN2), CompileOptions(lnc=2))
    before = made.total()
    assert alone(half, m.tensors) == oracle(m.program(), m.tensors)
    assert made.total() - before == max(made.values())
