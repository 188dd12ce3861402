"""From a region's meaning to its code: normalise, group the stores, generate each group, place
tiles, order engines.

Stores that need no contraction become one strip nest, stores that need the same contraction one
contraction nest, plain copies a DMA of their own. The result is checked against the limits of the
target before anybody else sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compiler.allocate import allocate
from compiler.codegen.builder import Builder
from compiler.codegen.contraction import emit_contraction
from compiler.codegen.copies import emit_copy, is_copy
from compiler.codegen.in_place import refuse_stale_reads
from compiler.codegen.space import Space, normalise
from compiler.codegen.strip_plan import plan_strips
from compiler.codegen.strips import emit_strips
from compiler.diagnostics import CapacityError, CompileError
from compiler.engine_order import order_engines
from compiler.isa.limits import Limits, check_region, limits_for
from compiler.isa.program import Region
from compiler.isa.region import RegionProgram, Tensor
from compiler.options import DEFAULTS, CompileOptions

# Share of SBUF the planners may fill, tried in turn: their estimates leave out what allocation
# rounds up.
_BUDGETS = (0.85, 0.6, 0.4, 0.2, 0.1, 0.05)


@dataclass(frozen=True, slots=True)
class Generated:
    """A region with code, and the first register number it left free."""

    region: Region
    next_register: int


def generate(
    program: RegionProgram,
    tensors: Sequence[Tensor],
    target: str | Limits,
    first_register: int,
    options: CompileOptions = DEFAULTS,
) -> Generated:
    """Tiles and instructions for `program`.

    Loop counters are registers from `first_register` on. Regions other than `compute` have no code.

    Raises: CompileError for what the engines cannot do, CapacityError when no tiling fits.
    """
    region = Region(program)
    if program.kind != "compute":
        return Generated(region, first_register)
    limits = limits_for(target)
    space = normalise(program)
    groups = _groups(space, tensors)
    failure: CapacityError | None = None
    for share in _BUDGETS:
        builder = Builder(limits, tensors, first_register)
        for emit, sinks in groups:
            emit(builder, space, sinks, int(share * limits.sbuf_bytes))
        region = Region(program, builder.tiles, [*builder.prefix, *builder.body])
        try:
            allocate(region, limits)
        except CapacityError as error:
            failure = error
            continue
        order_engines(region, tensors, limits)
        _verify(region, limits)
        return Generated(region, builder.next_register)
    assert failure is not None
    raise failure


Emit = Callable[[Builder, Space, list[int], int], None]


def _groups(space: Space, tensors: Sequence[Tensor]) -> list[tuple[Emit, list[int]]]:
    """Stores that share a nest, in the order of their first store.

    Raises CompileError when a nest would read what an earlier one of the region has overwritten.
    """
    found: dict[object, tuple[Emit, list[int]]] = {}
    for sink in space.sinks:
        contracts = [n for n in space.slice([sink]) if space.values[n].op == "contract"]
        if len(contracts) > 1:
            raise CompileError(
                "SW_CODEGEN_CONTRACTS",
                f"region {space.name} requires at most one contraction per stored value, got"
                f" {len(contracts)}",
                hint="lower each contraction to a region of its own",
            )
        key: object = ("copy", sink) if is_copy(space, sink, tensors) else tuple(contracts)
        emit = emit_contraction if contracts else _strips
        found.setdefault(key, (emit_copy if key == ("copy", sink) else emit, []))[1].append(sink)
    groups = list(found.values())
    refuse_stale_reads(space, tensors, [sinks for _, sinks in groups])
    return groups


def _strips(builder: Builder, space: Space, sinks: list[int], budget: int) -> None:
    emit_strips(builder, plan_strips(space, sinks, builder.limits, builder.tensors, budget))


def _verify(region: Region, limits: Limits) -> None:
    findings = check_region(region, limits)
    if findings:
        raise CompileError(
            "SW_CODEGEN_ILLEGAL",
            f"generated code breaks {len(findings)} limits, first: {findings[0]}",
            hint="this is a defect of the code generator",
        )
