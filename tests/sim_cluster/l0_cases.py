"""Hand-written kernels with real semaphores for the L0 tests: a tiled matmul and an RMSNorm."""

from __future__ import annotations

from typing import Any

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Node, View
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Kernel, Loop, Space, Tile

F32 = DType.F32
ZERO = Affine()
HBM, SBUF, PSUM = Space.HBM, Space.SBUF, Space.PSUM


def hbm(tensor: int, offset: Affine, *dims: tuple[int, int]) -> AccessPattern:
    """A pattern over a tensor."""
    return AccessPattern(HBM, tensor, offset, dims)


def tile(
    number: int,
    partitions: int,
    *dims: tuple[int, int],
    space: Space = SBUF,
    offset: Affine = ZERO,
    start: int = 0,
) -> AccessPattern:
    """A pattern over a tile."""
    return AccessPattern(space, number, offset, ((1, partitions), *dims), start)


def instr(
    opcode: str,
    engine: Engine,
    dst: AccessPattern | None,
    *srcs: AccessPattern,
    waits: tuple[int, ...] = (),
    signals: tuple[int, ...] = (),
    **attrs: Any,
) -> Instr:
    """An instruction."""
    return Instr(opcode, engine, dst, srcs, attrs, waits, signals)


def node(
    op: str, inputs: tuple[int, ...], iter_dims: tuple[int, ...], dtype: DType = F32, **attrs: Any
) -> Node:
    """A node of a kernel program."""
    return Node(op, inputs, iter_dims, dtype, attrs)


def matmul_kernel(m: int, n: int, k: int, dtype: DType = F32) -> Kernel:
    """out[M, N] = a[K, M]^T @ b[K, N]: 128-row panels of K, 128 x 512 results, all dims multiples
    of a tile.

    Registers 0, 1, 2 count rows, columns, panels. Semaphores: 0 panels loaded, 1 panels free (2
    slots), 2 sum complete, 3 sum free, 4 result copied, 5 result stored.
    """
    tm, tn, tk = min(m, 128), min(n, 512), min(k, 128)
    tiles = [
        Tile("a", SBUF, tk, tm, dtype, slots=2, loop=2, address=0),
        Tile("b", SBUF, tk, tn, dtype, slots=2, loop=2, address=4096),
        Tile("sum", PSUM, tm, 512, F32, slots=2, loop=1, address=0),
        Tile("out", SBUF, tm, tn, F32, slots=1, loop=1, address=16384),
    ]
    at_a = Affine(0, ((0, tm), (2, tk * m)))
    at_b = Affine(0, ((1, tn), (2, tk * n)))
    at_out = Affine(0, ((0, tm * n), (1, tn)))
    panel = [
        instr(
            "dma", Engine.DMA_IN, tile(0, tk, (1, tm)), hbm(0, at_a, (m, tk), (1, tm)), waits=(1,)
        ),
        instr(
            "dma", Engine.DMA_IN, tile(1, tk, (1, tn)), hbm(1, at_b, (n, tk), (1, tn)), signals=(0,)
        ),
        instr(
            "matmul",
            Engine.TENSOR,
            tile(2, tm, (1, tn), space=PSUM),
            tile(0, tk, (1, tm)),
            tile(1, tk, (1, tn)),
            waits=(0,),
            signals=(1,),
            zero_when=(2,),
        ),
    ]
    column = [
        instr("wait", Engine.TENSOR, None, waits=(3,)),
        Loop(2, k // tk, panel),
        instr("signal", Engine.TENSOR, None, signals=(2,)),
        instr(
            "tensor_copy",
            Engine.VECTOR,
            tile(3, tm, (1, tn)),
            tile(2, tm, (1, tn), space=PSUM),
            waits=(2, 5),
            signals=(3, 4),
        ),
        instr(
            "dma",
            Engine.DMA_OUT,
            hbm(2, at_out, (n, tm), (1, tn)),
            tile(3, tm, (1, tn)),
            waits=(4,),
            signals=(5,),
        ),
    ]
    nest = Loop(0, m // tm, [Loop(1, n // tn, column)])
    return Kernel(matmul_program(m, n, k, dtype), tiles, [nest], tokens=(0, 2, 0, 2, 0, 1))


def matmul_program(m: int, n: int, k: int, dtype: DType) -> KernelProgram:
    """What the tiled matmul computes."""
    nodes = (
        node("load", (), (0, 2), dtype, view=View(0, Affine(), (1, 0, m))),
        node("load", (), (1, 2), dtype, view=View(1, Affine(), (0, 1, n))),
        node("contract", (0, 1), (0, 1), over=(2,)),
        node("store", (2,), (0, 1), view=View(2, Affine(), (n, 1, 0))),
    )
    return KernelProgram(kind="compute", name="matmul", iter_dims=(m, n, k), nodes=nodes)


def norm_kernel(rows: int, width: int, eps: float = 1e-5) -> Kernel:
    """out = x / sqrt(mean(x^2) + eps) * w, rows in blocks of 128 and a partial last one is not
    needed.

    Tensors x, w, out. Register 0 counts blocks. Semaphores: 0 x loaded, 1 x free, 2 sum ready, 3
    factor ready, 4 result ready, 5 result stored, 6 weight loaded.
    """
    p = min(rows, 128)
    wide = (1, width)
    tiles = [
        Tile("x", SBUF, p, width, F32, slots=2, loop=0, address=0),
        Tile("square", SBUF, p, width, F32, slots=1, loop=0, address=16384),
        Tile("sum", SBUF, p, 1, F32, slots=2, loop=0, address=32768),
        Tile("factor", SBUF, p, 1, F32, slots=2, loop=0, address=32800),
        Tile("w", SBUF, p, width, F32, address=40960),
        Tile("out", SBUF, p, width, F32, slots=2, loop=0, address=65536),
    ]
    at = Affine(0, ((0, p * width),))
    x, out = hbm(0, at, (width, p), wide), hbm(2, at, (width, p), wide)
    block = [
        instr("dma", Engine.DMA_IN, tile(0, p, wide), x, waits=(1,), signals=(0,)),
        *norm_block(p, width, eps),
        instr("dma", Engine.DMA_OUT, out, tile(5, p, wide), waits=(4,), signals=(5,)),
    ]
    weight = hbm(1, Affine(), (0, p), wide)
    body = [
        instr("dma", Engine.DMA_IN, tile(4, p, wide), weight, signals=(6,)),
        instr("wait", Engine.VECTOR, None, waits=(6,)),
        Loop(0, rows // p, block),
    ]
    return Kernel(norm_program(rows, width, eps), tiles, body, tokens=(0, 2, 0, 0, 0, 2, 0))


def norm_block(p: int, width: int, eps: float) -> list[Instr]:
    """The arithmetic on a block of `p` rows that has been loaded."""
    widths = (width, width, 1, 1, width, width)
    x, square, total, factor, weight, out = (
        tile(number, p, (1, columns)) for number, columns in enumerate(widths)
    )
    reduction: dict[str, Any] = {"op": "add", "num_reduced": 1, "zero_when": ()}
    root: dict[str, Any] = {"func": "rsqrt", "scale": 1 / width, "bias": eps}
    scaling: dict[str, Any] = {"op0": "multiply", "scalar0": None, "op1": None, "scalar1": 0.0}
    v = Engine.VECTOR
    return [
        instr("tensor_tensor", v, square, x, x, waits=(0,), op="multiply"),
        instr("tensor_reduce", v, total, square, signals=(2,), **reduction),
        instr("activation", Engine.SCALAR, factor, total, waits=(2,), signals=(3,), **root),
        instr("tensor_scalar", v, out, x, factor, waits=(3, 5), signals=(1,), **scaling),
        instr("tensor_tensor", v, out, out, weight, signals=(4,), op="multiply"),
    ]


def norm_program(rows: int, width: int, eps: float) -> KernelProgram:
    """What the norm computes."""
    nodes = (
        node("load", (), (0, 1), view=View(0, Affine(), (width, 1))),
        node("multiply", (0, 0), (0, 1)),
        node("reduce", (1,), (0,), kind="add", over=(1,)),
        node("constant", (), (), value=1 / width),
        node("multiply", (2, 3), (0,)),
        node("constant", (), (), value=eps),
        node("add", (4, 5), (0,)),
        node("rsqrt", (6,), (0,)),
        node("multiply", (0, 7), (0, 1)),
        node("load", (), (1,), view=View(1, Affine(), (0, 1))),
        node("multiply", (8, 9), (0, 1)),
        node("store", (10,), (0, 1), view=View(2, Affine(), (width, 1))),
    )
    return KernelProgram(kind="compute", name="norm", iter_dims=(rows, width), nodes=nodes)
