"""Which outputs of a module take over the memory of an input, as the module says.

JAX writes `tf.aliasing_output` on an argument; HLO carries `input_output_alias`, which becomes a
module attribute. An output that cannot share (another type, an input given away twice) is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardwright.compiler.frontend.mlir import functions_of
from shardwright.compiler.ir.types import Graph

Aliases = tuple[tuple[int, int], ...]
"""(output number, input number) pairs, by output."""

_ARGUMENT = "tf.aliasing_output"
_MODULE = "mhlo.input_output_alias"


def read_aliases(module: Any, graph: Graph) -> Aliases:
    """The aliases of `module` that `graph`, imported from it, can have."""
    taken: dict[int, int] = {}
    for output, argument in (*_of_arguments(module), *_of_module(module)):
        known = 0 <= output < len(graph.outputs) and 0 <= argument < len(graph.inputs)
        free = known and output not in taken and argument not in taken.values()
        if free and graph.outputs[output].type == graph.inputs[argument].type:
            taken[output] = argument
    return tuple(sorted(taken.items()))


def _of_arguments(module: Any) -> Iterable[tuple[int, int]]:
    main = functions_of(module).get("main")
    given = main.attributes.get("arg_attrs") if main is not None else None
    for number, found in enumerate(given or ()):
        if _ARGUMENT in found:
            yield int(found[_ARGUMENT].value), number


def _of_module(module: Any) -> Iterable[tuple[int, int]]:
    """Whole parameters and outputs only: what lies inside of a tuple has no number here."""
    attributes = module.operation.attributes
    for row in attributes.get(_MODULE, ()):
        alias, output = row["alias"], list(row["output_index"])
        if len(output) <= 1 and not list(alias["parameter_index"]):
            yield (output[0] if output else 0), int(alias["parameter_number"].value)
