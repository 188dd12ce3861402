"""Kernels of a published table: what a row's words (and `kernel_settings.toml`, for kernels whose
source is public) say is computed, and its time on one core.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa.program import Function
from shardwright.compiler.machine.target import PS_PER_S, Target
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.timing.evaluate import function_segments
from shardwright.orchestrator.validation.published_columns import entries, matches

DTYPES = {"fp32": "f32", "f32": "f32", "bf16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """What the source of a kernel says: see `kernel_settings.toml`."""

    source: str
    match: Mapping[str, str] = field(default_factory=dict)
    bias: str = ""
    transposed: bool = False
    wide: bool = False
    operators: bool = False


@cache
def _settings() -> tuple[KernelSettings, ...]:
    return tuple(KernelSettings(**entry) for entry in entries("kernel_settings.toml", "kernel"))


def settings_of(columns: Mapping[str, str]) -> KernelSettings:
    """The settings of a row; the last entry takes every row."""
    return next(one for one in _settings() if matches(one.match, columns))


@dataclass(frozen=True, slots=True)
class MeasuredKernel:
    """A kernel that can be compiled: its kind and sizes, and how it is computed. `gelu` and `bias`
    are as `models.kernels.product_graph` has them, `apart` says that GELU is a kernel of its own
    behind HBM; `attention` is how scores are kept, `pool` the window of a maximum behind a
    convolution."""

    kind: str
    sizes: tuple[int, ...]
    dtype: str
    gelu: str = ""
    apart: bool = False
    attention: str = "flash"
    pool: int = 1
    bias: str = ""
    transposed: bool = False
    wide: bool = False


def kernel_of(columns: Mapping[str, str]) -> MeasuredKernel:
    """The kernel of a row with the columns kernel, shape, dtype and, where it is known, source.
    Raises ValueError for one that is not told from its words."""
    name, shape, dtype = (columns[key] for key in ("kernel", "shape", "dtype"))
    if dtype not in DTYPES:
        raise ValueError(f"dtype requires {', '.join(DTYPES)}, got {dtype or 'none'}")
    words = name.lower()
    reader = next((read for named, read in _READERS if any(w in words for w in named)), None)
    if reader is None:
        raise ValueError(
            f"kernel requires a matmul, GEMM, attention, convolution or k-means, got {name}"
        )
    return reader(words, shape, DTYPES[dtype], settings_of(columns))


def _attention(words: str, shape: str, dtype: str, known: KernelSettings) -> MeasuredKernel:
    """How a row's words say that scores are kept: three phases are a product, a softmax in one pass
    over stored scores, and a product."""
    form = "flash"
    if "through hbm" in words:
        form = "fused" if "three phases" in words else "unfused"
    sizes = _sizes(shape, "seq", "d_head")
    return MeasuredKernel(
        "attention", sizes, dtype, attention=form, transposed=known.transposed, wide=known.wide
    )


def _product(words: str, shape: str, dtype: str, known: KernelSettings) -> MeasuredKernel:
    gelu = "gelu" in words
    return MeasuredKernel(
        "product",
        _sizes(shape, "m", "k", "n"),
        dtype,
        ("operators" if known.operators else "function") if gelu else "",
        gelu and "baseline" in words,
        bias=known.bias,
        transposed=known.transposed,
    )


def _nearest(words: str, shape: str, dtype: str, known: KernelSettings) -> MeasuredKernel:
    return MeasuredKernel("nearest", _sizes(shape, "n", "d", "k"), dtype)


def _convolution(words: str, shape: str, dtype: str, known: KernelSettings) -> MeasuredKernel:
    """A square convolution without padding: `batch 1, Cin 256, Cout 256, 224x224, 3x3, valid`."""
    squares = [int(a) for a, b in re.findall(r"(\d+)x(\d+)", shape) if a == b]
    if len(squares) != 2 or "valid" not in shape.lower():
        raise ValueError(f"shape requires a square image, a square window and `valid`, got {shape}")
    pooled = re.search(r"(\d+)x\1 max pool", words)
    sizes = (*_sizes(shape, "batch", "cin", "cout"), *squares)
    return MeasuredKernel("convolution", sizes, dtype, pool=int(pooled[1]) if pooled else 1)


Reader = Callable[[str, str, str, KernelSettings], MeasuredKernel]
_READERS: tuple[tuple[tuple[str, ...], Reader], ...] = (
    (("k-means",), _nearest),
    (("attention",), _attention),
    (("conv2d",), _convolution),
    (("matmul", "gemm"), _product),
)
"""Words of a name, the more special ones first, and who reads the rest of the row."""


def _sizes(shape: str, *names: str) -> tuple[int, ...]:
    """Numbers behind names: `M=4096 K=8192`, `seq 512, d_head 128`."""
    found = dict(re.findall(r"([a-z_]+)\s*[= ]\s*(\d+)", shape.lower()))
    if not found.keys() >= set(names):
        raise ValueError(f"shape requires {', '.join(names)}, got {shape}")
    return tuple(int(found[name]) for name in names)


def kernel_seconds(kernel: MeasuredKernel, target: Target) -> float:
    """Time of a kernel on one core of `target`. The clock of a benchmark runs around the kernel
    alone: no program start, and no neighbours that fill its stalls."""
    target = replace(target, core=replace(target.core, stall_recovery=0.0))
    duration_ps = sum(
        segment.duration_ps
        for function in _compiled(kernel, target.name)
        for segment in function_segments(function, target, recorded=False)
    )
    return duration_ps / PS_PER_S


@cache
def _compiled(kernel: MeasuredKernel, target: str) -> tuple[Function, ...]:
    from shardwright.compiler.driver import compile_unit
    from shardwright.compiler.lower.function import Signature
    from shardwright.compiler.outline.unit import Unit

    options = CompileOptions(attention=kernel.attention)
    units = [Unit("kernel", graph, Signature()) for graph in _graphs(kernel)]
    return tuple(compile_unit(unit, target, options) for unit in units)


def _graphs(kernel: MeasuredKernel) -> list[Graph]:
    """What runs one after the other."""
    from shardwright.orchestrator.models import kernels

    if kernel.kind == "attention":
        positions, width = kernel.sizes
        how = {"transposed": kernel.transposed, "wide": kernel.wide}
        return [kernels.attention_graph(positions, width, kernel.dtype, **how)]
    if kernel.kind == "nearest":
        vectors, width, centres = kernel.sizes
        return [kernels.nearest_graph(vectors, width, centres, kernel.dtype)]
    if kernel.kind == "convolution":
        batch, given, made, size, window = kernel.sizes
        shape = (batch, (given, made), size, window)
        return [kernels.convolution_graph(*shape, kernel.dtype, pool=kernel.pool)]
    m, k, n = kernel.sizes
    gelu = "" if kernel.apart else kernel.gelu
    found = [
        kernels.product_graph(
            m, k, n, kernel.dtype, gelu=gelu, bias=kernel.bias, transposed=kernel.transposed
        )
    ]
    return [*found, kernels.gelu_graph(m, n, kernel.dtype)] if kernel.apart else found
