"""Tiling as text: how the index space of every kernel is cut into what lies on chip at a time.

Which loop walks along which iter dim is read off the code itself: a DMA inside of the loop moves on
by so many steps of that iter dim in HBM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

from shardwright.compiler.codegen.domain import Split
from shardwright.compiler.codegen.generate import Codes, Recipe
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import STORES, Tensor, View
from shardwright.compiler.isa.kernel_text import head_text
from shardwright.compiler.isa.limits import limits_for, walk
from shardwright.compiler.isa.program import Function, Instr, Kernel, Loop, Space
from shardwright.compiler.machine.target import Limits, Target
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.schedule.allocate import Life, end_address, lifetimes
from shardwright.compiler.shown.charts import bytes_text, span_chart, table, tensor_text, us_text
from shardwright.compiler.timing.evaluate import KernelTime, function_segments

Recipes = Sequence[Sequence[Recipe | None]]
_CHART = 32
_HEAD = """\
How every kernel is cut into tiles.

An iteration dim is an independent index of the kernel. A tile holds a block of it on chip, a loop
walks over its blocks; a folded one is that of a sum, a maximum or a product. `partitions`
are the {partitions} lanes of SBUF and PSUM, `elements` lie behind each other on one. A tile with
several slots rotates: one slot is filled while another is read. `in use` shows when, from the first
to the last element of the body of its loop: tiles that are never in use together may share an
address.

Tiles are named after the operation that makes them. For products (tensor engine): `stationary` and
`moving` are the operands, `rows` is loaded to be transposed, `turned` is transposed, `product` is
the sum in PSUM, `staged` waits to be stored.

A nest is what one planner tiles: `loop` (elementwise and folds of rows), `contraction` (one
product), `reduction` (several products, or folds beside them, as in attention), `windows`
(convolutions), `copy`. The words of a tiling that was tried are the fields of its plan
(ContractPlan, LoopPlan, RowPlan in compiler/codegen); numbers in it are iteration dims of the
kernel as it was normalised.

`op N` is the N-th op, from 0, of the function's graph before its passes. Times are on the nominal
machine.
"""
_INSIDE = ("cost", "variant", "number", "run", "values")  # of plans: what says nothing of tiles


def tiling_text(
    function: Function, recipes: Recipes, target: Target, options: CompileOptions
) -> str:
    """The tiling of every kernel of a function; `recipes` are those of its physical cores."""
    limits, times = limits_for(target.name), _times(function, target)
    lines = _HEAD.format(partitions=limits.partitions).splitlines()
    for core, kernels in enumerate(function.subgraphs):
        for number, kernel in enumerate(kernels):
            name = f" on physical core {core}" if len(function.subgraphs) > 1 else ""
            made_of = f" (op {kernel.program.loc})" if kernel.program.loc >= 0 else ""
            lines += ["", f"kernel {number}{name}: {head_text(kernel.program)}{made_of}"]
            if kernel.program.kind == "compute":
                one = _Tiled(kernel, function.tensors, target, limits)
                lines += one.lines()
                lines += _timed(times[number])
                lines += _searched(one, recipes[number][core], options)
    return "\n".join(lines) + "\n"


def _times(function: Function, target: Target) -> dict[int, KernelTime]:
    """Times of kernels by number, as they follow each other."""
    kinds = enumerate(kernel.program.kind for kernel in function.kernels)
    numbers = [number for number, kind in kinds if not kind.startswith("collective")]
    segments = function_segments(function, target)
    times = [time for segment in segments for time in segment.kernels]
    return dict(zip(numbers, times, strict=True))


def _timed(time: KernelTime) -> Iterator[str]:
    busy = ", ".join(f"{engine} {us_text(ps)}" for engine, ps in time.busy_ps.items())
    moved = bytes_text(time.hbm_bytes)
    yield f"  time: adds {us_text(time.duration_ps)} to a call, {moved} through HBM"
    yield f"  busy: {busy or 'nothing'}"


class _Tiled:
    """One kernel."""

    def __init__(
        self, kernel: Kernel, tensors: Sequence[Tensor], target: Target, limits: Limits
    ) -> None:
        self.kernel, self.tensors, self.target, self.limits = kernel, tensors, target, limits
        self.moving = [n for n in kernel.program.nodes if "view" in n.attrs]
        self.views = [n.attrs["view"] for n in self.moving]
        self.walked = dict(self._walked())

    def lines(self) -> Iterator[str]:
        """Iter dims, tiles, loops."""
        yield from self._touched()
        yield from self._iter_dims()
        yield from self._tiles()
        yield "  loops and what they hold:"
        yield from _loops(self.kernel.body, self.walked, 2)

    def _touched(self) -> Iterator[str]:
        """The tensors that the kernel reads and writes in HBM."""
        for what, stores in (("reads", False), ("writes", True)):
            nodes = [n for n in self.moving if (n.op in STORES) is stores]
            for number in dict.fromkeys(n.attrs["view"].tensor for n in nodes):
                yield f"  {what:<6} tensor {number}: {tensor_text(self.tensors[number])}"

    def _along(self, iter_dim: int) -> str:
        """The tensors that an iter dim walks along, and whether it is summed over."""
        numbers = sorted({v.tensor for v in self.views if v.strides[iter_dim]})
        folded = any(iter_dim in n.attrs.get("over", ()) for n in self.kernel.program.nodes)
        tensors = f" along {', '.join(f'tensor {n}' for n in numbers)}" if numbers else ""
        return f"{tensors}{', folded' if folded else ''}"

    def _iter_dims(self) -> Iterator[str]:
        yield "  iteration dims:"
        for iter_dim, size in enumerate(self.kernel.program.iter_dims):
            loops = [
                f"loop r{loop.register}: {loop.trip} blocks of {block}"
                for loop in _all_loops(self.kernel.body)
                for found, block in (self.walked.get(loop.register, (-1, 0)),)
                if found == iter_dim
            ]
            cut = "; ".join(dict.fromkeys(loops)) or "whole: no loop moves a DMA along it"
            yield f"    iteration dim {iter_dim} of {size}{self._along(iter_dim)}: {cut}"

    def _tiles(self) -> Iterator[str]:
        if not self.kernel.tiles:
            yield "  no tiles: a DMA moves HBM to HBM"
            return
        sizes = {Space.SBUF: self.limits.sbuf_bytes, Space.PSUM: self.limits.psum_bytes}
        for space, capacity in sizes.items():
            tiles = [t for t in self.kernel.tiles if t.space is space]
            if tiles:
                used = max(map(end_address, tiles)) - min(t.address for t in tiles)
                of = f"{bytes_text(used)} of {bytes_text(capacity)}"
                yield f"  {space.value.upper()}: {of} per partition"
        rows: list[Sequence[object]]
        rows = [("tile", "space", "partitions x elements", "slots", "bytes", "at", "in use")]
        lives = zip(self.kernel.tiles, lifetimes(self.kernel), strict=True)
        for n, (t, life) in enumerate(lives):
            size = f"{t.partitions} x {t.elements} {t.dtype.value}"
            slots = f"{t.slots}{f' by r{t.loop}' if t.slots > 1 else ''}"
            place = (t.slots * t.slot_bytes, t.address, self._life(life))
            rows.append((f"{n} {t.name}", t.space.value, size, slots, *place))
        yield "  tiles (bytes and address are per partition):"
        yield from (f"    {line}" for line in table(rows, right=(4, 5)))

    def _life(self, life: Life) -> str:
        """When a tile is in use, in elements of the body of the loop it belongs to."""
        if life.last < 0:
            return "never"
        body, where = self.kernel.body, "kernel"
        for at in life.home:
            item = body[at]
            assert isinstance(item, Loop)
            body, where = item.body, f"r{item.register}"
        return f"{span_chart(life.first, life.last, len(body), _CHART)} of {where}"

    def _walked(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """(register, (iter dim, points per turn)) of loops that move along one in HBM."""
        iter_dims = self.kernel.program.iter_dims
        for loop in _all_loops(self.kernel.body):
            moves = (m for i in walk(loop.body) for m in _moves(loop, i, self.views, iter_dims))
            yield from ((loop.register, move) for move in islice(moves, 1))


def _moves(
    loop: Loop, instr: Instr, views: Sequence[View], sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """The (iter dim, block) that explain how far a turn of the loop moves a DMA in HBM."""
    for pattern in (*instr.srcs, *instr.dsts):
        step = abs(dict(pattern.offset.terms).get(loop.register, 0))
        is_moved = pattern.space is Space.HBM and step
        for view in (v for v in views if is_moved and v.tensor == pattern.buffer):
            for iter_dim in sorted(range(len(sizes)), key=lambda a: -abs(view.strides[a])):
                stride = abs(view.strides[iter_dim])
                if stride and step % stride == 0 and step // stride * loop.trip <= sizes[iter_dim]:
                    yield iter_dim, step // stride


def _all_loops(body: Sequence[Instr | Loop]) -> Iterator[Loop]:
    for item in body:
        if isinstance(item, Loop):
            yield item
            yield from _all_loops(item.body)


def _loops(
    body: Sequence[Instr | Loop], walked: Mapping[int, tuple[int, int]], depth: int
) -> Iterator[str]:
    """The nest, instructions counted where they stand."""
    pad = "  " * depth
    counts: Counter[str] = Counter()

    def told() -> Iterator[str]:
        if counts:
            yield pad + ", ".join(f"{n} x {name}" for name, n in counts.items())
            counts.clear()

    for item in body:
        if isinstance(item, Instr):
            if item.opcode not in ("wait", "signal"):
                counts[f"{item.engine.value} {item.opcode}"] += 1
            continue
        yield from told()
        along = walked.get(item.register)
        what = (
            "along iteration dim {} in blocks of {}".format(*along)
            if along
            else "over what is on chip"
        )
        yield f"{pad}loop r{item.register}: {item.trip} turns {what}"
        yield from _loops(item.body, walked, depth + 1)
    yield from told()


def _searched(one: _Tiled, recipe: Recipe | None, options: CompileOptions) -> Iterator[str]:
    """What the tiling was chosen from."""
    if recipe is None:
        return
    codes = Codes(one.kernel.program, one.tensors, one.target.name, 0, options)
    apart = ", loads in bytes of their own" if recipe.loads_apart else ""
    beside = f", innermost loops unrolled up to {recipe.unroll} times" if recipe.unroll > 1 else ""
    yield f"  search: up to {recipe.share:.0%} of SBUF{beside}{apart}"
    for choice in codes.choices(recipe):
        yield f"    {choice.kind} nest: tiling {choice.position} of {len(choice.tried)} tried"
        for number, candidate in enumerate(choice.tried):
            mark = "->" if number == choice.position else "  "
            has_estimate = choice.kind not in ("reduction", "copy")  # nothing tells those apart
            estimate = f"estimated {candidate.cost / 1e3:.3f} us" if has_estimate else ""
            variant = "variant" if candidate.variant else ""
            told = (estimate, candidate.note, plan_text(candidate.plan), variant)
            said = "; ".join(text for text in told if text)
            yield f"    {mark} {number}: {said or 'the only way'}"


def plan_text(plan: object) -> str:
    """The plain choices of a planner, by the names of its plan."""
    if not is_dataclass(plan):
        return ""
    names = (f.name for f in fields(plan) if f.name not in _INSIDE)
    shown = ((name, _plain(getattr(plan, name))) for name in names)
    return ", ".join(f"{name}={text}" for name, text in shown if text)


def _plain(value: Any) -> str:
    match value:
        case None | False | "":
            return ""
        case bool() | int() | float() | str():
            return str(value)
        case DType():
            return value.value
        case Split():
            return f"{value.major}:{value.minor}" + (f" tail {value.tail}" if value.tail else "")
        case tuple() if value and all(isinstance(v, int) for v in value):
            return f"({' '.join(map(str, value))})"
        case Mapping() if value and all(isinstance(v, int) for v in (*value, *value.values())):
            return f"{{{' '.join(f'{k}:{v}' for k, v in value.items())}}}"
    return ""
