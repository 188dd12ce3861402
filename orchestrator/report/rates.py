"""FLOPs of a step, and what MFU and HFU make of them: one definition for every model.

MFU counts what the model needs: three times the contractions that its loss depends on, attention in
full; of products with frozen weights two, since those have no gradient. Source: PaLM, appendix B,
6 P + 12 L h s per token, counted on the captured graph, so that it holds for any architecture;
published figures are compared by the same formula (`published_mfu.py`).
HFU counts the contractions that cores run: recomputation, replicas of ranks and padding too, masked
scores where the code goes over them or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from shardwright.compiler.frontend.roles import UNCHANGED_ROLES
from shardwright.compiler.frontend.task import Mode
from shardwright.compiler.ir.analysis import flops
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.traits import CONTRACTIONS
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.neff.schedule import run_counts
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.rewriting.driver import Rewrite
from shardwright.orchestrator.report.hidden import attention_flops, levels
from shardwright.orchestrator.report.text import Facts
from shardwright.orchestrator.road.build import Built
from shardwright.sharding.indices.dims import reached

SERVED = 1
TRAINED = 3  # a backward pass has two contractions per contraction of the forward pass
CAUSAL, FULL, NO_ATTENTION = "causal", "full", "none"


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of contractions of one step, all samples: what the model needs with its attention in
    full, and without scores that a causal mask hides; what is captured, recomputation included and
    copies of key-value heads not; what cores run. `attention` says what kind the model has.
    """

    model: int
    causal: int
    captured: int
    executed: int
    attention: str

    def rates(self, seconds: float, peak: float) -> Facts:
        """The rates of a step of so many seconds on cores of that peak, in FLOP/s."""
        counts = asdict(self)
        attention = counts.pop("attention")
        return {
            "mfu": self.model / seconds / peak,
            "mfu_causal": self.causal / seconds / peak,
            "hfu": self.executed / seconds / peak,
            "attention": attention,
            "flops": counts,
        }


def step_flops(built: Built) -> StepFlops:
    """Those of a built job. The model needs no more than what runs: first layers have fewer than
    two contractions of the backward pass."""
    forward, executed = FORWARD(*built.counted), _executed(built)
    needed = passes_of(forward, built.counted_roles, built.mode)
    attention = attention_flops(forward, needed)
    model = min(built.of_a_step(_needed(forward, needed)), executed)
    kind = CAUSAL if attention.hidden else FULL if attention.whole else NO_ATTENTION
    return StepFlops(
        model=model,
        causal=max(0, model - built.of_a_step(attention.hidden)),
        captured=built.of_a_step(flops(built.counted[0], CONTRACTIONS)),
        executed=executed,
        attention=kind,
    )


def passes_of(forward: Graph, roles: Sequence[str], mode: Mode) -> Callable[[Op], int]:
    """How many contractions a step needs per contraction of its forward pass, whose first inputs
    have these roles: that one, and one for the gradient of each operand where it trains. A frozen
    weight has no gradient, nor has what is made of the batch and of frozen weights alone.
    """
    if not mode.trains:
        return lambda op: SERVED
    given = list(zip(roles, forward.inputs, strict=False))
    by_frozen = reached(forward, [v for role, v in given if role in UNCHANGED_ROLES])
    without = by_frozen - reached(forward, [v for role, v in given if role == "parameter"])
    return lambda op: TRAINED - sum(v in without for v in op.operands[:2])


def _needed(forward: Graph, passes: Callable[[Op], int]) -> int:
    """FLOPs of all contractions of a graph, each as often as it is needed."""
    return sum(
        times * passes(op) * OPS[op.name].flops(op)
        for level, times in levels(forward)
        for op in level.ops
        if op.name in CONTRACTIONS
    )


def product_types(graph: Graph) -> dict[str, float]:
    """The share of the FLOPs of contractions by what type their operands have, largest first."""
    found = Counter[str]()
    for level, times in levels(graph):
        for op in level.ops:
            if op.name in CONTRACTIONS:
                widest = max((v.type.dtype for v in op.operands), key=lambda dtype: dtype.bytes)
                found[widest.value] += times * OPS[op.name].flops(op)
    total = sum(found.values()) or 1
    return {name: count / total for name, count in found.most_common()}


def only_result(graph: Graph, output: int = 0) -> Graph:
    """`graph` with one of its outputs, and what that depends on."""
    return dce(with_ops(graph, graph.ops, (graph.outputs[output],)))


FORWARD = Rewrite(
    "forward", only_result, "what the loss depends on, for the FLOPs of a forward pass"
)


def _executed(built: Built) -> int:
    """Contractions of the programs as cores run them, replicas and padding included."""
    step = built.plan.step
    runs = Counter[str]()
    for schedule in step.schedules:
        runs.update(run_counts(schedule))
    cores = built.layout.mesh.num_cores // len(step.schedules)  # that run each program
    return sum(cores * runs[p.name] * flops(p.graph, CONTRACTIONS) for p in step.programs)
