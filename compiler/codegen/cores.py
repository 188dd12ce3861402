"""Cutting a kernel for the two physical cores of a logical NeuronCore.

A kernel is cut along one iter dim before it is tiled: each half is a kernel of its own, with its
own tiling, on-chip memory and queues, so the outermost parallel tile loop of the whole runs on both
cores at once. An iter dim qualifies when nothing is summed along it and neither half touches what
the other one stores. Which cut is taken is `compiler/fusion/logical_core.py`'s choice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardwright.compiler.codegen.domain import Tensors, needed
from shardwright.compiler.codegen.in_place import reaches
from shardwright.compiler.codegen.partial_sums import Cut, split_at_sums
from shardwright.compiler.isa.kernel import STORES, KernelProgram, Node, View, root_of

Halves = tuple[KernelProgram, KernelProgram]


def cuts(program: KernelProgram, tensors: Tensors) -> Iterator[Cut]:
    """The ways to cut a kernel in two, those first that leave least work to do on both cores, along
    the longest iter dims first among equals; along summed ones only where there is no other.

    Halves are equal, or the first one is longer by one point.
    """
    iter_dims = [a for a, size in enumerate(program.iter_dims) if size > 1]
    iter_dims.sort(key=lambda a: (_shared_points(program, a), -program.iter_dims[a]))
    plain = [cut for a in iter_dims if (cut := _plain(program, a, tensors)) is not None]
    yield from plain
    if not plain:
        summed = (_summed(program, a, tensors) for a in iter_dims)
        yield from (cut for cut in summed if cut is not None)


def _shared_points(program: KernelProgram, iter_dim: int) -> int:
    """Points of what both halves would make themselves if the kernel were cut along it."""
    return sum(
        math.prod(program.iter_dims[a] for a in node.iter_dims)
        for node in program.nodes
        if iter_dim not in (*node.iter_dims, *node.attrs.get("over", ()))
    )


def _plain(program: KernelProgram, iter_dim: int, tensors: Tensors) -> Cut | None:
    if _is_summed(program, iter_dim) or _is_inside_points(program, iter_dim):
        return None
    halves = _halves((program, program), iter_dim)
    return Cut(halves) if halves is not None and _are_independent(halves, tensors) else None


def _summed(program: KernelProgram, iter_dim: int, tensors: Tensors) -> Cut | None:
    split = split_at_sums(program, iter_dim, tensors)
    if split is None or _is_inside_points(program, iter_dim):
        return None
    halves = _halves(split.halves, iter_dim, {t + len(tensors) for t in range(len(split.scratch))})
    if halves is None or not _are_independent(halves, [*tensors, *split.scratch]):
        return None
    return replace(split, halves=halves)


def _is_summed(program: KernelProgram, iter_dim: int) -> bool:
    return any(iter_dim in node.attrs.get("over", ()) for node in program.nodes)


def _is_inside_points(program: KernelProgram, iter_dim: int) -> bool:
    """Whether the iter dim walks inside the points of a window, which are loaded as a whole."""
    return any(
        0 < abs(node.attrs["view"].strides[iter_dim]) < min(bound.unit for bound in bounds)
        for node in program.nodes
        if (bounds := node.attrs.get("bounds"))
    )


def _halves(programs: Halves, iter_dim: int, sums: Collection[int] = ()) -> Halves | None:
    """A half of each program; None when one of them would have nothing to store. What has nothing
    to do with the iter dim is stored by the first; both store to tensors of `sums`.
    """
    first, second = programs
    roots = [n for n, node in enumerate(first.nodes) if node.op in STORES]
    own = {n for n in roots if first.nodes[n].attrs["view"].tensor in sums}
    moving = own | {n for n in roots if _moves(first, first.nodes[n], iter_dim)}
    still = (first.nodes[n] for n in roots if n not in moving)
    if not moving or any(_spans(first, node, iter_dim) for node in still):
        return None
    size = first.iter_dims[iter_dim]
    middle = (size + 1) // 2
    return (
        _part(first, iter_dim, range(middle), roots),
        _part(second, iter_dim, range(middle, size), moving),
    )


def _moves(program: KernelProgram, root: Node, iter_dim: int) -> bool:
    """Whether points of the iter dim are stored at elements of their own."""
    view: View = root.attrs["view"]
    by_index = bool(root.attrs.get("unique")) and _spans(program, root, iter_dim)
    return by_index or view.strides[iter_dim] != 0


def _spans(program: KernelProgram, node: Node, iter_dim: int) -> bool:
    return any(iter_dim in program.nodes[i].iter_dims for i in node.inputs)


def _part(
    program: KernelProgram, iter_dim: int, points: range, roots: Collection[int]
) -> KernelProgram:
    """What `roots` store at some points of an iter dim."""
    kept = needed(program.nodes, roots)
    number = {old: new for new, old in enumerate(kept)}
    nodes = tuple(_moved(program.nodes[n], iter_dim, points.start, number) for n in kept)
    sizes = tuple(
        len(points) if a == iter_dim else size for a, size in enumerate(program.iter_dims)
    )
    return replace(program, iter_dims=sizes, nodes=nodes)


def _moved(node: Node, iter_dim: int, start: int, number: Mapping[int, int]) -> Node:
    """`node` where index 0 of `iter_dim` stands for `start`."""
    attrs: dict[str, Any] = dict(node.attrs)
    if "view" in attrs:
        view: View = attrs["view"]
        attrs["view"] = replace(view, offset=view.offset + view.strides[iter_dim] * start)
    if "bounds" in attrs:
        attrs["bounds"] = tuple(
            replace(b, offset=b.offset + b.strides[iter_dim] * start) for b in attrs["bounds"]
        )
    if node.op == "iota" and attrs["atom"] == iter_dim:
        attrs["start"] = attrs["start"] + attrs["step"] * start
    return replace(node, inputs=tuple(number[i] for i in node.inputs), attrs=attrs)


def _are_independent(halves: Halves, tensors: Tensors) -> bool:
    """Whether neither half touches an element that the other one stores."""
    return not any(
        _meet(store, mine, other, theirs, tensors)
        for mine, theirs in (halves, halves[::-1])
        for store in mine.nodes
        if store.op in STORES
        for other in theirs.nodes
        if "view" in other.attrs
    )


def _meet(a: Node, mine: KernelProgram, b: Node, theirs: KernelProgram, tensors: Tensors) -> bool:
    """Whether two nodes of different halves can touch a common element."""
    view: View = a.attrs["view"]
    other: View = b.attrs["view"]
    if root_of(tensors, view.tensor) != root_of(tensors, other.tensor):
        return False
    if a.attrs.get("unique") and a.op == b.op and _is_only_store(mine, view.tensor):
        return False  # no row is picked twice, whichever half picks it
    if view.offset.terms != other.offset.terms:
        return True
    steps = [*_steps(a, mine, 1), *_steps(b, theirs, -1)]
    return reaches(steps, other.offset.const - view.offset.const)


def _is_only_store(program: KernelProgram, tensor: int) -> bool:
    stored = [n.attrs["view"].tensor for n in program.nodes if n.op in STORES]
    return stored.count(tensor) == 1


def _steps(node: Node, program: KernelProgram, sign: int) -> Iterator[tuple[int, int]]:
    """How far a view reaches: (elements per step, steps)."""
    for stride, size in zip(node.attrs["view"].strides, program.iter_dims, strict=True):
        if stride:
            yield sign * stride, size
    if node.op.endswith("_indexed"):
        yield sign * node.attrs["stride"], node.attrs["rows"]
