"""`ragged_all_to_all`: every rank sends runs of rows of any length to any rank.

No collective of the machine has sizes that are known only when it runs. What is exchanged is an
all_to_all of chunks that hold the longest run that can be: that of the sizes where the module says
them as constants, else of the buffers (docs/network.md has what this costs). Rows are put into
chunks before, and out of them after. `manual_regions.py` says the same of whole values in JAX.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.mlir import producer
from shardwright.compiler.frontend.rules.registry import Maker, Site, refuse
from shardwright.compiler.ir.ops import GatherAttrs
from shardwright.compiler.ir.types import Value

OPERANDS = ("operand", "output", "input_offsets", "send_sizes", "output_offsets", "recv_sizes")
Exchange = Callable[[Value], Value]
"""An all_to_all over the ranks of the call, along dim 0."""


def exchange_rows(site: Site, num_ranks: int, exchange: Exchange) -> Value:
    """The result of the call at `site`, over groups of `num_ranks`.

    Refuses operands that are no ragged exchange (NCC_EVRF064).
    """
    _check(site, num_ranks)
    rows, output, *numbers = site.operands
    make = site.make
    starts, _, places, lengths = (make.convert(n, DType.I32) for n in numbers)
    chunk = min(rows.type.shape[0], output.type.shape[0], longest(site.op.operands[3]))
    if not chunk:
        return output
    runs = starts.type.shape[0]
    sent = _take(make, rows, _add(make, starts, make.iota((runs, chunk), 1), 0))
    arrived = exchange(sent)
    return _placed(make, arrived, output, exchange(places), lengths)


def longest(sizes: object) -> int:
    """The longest run of an MLIR value of sizes: no limit unless it is a constant."""
    from jaxlib.mlir import ir

    made = producer(sizes)
    if made is None or made.name != "stablehlo.constant":
        return 1 << 62
    values = ir.DenseIntElementsAttr(made.attributes["value"])
    return max(0, int(np.array(values).max(initial=0)))


def _check(site: Site, num_ranks: int) -> None:
    types = [v.type for v in site.operands]
    if len(types) != len(OPERANDS):
        _require(f"operands {', '.join(OPERANDS)}", f"{len(types)}")
    rows, output, *numbers = types
    if (rows.shape[1:], rows.dtype) != (output.shape[1:], output.dtype) or not rows.rank:
        _require("an operand and an output of rows alike", f"{rows} and {output}")
    runs = {n.shape for n in numbers}
    if len(runs) != 1 or numbers[0].rank != 1 or any(n.dtype.is_float for n in numbers):
        _require("offsets and sizes as vectors of integers of one length", f"{numbers}")
    if numbers[0].shape[0] % num_ranks:
        given = f"{numbers[0].shape[0]} runs"
        _require(f"as many runs for each of its {num_ranks} ranks", given)
    if site.result_types() != [output]:
        _require(f"the result {output}", f"{site.result_types()}")


def _require(needed: str, given: str) -> None:
    refuse("NCC_EVRF064", f"ragged_all_to_all requires {needed}, got {given}")


def _add(make: Maker, vector: Value, table: Value, dim: int) -> Value:
    """`table` plus `vector` along a dim."""
    return make.add(make.broadcast(vector, table.type.shape, (dim,)), table)


def _take(make: Maker, rows: Value, numbers: Value) -> Value:
    """The rows of these numbers; what no run has is any row."""
    last = rows.type.shape[0] - 1
    zero, top = (make.splat(n, numbers.type) for n in (0, last))
    kept = make.op("minimum", make.op("maximum", numbers, zero), top)
    rank = numbers.type.rank
    attrs = GatherAttrs(
        offset_dims=tuple(range(rank, rank + rows.type.rank - 1)),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
        index_vector_dim=rank,
        slice_sizes=(1, *rows.type.shape[1:]),
    )
    return make.op("gather", rows, kept, attrs=attrs)


def _placed(make: Maker, arrived: Value, output: Value, places: Value, lengths: Value) -> Value:
    """`output` with what arrived, [runs, chunk, ...], where its senders said."""
    (runs, chunk, *row), count = arrived.type.shape, output.type.shape[0]
    table = (count, runs)
    begin, size = (make.broadcast(v, table, (1,)) for v in (places, lengths))
    inside = make.op("subtract", make.iota(table, 0), begin)  # the row's place in each run
    zero = make.splat(0, inside.type)
    is_of = make.op("and", make.compare(inside, zero, "GE"), make.compare(inside, size, "LT"))
    first = make.multiply(make.iota(table, 1), make.splat(chunk, inside.type))
    source = make.reduce(make.op("select", is_of, make.add(first, inside), zero), "max", (1,))
    covered = make.reduce(make.op("select", is_of, make.splat(1, zero.type), zero), "max", (1,))
    taken = _take(make, make.reshape(arrived, (runs * chunk, *row)), source)
    is_covered = make.compare(covered, make.splat(0, covered.type), "NE")
    spread = make.broadcast(is_covered, output.type.shape, (0,))
    return make.op("select", spread, taken, output)
