"""What a module says about its own distribution: its mesh, and the shardings of its arguments and
results.

JAX writes `sdy.mesh` and `sdy.sharding` for the shardings a user gives to `jax.jit` and to
abstract arrays; constraints inside of the step stay ops. Nothing is decided here: strategy `manual`
reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compiler.diagnostics import ImportRuleError
from compiler.frontend.importer import entry_name, functions_of
from compiler.frontend.rules.registry import RefusedError
from compiler.frontend.rules.sharding import constraint_attrs
from compiler.ir.ops import ShardingConstraintAttrs

MeshAxes = tuple[tuple[str, int], ...]


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

    functions = functions_of(module)
    entry = functions[entry_name(functions)]
    kind = ir.FunctionType(ir.TypeAttr(entry.attributes["function_type"]).value)
    return ModuleShardings(
        tuple(dict.fromkeys(_meshes(module))),
        _of_slots(entry, "arg_attrs", len(kind.inputs)),
        _of_slots(entry, "res_attrs", len(kind.results)),
    )


def _meshes(module: Any) -> list[MeshAxes]:
    """The axes of every mesh that has some; a mesh without axes names one device."""
    from jaxlib.mlir.dialects import sdy

    found = []
    for view in module.body.operations:
        if view.operation.name == "sdy.mesh":
            mesh = sdy.MeshAttr(view.operation.attributes["mesh"])
            axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
            found.append(tuple((axis.name, int(axis.size)) for axis in axes))
    return [axes for axes in found if axes]


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
        raise ImportRuleError(error.code, f"{what}: {error}", None, error.hint) from error
