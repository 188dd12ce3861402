"""What a module says about its own distribution: its mesh, and the shardings of its arguments and
results.

JAX writes `sdy.mesh` and `sdy.sharding` for the shardings a user gives to `jax.jit` and to
abstract arrays; constraints inside of the step stay ops. Nothing is decided here: strategy `manual`
reads it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.diagnostics import Diagnostic, Loc
from shardwright.compiler.frontend.locations import LocationReader
from shardwright.compiler.frontend.mlir import all_ops, entry_of
from shardwright.compiler.frontend.rules.gspmd import splits
from shardwright.compiler.frontend.rules.process_groups import MeshAxes
from shardwright.compiler.frontend.rules.ranks import MANUAL, declared_grid, module_meshes
from shardwright.compiler.frontend.rules.registry import RefusedError
from shardwright.compiler.frontend.rules.sharding import constraint_attrs
from shardwright.compiler.ir.ops import ShardingConstraintAttrs

_KEYS = ("sdy.sharding", "mhlo.sharding")  # of arguments, results and ops
_ASKING = {
    "sdy.sharding_constraint": ("sharding",),
    MANUAL: ("in_shardings", "out_shardings"),
}
"""Attributes with shardings of the ops that are there for them."""
_AXIS = re.compile(r'"([^"]+)"')


@dataclass(frozen=True, slots=True)
class ModuleShardings:
    """The distinct meshes of a module (axis names and sizes, major to minor), and the sharding of
    each input and output of its graph; None where the module says nothing.
    """

    meshes: tuple[MeshAxes, ...]
    inputs: tuple[ShardingConstraintAttrs | None, ...]
    outputs: tuple[ShardingConstraintAttrs | None, ...]


def read_shardings(module: Any) -> ModuleShardings:
    """The shardings of `module`; its context must be entered.

    Raises: ImportRuleError SW_CONSTRAINT for parts of axes and unreduced values.
    """
    from jaxlib.mlir import ir

    entry = entry_of(module)
    kind = ir.FunctionType(ir.TypeAttr(entry.attributes["function_type"]).value)
    return ModuleShardings(
        tuple(dict.fromkeys(axes for axes, _ in module_meshes(module).values() if axes)),
        _of_slots(entry, "arg_attrs", len(kind.inputs)),
        _of_slots(entry, "res_attrs", len(kind.results)),
    )


def _of_slots(entry: Any, key: str, count: int) -> tuple[ShardingConstraintAttrs | None, ...]:
    """The shardings among the attributes of all arguments, or of all results."""
    given = entry.attributes[key] if key in entry.attributes else [{}] * count
    return tuple(_of_slot(row, f"{key.partition('_')[0]} {i}") for i, row in enumerate(given))


def _of_slot(attributes: Any, what: str) -> ShardingConstraintAttrs | None:
    if "sdy.sharding" not in attributes:
        return None
    try:
        return constraint_attrs(attributes["sdy.sharding"])
    except RefusedError as error:
        raise error.at(None, f"{what}: ") from error


def unused_shardings(module: Any, locations: LocationReader) -> tuple[Diagnostic, ...]:
    """What to tell about shardings that split values of a module compiled for one core."""
    found = _splitting(module, locations)
    if not found:
        return ()
    text, loc = next(((t, where) for t, where in found if where.file), found[0])
    told = f"{len(found)} shardings split values of the module and are"
    if len(found) == 1:
        told = "1 sharding splits a value of the module and is"
    return (
        Diagnostic(
            "SW_SHARDING_UNUSED",
            f"{told} not applied, for example {text}: the file is one program for one core, on"
            " whole values",
            loc,
            "write the module as StableHLO for a mesh of as many cores as mhlo.num_partitions, give"
            " the step to `shardwright run` or `plan` with --strategy manual, or compile what XLA's"
            " partitioner made of the module",
            "warning",
        ),
    )


def asked_shardings(module: Any, locations: LocationReader) -> ModuleShardings | None:
    """The shardings of a module that asks for as many partitions as its one mesh has cores, in the
    order of the mesh, and says with `sdy` alone how; None for any other.

    Raises: ImportRuleError, as `read_shardings`.
    """
    meshes = {mesh for mesh in module_meshes(module).values() if mesh[0]}
    found = _splitting(module, locations)
    if len(meshes) != 1 or not found or any(splits(text) for text, _ in found):
        return None
    ((axes, order),) = meshes
    count = math.prod(size for _, size in axes)
    grid = declared_grid(module, locations)
    asks = grid is not None and (grid.replicas, grid.partitions) == (1, count) and not order
    return read_shardings(module) if asks else None


def _splitting(module: Any, locations: LocationReader) -> list[tuple[str, Loc]]:
    """The shardings that split a value, as text, and where they stand."""
    sizes = {name: size for axes, _ in module_meshes(module).values() for name, size in axes}
    return [
        (text, loc)
        for text, loc in _shardings(module, locations)
        if splits(text) or any(sizes.get(axis, 1) > 1 for axis in _AXIS.findall(text))
    ]


def _shardings(module: Any, locations: LocationReader) -> Iterator[tuple[str, Loc]]:
    """Every sharding of a module as text, and where it stands."""
    entry = entry_of(module)
    where = locations.read(entry.location)
    for key in ("arg_attrs", "res_attrs"):
        rows = entry.attributes.get(key, ())
        yield from ((str(row[k]), where) for row in rows for k in _KEYS if k in row)
    for op in all_ops(module):
        keys = [k for k in _KEYS if k in op.attributes]
        keys += _ASKING.get(op.name, ())
        yield from ((str(op.attributes[k]), locations.read(op.location)) for k in keys)
