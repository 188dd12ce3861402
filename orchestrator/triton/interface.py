"""What a served file takes and returns, in Triton's words, and the configuration that says so.

Types and fields are those of Triton's `model_config.proto`; a configuration is what Triton hands to
a Python model, `config.pbtxt` as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.dtypes import DType
from shardwright.orchestrator.triton.asked import LEVEL, LEVELS, TIMEOUT_S

TYPES = {
    DType.PRED: "BOOL",
    DType.I8: "INT8",
    DType.I16: "INT16",
    DType.I32: "INT32",
    DType.I64: "INT64",
    DType.U8: "UINT8",
    DType.U16: "UINT16",
    DType.U32: "UINT32",
    DType.U64: "UINT64",
    DType.F16: "FP16",
    DType.BF16: "BF16",
    DType.TF32: "FP32",
    DType.F32: "FP32",
    DType.F64: "FP64",
}
"""Triton has no other numbers: fp8 is missing."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An argument or result of a run; `dtype` is one of `TYPES`. A size that depends on values is
    -1."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in TYPES:
            raise UsageError(
                "SW_TRITON_MODEL",
                f"{self.name} requires a type that Triton has, got {self.dtype.value}",
                hint="convert it to bf16 in the model",
            )
        if 0 in self.shape:
            raise UsageError(
                "SW_TRITON_MODEL",
                f"{self.name} requires sizes of at least 1, got {list(self.shape)}",
                hint="leave tensors without elements out of what is served",
            )

    @property
    def numpy(self) -> np.dtype[Any]:
        """Its type in NumPy, bf16 that of ml_dtypes."""
        return self.dtype.numpy

    def dims(self, is_batched: bool) -> list[int]:
        """Its sizes in a configuration: without that of the batch; a scalar has one of 1."""
        return list(self.shape[is_batched:]) or [1]

    def row(self, is_batched: bool) -> dict[str, Any]:
        """What a configuration says of it."""
        return {
            "name": self.name,
            "data_type": f"TYPE_{TYPES[self.dtype]}",
            "dims": self.dims(is_batched),
        }


@dataclass(frozen=True, slots=True)
class Interface:
    """What a served file is called with. `digest` is the SHA-256 of what is served."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    digest: str
    ranks: int = 1

    @property
    def samples(self) -> int:
        """The first size that all tensors share, which may be that of a batch; 0 where none is."""
        first = {spec.shape[0] if spec.shape else 0 for spec in (*self.inputs, *self.outputs)}
        return first.pop() if len(first) == 1 and self.ranks == 1 and self.inputs else 0

    def check_batch(self, most: int) -> None:
        """That requests of up to `most` samples can be one run. Raises UsageError."""
        if most and not 0 < most <= self.samples:
            tensors = (*self.inputs, *self.outputs)
            given = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in tensors)
            raise UsageError(
                "SW_TRITON_MODEL",
                f"max_batch_size = {most} requires a file whose arguments and results all have at"
                f" least {most} samples as their first size, got {given}",
                hint="compile it for so many samples, give weights by --weights, or leave"
                " --max-batch out",
            )

    def check(self, config: Mapping[str, Any]) -> None:
        """That a configuration says the same. Raises UsageError with the first difference."""
        most = int(config.get("max_batch_size", 0))
        self.check_batch(most)
        for kind, specs in (("input", self.inputs), ("output", self.outputs)):
            said = {row["name"]: _said(row) for row in config.get(kind, ())}
            here = {spec.name: _said(spec.row(bool(most))) for spec in specs}
            for name in dict.fromkeys((*here, *said)):
                if said.get(name) != here.get(name):
                    raise UsageError(
                        "SW_TRITON_CONFIG",
                        f"config.pbtxt requires {kind} {name}: {said.get(name, 'none')}, the file"
                        f" has {here.get(name, 'none')}",
                        hint="write the repository again with `shardwright triton`",
                    )


def _said(row: Mapping[str, Any]) -> str:
    return f"{row['data_type']} {[int(size) for size in row['dims']]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How a file is served; parameters of `config.pbtxt`. The times are seconds that a run and the
    start of a simulator may take; `level` is that of `neff run`."""

    request_timeout_s: float = TIMEOUT_S
    load_timeout_s: float = 120.0
    level: str = LEVEL

    def __post_init__(self) -> None:
        for name in ("request_timeout_s", "load_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise _no_limit(name, "seconds above 0", getattr(self, name))
        if self.level not in LEVELS:
            raise _no_limit("level", " or ".join(LEVELS), self.level)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Limits:
        """Those of a configuration. Raises UsageError."""
        rows = config.get("parameters", {})
        said = {name: str(row.get("string_value", "")) for name, row in rows.items()}
        default = cls()
        return cls(
            request_timeout_s=_seconds(said, "request_timeout_s", default.request_timeout_s),
            load_timeout_s=_seconds(said, "load_timeout_s", default.load_timeout_s),
            level=said.get("level", default.level),
        )


def _seconds(said: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(said.get(name, default))
    except ValueError:
        raise _no_limit(name, "seconds above 0", said[name]) from None


def _no_limit(name: str, required: str, given: object) -> UsageError:
    return UsageError(
        "SW_TRITON_CONFIG",
        f"parameter {name} requires {required}, got {given}",
        hint="docs/serving.md lists the parameters of config.pbtxt",
    )


def config_text(
    name: str,
    interface: Interface,
    limits: Limits,
    *,
    max_batch: int,
    instances: int,
    queue: int,
    queue_timeout_s: float,
) -> str:
    """`config.pbtxt`, protobuf's text format."""
    lines = [
        f"name: {_quoted(name)}",
        'backend: "python"',
        f"max_batch_size: {max_batch}",
        *_tensors("input", interface.inputs, bool(max_batch)),
        *_tensors("output", interface.outputs, bool(max_batch)),
        f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]",
        "dynamic_batching {",
        "  default_queue_policy {",
        "    timeout_action: REJECT",
        f"    default_timeout_microseconds: {round(queue_timeout_s * 1e6)}",
        "    allow_timeout_override: true",
        f"    max_queue_size: {queue}",
        "  }",
        "}",
    ]
    for key in ("request_timeout_s", "load_timeout_s", "level"):
        value = getattr(limits, key)
        shown = value if isinstance(value, str) else f"{value:g}"
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{shown}" }} }}')
    return "\n".join(lines) + "\n"


def _tensors(kind: str, specs: Sequence[TensorSpec], is_batched: bool) -> list[str]:
    lines = []
    for spec in specs:
        row, is_scalar = spec.row(is_batched), not spec.shape[is_batched:]
        dims = ", ".join(map(str, row["dims"]))
        reshape = " reshape { shape: [ ] }" if is_scalar else ""
        named = f"name: {_quoted(spec.name)} data_type: {row['data_type']}"
        lines.append(f"{kind} {{ {named} dims: [ {dims} ]{reshape} }}")
    return lines


def _quoted(text: str) -> str:
    """A string literal of protobuf's text format: bytes that are no plain character in octal."""
    plain = (
        chr(b) if 0x20 <= b < 0x7F and b not in b'"\\' else f"\\{b:03o}" for b in text.encode()
    )
    return f'"{"".join(plain)}"'
