"""Kernels without a barrier between them: what they wait for, that it suffices, that it is needed,
and what it saves."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.decode import decode_function
from shardwright.compiler.isa.encode import encode_function
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Tensor
from shardwright.compiler.isa.limits import limits_for, walk
from shardwright.compiler.isa.program import (
    AccessPattern,
    Border,
    Engine,
    Function,
    Instr,
    Kernel,
    Space,
    Tile,
)
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.schedule.kernel_order import order_kernels
from shardwright.compiler.timing.evaluate import function_segments
from shardwright.sim_cluster.values.functions import L0, FunctionCode
from tests.support.compiled import graph_of, link
from tests.support.instruction_cluster import with_barriers

TARGET = "trn1n.32xlarge"
LIMITS = limits_for(TARGET)
ELEMENTS = 8


def pattern(space: Space, buffer: int) -> AccessPattern:
    return AccessPattern(space, buffer, Affine(), ((1, 1), (1, ELEMENTS)))


WIDE = 40_000  # elements of a tile that meets another one of this size wherever it lies


def kernel(name: str, body: list[Instr], tokens: int = 0, elements: int = ELEMENTS) -> Kernel:
    tile = Tile("t", Space.SBUF, 1, elements, DType.F32, address=0)
    return Kernel(KernelProgram("compute", name), [tile], body, (0,) * tokens)


def doubled(source: int, target: int, elements: int = ELEMENTS) -> Kernel:
    """A kernel that loads a tensor, doubles it and stores it."""
    at = pattern(Space.SBUF, 0)
    attrs = {"op0": "multiply", "scalar0": 2.0, "reverse0": False, "op1": None}
    body = [
        Instr("dma", Engine.DMA_IN, at, (pattern(Space.HBM, source),), signals=(0,)),
        Instr("tensor_scalar", Engine.VECTOR, at, (at,), attrs, waits=(0,), signals=(1,)),
        Instr("dma", Engine.DMA_OUT, pattern(Space.HBM, target), (at,), waits=(1,)),
    ]
    return kernel("doubled", body, 2, elements)


def copied(source: int, target: int) -> Kernel:
    """A kernel that copies a tensor within HBM."""
    operands = pattern(Space.HBM, target), (pattern(Space.HBM, source),)
    return kernel("copied", [Instr("dma", Engine.DMA_IN, *operands)])


def filled(target: int) -> Kernel:
    """A kernel that stores a constant."""
    at = pattern(Space.SBUF, 0)
    fill = Instr("memset", Engine.VECTOR, at, (), {"value": 7.0}, signals=(0,))
    store = Instr("dma", Engine.DMA_OUT, pattern(Space.HBM, target), (at,), waits=(0,))
    return kernel("filled", [fill, store], 1)


def function(*kernels: Kernel) -> Function:
    """Over four tensors of the caller."""
    tensors = [Tensor(f"t{n}", (ELEMENTS,), DType.F32, "input") for n in range(4)]
    order_kernels([kernels], tensors, LIMITS)
    return Function("f", tensors, (0, 1, 2, 3), (), (), 0, list(kernels), [], target=TARGET)


def run(given: Function) -> list[np.ndarray]:
    """The tensors after a run at L0."""
    data = [np.full(ELEMENTS, n, np.float32) for n in range(4)]
    buffers = [d.view(np.uint8) for d in data]
    for _ in FunctionCode(given, L0).bind(buffers, (), np.zeros(0, np.uint8)).run({}):
        raise AssertionError("no collectives here")
    return data


def without(given: Function) -> Iterator[tuple[tuple[Border, ...], Function]]:
    """The borders of every instruction that has some, and the function without them."""
    for number, made in enumerate(given.kernels):
        for at, instr in enumerate(walk(made.body)):
            if instr.borders:
                other = copy.deepcopy(given)
                list(walk(other.kernels[number].body))[at].borders = ()
                yield tuple((made.borders or ())[b] for b in instr.borders), other


STORED, LOADED, COMPUTED = (
    Border(engine, 1) for engine in (Engine.DMA_OUT, Engine.DMA_IN, Engine.VECTOR)
)


@pytest.mark.parametrize(
    ("kernels", "borders"),
    [
        # nothing in common, and tiles that can keep out of each other's way
        ([doubled(0, 1), doubled(0, 2)], []),
        # loads what was stored
        ([doubled(0, 1), doubled(1, 2)], [(STORED,)]),
        # stores, on another queue, where was stored: before, and two kernels before
        ([doubled(0, 1), copied(0, 1)], [(STORED,)]),
        ([doubled(0, 1), filled(2), copied(0, 1)], [(Border(Engine.DMA_OUT, 2),)]),
        # stores where is still loaded; a store behind a load of its own is behind all older ones
        ([copied(1, 2), filled(1)], [(LOADED,)]),
        ([copied(1, 2), doubled(0, 1)], []),
        # overwrites bytes that are computed with and stored
        ([doubled(0, 1, WIDE), doubled(0, 2, WIDE)], [(COMPUTED, STORED)]),
        # what the second has waited for, the third need not wait for again
        ([doubled(0, 1), copied(1, 2), copied(1, 3)], [(STORED,)]),
    ],
)
def test_what_kernels_wait_for_suffices_and_is_needed(
    kernels: list[Kernel], borders: list[tuple[Border, ...]]
) -> None:
    made = function(*copy.deepcopy(kernels))
    assert made.kernels[0].borders is None
    damaged = list(without(made))
    assert [found for found, _ in damaged] == borders
    for have, want in zip(run(made), run(with_barriers(made)), strict=True):
        np.testing.assert_array_equal(have, want)
    for _, other in damaged:
        with pytest.raises(SimulationError) as caught:
            run(other)
        assert caught.value.code == "SW_L0_RACE"


def test_what_a_border_names_must_be_there() -> None:
    made = function(doubled(0, 1), doubled(1, 2))
    for borders, named in (((Border(Engine.DMA_OUT, 2),), (0,)), ((), (0,))):
        made.kernels[1].borders = borders
        made.kernels[1].body[0].borders = named
        with pytest.raises(SimulationError) as caught:
            run(made)
        assert caught.value.code == "SW_L0_OPERANDS"


@pytest.mark.parametrize("kind", ["register_load", "collective_start", "collective_wait"])
def test_barriers_stay_where_engines_meet(kind: str) -> None:
    """Also on the other physical core, which is idle there."""
    program = KernelProgram(kind, kind)
    events = [Kernel(program), Kernel(KernelProgram("idle", "idle"))]
    subgraphs = [[doubled(0, 1), event, doubled(1, 2), doubled(0, 3)] for event in events]
    tensors = [Tensor(f"t{n}", (ELEMENTS,), DType.F32, "input") for n in range(4)]
    order_kernels(subgraphs, tensors, LIMITS)
    for kernels in subgraphs:
        assert [k.borders for k in kernels] == [None, None, None, ()]


@cache
def compiled() -> tuple[Function, list[np.ndarray]]:
    """Products, norms and a softmax, and some of it that needs nothing of the rest."""
    import jax

    def step(x: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
        h = jax.nn.gelu(x @ a)
        y = jax.nn.softmax(h @ b, axis=-1)
        z = (y - y.mean(0)) * jax.lax.rsqrt(1 + (y * y).sum(0))
        w = jax.nn.softmax(z @ c, axis=0)
        return z.T @ w, w @ c.T, (h * 2).sum(1), b @ c

    rng = np.random.default_rng(3)
    shapes = ((192, 256), (256, 384), (384, 128), (128, 96))
    args = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    (found,) = link(graph_of(step, *args), DEFAULTS).functions
    return found, args


def outputs(given: Function, args: list[np.ndarray]) -> list[bytes]:
    """At L0."""
    data = [a.view(np.uint8).reshape(-1) for a in args]
    sizes = [np.prod(given.tensors[n].shape) * 4 for n in given.outputs]
    out = [np.zeros(int(size), np.uint8) for size in sizes]
    scratch = np.zeros(given.scratch_bytes, np.uint8)
    for _ in FunctionCode(given, L0).bind(data, out, scratch).run({}):
        raise AssertionError("no collectives here")
    return [o.tobytes() for o in out]


def test_compiled_code_is_the_same_without_barriers_and_takes_less_time() -> None:
    made, args = compiled()
    assert sum(k.borders is not None for k in made.kernels) >= 3
    barriers = with_barriers(made)
    assert outputs(made, args) == outputs(barriers, args)
    machine = load_target(TARGET)
    ((now,), (before,)) = (function_segments(f, machine) for f in (made, barriers))
    assert now.duration_ps < before.duration_ps
    assert (now.busy_ps, now.hbm_bytes) == (before.busy_ps, before.hbm_bytes)
    assert sum(k.duration_ps for k in now.kernels) == now.duration_ps


def test_compiled_code_without_what_orders_its_data_is_refused() -> None:
    """What waits for the stores of the kernel before reads them, or overwrites what they read."""
    made, args = compiled()
    refused = 0
    for borders, other in without(made):
        if STORED not in borders:
            continue
        with pytest.raises(SimulationError) as caught:
            outputs(other, args)
        assert caught.value.code == "SW_L0_RACE"
        refused += 1
    assert refused >= 3


def test_files_keep_borders_and_older_ones_have_barriers() -> None:
    made, _ = compiled()
    sections = encode_function(made)
    assert decode_function(sections) == made
    older = {name: data for name, data in sections.items() if not name.startswith("b")}
    assert decode_function(older) == with_barriers(made)
    assert encode_function(with_barriers(made)).keys() == older.keys()
