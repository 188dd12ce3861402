"""How a product leaves PSUM: as what its one reader makes of it, where the reader's engine reaches
PSUM, else by a copy.

Vector and Scalar read PSUM as fast as SBUF, so that a sum with a bias, a scale or an activation
behind a product costs no pass of its own. Chains behind the product are fused as those of loop
fusions are (`fusion.py`). Next: `contraction.py` emits both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwright.compiler.codegen import fusion
from shardwright.compiler.codegen.builder import Box, Held, Scope, merge_dims
from shardwright.compiler.codegen.contract_plan import ContractPlan, needed_by_epilogue
from shardwright.compiler.codegen.domain import FROM_PSUM, SPLATS, Domain, Value
from shardwright.compiler.codegen.transposed_blocks import is_plain
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.program import AccessPattern, Engine

_RUN = -2  # the axis of a run of columns; iter dims are positive, -1 stands for none


def fused(plan: ContractPlan, roots: Iterable[int]) -> tuple[ContractPlan, list[int]]:
    """(plan, values behind its product) with the chains behind the product fused."""
    roots = list(roots)
    epilogue = needed_by_epilogue(plan.domain, plan.number, roots)
    if plan.rates is None or all(is_plain(plan.domain, n) for n in roots):
        return plan, epilogue
    kept = _as_it_is(plan.domain, roots)
    wanted = [n for n in epilogue if n not in kept]
    domain, number = fusion.fuse_behind(plan.domain, wanted, lambda v: _points(plan, v), plan.rates)
    sides = (replace(side, number=number[side.number]) for side in (plan.stationary, plan.moving))
    stationary, moving = sides
    plan = replace(
        plan, domain=domain, number=number[plan.number], stationary=stationary, moving=moving
    )
    return plan, needed_by_epilogue(domain, plan.number, [number[n] for n in roots])


def _as_it_is(domain: Domain, roots: Iterable[int]) -> set[int]:
    """Conversions of the product that are only stored: `transposed_blocks.py` looks for them."""
    plain = [n for n in roots if is_plain(domain, n)]
    return {n for n in domain.slice(plain) if domain[n].op == "convert"}


def _points(plan: ContractPlan, value: Value) -> int:
    return math.prod(plan.extents[a] for a in plan.out_axes if a in value.iter_dims)


def taker(domain: Domain, number: int, epilogue: Iterable[int]) -> int | None:
    """The one reader of product `number` that can take it from PSUM; None when it is copied."""
    readers = [n for n in epilogue if number in domain[n].inputs]
    if len(readers) != 1 or domain[number].dtype is not DType.F32:
        return None
    reader = domain[readers[0]]
    # Vector reads one of two tensors from PSUM, not both (documented: NKI reference,
    # nki.isa.tensor_tensor).
    twice = reader.inputs.count(number) > 1 or fusion.is_pair(reader)
    return readers[0] if reader.op in FROM_PSUM and not twice else None


def copier(plan: ContractPlan, epilogue: Iterable[int]) -> Engine:
    """Who copies products out of PSUM: the engine with less to do in the epilogue, else Vector."""
    rates, values = plan.rates, plan.domain.values
    assert rates is not None
    busy = {Engine.VECTOR: 0.0, Engine.SCALAR: 0.0}
    for n in epilogue:
        engine = fusion.engine_of(values[n])
        cycles = fusion.cycles(plan.domain, values[n], lambda v: _points(plan, v))
        busy[engine] += rates.engine_ns(engine, cycles)
    return min(busy, key=busy.__getitem__)


class Columns(Frame):
    """Value `number` on a run of columns of its tile in `frame`, while the product is in PSUM."""

    def __init__(self, frame: Frame, number: int, product: int, scope: Scope) -> None:
        super().__init__(frame.builder, frame.domain, frame.partition, (_RUN,))
        self._frame, self._number, self._product = frame, number, product
        self._wide = {a for a in frame.axes if scope.extent(a) > 1}
        self._column = Affine()

    def free_axes(self, value: Value) -> list[int]:
        """The run, for values that move along it."""
        return [_RUN] if value.iter_dims & self._wide else []

    def new(self, number: int, value: Value, scope: Scope, dtype: DType | None = None) -> Held:
        """The columns of the tile that is there already."""
        return self._part(number, 1)

    def take(self, scope: Scope, bank: AccessPattern, column: Affine) -> None:
        """The value for the columns from `column` on that `bank` has the product of."""
        scope.boxes[_RUN] = Box(column, bank.shape[-1])
        self._column = column
        for i in self.domain[self._number].inputs:
            if i in self._frame.held:
                self.held[i] = self._part(i, 1 if self.domain[i].iter_dims & self._wide else 0)
        self.held[self._product] = Held(bank.buffer, {_RUN: 1}, bank.offset)
        self.emit(self._number, scope)

    def _part(self, number: int, stride: int) -> Held:
        whole = self._frame.held[number]
        return Held(whole.tile, {_RUN: stride}, whole.offset + self._column * stride)


def is_run(frame: Frame, numbers: Sequence[int], scope: Scope) -> bool:
    """Whether a run of columns is a run in the tile of each of `numbers` too, or one element."""
    sizes = [scope.extent(a) for a in frame.axes]
    for n in numbers:
        if frame.domain[n].op in SPLATS:
            continue
        strides = [frame.held[n].strides.get(a, 0) for a in frame.axes]
        (dims,) = merge_dims(sizes, [strides])
        if len(dims) > 1 or dims[0][0] not in (0, 1):
            return False
    return True
