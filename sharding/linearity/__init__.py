"""How each value depends on the batch: not at all, per sample, as a sum over samples, or in another
way.

The labels decide where micro-batches may be accumulated: a sum over samples, and what is linear in
it, may be added up over micro-batches; anything else may not. The analysis follows the dims that
hold samples through every op, reads global types (where a sample dim is not yet divided down to
size 1) and is used by `sharding/cut/stages.py`.
"""

from shardwright.sharding.linearity import contraction, elementwise, gather, shape
from shardwright.sharding.linearity.labels import Kind, Label, counts_samples
from shardwright.sharding.linearity.rules import label_values

__all__ = [
    "Kind",
    "Label",
    "contraction",
    "counts_samples",
    "elementwise",
    "gather",
    "label_values",
    "shape",
]
