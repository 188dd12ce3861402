"""Why kernels are what they are: bytes moved and avoided, and the first rule that refused a merge.

The refusals are asked again for the finished kernels, so that lowering itself keeps no record of
the thousands of merges it tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.ir.traits import CONTRACTIONS
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa.kernel import KernelProgram, Tensor
from shardwright.compiler.lower.cost_oracle import CostOracle
from shardwright.compiler.lower.function import Fixpoint, Signature, lower_to_fixpoint
from shardwright.compiler.lower.group import Groups, Part
from shardwright.compiler.lower.reduction_rule import ReductionRule
from shardwright.compiler.lower.rule import traffic
from shardwright.compiler.lower.space import Refusal
from shardwright.compiler.lower.task import COLLECTIVE, Task
from shardwright.compiler.lower.write_out import kernel_program, title
from shardwright.compiler.options import DEFAULTS, CompileOptions


@dataclass(frozen=True, slots=True)
class RefusedMerge:
    """A kernel that reads `num_bytes` of this one's result through HBM, and why it is not merged
    with it.
    """

    reader: str
    num_bytes: int
    refusal: Refusal


@dataclass(slots=True)
class KernelStory:
    """A compute kernel: name, the user's line, HBM bytes moved (every input read once, every output
    written once) and avoided against an operator at a time; `notes` on its code.
    """

    name: str
    loc: Loc
    operators: int
    moved_bytes: int
    avoided_bytes: int
    refused: list[RefusedMerge] = field(default_factory=list)
    notes: tuple[str, ...] = ()


Describe = Callable[[KernelProgram, Sequence[Tensor]], tuple[str, ...]]
"""Notes on the code of a kernel."""


def explain_fusion(
    graph: Graph,
    signature: Signature,
    options: CompileOptions = DEFAULTS,
    oracle: CostOracle | None = None,
    describe: Describe | None = None,
) -> list[KernelStory]:
    """The kernels of a function in program order; reduction fusions with what `describe` says of
    them. Raises what `lower_to_fixpoint` raises.
    """
    return stories_of(lower_to_fixpoint(graph, signature, options, oracle), describe)


def stories_of(fixpoint: Fixpoint, describe: Describe | None = None) -> list[KernelStory]:
    """`explain_fusion` of a function that is lowered already."""
    groups = fixpoint.groups
    stories = {
        kernel: _story(groups, part)
        for kernel, part in sorted(groups.parts.items(), key=lambda item: min(item[1].members))
        if groups.body.tasks[kernel].kind != COLLECTIVE
    }
    for kernel, part in groups.parts.items() if describe else ():
        if part.phase == ReductionRule.phase and describe:
            program = kernel_program(groups, part.members)
            stories[kernel].notes = describe(program, groups.storage.tensors)
    for producer, consumer, num_bytes in _borders(groups):
        if producer in stories and consumer in stories:
            refusal = _first_refusal(fixpoint, producer, consumer)
            merge = RefusedMerge(stories[consumer].name, num_bytes, refusal)
            stories[producer].refused.append(merge)
    return list(stories.values())


def _story(groups: Groups, part: Part) -> KernelStory:
    tasks = groups.tasks(part.members)
    unfused = sum(traffic(groups, (t.number,)) for t in tasks)
    moved = traffic(groups, part.members)
    return KernelStory(title(tasks), _loc(tasks), len(tasks), moved, unfused - moved)


def _loc(tasks: Sequence[Task]) -> Loc:
    """The line of the most expensive-looking op: the first contraction, else the last op."""
    named = [t for t in tasks if t.op.loc != Loc()] or tasks
    return next((t.op.loc for t in named if t.op.name in CONTRACTIONS), named[-1].op.loc)


def _borders(groups: Groups) -> list[tuple[int, int, int]]:
    """(producing kernel, reading kernel, bytes of the largest value) per pair of kernels."""
    kernel = groups.kernel_of
    found: dict[tuple[int, int], int] = {}
    for producer, consumer, value in groups.edges():
        pair = (kernel[producer], kernel[consumer])
        if pair[0] != pair[1]:
            found[pair] = max(found.get(pair, 0), value.type.num_bytes)
    return [(a, b, n) for (a, b), n in found.items()]


def _first_refusal(fixpoint: Fixpoint, a: int, b: int) -> Refusal:
    """The trial that undid a merge, else what the last phase says that merges such kernels."""
    groups = fixpoint.groups
    first, second = groups.parts[a], groups.parts[b]
    union = first.members | second.members
    for members, refusal in fixpoint.trials.refused.items():
        if union <= members:
            return refusal
    if not groups.graph().acyclic(a, b):
        return Refusal("cycle", "another kernel stands between them")
    if groups.may_not_fuse(union):
        return Refusal("order", "one overwrites what the other still reads")
    said = [rule.refusal(groups, first, second) for rule in reversed(fixpoint.rules)]
    found = [refusal for refusal in said if refusal is not None]
    if len(found) < len(said):
        return Refusal("order", "merged with something else first")
    return next((r for r in found if r.rule != "kind"), found[0])
