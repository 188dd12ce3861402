"""Which merges are kept: a kernel that is slower than its parts, or has no code, is split again.

The cost oracle (`compiler/fusion/`) generates code and tells its simulated time. A kernel is
compared with the parts it would have without the phase that made it; if it loses, its last merge is
undone and the halves are asked the same question. So no refusal of the code generator for a merged
kernel ever reaches the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.ir.traits import REDUCTIONS
from shardwright.compiler.lower.cost_oracle import QUICK_MARGIN, CostOracle, time_or_inf
from shardwright.compiler.lower.group import Groups, Part
from shardwright.compiler.lower.space import Refusal
from shardwright.compiler.lower.task import ClashError, NeedsCopyError, NeedsScratchError
from shardwright.compiler.lower.write_out import kernel_program
from shardwright.compiler.model_types import MODEL_TYPES
from shardwright.compiler.options import CompileOptions

SEARCH_BYTES = 1 << 20
"""Loop merges that keep less than this on chip are not timed: both forms end within a few DMA
descriptors (our choice).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the optimization level and the model type mean for merges.

    `timed`: phases whose merges are compared by simulated time (others only need code, `coded`);
    `crossing`: loop fusions that fold both ways are too.
    `margin`: how much slower than its parts a kernel may be, for what it saves in HBM.
    """

    coded: frozenset[str] = frozenset()
    timed: frozenset[str] = frozenset()
    crossing: bool = False
    margin: float = 0.0


def policy_of(options: CompileOptions) -> Policy:
    """-O1 times reduction fusions, by their first tiling as every level does, keeps those that are
    a little slower (`QUICK_MARGIN`), and leaves epilogues alone; -O2 times epilogues, and of large
    loop fusions those that fold both ways; -O3 times all of those. What a model type
    changes is in `compiler/model_types.py`.

    Without the clock a reduction fusion would be kept wherever it has code. One of both products of
    an
    MLP has, where a row fits on chip: a hundred times as slow as two kernels.
    """
    level, model = options.optlevel, MODEL_TYPES[options.model_type]
    phases = {
        1: ("reduction",),
        2: ("reduction", "epilogue"),
        3: ("reduction", "epilogue", "loop"),
    }[level]
    return Policy(
        coded=frozenset(("reduction", "epilogue", *(("loop",) if model.wide_norms else ()))),
        timed=frozenset(phases),
        crossing=level > 1,
        margin=max(model.keep_scores, QUICK_MARGIN if level == 1 else 0.0),
    )


class Trials:
    """Trials of the kernels of one body, and why merges were undone."""

    def __init__(self, groups: Groups, oracle: CostOracle | None, policy: Policy) -> None:
        self.groups = groups
        self.policy = policy
        self.refused: dict[frozenset[int], Refusal] = {}
        self._oracle = oracle

    def undo_merges(self) -> None:
        """Split every kernel that does not pay. Raises the errors that ask for another try."""
        if self._oracle is None:
            return
        for kernel, part in list(self.groups.parts.items()):
            kept = list(self._best(part))
            if kept != [part]:
                self.groups.replace(kernel, kept)
        self.groups.storage.reset()

    def _best(self, part: Part) -> Iterator[Part]:
        """`part`, or what is left of it after undoing merges that do not pay."""
        refusal = self._refusal(part) if self._is_tried(part) else None
        if refusal is None:
            yield part
            return
        self.refused[part.members] = refusal
        for half in part.halves:
            yield from self._best(half)

    def _is_tried(self, part: Part) -> bool:
        if part.phase == "loop":
            mine = self._is_timed(part) or "loop" in self.policy.coded
            return mine and self._internal_bytes(part) >= SEARCH_BYTES
        return part.phase in self.policy.coded | self.policy.timed

    def _is_timed(self, part: Part) -> bool:
        """Whether a kernel has to be as fast as its parts; loop fusions that fold both ways may not
        be: where their rows do not fit on chip, columns lie on the partitions, a few to each.
        """
        if part.phase in self.policy.timed:
            return True
        return part.phase == "loop" and self.policy.crossing and self._folds_both(part)

    def _folds_both(self, part: Part) -> bool:
        """Whether some reductions of a kernel keep what others add up."""
        tasks = (self.groups.body.tasks[n] for n in part.members)
        folds = [(t.data[0].type.shape, t.op.attrs.dims) for t in tasks if t.op.name in REDUCTIONS]
        return any(one == other and not set(a) & set(b) for one, a in folds for other, b in folds)

    def _internal_bytes(self, part: Part) -> int:
        """Bytes of values that are made and used inside only."""
        tasks = [self.groups.body.tasks[n] for n in part.members]
        inside = [t for t in tasks if not self.groups.is_stored(t, part.members)]
        return sum(t.result.type.num_bytes for t in inside)

    def _refusal(self, part: Part) -> Refusal | None:
        oracle, tensors = self._oracle, self.groups.storage.tensors
        assert oracle is not None
        try:
            merged = oracle(kernel_program(self.groups, part.members), tensors)
        except DiagnosticError as error:
            return Refusal("code", error.diagnostic.message)
        except (NeedsCopyError, NeedsScratchError, ClashError):
            return Refusal("order", "memory could not be read or written in one pass")
        if not self._is_timed(part):
            return None
        parts = list(_without(part, part.phase))
        passed = self._internal_bytes(part) - sum(map(self._internal_bytes, parts))
        if passed > oracle.limit_bytes:
            return None
        programs = [kernel_program(self.groups, part.members) for part in parts]
        split = sum(time_or_inf(oracle, program, tensors) for program in programs)
        if merged <= split * (1 + self.policy.margin):
            return None
        return Refusal("slower", f"by {merged / split - 1:.0%}")


def _without(part: Part, phase: str) -> Iterator[Part]:
    """The parts that `part` had before `phase`."""
    if part.phase != phase:
        yield part
        return
    for half in part.halves:
        yield from _without(half, phase)
