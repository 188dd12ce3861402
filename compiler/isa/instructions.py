"""The instruction set: name, meaning, engines that may issue it and operands.

Legality limits and cost formulas per NeuronCore generation live beside it (`limits.py`,
`costs.py`); what an instruction does to values is in `sim_cluster/instructions/engines`. Names
follow the public NKI instruction set where it has the instruction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.compiler.isa.program import Engine

COMPUTE = (Engine.VECTOR, Engine.GPSIMD)
DMA = (Engine.DMA_IN, Engine.DMA_OUT)
TOKENS_ONLY = ("wait", "signal")
"""Instructions without a destination: they take or give tokens, and do nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstrDef:
    """One instruction: who may issue it, and how many sources it takes."""

    engines: tuple[Engine, ...]
    sources: tuple[int, ...]  # legal numbers of source operands
    attrs: tuple[str, ...] = ()

    @property
    def issuers(self) -> frozenset[Engine]:
        """Who issues it on some core: Vector too, where it stands in for GpSimd (`Limits.issuer`
        says on which).
        """
        return frozenset((*self.engines, *(COMPUTE if Engine.GPSIMD in self.engines else ())))


INSTRUCTIONS: Mapping[str, InstrDef] = {
    # dst PSUM fp32 [M, N] = or += stationary[K, M]^T @ moving[K, N], SBUF operands, K, M <= 128, N
    # <= 512, one PSUM bank. zero_when: None adds; a tuple of registers overwrites when all of them
    # are 0 (() always overwrites).
    "matmul": InstrDef(engines=(Engine.TENSOR,), sources=(2,), attrs=("zero_when",)),
    # dst PSUM [F, P] = src[P, F]^T, P, F <= 128 (identity matmul).
    "transpose": InstrDef(engines=(Engine.TENSOR,), sources=(1,)),
    # dst = a op b elementwise; sources may have stride 0 in free dims. op: a binary elementwise
    # name or a compare direction (EQ NE LT LE GT GE). Vector computes in fp32; integer operands
    # need GpSimd, which is exact.
    "tensor_tensor": InstrDef(engines=COMPUTE, sources=(2,), attrs=("op",)),
    # dst = (src op0 s0) op1 s1; op1 may be None. A scalar is an immediate, or None: then the next
    # source, [P, 1], supplies one value per partition. reverse swaps the two sides of the op.
    "tensor_scalar": InstrDef(
        engines=COMPUTE,
        sources=(1, 2, 3),
        attrs=("op0", "scalar0", "reverse0", "op1", "scalar1", "reverse1"),
    ),
    # dst = reduce of the last num_reduced dims of src by op (add maximum minimum and or xor
    # multiply); zero_when as in matmul decides between overwriting dst and combining with it.
    "tensor_reduce": InstrDef(
        engines=(Engine.VECTOR, Engine.GPSIMD),
        sources=(1,),
        attrs=("op", "num_reduced", "zero_when"),
    ),
    # dst = src converted to the type of dst (round to nearest even). GpSimd cannot touch PSUM.
    "tensor_copy": InstrDef(engines=(Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD), sources=(1,)),
    # dst = the bits of src; equal widths.
    "bitcast_copy": InstrDef(engines=COMPUTE, sources=(1,)),
    # dst = on_true where pred else on_false; sources (pred, on_true, on_false).
    "select": InstrDef(engines=COMPUTE, sources=(3,)),
    # dst = value.
    "memset": InstrDef(engines=COMPUTE, sources=(0,), attrs=("value",)),
    # dst = func(scale * src + bias); scale and bias are immediates, or None: then the next source,
    # [P, 1]. func: a unary elementwise name, 'square' or 'identity'. One tensor input only.
    "activation": InstrDef(
        engines=(Engine.SCALAR,), sources=(1, 2, 3), attrs=("func", "scale", "bias")
    ),
    # activation; row_sum, fp32 [P, 1], = the sum of func(scale * src + bias) along the free dims,
    # before dst is rounded.
    "activation_reduce": InstrDef(
        engines=(Engine.SCALAR,), sources=(1, 2, 3), attrs=("func", "scale", "bias")
    ),
    # dst = op(src) for unary names without an activation table (not, negate, abs, sign, floor,
    # ceil, is_finite, round_nearest_even, reciprocal).
    "tensor_unary": InstrDef(engines=COMPUTE, sources=(1,), attrs=("op",)),
    # dst[p, i...] = start (Affine) + p * partition_step + sum(i_k * steps[k]) over the free dims.
    "iota": InstrDef(
        engines=(Engine.GPSIMD,), sources=(0,), attrs=("start", "partition_step", "steps")
    ),
    # dst = src where the number that iota would make there is direction (EQ NE LT LE GT GE) 0,
    # elsewhere fill.
    "affine_select": InstrDef(
        engines=(Engine.GPSIMD,),
        sources=(1,),
        attrs=("start", "partition_step", "steps", "direction", "fill"),
    ),
    # dst = src, equal shapes dim by dim, any strides, casts through fp32 (integers exactly); HBM to
    # or from SBUF, or HBM to HBM. Stride 0 in an HBM source replicates.
    "dma": InstrDef(engines=DMA, sources=(1,)),
    # dst SBUF [P, ...]: partition p reads src (HBM pattern of one row; its dims[0] is (0, P))
    # shifted by index[p] * row_stride elements; index SBUF int32 [P, 1]; mode clamp keeps the index
    # within rows, fill writes 0.
    "dma_gather": InstrDef(
        engines=(Engine.DMA_IN,), sources=(2,), attrs=("row_stride", "rows", "mode")
    ),
    # HBM rows picked by index [P, 1] = src [P, ...]; rows outside 0..rows-1 are dropped; equal rows
    # must carry equal values (checked by L0).
    "dma_scatter": InstrDef(engines=(Engine.DMA_OUT,), sources=(2,), attrs=("row_stride", "rows")),
    # Only takes tokens.
    "wait": InstrDef(engines=tuple(Engine), sources=(0,)),
    # Only gives tokens.
    "signal": InstrDef(engines=tuple(Engine), sources=(0,)),
}
