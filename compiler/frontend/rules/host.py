"""Placements in memories: JAX's `annotate_device_placement`, the form that its offload policies and
`jax.device_put` to another memory have in a module.
"""

from __future__ import annotations

from shardwright.compiler.frontend.rules.registry import Site, Values, refuse
from shardwright.compiler.ir.ops import MoveToAttrs
from shardwright.compiler.ir.ops.host import DEVICE, HOST

ANNOTATION = "annotate_device_placement"
ATTRIBUTES, PLACEMENT = "mhlo.frontend_attributes", "_xla_buffer_placement"
MEMORIES = {DEVICE: DEVICE, "pinned_host": HOST, "unpinned_host": HOST}
"""JAX's kinds of memory -> ours. Host memory that a DMA reaches is pinned in either case."""


def placement(site: Site) -> Values:
    """The operand, in another memory from here on."""
    given = site.optional(ATTRIBUTES)
    kind = given[PLACEMENT].value if given is not None and PLACEMENT in given else "none"
    if kind not in MEMORIES:
        known = ", ".join(MEMORIES)
        refuse("NCC_EVRF064", f"{ANNOTATION} requires a memory of {known}, got {kind}")
    return site.emit("move_to", site.operands, MoveToAttrs(MEMORIES[kind])).results
