"""What crosses from layer to layer, read as indices: the residual, and the sequence.

The values at the borders of layers have samples, a sequence in a language model, and one feature
index that every layer reads and adds to. Tensor parallelism leaves that index whole, context
parallelism splits the sequence. A model without layers has neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.types import Value
from shardwright.sharding.indices.indices import Class, IndexClasses
from shardwright.sharding.indices.layers import ScannedLayers, UnrolledLayers


@dataclass(frozen=True, slots=True)
class Borders:
    """Families at layer borders: `residual` are features, `sequence` are positions."""

    residual: frozenset[Class]
    sequence: frozenset[Class]


def borders(
    scans: Iterable[ScannedLayers],
    runs: Iterable[UnrolledLayers],
    samples: Mapping[Value, int],
    indices: IndexClasses,
    batch: Sequence[Value],
    weights: Sequence[Value],
) -> Borders:
    """The families of the dims at the borders of all layers.

    A dim is a position when a batch input has it (a table of learned positions has it too), or when
    no weight has it.
    """
    given = {f for v in batch for d, f in indices.families(v) if d != samples.get(v)}
    weighty = {f for v in weights for _, f in indices.families(v)}
    found = {
        family
        for value in _crossing(scans, runs)
        if value in samples
        for dim, family in indices.families(value)
        if dim != samples[value] and value.type.shape[dim] > 1
    }
    sequence = {f for f in found if f in given or f not in weighty}
    return Borders(frozenset(found - sequence), frozenset(sequence))


def _crossing(scans: Iterable[ScannedLayers], runs: Iterable[UnrolledLayers]) -> Iterator[Value]:
    """Values that one layer hands to the next."""
    for scan in scans:
        body = scan.loop.regions[0]
        yield from (body.inputs[carry] for carry in scan.borders)
    for run in runs:
        yield from (value for border in run.borders for value in border)
