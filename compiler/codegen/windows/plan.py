"""Who plans a nest with windows: products when channels are summed, else gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.compiler.codegen.domain import Space
from shardwright.compiler.codegen.planning import Candidate, Room
from shardwright.compiler.codegen.windows.form import form_of, refused
from shardwright.compiler.codegen.windows.gradient import gradient_candidates
from shardwright.compiler.codegen.windows.product import product_candidates
from shardwright.compiler.diagnostics import CapacityError


def has_windows(space: Space, roots: Iterable[int]) -> bool:
    """Whether what `roots` need reads windows that may leave their operand."""
    accesses = (space[n].map for n in space.slice(roots))
    return any(w is not None and w.bounds for w in accesses)


def window_candidates(space: Space, roots: list[int], room: Room) -> Sequence[Candidate]:
    """Tilings of the one contraction of windows that `roots` need. Raises CompileError."""
    inside = space.slice(roots)
    contracts = [n for n in inside if space[n].op == "contract"]
    if len(contracts) != 1 or any(space[n].op == "reduce" for n in inside):
        raise refused(space, "windows to meet one contraction and nothing else")
    form = form_of(space, contracts[0])
    candidates = product_candidates if form.sums_channels else gradient_candidates
    found = candidates(form, roots, room)
    if not found:
        raise CapacityError(
            "SW_SBUF_CAPACITY",
            f"kernel {space.name}: lines of {form.inner.size} positions with {form.pixel} channels"
            f" exceed {room.budget} bytes per partition",
            hint="fewer channels per core fit",
        )
    return found
