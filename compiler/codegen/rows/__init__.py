"""Tile code for reduction fusions: several contractions with elementwise work and reductions
between them, one tile of rows at a time.

`roles.py` says what every value is for a choice of the row iter dim, `plan.py` orders the work of a
row tile (`passes.py`) and sizes its tiles (`size.py`), `nest.py` emits the loops around
groups of row tiles, `group.py` and `products.py` the code of a group.
"""

from shardwright.compiler.codegen.rows.nest import reduction_candidates
from shardwright.compiler.codegen.rows.plan import plan_rows

__all__ = ["plan_rows", "reduction_candidates"]
