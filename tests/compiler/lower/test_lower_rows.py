"""Reduction fusions: contractions grow together with what is between them, values stay right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from shardwright.compiler.diagnostics import CapacityError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.isa.kernel import KernelProgram, Tensor
from shardwright.compiler.lower import function
from shardwright.compiler.lower.accept import policy_of
from shardwright.compiler.lower.cost_oracle import Clock
from shardwright.compiler.lower.explain import explain_fusion
from shardwright.compiler.lower.function import Signature, lower_to_fixpoint
from shardwright.compiler.lower.rule import Budget, budget_of
from shardwright.compiler.lower.write_out import Lowered
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.options import CompileOptions
from tests.support.kernel_reference import check_lowering, lower_function

RNG = np.random.default_rng(1)
HEADS, T, S, D, E = 3, 67, 71, 5, 7


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def scores(b: Builder, q: Value, k: Value, causal: bool) -> Value:
    """[h, t, s]: scaled products, masked above the diagonal."""
    product = b.dot(q, k, ((2,), (2,)), ((0,), (0,)))
    shape = product.type.shape
    x = b.multiply(product, b.full(shape, 1 / math.sqrt(D)))
    if not causal:
        return x
    mask = b.compare(b.iota(shape[1:], 0), b.iota(shape[1:], 1), "GE")
    return b.op("select", b.broadcast(mask, shape, (1, 2)), x, b.full(shape, -1e9))


def softmax(b: Builder, x: Value) -> Value:
    def wide(row: Value) -> Value:
        return b.broadcast(row, x.type.shape, (0, 1))

    e = b.op("exponential", b.op("subtract", x, wide(b.reduce(x, "max", (2,)))))
    return b.op("divide", e, wide(b.reduce(e, "add", (2,))))


def forward(causal: bool = True) -> Graph:
    b = Builder()
    q, k, v = b.input((HEADS, T, D)), b.input((HEADS, S, D)), b.input((HEADS, S, E))
    p = softmax(b, scores(b, q, k, causal))
    return b.finish(b.dot(p, v, ((2,), (1,)), ((0,), (0,))))


def backward() -> Graph:
    """dQ, dK, dV from dO with the probabilities made again."""
    b = Builder()
    q, k, v = b.input((HEADS, T, D)), b.input((HEADS, S, D)), b.input((HEADS, S, E))
    grad = b.input((HEADS, T, E))
    p = softmax(b, scores(b, q, k, True))
    dv = b.dot(p, grad, ((1,), (1,)), ((0,), (0,)))
    dp = b.dot(grad, v, ((2,), (2,)), ((0,), (0,)))
    row = b.reduce(b.multiply(dp, p), "add", (2,))
    ds = b.multiply(p, b.op("subtract", dp, b.broadcast(row, dp.type.shape, (0, 1))))
    dq = b.dot(ds, k, ((2,), (1,)), ((0,), (0,)))
    dk = b.dot(ds, q, ((1,), (1,)), ((0,), (0,)))
    return b.finish(dq, dk, dv)


INPUTS = [normal(HEADS, T, D), normal(HEADS, S, D), normal(HEADS, S, E)]


def compute(lowered: Lowered) -> list[KernelProgram]:
    return [k for k in lowered.kernels if k.kind == "compute"]


def score_tensors(lowered: Lowered) -> int:
    return sum(math.prod(t.shape) == HEADS * T * S for t in lowered.tensors)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_forward_is_one_kernel(causal: bool) -> None:
    lowered = check_lowering(forward(causal), INPUTS)
    assert len(compute(lowered)) == 1 and lowered.scratch_bytes == 0
    assert sum(n.op == "contract" for n in compute(lowered)[0].nodes) == 2


def test_attention_backward_keeps_scores_on_chip() -> None:
    lowered = check_lowering(backward(), [*INPUTS, normal(HEADS, T, E)], tolerance=1e-5)
    assert len(compute(lowered)) == 1 and not score_tensors(lowered)


def score_traffic(lowered: Lowered) -> list[int]:
    """Score tensors read or written by kernels without a contraction, one by one."""
    counts = []
    for kernel in compute(lowered):
        views = {n.attrs["view"] for n in kernel.nodes if "view" in n.attrs}
        scored = [v for v in views if math.prod(lowered.tensors[v.tensor].shape) == HEADS * T * S]
        if scored and not any(n.op == "contract" for n in kernel.nodes):
            counts.append(len(scored))
    return counts


@pytest.mark.parametrize(("form", "counts"), [("unfused", [2, 1, 2, 1, 2]), ("fused", [2])])
def test_forms_of_the_softmax_move_the_published_number_of_score_tensors(form, counts) -> None:
    """Unfused: 8 forward, besides the reads and writes of the contractions."""
    lowered = check_lowering(forward(), INPUTS, options=CompileOptions(attention=form))
    assert score_traffic(lowered) == counts


def test_forms_order_by_bytes_and_agree_in_values() -> None:
    moved = []
    for form in ("unfused", "fused", "flash"):
        options = CompileOptions(attention=form)
        grad = normal(HEADS, T, E)
        check_lowering(backward(), [*INPUTS, grad], options=options, tolerance=1e-5)
        stories = explain_fusion(backward(), Signature(), options)
        moved.append(sum(s.moved_bytes for s in stories))
    scores = 4 * HEADS * T * S
    assert moved[0] >= moved[1] + 4 * scores and moved[1] >= moved[2] + 6 * scores


def test_grouped_keys_are_packed_for_their_group() -> None:
    """Q of 2 groups x 2 heads reads K and V of its group; dK adds the heads of a group up."""
    b = Builder()
    q, k = b.input((2, 2, T, D)), b.input((2, S, D))
    product = b.dot(q, k, ((3,), (2,)), ((0,), (0,)))
    e = b.op("tanh", product)
    dk = b.dot(e, q, ((1, 2), (1, 2)), ((0,), (0,)))
    lowered = check_lowering(b.finish(dk), [normal(2, 2, T, D), normal(2, S, D)], tolerance=1e-5)
    assert len(compute(lowered)) == 1


def test_one_tensor_in_both_roles_keeps_two_indices() -> None:
    """Q = K = V: rows and keys are independent although they come from one tensor."""
    b = Builder()
    x = b.input((HEADS, T, D))
    p = softmax(b, scores(b, x, x, False))
    graph = b.finish(b.dot(p, x, ((2,), (1,)), ((0,), (0,))))
    assert len(compute(check_lowering(graph, INPUTS[:1]))) == 1


def test_projection_of_both_sides_cannot_join() -> None:
    """K = x W spans all keys of x, so x -> K -> scores is never one kernel with x -> Q."""
    b = Builder()
    x, wq, wk = b.input((T, D)), b.input((D, D)), b.input((D, D))
    y = b.op("tanh", x)
    q, k = b.dot(y, wq, ((1,), (0,))), b.dot(y, wk, ((1,), (0,)))
    graph = b.finish(b.dot(q, k, ((1,), (1,))))
    lowered = check_lowering(graph, [normal(T, D), normal(D, D), normal(D, D)])
    assert len(compute(lowered)) > 1


def test_few_rows_do_not_make_a_row_kernel() -> None:
    b = Builder()
    q, k = b.input((32, D)), b.input((48, D))
    e = b.op("tanh", b.dot(q, k, ((1,), (1,))))
    graph = b.finish(b.dot(e, k, ((1,), (0,))))
    assert len(compute(check_lowering(graph, [normal(32, D), normal(48, D)]))) == 2


def test_packed_tiles_that_do_not_fit_stay_contractions() -> None:
    """A linear layer of d_model-sized weights is tiled by the contraction generator."""
    b = Builder()
    x, w1, w2 = b.input((4096, 4096)), b.input((4096, 11008)), b.input((11008, 4096))
    graph = b.finish(b.dot(b.op("tanh", b.dot(x, w1, ((1,), (0,)))), w2, ((1,), (0,))))
    kernels = compute(lower_function(graph))
    assert [sum(n.op == "contract" for n in k.nodes) for k in kernels] == [1, 1]


def test_scores_that_do_not_fit_are_cut_where_the_bytes_are_fewest() -> None:
    graph = forward()
    lowered = check_lowering(graph, INPUTS, budget=Budget(1 << 16, 400, 192))
    assert len(compute(lowered)) > 1


@pytest.mark.parametrize(("row_bytes", "left"), [(2380, 1), (2480, 0)])
def test_scores_between_kernels_are_made_again(row_bytes: int, left: int, monkeypatch) -> None:
    """Where the backward pass does not fit in one kernel, its halves share no score tensor."""
    budget, inputs = Budget(1 << 16, row_bytes, 192), [*INPUTS, normal(HEADS, T, E)]
    with monkeypatch.context() as without:
        without.setattr(function, "MAX_REMAT_ROUNDS", 0)
        before = score_tensors(lower_function(backward(), budget=budget))
    lowered = check_lowering(backward(), inputs, budget=budget, tolerance=1e-5)
    assert score_tensors(lowered) == left < before


@dataclass(frozen=True)
class Oracle:
    """One clock for first tilings, one for the code that will run."""

    first: Clock
    last: Clock
    limit_bytes: int = 1 << 40

    def __call__(self, program: KernelProgram, tensors: Sequence[Tensor]) -> int:
        return self.first(program, tensors)

    def searched(self, program: KernelProgram, tensors: Sequence[Tensor]) -> int:
        return self.last(program, tensors)


def count(kernel: KernelProgram, op: str) -> int:
    return sum(n.op == op for n in kernel.nodes)


def slow_exponentials(kernel: KernelProgram, _: object) -> int:
    return 10 + 1000 * count(kernel, "exponential")


@pytest.mark.parametrize(
    ("searched", "stored"), [(slow_exponentials, True), (lambda _k, _t: 10, False)]
)
def test_what_is_made_again_is_held_against_the_clock(searched: Clock, stored: bool) -> None:
    """Fewer bytes are no gain where computing twice takes longer. First tilings may say so; the
    code that will run decides.
    """
    fixpoint = lower_to_fixpoint(
        backward(), budget=Budget(1 << 16, 2480, 192), oracle=Oracle(slow_exponentials, searched)
    )
    assert bool(score_tensors(fixpoint.lowered)) is stored


def test_what_hbm_does_not_hold_is_no_code_to_compare_with() -> None:
    """The fastest form stores a tensor of scores; where it does not fit, it is made again."""
    size = HEADS * T * S * 4
    for room, stored in ((size, 1), (size - 1, 0)):
        oracle = Oracle(slow_exponentials, slow_exponentials, room)
        fixpoint = lower_to_fixpoint(backward(), budget=Budget(1 << 16, 2480, 192), oracle=oracle)
        assert score_tensors(fixpoint.lowered) == stored


def test_slower_kernels_stand_where_their_parts_pass_more_than_hbm_holds() -> None:
    def clock(kernel: KernelProgram, tensors: object) -> int:
        return 100 if count(kernel, "contract") > 1 else 10

    (kernel,) = compute(lower_to_fixpoint(forward(), oracle=Oracle(clock, clock, 1)).lowered)
    assert count(kernel, "contract") == 2


def test_slower_kernels_fall_apart_at_their_last_merge() -> None:
    """The oracle makes two contractions in one kernel slow: softmax joins one side at most."""

    def clock(kernel: KernelProgram, tensors: object) -> int:
        return 100 if count(kernel, "contract") > 1 else 10

    fixpoint = lower_to_fixpoint(forward(), oracle=Oracle(clock, clock))
    counts = [sum(n.op == "contract" for n in k.nodes) for k in compute(fixpoint.lowered)]
    assert max(counts) == 1
    (refusal, *_) = fixpoint.trials.refused.values()
    assert refusal.rule == "slower" and refusal.detail == "by 233%"


@pytest.mark.parametrize("level", [1, 2])
def test_kernels_without_code_are_split_and_never_an_error(level: int) -> None:
    def clock(kernel: KernelProgram, tensors: object) -> int:
        if count(kernel, "contract") and len(kernel.nodes) > 4:
            raise CapacityError("SW_SBUF", "tile p does not fit")
        return 10

    options, oracle = CompileOptions(optlevel=level), Oracle(clock, clock)
    fixpoint = lower_to_fixpoint(forward(), options=options, oracle=oracle)
    assert len(compute(fixpoint.lowered)) == 3
    assert {r.rule for r in fixpoint.trials.refused.values()} == {"code"}


def folded(other: int) -> Graph:
    """A MiB and more that stays on chip between a sum over columns and one over `other`."""
    b = Builder()
    x = b.input((512, 1024))
    y = b.op("tanh", b.op("exponential", x))
    return b.finish(b.reduce(y, "add", (1,)), b.reduce(b.multiply(y, y), "add", (other,)))


@pytest.mark.parametrize(("level", "other", "split"), [(2, 0, True), (2, 1, False), (1, 0, False)])
def test_loops_that_fold_both_ways_are_held_against_their_parts(
    level: int, other: int, split: bool
) -> None:
    """Where rows do not fit on chip, columns lie on the partitions, and move a few at a time."""

    def clock(kernel: KernelProgram, tensors: object) -> int:
        return 10 ** (2 * count(kernel, "reduce"))

    options = CompileOptions(optlevel=level)
    fixpoint = lower_to_fixpoint(folded(other), options=options, oracle=Oracle(clock, clock))
    most = max(count(kernel, "reduce") for kernel in compute(fixpoint.lowered))
    assert (most == 1) is split


def test_levels_try_different_merges() -> None:
    timed = [policy_of(CompileOptions(optlevel=level)).timed for level in (1, 2, 3)]
    assert timed == [{"reduction"}, {"reduction", "epilogue"}, {"reduction", "epilogue", "loop"}]
    assert policy_of(CompileOptions(model_type="transformer")).margin > 0


def test_budgets_are_those_of_the_machine() -> None:
    first, later = (load_target(name) for name in ("trn1.32xlarge", "trn2.48xlarge"))
    budget = budget_of(first, CompileOptions())
    assert budget.loop_bytes == 96 * 1024  # half of the 192 KiB of a partition
    unet = budget_of(first, CompileOptions(model_type="unet-inference"))
    assert unet.loop_bytes == 150 * 1024
    assert budget_of(later, CompileOptions()).loop_bytes == 112 * 1024  # of 224 KiB
    narrow = replace(first, hbm_bytes_per_s_per_core=first.hbm_bytes_per_s_per_core / 2)
    assert budget_of(narrow, CompileOptions()).intensity == pytest.approx(
        2 * budget.intensity, abs=1
    )


def test_result_of_a_sum_may_be_converted_and_stored_in_place() -> None:
    b = Builder()
    q, k, stack = b.input((T, D)), b.input((S, D)), b.input((4, S, D), DType.BF16)
    e = b.op("tanh", b.dot(q, k, ((1,), (1,))))
    dk = b.reshape(b.convert(b.dot(e, q, ((0,), (0,))), DType.BF16), (1, S, D))
    zero, one = b.constant(0, DType.I32), b.constant(1, DType.I32)
    graph = b.finish(b.dynamic_update_slice(stack, dk, (one, zero, zero)))
    held = normal(4, S, D).astype(DType.BF16.numpy)
    signature = Signature(aliases=((0, 2),))
    one_rounding = 2.0**-8  # of bf16: fp32 sums in two orders may lie on both sides of a tie
    given = [normal(T, D), normal(S, D), held]
    lowered = check_lowering(graph, given, signature, tolerance=one_rounding)
    assert len(compute(lowered)) == 1


def test_elementwise_work_joins_its_contraction_as_an_epilogue() -> None:
    b = Builder()
    x, w, bias, gate = (b.input(s) for s in ((T, 9), (9, S), (S,), (T, S)))
    y = b.dot(x, w, ((1,), (0,)))
    y = b.op("logistic", b.add(y, b.broadcast(bias, (T, S), (1,))))
    inputs = [normal(T, 9), normal(9, S), normal(S), normal(T, S)]
    lowered = check_lowering(b.finish(b.multiply(y, gate)), inputs)
    assert len(compute(lowered)) == 1


def test_the_quick_level_leaves_epilogues_alone() -> None:
    b = Builder()
    x, w = b.input((512, 4096)), b.input((4096, 4096))
    graph = b.finish(b.op("tanh", b.dot(x, w, ((1,), (0,)))))
    for level, kernels in ((1, 2), (2, 1), (3, 1)):
        lowered = lower_function(graph, options=CompileOptions(optlevel=level))
        assert len(compute(lowered)) == kernels


def test_sums_over_a_large_result_stay_out_of_the_epilogue() -> None:
    b = Builder()
    x, w = b.input((512, 4096)), b.input((4096, 4096))
    y = b.op("tanh", b.dot(x, w, ((1,), (0,))))
    stories = explain_fusion(b.finish(b.reduce(y, "add", (1,))), Signature())
    assert [s.operators for s in stories] == [1, 2]
    (merge,) = stories[0].refused
    assert merge.num_bytes == 512 * 4096 * 4 and merge.refusal.rule == "intensity"


def test_explained_bytes_are_the_bytes_of_the_kernels() -> None:
    (story,) = explain_fusion(forward(), Signature())
    stored = 4 * (HEADS * (T * D + S * D + S * E) + HEADS * T * E)
    assert story.moved_bytes == stored and story.avoided_bytes > 10 * HEADS * T * S * 4


def test_explanation_names_the_first_failed_rule() -> None:
    def oracle(kernel: KernelProgram, tensors: object) -> int:
        return 1 << 4 * sum(n.op == "contract" for n in kernel.nodes)

    graph = forward()
    stories = explain_fusion(graph, Signature(), oracle=Oracle(oracle, oracle))
    assert {m.refusal.rule for s in stories for m in s.refused} == {"slower"}
    few = lower_to_fixpoint(graph, budget=Budget(1 << 16, 400, 192))
    assert len(few.groups.parts) > 1
    stories = explain_fusion(graph, Signature(), CompileOptions(attention="fused"))
    assert {m.refusal.rule for s in stories for m in s.refused} == {"kind"}


MIB = 2**20


@pytest.mark.parametrize(
    ("passed", "ratio", "stays"),
    [
        (3, 1.1, False),
        (5, 1.1, True),
        (5, 1.5, False),
        (5, math.inf, False),
        (300, 1.5, True),
    ],
)
def test_memory_between_kernels_has_a_price(passed: int, ratio: float, stays: bool) -> None:
    """A form that passes more than a 64th of HBM from kernel to kernel has to be 1.4 times as fast
    as one that does not; what HBM does not hold is no form.
    """

    def form(mib: int, time: float) -> SimpleNamespace:
        scores = Tensor("scores", (mib, MIB // 4), DType.F32, "scratch")
        lowered = SimpleNamespace(tensors=[scores], expected_ps=time)
        return SimpleNamespace(lowered=lowered)

    def clock(_kernel: object, _: object) -> int:
        raise AssertionError("forms were timed when they were written")

    lean, fast = form(0, 1000.0 * ratio), form(passed, 1000.0)
    chosen = function._quicker([fast, lean], Oracle(clock, clock, 256 * MIB))
    assert (chosen is lean) is stays
