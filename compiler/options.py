"""What a user may choose about compilation, in neuronx-cc's own names with underscores.

One frozen object goes from the command line or `[compiler]` to the step passes and into every
compile unit; its packed form is part of the unit's key, so equal options mean equal bytes. Values
are checked where text is read (`orchestrator/`), not here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import msgpack


def choice(default: Any, *allowed: Any, **about: Any) -> Any:
    """A field with a closed set of values."""
    return field(default=default, metadata={"choices": allowed, **about})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options that change the code that is made."""

    optlevel: int = choice(2, 1, 2, 3)
    """1: quick compile; 2: balanced; 3: whole-model search."""

    model_type: str = choice("generic", "generic", "transformer", "unet-inference")

    attention: str = choice("flash", "unfused", "fused", "flash")
    """How T x T scores are kept. unfused: every softmax operator passes through HBM; fused: scores
    are stored, softmax is one pass; flash: scores stay on chip, backward makes them again.
    """

    auto_cast: str = choice("none", "none", "matmult", "all")
    """Which fp32 operations are cast to `auto_cast_type`."""

    auto_cast_type: str = choice("bf16", "bf16", "fp16", "tf32", "fp8_e4m3")

    relayout: str = choice("exact", "exact", "bf16", "fp16")
    """The type in which fp32 values are transposed: as products of the tensor engine in a short
    one, or byte by byte. neuron-cc's fast and no-fast relayout.
    """

    mixed_precision_accumulation: bool = True
    """Keep intermediates of reductions of short types in fp32."""

    latency_hiding: bool = True
    """Order and cut functions by what collectives are expected to take, so that code runs beside
    them; False: as in the program. The vendor's compiler does it where it is asked to
    (`--tensorizer-options='--enable-ccop-compute-overlap'`).
    """

    saturate_infinity: bool = False
    """Clamp infinities in front of what makes NaN of them."""

    saturate_before: str = choice("any", "any", "transposes")
    """What that is: any operation, or transposes that the tensor engine does as matmul alone."""

    native_int64: str = choice("default", "default", "enabled", "disabled")

    double_precision: str = choice("refused", "refused", "f32")
    """What becomes of 64-bit floats: an error (NCC_ESPP004), or fp32 with a warning."""

    implicit_integer_downcast: str = "default"
    """default, all, none, or a comma list of dot scatter all_reduce reduce_scatter pow."""

    instruction_limit: int = 5_000_000
    """Instructions a module may have. At this default, the documented limit, jobs only warn; the
    compile command refuses.
    """

    lnc: int = field(default=1, metadata={"choices": (1, 2), "key": "cluster.lnc"})
    """Physical cores of a logical NeuronCore that kernels are cut for. It belongs to the machine,
    so a job sets it there and not in `[compiler]`.
    """

    experimental_unsafe_fp8e4m3fn_as_fp8e4m3: bool = False
    """Accept f8E4M3FN where the machine has f8E4M3 only: values beyond 240 differ there."""

    @property
    def keeps_fp32(self) -> bool:
        """Whether short floats stay fp32 on chip; casting everything asks for the opposite, and so
        does a relayout that rounds.
        """
        rounds = self.auto_cast == "all" or self.relayout != "exact"
        return self.mixed_precision_accumulation and not rounds

    def packed(self) -> bytes:
        """A short form of everything that differs from the defaults, deterministic."""
        changed = {
            f.name: getattr(self, f.name)
            for f in sorted(dataclasses.fields(self), key=lambda f: f.name)
            if getattr(self, f.name) != f.default
        }
        data: bytes = msgpack.packb(changed)
        return data

    @classmethod
    def unpacked(cls, data: bytes) -> CompileOptions:
        """Inverse of `packed`."""
        values: dict[str, Any] = msgpack.unpackb(data)
        return cls(**values)


DEFAULTS = CompileOptions()
