"""Instruction costs as data: cycles of the issuing engine, per instruction and condition.

N is the number of elements per partition. A rule gives `max(minimum, slope * N) + extra` cycles, an
initiation interval (how soon the engine can start its next instruction). The formulas are the ones
the NKI ISA reference printed until 2025-12 (aws-neuron-sdk commit 49ee15c5,
general/nki/api/nki/isa/__init__.py; called OLD below), one set for NeuronCore v2 and v3; the clocks
differ. Rows are tried in order; the first whose condition holds counts. DMA is not here: its cost
follows from descriptors (`dma_interval_ps`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.instructions import DMA, TOKENS_ONLY
from shardwright.compiler.isa.kernel import Tensor
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Space, Tile
from shardwright.compiler.machine.target import PS_PER_S, CoreModel


@dataclass(frozen=True, slots=True)
class Operands:
    """What a cost rule may look at: spaces, element types and shapes of destination (first) and
    sources."""

    patterns: tuple[AccessPattern, ...]
    dtypes: tuple[DType, ...]
    op: str

    @property
    def elements(self) -> int:
        """N: the largest number of elements per partition of any operand."""
        return max(math.prod(size for _, size in p.dims[1:]) for p in self.patterns)


@dataclass(frozen=True, slots=True)
class CostRule:
    """Cycles = max(minimum, slope * N) + extra when `holds`."""

    opcode: str
    engine: Engine | None  # None: any
    holds: Callable[[Operands], bool]
    minimum: float
    slope: float
    extra: float
    status: str
    source: str


def _always(_: Operands) -> bool:
    return True


def _all_bf16(o: Operands) -> bool:
    return all(d is DType.BF16 for d in o.dtypes)


def _one_psum_one_sbuf(o: Operands) -> bool:
    return {p.space for p in o.patterns[1:]} == {Space.PSUM, Space.SBUF}


def _fast_tensor_tensor(o: Operands) -> bool:
    unit = all(p.dims[-1][0] == 1 for p in o.patterns)
    fast_bf16 = _all_bf16(o) and unit and o.op in ("add", "multiply", "subtract")
    return _one_psum_one_sbuf(o) or fast_bf16


def _fast_reduce(o: Operands) -> bool:
    return _all_bf16(o) and o.op in ("add", "maximum")


def _random(o: Operands) -> bool:
    return o.op == "random_bits"


def _division(o: Operands) -> bool:
    return o.op in ("divide", "reciprocal", "remainder", "power")


_DOC, _INF, _UNK = "documented", "inferred", "unknown"
_V, _S, _G = Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD
_RECIPROCAL = "OLD: reciprocal max(64, 8N); divide, remainder and power have no printed row"
_GENERATOR = "as other operators: NKI reference, nki.isa.rng, prints no cycles"
_NO_RULE = "default 150 + N for 4-byte elementwise work (K1: no general rule is given)"


def _on_gpsimd(opcode: str, status: str, source: str) -> CostRule:
    """150 + N cycles, which is also what is assumed where nothing is printed."""
    return CostRule(opcode, _G, _always, 0, 1, 150, status, source)


RULES: tuple[CostRule, ...] = (
    CostRule("tensor_tensor", _V, _division, 64, 8, 0, _INF, _RECIPROCAL),
    CostRule("tensor_tensor", _V, _fast_tensor_tensor, 64, 1, 0, _DOC, "OLD"),
    CostRule("tensor_tensor", _V, _always, 64, 2, 0, _DOC, "OLD"),
    CostRule("tensor_scalar", _V, _division, 64, 8, 0, _INF, _RECIPROCAL),
    CostRule("tensor_scalar", _V, _random, 64, 1, 0, _INF, _GENERATOR),
    CostRule(
        "tensor_scalar", _V, _always, 64, 1, 0, _DOC, "OLD: one or two operators cost the same"
    ),
    CostRule("tensor_reduce", _V, _fast_reduce, 64, 0.5, 0, _DOC, "OLD"),
    CostRule("tensor_reduce", _V, _always, 64, 1, 0, _DOC, "OLD"),
    _on_gpsimd("tensor_copy", _UNK, _NO_RULE),
    CostRule("tensor_copy", None, _always, 64, 1, 0, _DOC, "OLD"),
    CostRule("bitcast_copy", _V, _always, 64, 1, 0, _INF, "as tensor_copy"),
    CostRule("select", _V, _one_psum_one_sbuf, 64, 1, 0, _DOC, "OLD: tensor_copy_predicated"),
    CostRule("select", _V, _always, 64, 2, 0, _DOC, "OLD: tensor_copy_predicated in SBUF"),
    CostRule("memset", _V, _all_bf16, 64, 0.5, 0, _DOC, "OLD: 2-byte type"),
    CostRule("memset", _V, _always, 64, 1, 0, _DOC, "OLD"),
    CostRule("tensor_unary", _V, _division, 64, 8, 0, _DOC, "OLD: reciprocal"),
    CostRule("tensor_unary", _V, _always, 64, 1, 0, _INF, "as tensor_scalar"),
    CostRule("activation", _S, _always, 64, 1, 0, _DOC, "OLD: scale and bias are free"),
    CostRule(
        "activation_reduce", _S, _always, 64, 1, 64, _DOC, "OLD: 64 cycles to read the accumulator"
    ),
    _on_gpsimd("iota", _DOC, "OLD"),
    _on_gpsimd("affine_select", _DOC, "OLD"),
)
OF_OPCODE: Mapping[str, Sequence[CostRule]] = {
    opcode: [rule for rule in RULES if rule.opcode == opcode]
    for opcode in dict.fromkeys(rule.opcode for rule in RULES)
}
"""The rules again, as they are looked up."""
_GPSIMD_DEFAULT = _on_gpsimd("*", _UNK, _NO_RULE)


def rule_for(opcode: str, engine: Engine, operands: Operands) -> CostRule:
    """The first rule that holds; an engine that stands in for the only one with a rule takes as
    many cycles.

    Raises KeyError when an instruction has no cost on that engine.
    """
    for rule in OF_OPCODE.get(opcode, ()):
        if rule.engine in (None, engine) and rule.holds(operands):
            return rule
    if engine is Engine.GPSIMD:
        return _GPSIMD_DEFAULT
    only = OF_OPCODE.get(opcode, ())
    if engine is Engine.VECTOR and [rule.engine for rule in only] == [Engine.GPSIMD]:
        return only[0]
    raise KeyError(f"no cost rule for {opcode} on {engine.value}")


def instr_interval_ps(
    instr: Instr, tiles: Sequence[Tile], tensors: Sequence[Tensor], core: CoreModel
) -> int:
    """Initiation interval of an instruction in ps; 0 for bare waits and signals."""
    if instr.opcode in TOKENS_ONLY:
        return 0
    operands = _operands(instr, tiles, tensors)
    if instr.engine in DMA:
        return dma_interval_ps(operands, core)
    if instr.engine is Engine.TENSOR:
        cycles = _tensor_cycles(instr, operands)
    else:
        rule = rule_for(instr.opcode, instr.engine, operands)
        slope = rule.slope * _stride_factor(operands, core) * _width_factor(operands)
        cycles = max(rule.minimum, slope * operands.elements) + rule.extra
    return round(cycles * PS_PER_S / core.clock_hz[instr.engine.value])


def _operands(instr: Instr, tiles: Sequence[Tile], tensors: Sequence[Tensor]) -> Operands:
    patterns = tuple(p for p in (instr.dst, *instr.srcs) if p is not None)
    dtypes = tuple(
        tensors[p.buffer].dtype if p.space is Space.HBM else tiles[p.buffer].dtype for p in patterns
    )
    op = instr.attrs.get("op", instr.attrs.get("op0", ""))
    return Operands(patterns, dtypes, op)


def tensor_cycles(instr: Instr, tiles: Sequence[Tile], tensors: Sequence[Tensor]) -> float:
    """Cycles of the tensor engine that an instruction of it takes, by what it moves."""
    return _tensor_cycles(instr, _operands(instr, tiles, tensors))


def _tensor_cycles(instr: Instr, o: Operands) -> float:
    """OLD: matmul max(min(64, N_stationary), N_moving), transpose max(P, min(64, F)); fp32 in four
    passes."""
    passes = 4 if o.dtypes[1] is DType.F32 else 1
    source = o.patterns[1]
    free = math.prod(source.shape[1:])
    if instr.opcode == "transpose":
        return passes * max(source.shape[0], min(64, free))
    return passes * max(min(64, free), math.prod(o.patterns[2].shape[1:]))


def _stride_factor(o: Operands, core: CoreModel) -> float:
    """K1: an innermost stride over 16 bytes halves the SBUF rate."""
    for pattern, dtype in zip(o.patterns, o.dtypes, strict=True):
        if len(pattern.dims) > 1 and abs(pattern.dims[-1][0]) * dtype.bytes > 16:
            return core.wide_stride_factor
    return 1.0


_WIDE_INTEGERS = (DType.I64, DType.U64)
_WIDE_FACTOR = 1.25
"""documented: 64-bit integers cost 20 to 30 % more where they are computed as such (command
reference, native-int64); the middle of it."""


def _width_factor(o: Operands) -> float:
    return _WIDE_FACTOR if any(d in _WIDE_INTEGERS for d in o.dtypes) else 1.0


def dma_interval_ps(operands: Operands, core: CoreModel) -> int:
    """Time a transfer keeps its DMA engines busy.

    One descriptor moves one contiguous run and takes max(min, bytes + extra) / engine rate; the
    runs of up to 8 partitions go through one of the 16 engines, HBM to HBM transfers spread evenly.
    Source: DO and DB of the machine notes.
    """
    descriptors, run_bytes = _descriptors(operands, core)
    each = max(core.dma_descriptor_min_bytes, run_bytes + core.dma_descriptor_extra_bytes)
    engines = core.dma_engines
    on_chip = [p for p in operands.patterns if p.space is not Space.HBM]
    if on_chip:
        engines = min(engines, math.ceil(on_chip[0].shape[0] / core.dma_partitions_per_engine))
    busiest = math.ceil(descriptors / engines)
    return round(busiest * each / core.dma_engine_bytes_per_s * PS_PER_S)


def _descriptors(o: Operands, core: CoreModel) -> tuple[int, float]:
    """(number of descriptors, bytes of each) of a transfer: the side with the shorter runs
    decides."""
    total = math.prod(o.patterns[0].shape)
    run = min(map(_run_elements, o.patterns[:2]))
    width = max(d.bytes for d in o.dtypes[:2])
    run_bytes = min(run * width, core.dma_descriptor_max_bytes)
    return math.ceil(total * width / run_bytes), run_bytes


def _run_elements(p: AccessPattern) -> int:
    """Contiguous elements at the innermost end; the partition dim of an on-chip buffer never
    continues a run."""
    dims = p.dims if p.space is Space.HBM else p.dims[1:]
    run = 1
    for stride, size in reversed(dims):
        if size == 1:
            continue
        if stride != run:
            break
        run *= size
    return run
