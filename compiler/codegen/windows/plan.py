"""Who plans a nest with windows: products when channels are summed, else gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.compiler.codegen.domain import Domain
from shardwright.compiler.codegen.planning import Candidate, Room
from shardwright.compiler.codegen.windows.form import form_of, refused
from shardwright.compiler.codegen.windows.gradient import gradient_candidates
from shardwright.compiler.codegen.windows.product import product_candidates
from shardwright.compiler.diagnostics import CapacityError


def has_windows(domain: Domain, roots: Iterable[int]) -> bool:
    """Whether what `roots` need reads windows that may leave their operand."""
    accesses = (domain[n].map for n in domain.slice(roots))
    return any(w is not None and w.bounds for w in accesses)


def window_candidates(domain: Domain, roots: list[int], room: Room) -> Sequence[Candidate]:
    """Tilings of the one contraction of windows that `roots` need. Raises CompileError."""
    inside = domain.slice(roots)
    contracts = [n for n in inside if domain[n].op == "contract"]
    if len(contracts) != 1 or any(domain[n].op == "reduce" for n in inside):
        raise refused(domain, "windows to meet one contraction and nothing else")
    form = form_of(domain, contracts[0])
    candidates = product_candidates if form.sums_channels else gradient_candidates
    found = candidates(form, roots, room)
    if not found:
        raise CapacityError(
            "SW_SBUF_CAPACITY",
            f"kernel {domain.name}: lines of {form.inner.size} positions with {form.pixel} channels"
            f" exceed {room.budget} bytes per partition",
            hint="fewer channels per core fit",
        )
    return found
