"""What a nest may overwrite while it still reads: nothing but the point it is working on.

A kernel means "all loads, then all stores"; its code runs tile by tile. The two agree when no tile
stores to an element that another tile still loads. That holds for views that place every point at
the same element, and for views that have no element in common; everything else is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.compiler.codegen.domain import AccessMap, Domain, Tensors, Value
from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.isa.kernel import STORES, root_of

_BUDGET = 20000  # steps of the search for a common element; beyond it views count as overlapping


def refuse_stale_reads(domain: Domain, tensors: Tensors, groups: Iterable[Sequence[int]]) -> None:
    """Check the nests of a kernel in their order. Raises CompileError SW_CODEGEN_IN_PLACE."""
    written: set[int] = set()
    for roots in groups:
        inside = [domain[n] for n in domain.slice(roots)]
        reads = [v for v in inside if v.map and v.map.tensor >= 0 and v.op not in STORES]
        stores = [v for v in inside if v.op in STORES]
        for read in reads:
            if _root(tensors, read) in written:
                raise _error(domain, tensors, read)
            for store in stores:
                same_memory = _root(tensors, read) == _root(tensors, store)
                if same_memory and not _is_safe(domain, read, store, roots):
                    raise _error(domain, tensors, read)
        written |= {_root(tensors, v) for v in stores}


def _root(tensors: Tensors, value: Value) -> int:
    return root_of(tensors, value.access.tensor)


def _error(domain: Domain, tensors: Tensors, value: Value) -> CompileError:
    return CompileError(
        "SW_CODEGEN_IN_PLACE",
        f"kernel {domain.name} requires memory it reads to stay as it is, got a store to elements"
        f" of tensor {tensors[value.access.tensor].name} that other tiles still load",
        hint="store to another buffer, or lower the two parts to kernels of their own",
    )


def _is_safe(domain: Domain, read: Value, store: Value, roots: Sequence[int]) -> bool:
    if read.op != "load" or store.op != "store":
        return False
    a, b = read.access, store.access
    if a.offset == b.offset and a.strides == b.strides:
        return _is_pointwise(domain, read)
    return not _meet(domain, a, b)


def _is_pointwise(domain: Domain, read: Value) -> bool:
    """Whether a point is read only where it is stored: not as an operand of a contraction."""
    operands = [i for v in domain.values if v.op == "contract" for i in v.inputs]
    return all(domain[n] is not read for n in domain.slice(operands))


def _meet(domain: Domain, a: AccessMap, b: AccessMap) -> bool:
    """Whether two views can touch a common element."""
    if a.offset.terms != b.offset.terms:
        return True
    steps = [(s, domain.sizes[iter_dim]) for iter_dim, s in a.strides.items()]
    steps += [(-s, domain.sizes[a]) for a, s in b.strides.items()]
    return reaches(steps, b.offset.const - a.offset.const)


def reaches(steps: Iterable[tuple[int, int]], distance: int) -> bool:
    """Whether sum(step * x) == distance for some 0 <= x < size each; True beyond a budget."""
    bounds: dict[int, list[int]] = {}  # steps of one length: how often at least, and at most
    for step, size in steps:
        low_high = bounds.setdefault(abs(step), [0, 0])
        low_high[step > 0] += size - 1 if step > 0 else 1 - size
    levels = sorted(((step, low, high) for step, (low, high) in bounds.items()), reverse=True)
    rests = [(0, 0)]  # what the levels from the last one on can add up to
    for step, low, high in reversed(levels):
        rests.append((rests[-1][0] + step * low, rests[-1][1] + step * high))
    return _reaches(levels, rests[-2::-1], distance, [_BUDGET])


def _reaches(
    levels: Sequence[tuple[int, int, int]],
    rests: Sequence[tuple[int, int]],
    distance: int,
    budget: list[int],
) -> bool:
    """The same over (step, least, most) per level; `rests` is what levels behind each can give."""
    if not levels:
        return distance == 0
    budget[0] -= 1
    if budget[0] < 0:
        return True
    (step, low, high), (rest_low, rest_high) = levels[0], rests[0]
    first = max(low, -((rest_high - distance) // step))
    last = min(high, (distance - rest_low) // step)
    return any(
        _reaches(levels[1:], rests[1:], distance - step * x, budget) for x in range(first, last + 1)
    )
