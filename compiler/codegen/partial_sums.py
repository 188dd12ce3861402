"""Cutting a kernel along an iter dim it sums over: each core sums its half, then one adds the two.

The first pair of kernels does everything up to the sums and leaves them in scratch memory, one
copy per core; a second, small kernel on core 0 joins the copies and does what follows. It is
offered for kernels that have no other cut: gradients of weights summed over rows, norms.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.codegen.domain import Tensors
from shardwright.compiler.ir.combinations import ELEMENTWISE_OF
from shardwright.compiler.isa.kernel import (
    STORES,
    Affine,
    KernelProgram,
    Node,
    Tensor,
    View,
    root_of,
)


@dataclass(frozen=True, slots=True)
class Cut:
    """A kernel cut in two; `joined` follows where both halves have sums of their own, which lie in
    `scratch`: tensors numbered behind those of the function.
    """

    halves: tuple[KernelProgram, KernelProgram]
    joined: KernelProgram | None = None
    scratch: tuple[Tensor, ...] = ()


def split_at_sums(program: KernelProgram, iter_dim: int, tensors: Tensors) -> Cut | None:
    """`program` in front of and behind its sums over `iter_dim`; None when something behind a sum
    still moves along the iter dim, or needs more than loads and elementwise operators.
    """
    sums = [n for n, node in enumerate(program.nodes) if iter_dim in node.attrs.get("over", ())]
    behind = _behind(program.nodes, sums)
    if not sums or any(_moves(program, n, iter_dim) for n in behind):
        return None
    remat = _rematerialised(program, behind, sums)
    if remat is None or _overwrites(program, behind, remat, tensors):
        return None
    numbers = range(len(tensors), len(tensors) + len(sums))
    summed = zip(numbers, (program.nodes[n] for n in sums), strict=True)
    scratch = tuple(  # memory for a sum of each core
        Tensor(f"sum{number}", (2, *_shape(program, node)), node.dtype, "scratch")
        for number, node in summed
    )
    first, second = (_front(program, sums, behind, numbers, core) for core in (0, 1))
    return Cut((first, second), _back(program, iter_dim, sums, behind | remat, numbers), scratch)


def _behind(nodes: Sequence[Node], sums: Collection[int]) -> set[int]:
    """What reads sums, directly or not; a sum that reads another one included."""
    found: set[int] = set()
    for n, node in enumerate(nodes):
        if any(i in found or i in sums for i in node.inputs):
            found.add(n)
    return found


def _moves(program: KernelProgram, number: int, iter_dim: int) -> bool:
    """Whether a node spans the iter dim, sums along it, or stores along it."""
    node = program.nodes[number]
    spans = node.op not in STORES and iter_dim in node.attrs.get("over", node.iter_dims)
    reads = any(iter_dim in program.nodes[i].iter_dims for i in node.inputs)
    return spans or reads or ("view" in node.attrs and node.attrs["view"].strides[iter_dim] != 0)


def _rematerialised(
    program: KernelProgram, behind: Collection[int], sums: Collection[int]
) -> set[int] | None:
    """What nodes behind the sums read besides them; None unless loads and elementwise operators."""
    found: set[int] = set()
    work = [i for n in behind for i in program.nodes[n].inputs]
    while work:
        n = work.pop()
        if n in found or n in behind or n in sums:
            continue
        if "over" in program.nodes[n].attrs or program.nodes[n].op == "load_indexed":
            return None
        found.add(n)
        work += program.nodes[n].inputs
    return found


def _overwrites(
    program: KernelProgram, behind: Collection[int], remat: Collection[int], tensors: Tensors
) -> bool:
    """Whether the front stores to memory that the back still loads."""
    nodes = program.nodes
    stored = (
        n.attrs["view"].tensor for k, n in enumerate(nodes) if n.op in STORES and k not in behind
    )
    loaded = (nodes[k].attrs["view"].tensor for k in (*behind, *remat) if nodes[k].op == "load")
    return not {root_of(tensors, t) for t in stored}.isdisjoint(root_of(tensors, t) for t in loaded)


def _shape(program: KernelProgram, node: Node) -> tuple[int, ...]:
    return tuple(program.iter_dims[a] for a in node.iter_dims)


def _view(program: KernelProgram, node: Node, tensor: int, core: int) -> View:
    """The copy of one core, dense in the order of the iter dims."""
    strides, step = [0] * len(program.iter_dims), 1
    for a in reversed(node.iter_dims):
        strides[a] = step
        step *= program.iter_dims[a]
    return View(tensor, Affine(core * math.prod(_shape(program, node))), tuple(strides))


def _front(
    program: KernelProgram,
    sums: Sequence[int],
    behind: Collection[int],
    numbers: Sequence[int],
    core: int,
) -> KernelProgram:
    """Everything not behind the sums, which a core stores to its copy."""
    kept = [n for n in range(len(program.nodes)) if n not in behind]
    nodes = list(_renumbered(program.nodes, kept, {}))
    for n, tensor in zip(sums, numbers, strict=True):
        node = program.nodes[n]
        attrs = {"view": _view(program, node, tensor, core)}
        nodes.append(Node("store", (kept.index(n),), node.iter_dims, node.dtype, attrs))
    return replace(program, nodes=tuple(nodes))


def _back(
    program: KernelProgram,
    iter_dim: int,
    sums: Sequence[int],
    kept: Collection[int],
    numbers: Sequence[int],
) -> KernelProgram:
    """The copies joined, and what is behind them."""
    nodes: list[Node] = []
    known: dict[int, int] = {}
    for n, tensor in zip(sums, numbers, strict=True):
        node = program.nodes[n]
        for core in (0, 1):
            attrs = {"view": _view(program, node, tensor, core)}
            nodes.append(Node("load", (), node.iter_dims, node.dtype, attrs))
        kind = node.attrs.get("kind", "add")
        known[n] = len(nodes)
        nodes.append(
            Node(ELEMENTWISE_OF[kind], (known[n] - 2, known[n] - 1), node.iter_dims, node.dtype)
        )
    nodes += _renumbered(program.nodes, sorted(kept), known, len(nodes))
    sizes = tuple(1 if a == iter_dim else size for a, size in enumerate(program.iter_dims))
    return replace(program, name=f"{program.name}_joined", iter_dims=sizes, nodes=tuple(nodes))


def _renumbered(
    nodes: Sequence[Node], kept: Sequence[int], known: dict[int, int], start: int = 0
) -> Iterator[Node]:
    """`kept` of `nodes` one after the other from number `start` on."""
    known |= {n: start + at for at, n in enumerate(kept)}
    for n in kept:
        yield replace(nodes[n], inputs=tuple(known[i] for i in nodes[n].inputs))
