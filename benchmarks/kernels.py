"""Simulated time of single functions beside their bounds: products, norms, optimizer updates.

    python benchmarks/kernels.py [--target trn1n.32xlarge] [--optlevel 2] [NAME ...]

Every case is a JAX function on the whole road: capture, import, passes, lowering, tile code,
evaluator. The bound is the larger of useful flops / tensor peak and bytes that must move (what is
read of the inputs once, outputs once) / sustained DMA rate. Bars: tensor use of matmul 4096^3 in
bf16 at least 0.80; norms and the Adam update within 1.3 times their bound; attention at least 0.20
of the products that count; convolutions and their gradients within 6 times their bound.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardwright.compiler.driver import compile_unit
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.capture import artifact_of
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.analysis import flops
from shardwright.compiler.ir.traits import CONTRACTIONS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import Function
from shardwright.compiler.lower.function import Signature
from shardwright.compiler.machine.target import PS_PER_S, Target, load_target
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.outline.unit import Unit
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.timing.evaluate import function_segments

HEADER = (
    f"{'case':36}{'us':>10}{'bound us':>10}{'ratio':>7}{'tensor':>8}{'GB/s':>7}"
    f"{'kernels':>9}{'instrs':>8}{'cpu s':>7}"
)
INDEXED = ("dynamic_slice", "gather", "slice")
FP32_PASSES = 4  # documented: hardware.json, fp32 products take four passes


@dataclass(frozen=True, slots=True)
class Case:
    """A JAX function and the shapes it is compiled for; `bar` is what must hold, as text,
    and `useful` the share of the products that counts (half of a causal square).
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    bar: str = ""
    useful: float = 1.0


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def matmul(m: int, k: int, n: int, dtype: Any = jnp.bfloat16, bar: str = "") -> Case:
    name = f"matmul {m}x{k}x{n} {jnp.dtype(dtype).name}"
    return Case(name, jnp.matmul, (array(m, k, dtype=dtype), array(k, n, dtype=dtype)), bar)


def matmul_transposed(m: int, k: int, n: int) -> Case:
    """x @ w.T: k is innermost in both operands."""
    return Case(f"matmul {m}x{k}x{n} x@w.T", lambda x, w: x @ w.T, (array(m, k), array(n, k)))


def weight_gradient(m: int, k: int, n: int) -> Case:
    """x.T @ dy: k is outermost in both operands."""
    return Case(f"matmul {m}x{k}x{n} x.T@y", lambda x, y: x.T @ y, (array(k, m), array(k, n)))


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype) * weight


def rms_norm_gradient(x: jax.Array, weight: jax.Array, dy: jax.Array) -> Any:
    return jax.vjp(rms_norm, x, weight)[1](dy)


def convolve(x: jax.Array, w: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def convolution(size: int, inputs: int, outputs: int, taps: int, **given: int) -> list[Case]:
    """A convolution of 8 images and its two gradients."""
    groups = given.get("groups", 1)
    x, w = array(8, size, size, inputs), array(taps, taps, inputs // groups, outputs)

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        return convolve(x, w, **given)

    def to_input(x: jax.Array, w: jax.Array, dy: jax.Array) -> jax.Array:
        return jax.vjp(lambda v: forward(v, w), x)[1](dy)[0]

    def to_filter(x: jax.Array, w: jax.Array, dy: jax.Array) -> jax.Array:
        return jax.vjp(lambda v: forward(x, v), w)[1](dy)[0]

    y = jax.eval_shape(forward, x, w)
    name = f"conv {size} {inputs}>{outputs} {taps}x{taps}"
    name += "".join(f" {key[0]}{value}" for key, value in given.items())
    return [
        Case(name, forward, (x, w), "ratio <= 6"),
        Case(f"{name} dx", to_input, (x, w, y), "ratio <= 6"),
        Case(f"{name} dw", to_filter, (x, w, y), "ratio <= 6"),
    ]


def max_pool(x: jax.Array) -> jax.Array:
    window, steps = (1, 3, 3, 1), (1, 2, 2, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, steps, "SAME")


def attention(heads: int, length: int, width: int, causal: bool) -> Case:
    """softmax(q k^T / sqrt(d)) v per head, scores and softmax in fp32."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("htd,hsd->hts", q, k, preferred_element_type=jnp.float32)
        scores = scores * width**-0.5
        if causal:
            rows, columns = (jax.lax.broadcasted_iota(jnp.int32, scores.shape, a) for a in (1, 2))
            scores = jnp.where(rows >= columns, scores, -1e30)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("hts,hsd->htd", weights, v)

    each = array(heads, length, width)
    name = f"flash attention {'causal' if causal else 'full'} {heads}x{length}x{width}"
    return Case(name, forward, (each, each, each), "tensor >= 0.20", 0.5 if causal else 1.0)


def adam(transform: optax.GradientTransformation, size: int) -> tuple[Callable[..., Any], Any]:
    """One parameter update and the state it reads."""

    def update(gradient: Any, state: Any, parameter: Any) -> Any:
        changes, new = transform.update(gradient, state, parameter)
        return optax.apply_updates(parameter, changes), new

    parameter = array(size, size, dtype=jnp.float32)
    return update, (parameter, jax.eval_shape(transform.init, parameter), parameter)


def cases() -> list[Case]:
    found = [
        matmul(4096, 4096, 4096, bar="tensor >= 0.80"),
        matmul(1024, 1024, 1024),
        matmul(2048, 8192, 1024),
        matmul(2048, 4096, 32000),
        matmul(2039, 4093, 1021),
        matmul_transposed(4096, 4096, 4096),
        weight_gradient(4096, 4096, 4096),
        matmul(4096, 4096, 4096, jnp.float32),
    ]
    for dtype in (jnp.float32, jnp.bfloat16):
        x, weight = array(4096, 4096, dtype=dtype), array(4096, dtype=dtype)
        name, bar = jnp.dtype(dtype).name, "ratio <= 1.3"
        found.append(Case(f"rms_norm {name}", rms_norm, (x, weight), bar))
        found.append(Case(f"rms_norm backward {name}", rms_norm_gradient, (x, weight, x), bar))
    found += [attention(16, 2048, 128, causal) for causal in (True, False)]
    for name, transform in (("adam", optax.adam(1e-3)), ("adamw", optax.adamw(1e-3))):
        found.append(Case(f"{name} float32", *adam(transform, 4096), "ratio <= 1.3"))
    found += convolution(56, 64, 64, 3)
    found += convolution(14, 256, 256, 3)
    found += convolution(56, 128, 256, 1, stride=2)
    found += convolution(224, 3, 64, 7, stride=2)
    found += convolution(56, 128, 128, 3, groups=128)
    found += convolution(32, 320, 320, 3)
    found += convolution(224, 3, 768, 16, stride=16)
    return found + movers()


def movers() -> list[Case]:
    """Pooling, ordering and data movement by index: bound by DMA."""
    image, table, rows = array(8, 112, 112, 64), array(32000, 1024), array(4096, 1024)
    index, f32 = array(4096, dtype=jnp.int32), jnp.float32

    def pool_gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
        return jax.vjp(max_pool, x)[1](dy)[0]

    def average(x: jax.Array) -> jax.Array:
        window = (1, 2, 2, 1)
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, window, "VALID") / 4

    return [
        Case("max_pool 112 64", max_pool, (image,)),
        Case("max_pool 112 64 backward", pool_gradient, (image, array(8, 56, 56, 64))),
        Case("average_pool 112 64", average, (image,)),
        Case("cumulative sum 512x2048", lambda x: jnp.cumsum(x, 1), (array(512, 2048, dtype=f32),)),
        Case("gather 4096 rows", lambda t, i: t[i], (table, index)),
        Case("scatter-add 4096 rows", lambda t, i, u: t.at[i].add(u), (table, index, rows)),
        Case(
            "scatter-max 512 rows",
            lambda t, i, u: t.at[i].max(u),
            (array(1024, 1024), array(512, dtype=jnp.int32), array(512, 1024)),
        ),
        Case("sort 128x256", lambda x: jnp.sort(x, 1), (array(128, 256, dtype=f32),)),
        Case("top 8 of 4096x1024", lambda x: jax.lax.top_k(x, 8), (array(4096, 1024, dtype=f32),)),
        Case("top 8 of 4096x64", lambda x: jax.lax.top_k(x, 8), (array(4096, 64, dtype=f32),)),
        Case("transpose 4096x4096", lambda x: x.T, (array(4096, 4096),)),
        Case("to channels last", lambda x: x.transpose(0, 2, 3, 1), (array(8, 64, 56, 56),)),
    ]


def graph_of(case: Case) -> Graph:
    traced = jax.jit(case.function, keep_unused=True).trace(*case.arguments)
    return dce(import_module(artifact_of(traced)))


def compiled(graph: Graph, target: Target, options: CompileOptions) -> Function:
    return compile_unit(Unit("case", graph, Signature()), target.name, options)


def bound_s(graph: Graph, target: Target, share: float) -> tuple[float, float]:
    """(tensor engine seconds, DMA seconds) no code can be faster than."""
    core = target.core
    passes = max(
        (
            FP32_PASSES if op.operands[0].type.dtype is DType.F32 else 1
            for op in graph.walk()
            if op.name in CONTRACTIONS
        ),
        default=1,
    )
    useful = share * flops(graph, CONTRACTIONS)
    moved = sum(read_bytes(graph, v) for v in dict.fromkeys(graph.inputs))
    moved += sum(v.type.num_bytes for v in graph.outputs)
    dma = core.dma_engines * core.dma_engine_bytes_per_s
    return useful * passes / core.peak_bf16_flops_per_s, moved / dma


def read_bytes(graph: Graph, value: Value) -> int:
    """Bytes of `value` that its readers need at least: those that index read what they take."""
    needed = 0
    for op in graph.ops:
        if value not in op.operands:
            continue
        taken = value.type.num_bytes
        if op.name in INDEXED and value is op.operands[0]:
            taken = op.results[0].type.num_bytes
        elif op.name == "convolution" and value is op.operands[0]:
            taken = int(taken * _share_under_windows(op))
        needed = max(needed, min(taken, value.type.num_bytes))
    return needed


def _share_under_windows(op: Op) -> float:
    """The part of a convolution's input under any tap of any window: strides wider than the window
    and holes of a dilated filter skip the rest.
    """
    attrs, (x, w), share = op.attrs, op.operands, 1.0
    spatial = zip(attrs.lhs[2:], attrs.rhs[2:], attrs.out[2:], strict=True)
    for n, (of_x, of_w, of_out) in enumerate(spatial):
        size, holes = x.type.shape[of_x], attrs.lhs_dilation[n]
        taps = range(0, w.type.shape[of_w] * attrs.rhs_dilation[n], attrs.rhs_dilation[n])
        windows = range(op.results[0].type.shape[of_out])
        read = {o * attrs.strides[n] + t - attrs.low[n] for o in windows for t in taps}
        share *= sum(at * holes in read for at in range(size)) / size
    return share


def report(case: Case, target: Target, options: CompileOptions) -> str:
    graph = graph_of(case)
    start = cpu_s()
    function = compiled(graph, target, options)
    spent = cpu_s() - start
    segments = function_segments(function, target)
    seconds = sum(s.duration_ps for s in segments) / PS_PER_S
    moved = sum(s.hbm_bytes for s in segments)
    tensor, dma = bound_s(graph, target, case.useful)
    bound = max(tensor, dma)
    instrs = sum(1 for kernel in function.kernels for _ in walk(kernel.body))
    return (
        f"{case.name:36}{seconds * 1e6:>10.1f}{bound * 1e6:>10.1f}{seconds / bound:>7.2f}"
        f"{tensor / seconds:>8.2f}{moved / seconds / 1e9:>7.0f}{len(function.kernels):>9}"
        f"{instrs:>8}{spent:>7.2f}  {case.bar}"
    )


def cpu_s() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--target", default="trn1n.32xlarge")
    parser.add_argument("--optlevel", type=int, choices=(1, 2, 3), default=2)
    args = parser.parse_args()
    target, options = load_target(args.target), CompileOptions(optlevel=args.optlevel)
    print(HEADER)
    for case in cases():
        if not args.names or any(name in case.name for name in args.names):
            try:
                print(report(case, target, options), flush=True)
            except Exception as e:
                print(case.name, str(e)[:200])


if __name__ == "__main__":
    main()
