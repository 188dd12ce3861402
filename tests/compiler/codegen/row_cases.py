"""Hand-made reduction fusions: attention forward and backward in the user's own arithmetic, norm
gradients, and what else keeps several contractions in one kernel.
"""

from __future__ import annotations

from shardwright.compiler.isa.kernel import Affine
from tests.compiler.codegen.kernel_harness import F32, I32, PRED, Maker

T, S, D, E, HEADS = 1, 2, 3, 4, 0


def causal(m: Maker, value: int, low: float, offset: int = 0, window: int = 0) -> int:
    """`value` where key position <= row + offset (and within `window` of it), else `low`."""
    i = m.node("iota", iter_dims=(T,), dtype=I32, atom=T, start=Affine(offset), step=1)
    j = m.node("iota", iter_dims=(S,), dtype=I32, atom=S, start=Affine(), step=1)
    keep = m.node("compare", i, j, dtype=PRED, direction="GE")
    if window:
        near = m.node("subtract", i, m.const(window, I32), dtype=I32)
        keep = m.node("and", keep, m.node("compare", j, near, dtype=PRED, direction="GT"))
    return m.node("select", keep, value, m.const(low), dtype=F32)


def _scores(
    m: Maker, lead: tuple[int, ...], dtype, mask: str, low: float, offset: int = 0
) -> tuple[int, int, int]:
    q, k = m.load((*lead, T, D), dtype), m.load((HEADS, S, D), dtype)
    x = m.node("multiply", m.contract(q, k, (D,), F32), m.const(m.iter_dims[D] ** -0.5))
    if mask == "padding":
        x = m.node("select", m.load((HEADS, S), PRED), x, m.const(low), dtype=F32)
    elif mask == "window":
        x = causal(m, x, low, 0, 100)
    elif mask == "causal":
        x = causal(m, x, low, offset)
    return q, k, x


def _rounded(m: Maker, value: int, dtype) -> int:
    return value if dtype is F32 else m.node("convert", value, dtype=dtype)


def forward(
    sizes: tuple[int, ...],
    dtype=F32,
    mask: str = "",
    statistics: bool = False,
    low: float = -1e30,
    offset: int = 0,
) -> Maker:
    """softmax(q k^T) v; sizes are heads, T, S, D, E and, for grouped queries, group."""
    m = Maker(sizes, "forward")
    lead = (HEADS, 5) if len(sizes) > 5 else (HEADS,)
    _, _, x = _scores(m, lead, dtype, mask, low, offset)
    v = m.load((HEADS, S, E), dtype)
    top = m.reduce(x, (S,), "max")
    p = m.node("exponential", m.node("subtract", x, top))
    total = m.reduce(p, (S,))
    weights = _rounded(m, m.node("divide", p, total), dtype)
    out = _rounded(m, m.contract(weights, v, (S,), F32), dtype)
    m.store(out, (*lead, T, E))
    if statistics:
        m.store(m.node("add", top, m.node("log", total)), (*lead, T))
    return m


def backward(
    sizes: tuple[int, ...], dtype=F32, mask: str = "", delta: bool = True, query: bool = True
) -> Maker:
    """dQ (of `query`), dK and dV from q, k, v, dO and the row statistics; without `delta` its row
    sums of p * dp are made here.
    """
    m = Maker(sizes, "backward")
    lead, over = ((HEADS, 5), (T, 5)) if len(sizes) > 5 else ((HEADS,), (T,))
    q, k, x = _scores(m, lead, dtype, mask, -1e30)
    v, do = m.load((HEADS, S, E), dtype), m.load((*lead, T, E), dtype)
    p = m.node("exponential", m.node("subtract", x, m.load((*lead, T))))
    m.store(m.contract(_rounded(m, p, dtype), do, over, F32), (HEADS, S, E))
    dp = m.contract(do, v, (E,), F32)
    row = m.load((*lead, T)) if delta else m.reduce(m.node("multiply", p, dp), (S,))
    ds = _rounded(m, m.node("multiply", p, m.node("subtract", dp, row)), dtype)
    scale = m.const(sizes[D] ** -0.5)
    m.store(m.node("multiply", m.contract(ds, q, over, F32), scale), (HEADS, S, D))
    if query:
        m.store(m.node("multiply", m.contract(ds, k, (S,), F32), scale), (*lead, T, D))
    return m


def weighted_rows(rows: int, columns: int, width: int, transposed: bool) -> Maker:
    """Rows divided by their sums, kept and times weights [columns, width] or their transpose."""
    m = Maker((rows, columns, width), "weighted_rows")
    x = m.load((0, 1))
    shares = m.node("divide", x, m.reduce(x, (1,)))
    weights = m.load((2, 1) if transposed else (1, 2))
    m.store(shares, (0, 1))
    m.store(m.contract(shares, weights, (1,), F32), (0, 2))
    return m
