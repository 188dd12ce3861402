"""Parts of a traced module, and what a module is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.compiler.frontend.pytorch.host_graph import HostGraph
from shardwright.compiler.frontend.pytorch.signature import Leaf, Signature
from shardwright.compiler.frontend.pytorch.types import fitting_array_of, tensor_of
from shardwright.compiler.isa.program import Program
from shardwright.orchestrator.traced.report import PartitionReport


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPart:
    """A NEFF and what it is called with: weights that are no constants of it, then inputs."""

    neff: bytes
    program: Program
    weights: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[Leaf, ...]

    @property
    def reads(self) -> set[str]:
        """Names of all values that it is called with."""
        return {*self.weights, *self.inputs}

    @property
    def makes(self) -> set[str]:
        """Names of its outputs."""
        return {leaf.name for leaf in self.outputs}

    def run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Its outputs by name."""
        from shardwright.sim_cluster.values.run_single import run_single

        names = (*self.weights, *self.inputs)
        given = zip(self.program.inputs, names, strict=True)
        arrays = run_single(self.program, {b: fitting_array_of(values[n]) for b, n in given})
        pairs = zip(self.program.outputs, self.outputs, strict=True)
        return {leaf.name: tensor_of(arrays[buffer], leaf.dtype) for buffer, leaf in pairs}


TracedPart = CompiledPart | HostGraph


@dataclass(slots=True, kw_only=True, repr=False)
class Content:
    """What a traced module is made of, and a file of it holds."""

    name: str
    signature: Signature
    parts: tuple[TracedPart, ...]
    tensors: dict[str, Any]
    """Weights that are no constants of a NEFF, and buffers that change, by name."""
    summary: PartitionReport
    made_by: Mapping[str, str] = field(default_factory=dict)
    """Versions of ours and of torch, the machine, and the flags."""


def needed(parts: Sequence[TracedPart], signature: Signature) -> set[str]:
    """Names of tensors that are not made by a call."""
    read = {name for part in parts for name in part.reads}
    read |= {each for each in signature.outputs if isinstance(each, str)}
    read |= {value for value, _ in signature.changed}
    return read
