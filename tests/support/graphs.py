"""Graphs that several IR tests share, built by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import Graph, Value
from tests.support.building import Builder

LAYERS, ROWS, WIDTH = 3, 4, 6


def norm(b: Builder, x: Value) -> Value:
    """x over the root of its mean square, per row."""
    squares = b.reduce(b.multiply(x, x), "add", (1,))
    scaled = b.op("divide", squares, b.full((x.type.shape[0],), x.type.shape[1]))
    root = b.op("rsqrt", b.add(scaled, b.full((x.type.shape[0],), 1e-5)))
    return b.multiply(x, b.broadcast(root, x.type.shape, (0,)))


def layer_stack(dtype: DType = DType.F32) -> Graph:
    """Stacked layers in a loop that saves its activations: inputs x and weights."""
    b = Builder(loc=Loc("model.py", 7, "stack"))
    x, weights = b.input((ROWS, WIDTH)), b.input((LAYERS, WIDTH, WIDTH))
    saved = b.full((LAYERS, ROWS, WIDTH), 0.0)

    def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        h, w, stack = carries
        zero = inner.constant(0, DType.I32)
        weight = inner.dynamic_slice(w, [i, zero, zero], (1, WIDTH, WIDTH))
        weight = inner.convert(inner.reshape(weight, (WIDTH, WIDTH)), dtype)
        kept = inner.dynamic_update_slice(
            stack, inner.reshape(h, (1, ROWS, WIDTH)), [i, zero, zero]
        )
        y = inner.dot(inner.convert(norm(inner, h), dtype), weight, dtype=DType.F32)
        (h,) = inner.barrier(inner.op("tanh", y))
        return h, w, kept

    h, _, kept = b.loop(LAYERS, [x, weights, saved], body)
    return b.finish(h, kept)


def stack_inputs(seed: int = 0) -> list[np.ndarray]:
    """Inputs of `layer_stack`."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return [x, rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32)]


def stack_by_hand(x: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `layer_stack` means."""
    saved = []
    for w in weights:
        saved.append(x)
        x = np.tanh(x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) @ w)
    return x, np.stack(saved)


def structural_hash(graph: Graph) -> str:
    """sha256 of op names, attrs, types and edges; locations and graph names do not count."""
    digest = hashlib.sha256()
    _hash_level(graph, digest.update)
    return digest.hexdigest()


def _hash_level(graph: Graph, update: Callable[[bytes], None]) -> None:
    """Feed one level, values numbered in order of definition."""
    numbers: dict[Value, int] = {}
    for value in graph.inputs:
        numbers[value] = len(numbers)
    update(f"inputs {[str(v.type) for v in graph.inputs]}\n".encode())
    for op in graph.ops:
        operands = [numbers[v] for v in op.operands]
        results = [str(v.type) for v in op.results]
        update(f"{op.name} {operands} {op.attrs!r} {results} {len(op.regions)}\n".encode())
        for region in op.regions:
            _hash_level(region, update)
        for value in op.results:
            numbers[value] = len(numbers)
    update(f"outputs {[numbers[v] for v in graph.outputs]}\n".encode())
