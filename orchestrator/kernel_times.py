"""Kernels of a published table: what a row's words say is computed, and its time on one core."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from compiler.evaluate import function_segments
from compiler.ir.types import Graph
from compiler.isa.program import Function
from compiler.options import CompileOptions
from compiler.target import PS_PER_S, Target

DTYPES = {"fp32": "f32", "f32": "f32", "bf16": "bf16"}


@dataclass(frozen=True, slots=True)
class MeasuredKernel:
    """A kernel that can be compiled: product or attention, its sizes, how scores are kept."""

    kind: str
    sizes: tuple[int, ...]
    dtype: str
    gelu: bool = False
    apart: bool = False  # the activation is a kernel of its own, behind HBM
    attention: str = "flash"


def kernel_of(name: str, shape: str, dtype: str) -> MeasuredKernel:
    """The kernel of a row. Raises ValueError for one that is not told from its words."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype requires {', '.join(DTYPES)}, got {dtype or 'none'}")
    words = name.lower()
    if "attention" in words:
        sizes = _sizes(shape, "seq", "d_head")
        form = _attention_form(words)
        return MeasuredKernel("attention", sizes, DTYPES[dtype], attention=form)
    if "matmul" in words or "gemm" in words:
        if "argmax" in words:
            raise ValueError("a product with an index search behind it is not among the kernels")
        sizes = _sizes(shape, "m", "k", "n")
        gelu = "gelu" in words
        return MeasuredKernel("product", sizes, DTYPES[dtype], gelu, gelu and "baseline" in words)
    raise ValueError(f"kernel requires a matmul, GEMM or attention, got {name}")


def _attention_form(words: str) -> str:
    """How a row's words say that scores are kept: three phases are a product, a softmax in one pass
    over stored scores, and a product.
    """
    if "through hbm" not in words:
        return "flash"
    return "fused" if "three phases" in words else "unfused"


def _sizes(shape: str, *names: str) -> tuple[int, ...]:
    """Numbers behind names: `M=4096 K=8192`, `seq 512, d_head 128`."""
    found = dict(re.findall(r"([a-z_]+)\s*[= ]\s*(\d+)", shape.lower()))
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"shape requires {', '.join(names)}, got {shape}")
    return tuple(int(found[name]) for name in names)


def kernel_seconds(kernel: MeasuredKernel, target: Target) -> float:
    """Time of a kernel on one core of `target`.

    The clock of a benchmark runs around the kernel alone: no program start.
    """
    segments = [
        segment
        for function in _compiled(kernel, target.name)
        for segment in function_segments(function, target, recorded=False)
    ]
    return sum(s.duration_ps for s in segments) / PS_PER_S


@cache
def _compiled(kernel: MeasuredKernel, target: str) -> tuple[Function, ...]:
    from compiler.driver import compile_unit
    from compiler.lower.function import Signature
    from compiler.outline.unit import Unit

    options = CompileOptions(attention=kernel.attention)
    units = [Unit("kernel", graph, Signature()) for graph in _graphs(kernel)]
    return tuple(compile_unit(unit, target, options) for unit in units)


def _graphs(kernel: MeasuredKernel) -> list[Graph]:
    """What runs one after the other."""
    from compiler.frontend.models import kernels

    if kernel.kind == "attention":
        positions, width = kernel.sizes
        return [kernels.attention_graph(positions, width, kernel.dtype)]
    m, k, n = kernel.sizes
    fused = kernel.gelu and not kernel.apart
    found = [kernels.product_graph(m, k, n, kernel.dtype, gelu=fused)]
    return [*found, kernels.gelu_graph(m, n, kernel.dtype)] if kernel.apart else found
