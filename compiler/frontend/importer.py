"""The importer's engine: walks MLIR blocks, inlines calls, lets regions capture, keeps types and
locations.

What an op becomes is the business of `rules/`; a rule sees one `Site`. Values a region reads from
outside become extra carries of its loop (splat constants are repeated inside instead), because
regions of our IR do not capture.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NoReturn

from shardwright.compiler.diagnostics import DiagnosticError, ImportRuleError, InternalError, Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.locations import LocationReader
from shardwright.compiler.frontend.mlir import all_ops, entry_name, functions_of
from shardwright.compiler.frontend.rules.ranks import RankMesh, whole
from shardwright.compiler.frontend.rules.registry import (
    Capture,
    Check,
    RefusedError,
    Rule,
    Scope,
    Site,
    Values,
    refuse,
)
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value, tensor_type
from shardwright.compiler.surface.operators import refusal_code


@dataclass(frozen=True, slots=True)
class ImportHooks:
    """What a caller wants to see of the MLIR module while it is imported.

    `on_op(mlir_op, values)` comes after every op that had results, with our value per result.
    `on_block(mlir_op, values)` comes for every function and loop body, with our value per block
    argument, before its ops. With hooks, every inlined call is visited again.
    """

    on_op: Callable[[Any, Values], None] | None = None
    on_block: Callable[[Any, Values], None] | None = None


class Importer:
    """Imports the functions of one MLIR module."""

    def __init__(
        self,
        module: Any,
        rules: Mapping[str, Rule],
        locations: LocationReader,
        hooks: ImportHooks,
        checks: Mapping[str, Check],
        ranks: RankMesh | None = None,
        regions: list[Graph] | None = None,
    ) -> None:
        self.rules = rules
        self.regions = regions  # of one rank, in a whole step; None where there may be none
        self.checks = checks
        self.is_partition = ranks is not None  # one rank's program, as opposed to a whole step
        self.ranks = ranks or whole(module, locations)
        self.locations = locations
        self.hooks = hooks
        self._observed = hooks.on_op is not None or hooks.on_block is not None
        self.attributes: dict[Any, Any] = {}
        self.scalars: dict[
            Value, Op
        ] = {}  # producers of single elements and splats, for trip counts and identities
        self.generators = 0  # `rng` ops met so far: the key of the next one
        self.words: dict[Value, Value] = {}  # 64-bit values -> their 32-bit words, low first
        self.formats: dict[Value, DType] = {}  # packed MX data -> the type of its elements
        self.functions = functions_of(module)
        self._types: dict[Any, TensorType] = {}
        self._templates: dict[str, Graph] = {}
        self._reusable: dict[str, bool] = {}
        self._calling: list[str] = []

    def main(self) -> Graph:
        """The graph of the entry function: `main`, or the only public one."""
        name = entry_name(self.functions)
        function = self.functions[name]
        arguments = tuple(
            Value(self._argument_type(function, a)) for a in self._block(function).arguments
        )
        self._calling.append(name)
        return self._function_graph(function, arguments)

    def _argument_type(self, function: Any, argument: Any) -> TensorType:
        """The type of an argument of the entry. Raises ImportRuleError at the function."""
        try:
            return self.type_of(argument.type)
        except RefusedError as error:
            loc = self.locations.read(function.location)
            raise error.at(loc, f"argument {argument.arg_number}: ") from error

    def _block(self, function: Any) -> Any:
        """The body of a function, which must be one block."""
        blocks = list(function.regions[0].blocks)
        if len(blocks) != 1:
            loc = self.locations.read(function.location)
            raise ImportRuleError(
                "NCC_EVRF001", f"function requires one block, got {len(blocks)}", loc
            )
        return blocks[0]

    def type_of(self, mlir_type: Any) -> TensorType:
        """Our type of an MLIR type; refuses dynamic shapes and element types we do not have."""
        type = self._types.get(mlir_type)
        if type is None:
            type = self._types[mlir_type] = _convert_type(mlir_type)
        return type

    def append(self, scope: Scope, op: Op) -> None:
        """Add `op` to `scope`; remember producers of single elements and splats."""
        scope.ops.append(op)
        if op.name == "constant":
            if op.attrs.is_splat:
                self.scalars[op.results[0]] = op
        elif len(op.results) == 1 and op.results[0].type.num_elements == 1:
            self.scalars[op.results[0]] = op

    def lookup(self, scope: Scope, value: Any) -> Value:
        """Our value of an MLIR value, captured where it is of an enclosing scope."""
        found = scope.env.get(value)
        if found is None:
            assert scope.parent is not None, "an MLIR value is used before it is defined"
            outer = self.lookup(scope.parent, value)
            found = scope.env[value] = self._capture(scope, outer)
        return found

    def _capture(self, scope: Scope, outer: Value) -> Value:
        """`outer` inside of `scope`: a copy of a splat constant, else a new carry."""
        op = self.scalars.get(outer)
        if op is not None and op.name == "constant":
            copy = Op(op.name, (), (Value(outer.type),), op.attrs, (), op.loc)
            self.append(scope, copy)
            return copy.results[0]
        inner = Value(outer.type)
        scope.captures.append(Capture(outer, inner))
        return inner

    def block(self, owner: Any, block: Any, scope: Scope, arguments: Values) -> tuple[Value, ...]:
        """Import the ops of `block` into `scope`; returns the values its terminator returns."""
        scope.env.update(zip(block.arguments, arguments, strict=True))
        if self.hooks.on_block is not None:
            self.hooks.on_block(owner, arguments)
        outputs: tuple[Value, ...] = ()
        for view in block.operations:
            op = view.operation
            if op.name in ("func.return", "stablehlo.return", "sdy.return"):
                outputs = tuple(self.lookup(scope, v) for v in op.operands)
            else:
                self._op(scope, op)
        return outputs

    def of_rank(self, ranks: RankMesh) -> Importer:
        """The importer of what one of `ranks` does inside of this module."""
        inner = copy(self)
        inner.is_partition, inner.ranks, inner.regions = True, ranks, None
        inner._templates, inner._reusable = {}, {}
        return inner

    def _op(self, scope: Scope, op: Any) -> None:
        """Import one op. Raises ImportRuleError with the user's location."""
        loc = self.locations.read(op.location)
        operands = tuple([self.lookup(scope, v) for v in op.operands])
        try:
            rule = self.rules.get(op.name, _refuse_unknown)
            site = Site(self, scope, op, operands, loc)
            if op.name in self.checks:
                self.checks[op.name](site)
            values = rule(site)
            self._bind(scope, op, values)
        except RefusedError as error:
            place = loc if loc.file else self._place_of_use(op, loc)
            raise error.at(place) from error
        except DiagnosticError:
            raise  # of an op inside, with its own line
        except Exception as error:
            raise InternalError.of(error, traceback.format_exc(), loc) from error
        if self.hooks.on_op is not None and values:
            self.hooks.on_op(op, values)

    def _place_of_use(self, op: Any, loc: Loc) -> Loc:
        """Where a result is first read, of an op without a line (jax gives constants none)."""
        uses = (use for result in op.results for use in result.uses)
        places = [self.locations.read(use.owner.location) for use in uses]
        return next((place for place in reversed(places) if place.file), loc)

    def _bind(self, scope: Scope, op: Any, values: Values) -> None:
        """Enter the results, after checking that our type rules agree with the module's types."""
        env = scope.env
        for result, value in zip(op.results, values, strict=True):
            if _is_sized_after_all(result.type, value.type):
                env[result] = value
                continue
            type = self.type_of(result.type)
            if value.type is not type and value.type != type:
                refuse("NCC_EVRF064", f"{op.name} requires a result of {value.type}, got {type}")
            env[result] = value

    def call(self, site: Site, name: str) -> Values:
        """Inline a call of function `name` at `site`."""
        if name not in self.functions:
            refuse("SW_STABLEHLO_CALL", f"call requires a function of the module, got @{name}")
        if name in self._calling:
            refuse("NCC_EVRF001", f"call requires no recursion, got @{name} inside of itself")
        self._calling.append(name)
        try:
            if self._is_reusable(name):
                return self._inline_copy(site, self._template(site, name))
            return self._inline_once(site, name)
        except ImportRuleError as error:
            loc = self.locations.join(site.loc, error.loc) if error.loc else site.loc
            found = error.diagnostic
            raise ImportRuleError(found.code, found.message, loc, found.hint) from error
        finally:
            self._calling.pop()

    def _inline_once(self, site: Site, name: str) -> Values:
        """Import the callee in place, under the locations of the call."""
        scope = Scope()
        function = self.functions[name]
        outputs = self.block(function, self._block(function), scope, site.operands)
        self._relocate(scope.ops, site.loc)
        site.scope.ops.extend(scope.ops)
        return outputs

    def _template(self, site: Site, name: str) -> Graph:
        """The graph of a function over its own inputs, converted once."""
        if name not in self._templates:
            arguments = tuple(Value(v.type) for v in site.operands)
            self._templates[name] = self._function_graph(self.functions[name], arguments)
        return self._templates[name]

    def _function_graph(self, function: Any, arguments: tuple[Value, ...]) -> Graph:
        scope = Scope()
        outputs = self.block(function, self._block(function), scope, arguments)
        return Graph(arguments, tuple(scope.ops), outputs)

    def _is_reusable(self, name: str) -> bool:
        """True when all calls of a function may share one conversion.

        With hooks every call is visited; a loop may take its trip count from an argument of the
        call.
        """
        if name not in self._reusable:
            self._reusable[name] = not self._observed and not self._has_loop(self.functions[name])
        return self._reusable[name]

    def _has_loop(self, op: Any) -> bool:
        """True when a loop is anywhere below `op`, calls included."""
        below = all_ops(op)
        callees = {inner.attributes["callee"].value for inner in below if inner.name == "func.call"}
        return any(inner.name == "stablehlo.while" for inner in below) or not all(
            self._is_reusable(callee) for callee in callees & self.functions.keys()
        )

    def _inline_copy(self, site: Site, template: Graph) -> Values:
        """Copy the ops of `template`, which have no regions, with operands for its inputs."""
        values = dict(zip(template.inputs, site.operands, strict=True))
        join, call = self.locations.join, site.loc
        for op in template.ops:
            assert not op.regions, "a function with a loop is imported once per call"
            operands = tuple([values[v] for v in op.operands])
            results = tuple([Value(r.type) for r in op.results])
            self.append(
                site.scope, Op(op.name, operands, results, op.attrs, (), join(call, op.loc))
            )
            values.update(zip(op.results, results, strict=True))
        return [values[v] for v in template.outputs]

    def _relocate(self, ops: Sequence[Op], call: Loc) -> None:
        """Put ops that were just made, and their regions, under the location of a call."""
        for op in ops:
            op.loc = self.locations.join(call, op.loc)
            for region in op.regions:
                self._relocate(region.ops, call)


def _refuse_unknown(site: Site) -> NoReturn:
    """The rule of an op without a rule; a type we do not have says more than the op."""
    for result in site.op.results:
        site.importer.type_of(result.type)
    name = site.name.removeprefix("stablehlo.")
    refuse(
        refusal_code(name),
        f"operator {name} is not supported",
        _OPTIMIZED
        if name == "mhlo.fusion"
        else "`shardwright list-operators` prints the supported ones",
    )


_OPTIMIZED = (
    "this module went through XLA's optimizer for another machine: give the one before it, such as"
    " jax.jit(step).lower(...).as_text()"
)


_ORDERED = (
    "a token orders callbacks into Python and infeeds: leave ordered=True out of jax.debug.print,"
    " and it is left out of the step"
)


def _is_sized_after_all(mlir_type: Any, type: TensorType) -> bool:
    """Whether `type` is a case of one with bounded dims (`set_dimension_size` of a constant)."""
    if getattr(mlir_type, "has_static_shape", True) or not mlir_type.has_rank:
        return False
    dims = zip(type.shape, range(mlir_type.rank), strict=False)
    return (
        len(type.shape) == mlir_type.rank
        and str(mlir_type.element_type) == type.dtype.value
        and all(mlir_type.is_dynamic_dim(d) or mlir_type.get_dim_size(d) == n for n, d in dims)
    )


def _convert_type(mlir_type: Any) -> TensorType:
    """Our type of a ranked, static tensor type."""
    from jaxlib.mlir import ir

    if not isinstance(mlir_type, ir.RankedTensorType):
        hint = _ORDERED if "token" in str(mlir_type) else ""
        refuse("NCC_EVRF001", f"values require a tensor type, got {mlir_type}", hint)
    if not mlir_type.has_static_shape:
        refuse(
            "NCC_EMOD025",
            f"every dimension requires a static size, got {mlir_type}",
            "pad or bucket the inputs",
        )
    element = str(mlir_type.element_type)
    try:
        return tensor_type(tuple(mlir_type.shape), DType(element))
    except ValueError:
        known = ", ".join(dtype.value for dtype in DType)
        refuse(_type_code(element), f"elements require a type of {known}; got {element}")


def _type_code(element: str) -> str:
    """The documented code for an element type that has no code generation."""
    if element.startswith("complex"):
        return "NCC_EVRF004"
    if element.startswith("f8"):
        return "NCC_EVRF005" if element.endswith("FNUZ") else "NCC_ESPP047"
    return "NCC_ESPP004"
