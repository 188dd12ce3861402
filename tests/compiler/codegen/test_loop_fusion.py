"""Loop fusions: generated code run by L0 equals the kernel's meaning run by L1."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.codegen import generate
from shardwright.compiler.codegen.search import EFFORTS
from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Node, Tensor, View
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.options import CompileOptions
from tests.compiler.codegen.kernel_harness import (
    BF16,
    F32,
    I32,
    PRED,
    TARGET,
    U32,
    Maker,
    arrays,
    check,
    count,
    distance,
)
from tests.support import l0, l1


def add(n: int) -> Maker:
    m = Maker((n,), "add")
    m.store(m.node("add", m.load((0,)), m.load((0,))), (0,))
    return m


def broadcasts(b: int, t: int, d: int) -> Maker:
    """Every broadcast form in one kernel: row vector, column vector, scalar, middle iter dim."""
    m = Maker((b, t, d), "broadcasts")
    x = m.load((0, 1, 2))
    y = m.node("add", x, m.load((2,)))
    y = m.node("multiply", y, m.load((0, 1)))
    y = m.node("subtract", m.load(()), y)
    y = m.node("maximum", y, m.load((1,)))
    y = m.node("add", y, m.load((0, 2)))
    m.store(y, (0, 1, 2))
    return m


def outer_sum(r: int, c: int) -> Maker:
    m = Maker((r, c), "outer")
    m.store(m.node("add", m.load((0,)), m.load((1,))), (0, 1))
    return m


def rms_norm(rows: int, d: int, dtype=F32) -> Maker:
    m = Maker((rows, d), "rms_norm")
    x, g = m.load((0, 1), dtype), m.load((1,), dtype)
    if dtype is not F32:
        x, g = (m.node("convert", v, dtype=F32) for v in (x, g))
    s = m.reduce(m.node("multiply", x, x), (1,))
    v = m.node("add", m.node("multiply", s, m.const(1 / d)), m.const(1e-5))
    y = m.node("multiply", m.node("multiply", x, m.node("rsqrt", v)), g)
    m.store(m.node("convert", y, dtype=dtype), (0, 1))
    return m


def rms_norm_backward(rows: int, d: int) -> Maker:
    """Row sums and a column sum of the same rows."""
    m = Maker((rows, d), "rms_norm_backward")
    x, dy, g = m.load((0, 1)), m.load((0, 1)), m.load((1,))
    r = m.node("rsqrt", m.reduce(m.node("multiply", x, x), (1,)))
    n = m.node("multiply", x, r)
    m.store(m.reduce(m.node("multiply", dy, n), (0,)), (1,))
    dn = m.node("multiply", dy, g)
    dot = m.reduce(m.node("multiply", dn, n), (1,))
    m.store(m.node("multiply", m.node("subtract", dn, m.node("multiply", n, dot)), r), (0, 1))
    return m


def softmax(rows: int, d: int, over: int = 1, log: bool = False) -> Maker:
    m = Maker((rows, d), "softmax")
    x = m.load((0, 1))
    shifted = m.node("subtract", x, m.reduce(x, (over,), "max"))
    e = m.node("exponential", shifted)
    total = m.reduce(e, (over,))
    y = m.node("subtract", shifted, m.node("log", total)) if log else m.node("divide", e, total)
    m.store(y, (0, 1))
    return m


def cross_entropy(rows: int, v: int) -> Maker:
    """Log-softmax, label picked by iota == label, mean over rows, and the gradient."""
    m = Maker((rows, v), "cross_entropy")
    x, label = m.load((0, 1)), m.load((0,), I32)
    shifted = m.node("subtract", x, m.reduce(x, (1,), "max"))
    e = m.node("exponential", shifted)
    total = m.reduce(e, (1,))
    logp = m.node("subtract", shifted, m.node("log", total))
    column = m.node("iota", iter_dims=(1,), dtype=I32, atom=1, start=Affine(), step=1)
    hit = m.node("compare", column, label, dtype=PRED, direction="EQ")
    picked = m.reduce(m.node("select", hit, logp, m.const(0.0), dtype=F32), (1,))
    m.store(m.node("multiply", m.reduce(picked, (0,)), m.const(-1 / rows)), ())
    onehot = m.node("convert", hit, dtype=F32)
    m.store(m.node("subtract", m.node("divide", e, total), onehot), (0, 1))
    return m


def adamw(n: int) -> Maker:
    """Parameter and both moments updated in place."""
    m = Maker((n,), "adamw")
    p, mu, nu, g = (m.load((0,)) for _ in range(4))
    lr, scale = m.load(()), m.load(())
    g = m.node("multiply", g, scale)
    c = m.const
    mu2 = m.node("add", m.node("multiply", mu, c(0.9)), m.node("multiply", g, c(0.1)))
    g2 = m.node("multiply", g, g)
    nu2 = m.node("add", m.node("multiply", nu, c(0.95)), m.node("multiply", g2, c(0.05)))
    nu2 = m.node("abs", nu2)
    step = m.node("divide", mu2, m.node("add", m.node("sqrt", nu2), c(1e-8)))
    step = m.node("add", step, m.node("multiply", p, c(0.1)))
    p2 = m.node("subtract", p, m.node("multiply", step, lr))
    for value, source in ((p2, 0), (mu2, 1), (nu2, 2)):
        m.store(value, (0,), tensor=m.tensor((0,), F32, "output", alias=source))
    return m


def column_sum(r: int, c: int, kind: str = "add") -> Maker:
    m = Maker((r, c), f"column_{kind}")
    m.store(m.reduce(m.load((0, 1)), (0,), kind), (1,))
    return m


def square_sum(*sizes: int) -> Maker:
    m = Maker(sizes, "square_sum")
    x = m.load(tuple(range(len(sizes))))
    m.store(m.reduce(m.node("multiply", x, x), tuple(range(len(sizes)))), ())
    return m


def casts(n: int) -> Maker:
    m = Maker((n, 7), "casts")
    x = m.node("multiply", m.load((0, 1)), m.const(3.7))
    i = m.node("convert", x, dtype=I32)
    m.store(i, (0, 1))
    m.store(m.node("convert", x, dtype=BF16), (0, 1))
    m.store(
        m.node(
            "convert", m.node("compare", x, m.const(0.0), dtype=PRED, direction="GT"), dtype=F32
        ),
        (0, 1),
    )
    m.store(m.node("convert", m.node("add", i, m.const(5, I32)), dtype=BF16), (0, 1))
    return m


def integers(n: int) -> Maker:
    """A threefry-like round in exact 32-bit arithmetic, to floats by bit tricks."""
    m = Maker((n,), "integers")
    x, y = (m.load((0,), U32) for _ in range(2))
    for r in (13, 15, 26, 6):
        x = m.node("add", m.node("multiply", x, m.const(2654435761, U32)), y)
        left = m.node("shift_left", y, m.const(r, U32))
        right = m.node("shift_right_logical", y, m.const(32 - r, U32))
        y = m.node("xor", m.node("or", left, right), x)
    bits = m.node("or", m.node("shift_right_logical", y, m.const(9, U32)), m.const(0x3F800000, U32))
    m.store(m.node("subtract", m.node("bitcast_convert", bits, dtype=F32), m.const(1.0)), (0,))
    m.store(x, (0,))
    return m


def unary(n: int) -> Maker:
    m = Maker((n,), "unary")
    x = m.load((0,))
    positive = m.node("add", m.node("abs", x), m.const(0.5))
    for op in ("sqrt", "rsqrt", "log", "log_plus_one"):
        m.store(m.node(op, positive), (0,))
    ops = ("exponential", "exponential_minus_one", "logistic", "tanh", "sine", "cosine", "sign")
    for op in (*ops, "floor", "ceil", "round_nearest_even", "negate"):
        m.store(m.node(op, x), (0,))
    m.store(m.node("is_finite", m.node("divide", m.const(1.0), x), dtype=PRED), (0,))
    m.store(m.node("power", positive, m.const(1.5)), (0,))
    m.store(m.node("remainder", x, positive), (0,))
    m.store(m.node("clamp", m.const(-1.0), x, m.const(1.0), dtype=F32), (0,))
    m.store(m.node("clamp", m.const(-1.0), x, positive, dtype=F32), (0,))
    return m


def causal_mask(t: int) -> Maker:
    """iota on partitions and free, predicates, select with a constant branch, register offset."""
    m = Maker((3, t, t), "causal")
    q = m.node("iota", iter_dims=(1,), dtype=I32, atom=1, start=Affine(2), step=3)
    k = m.node("iota", iter_dims=(2,), dtype=I32, atom=2, start=Affine(), step=2)
    keep = m.node("compare", k, q, dtype=PRED, direction="LE")
    keep = m.node("and", keep, m.node("not", m.load((2,), PRED)))
    m.store(m.node("select", keep, m.load((0, 1, 2)), m.const(-1e30), dtype=F32), (0, 1, 2))
    return m


def rotary(t: int, h: int, d: int) -> Maker:
    """Halves of a head as two windows of one tensor."""
    m = Maker((t, h, d), "rotary")
    tensor, out = (Tensor(n, (t, h, 2 * d), F32, k) for n, k in (("x", "input"), ("y", "output")))
    m.tensors += [tensor, out]
    strides = (h * 2 * d, 2 * d, 1)
    x, y = (
        m.node("load", iter_dims=(0, 1, 2), dtype=F32, view=View(0, Affine(o), strides))
        for o in (0, d)
    )
    c, s = m.load((0, 2)), m.load((0, 2))
    one = m.node("subtract", m.node("multiply", x, c), m.node("multiply", y, s))
    two = m.node("add", m.node("multiply", y, c), m.node("multiply", x, s))
    for value, o in ((one, 0), (two, d)):
        attrs = {"view": View(1, Affine(o), strides)}
        m.nodes.append(Node("store", (value,), (0, 1, 2), F32, attrs))
    return m


def constants(r: int, c: int) -> Maker:
    m = Maker((r, c), "constants")
    m.store(m.const(0.0), (0, 1))
    m.store(m.const(1.5, BF16), (1, 0))
    m.store(m.const(True, PRED), (0,))
    return m


CASES: dict[str, Callable[[], Maker]] = {
    **{f"add-{n}": lambda n=n: add(n) for n in (1, 5, 131, 1030, 100003, 128 * 4096)},
    "broadcasts-odd": lambda: broadcasts(3, 67, 131),
    "broadcasts-even": lambda: broadcasts(4, 128, 64),
    "outer": lambda: outer_sum(200, 131),
    "rms-small": lambda: rms_norm(7, 13),
    "rms-odd": lambda: rms_norm(131, 67),
    "rms": lambda: rms_norm(520, 200),
    "rms-bf16": lambda: rms_norm(200, 520, BF16),
    "rms-backward": lambda: rms_norm_backward(300, 200),
    "rms-backward-odd": lambda: rms_norm_backward(131, 67),
    "softmax": lambda: softmax(200, 131),
    "softmax-over-rows": lambda: softmax(131, 67, over=0),
    "softmax-wide": lambda: softmax(130, 40000),
    "log-softmax": lambda: softmax(67, 520, log=True),
    "log-softmax-wide": lambda: softmax(67, 32000, log=True),
    "cross-entropy": lambda: cross_entropy(200, 131),
    "cross-entropy-wide": lambda: cross_entropy(67, 33000),
    "adamw": lambda: adamw(13 * 1030),
    "adamw-big": lambda: adamw(300007),
    **{f"column-{k}": lambda k=k: column_sum(520, 131, k) for k in ("add", "max", "min")},
    "column-wide": lambda: column_sum(200, 9001),
    "column-max-wide": lambda: column_sum(131, 5000, "max"),
    "row-multiply": lambda: column_sum(13, 67, "multiply"),
    "sum-13": lambda: square_sum(13),
    "sum-prime": lambda: square_sum(100003),
    "sum-big": lambda: square_sum(1024, 515),
    "casts": lambda: casts(131),
    "integers": lambda: integers(1030),
    "unary": lambda: unary(520),
    "causal": lambda: causal_mask(67),
    "rotary": lambda: rotary(131, 4, 32),
    "constants": lambda: constants(131, 67),
}


@pytest.mark.parametrize("name", CASES)
def test_loop_code_computes_its_kernel(name: str) -> None:
    m = CASES[name]()
    bf16 = any(t.dtype is BF16 for t in m.tensors)
    check(m, 1e-2 if bf16 else 1e-6)


def test_code_stays_rolled() -> None:
    """The size of the code does not follow the number of rows."""
    for level, most in ((1, 12), (2, 12 * max(max(row) for row in EFFORTS[2].unroll))):
        options = CompileOptions(optlevel=level)
        for rows in (128 * 8, 128 * 8000):
            m = rms_norm(rows, 512)
            assert count(generate(m.program(), m.tensors, TARGET, 0, options).kernel) <= most


def shifted(n: int, shift: int, gap: int = 1) -> Maker:
    """y[i + shift] = -x[i] through one buffer, elements `gap` apart."""
    m = Maker((n,), "shift")
    size = n * gap + shift
    m.tensors.append(Tensor("x", (size,), F32, "input"))
    m.tensors.append(Tensor("y", (size,), F32, "output", alias=0))
    x = m.node("load", iter_dims=(0,), dtype=F32, view=View(0, Affine(), (gap,)))
    y = m.node("negate", x)
    m.nodes.append(Node("store", (y,), (0,), F32, {"view": View(1, Affine(shift), (gap,))}))
    return m


def test_in_place_updates_are_pointwise_disjoint_or_refused() -> None:
    check(shifted(100003, 0), 0)
    check(shifted(5003, 1, gap=2), 0)
    check(shifted(5003, 5003), 0)
    for overlapping in (shifted(100003, 1), shifted(300, 4, gap=2)):
        with pytest.raises(CompileError, match="SW_CODEGEN_IN_PLACE"):
            overlapping.kernel()


def test_refuses_what_it_cannot_do() -> None:
    m = Maker((4,), "wide")
    m.store(m.load((0,), I32), (0,))
    m.nodes[0] = Node("load", (), (0,), m.nodes[0].dtype.F64, m.nodes[0].attrs)
    with pytest.raises(CompileError, match="SW_CODEGEN_DTYPE"):
        m.kernel()


@st.composite
def loop_programs(draw) -> Maker:
    """Random elementwise and reduction chains over up to three iter dims with random layouts."""
    sizes = tuple(
        draw(st.sampled_from((1, 2, 3, 13, 67, 131, 200))) for _ in range(draw(st.integers(1, 3)))
    )
    m = Maker(sizes, "random")
    iter_dims = list(range(len(sizes)))

    def spanned() -> tuple[int, ...]:
        chosen = [a for a in iter_dims if draw(st.booleans())]
        return tuple(draw(st.permutations(chosen)))

    live = [m.load(tuple(draw(st.permutations(iter_dims)))), m.load(spanned())]
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(("binary", "unary", "reduce", "load")))
        if kind == "binary":
            op = draw(st.sampled_from(("add", "multiply", "maximum")))
            live.append(m.node(op, draw(st.sampled_from(live)), draw(st.sampled_from(live))))
        elif kind == "unary":
            live.append(
                m.node(
                    draw(st.sampled_from(("tanh", "logistic", "abs"))), draw(st.sampled_from(live))
                )
            )
        elif kind == "load":
            live.append(m.load(spanned()))
        else:
            value = draw(st.sampled_from(live))
            over = [a for a in m.nodes[value].iter_dims if draw(st.booleans())]
            if over:
                reduced = m.reduce(value, tuple(over), draw(st.sampled_from(("add", "max"))))
                live.append(m.node("multiply", reduced, m.const(1e-2)))
    stored = {live[-1], draw(st.sampled_from(live))}
    for value in stored:
        m.store(value, tuple(draw(st.permutations(m.nodes[value].iter_dims))))
    return m


@settings(deadline=None, max_examples=60)
@given(loop_programs())
def test_random_loops(m: Maker) -> None:
    try:
        program = m.kernel()
    except CompileError as error:
        assert error.code in ("SW_CODEGEN_STRIP", "SW_CODEGEN_IN_PLACE")
        return
    # Positive data: a sum that cancels has no accurate digits to compare.
    inputs = {n: np.abs(a) for n, a in enumerate(arrays(m.tensors, 0)) if not np.isnan(a).any()}
    got, want = arrays(m.tensors, 0, inputs), arrays(m.tensors, 0, inputs)
    l1.run_kernel(m.program(), want, {})
    l0.run_kernel(program, got, {})
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) <= 1e-6


def test_registers_shift_views_and_start_after_the_given_one() -> None:
    sizes, stride = (5, 200), 1000
    tensors = [Tensor("x", (4, 1000), F32, "input"), Tensor("y", (4, 1000), F32, "output")]
    views = [View(t, Affine(3, ((0, stride),)), (200, 1)) for t in (0, 1)]
    nodes = (
        Node("load", (), (0, 1), F32, {"view": views[0]}),
        Node("register", (), (), F32, {"value": Affine(1, ((0, 2),))}),
        Node("multiply", (0, 1), (0, 1), F32),
        Node("store", (2,), (0, 1), F32, {"view": views[1]}),
    )
    tensors = [Tensor(t.name, (4 * stride + 3,), F32, t.kind) for t in tensors]
    program = KernelProgram("compute", "layer", sizes, nodes)
    made = generate(program, tensors, TARGET, 7)
    assert made.next_register >= 7
    got, want = arrays(tensors, 0), arrays(tensors, 0)
    for layer in (0, 2):
        l1.run_kernel(program, want, {0: layer})
        l0.run_kernel(made.kernel, got, {0: layer})
    assert distance(got[1], want[1]) == 0 and np.isfinite(got[1]).sum() == 2000


@pytest.mark.parametrize(
    "make", [lambda: softmax(512, 4100, over=1), lambda: rms_norm(512, 4096, BF16)]
)
def test_a_sum_of_rows_is_a_by_product_of_scalar(make) -> None:
    """What an activation makes is not read again to be summed: Vector reduces no block of it, at
    most a column that an earlier block left.
    """
    m = make()
    body = list(walk(m.kernel().body))
    assert any(i.opcode == "activation_reduce" for i in body)
    sums = [i for i in body if i.opcode == "tensor_reduce" and i.attrs["op"] == "add"]
    assert all(math.prod(i.srcs[0].shape[1:]) == 1 for i in sums)
    check(m, 1e-2 if m.nodes[0].dtype is BF16 else 1e-6)


def test_a_sum_of_what_is_written_again_takes_a_pass_of_its_own() -> None:
    """A rounded value is not what Scalar summed."""
    m = Maker((256, 2048), "rounded")
    y = m.node("convert", m.node("exponential", m.load((0, 1))), dtype=BF16)
    m.store(m.reduce(m.node("convert", y, dtype=F32), (1,)), (0,))
    m.store(y, (0, 1))
    assert not any(i.opcode == "activation_reduce" for i in walk(m.kernel().body))
    check(m, 1e-6)


def test_a_square_goes_to_the_engine_with_less_to_do() -> None:
    """Sums keep Vector busy, so Scalar squares; alone with an exponential it is the other way."""
    m = rms_norm(1024, 4096)
    squares = [i for i in walk(m.kernel().body) if i.attrs.get("func") == "square"]
    assert squares and {i.opcode for i in squares} <= {"activation", "activation_reduce"}
    m = Maker((1024, 4096), "busy scalar")
    x = m.load((0, 1))
    y = m.node("tanh", m.node("exponential", x))
    m.store(m.node("tanh", m.node("sine", m.node("multiply", y, y))), (0, 1))
    opcodes = {i.opcode for i in walk(check(m).body) if i.attrs.get("op") == "multiply"}
    assert opcodes == {"tensor_tensor"}


def test_results_round_when_they_are_written() -> None:
    """No instruction only converts what arithmetic has made, however few columns there are."""
    for columns in (64, 700):
        m = Maker((256, columns), "rounding")
        x, y = m.load((0, 1)), m.load((0, 1))
        m.store(m.node("convert", m.node("multiply", x, y), dtype=BF16), (0, 1))
        assert sum(i.opcode != "dma" for i in walk(m.kernel().body)) == 1
        check(m, 1e-2)
