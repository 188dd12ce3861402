"""A traced program of TensorFlow: HLO with names for what it takes and gives, as one run of bytes.

The child that traces writes it (`tracing.py`), everything else reads it: neither TensorFlow nor
its files are needed from here on. Variables are arguments, new values of those that the function
assigns are results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any

import msgpack
import numpy as np
import zstandard

from shardwright.compiler.diagnostics import ImportRuleError, Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.capture import Lowered, function_artifact
from shardwright.compiler.frontend.graphs.types import Array, computed_type
from shardwright.compiler.frontend.locations import MODULE_FILE
from shardwright.compiler.frontend.tensorflow.philox import written_out
from shardwright.compiler.frontend.tensorflow.start import MAGIC
from shardwright.compiler.neff.format import MAX_FILE_BYTES

INPUT, VARIABLE = "input", "variable"
"""What an argument is."""
RESULT, LOSS, GRADIENT, UPDATE = "result", "loss", "gradient", "update"
"""What a result is: of the function, the loss that was asked for, the gradient of a variable, or
the new value of one."""


@dataclass(frozen=True, slots=True)
class Port:
    """An argument or a result: what it is, its name, shape and element type. A result that is a
    variable's has its name; `is_trained` says of a variable that training may change it; an
    input of whole numbers has values below `classes`, where that is known."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    is_trained: bool = False
    classes: int = 0

    @property
    def type(self) -> np.dtype[Any]:
        """The element type in NumPy."""
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    @property
    def computed(self) -> Any:
        """The port as JAX has it: no engine has numbers of 64 bits."""
        import jax

        return jax.ShapeDtypeStruct(self.shape, computed_type(self.type))


@dataclass(frozen=True)
class Program:
    """What was traced. `values` are those of the variables, where they were asked for; `samples` is
    the number that dims of samples have, 0 where no input has one."""

    name: str
    hlo: bytes
    arguments: tuple[Port, ...]
    results: tuple[Port, ...]
    samples: int = 0
    values: Mapping[str, Array] = field(default_factory=dict)
    example: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def read(cls, data: bytes) -> Program:
        """That of `written` bytes. Raises ImportRuleError."""
        try:
            whole = zstandard.ZstdDecompressor().decompress(data[len(MAGIC) :], MAX_FILE_BYTES)
            rows = msgpack.unpackb(whole, use_list=False, strict_map_key=False)
            name, hlo, arguments, results, samples, values, example = rows
            found = cls(
                name,
                hlo,
                tuple(Port(*port) for port in arguments),
                tuple(Port(*port) for port in results),
                samples,
                *({key: _array(*row) for key, row in part.items()} for part in (values, example)),
            )
        except (zstandard.ZstdError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise _damaged(str(error) or type(error).__name__) from error
        return found

    def written(self) -> bytes:
        """The bytes of it."""
        ports = ([astuple(port) for port in side] for side in (self.arguments, self.results))
        arrays = ({k: _row(a) for k, a in part.items()} for part in (self.values, self.example))
        made: bytes = msgpack.packb([self.name, self.hlo, *ports, self.samples, *arrays])
        return MAGIC + zstandard.ZstdCompressor().compress(made)

    def of(self, kind: str) -> list[Port]:
        """Arguments or results that are of a kind, in order."""
        return [port for port in (*self.arguments, *self.results) if port.kind == kind]

    @property
    def variables(self) -> list[Port]:
        """The variables that it reads or assigns."""
        return self.of(VARIABLE)

    @property
    def inputs(self) -> list[Port]:
        """What it is called with."""
        return self.of(INPUT)

    @cached_property
    def _exported(self) -> Any:
        """The module as something that JAX calls."""
        import jax
        from jax import export

        from shardwright.compiler.frontend.context import serialize_portable
        from shardwright.compiler.frontend.hlo import hlo_to_stablehlo

        takes, gives = len(self.arguments), len(self.results)
        artifact = serialize_portable(_sliced(hlo_to_stablehlo(self.hlo), takes, gives))
        avals = (
            tuple(jax.core.ShapedArray(port.shape, port.type) for port in side)
            for side in (self.arguments, self.results)
        )
        in_avals, out_avals = avals
        return export.Exported(
            fun_name=self.name,
            in_tree=jax.tree.structure(((0,) * takes, {})),
            in_avals=in_avals,
            out_tree=jax.tree.structure((0,) * gives),
            out_avals=out_avals,
            _has_named_shardings=False,
            _in_named_shardings=(None,) * takes,
            _out_named_shardings=(None,) * gives,
            in_shardings_hlo=(None,) * takes,
            out_shardings_hlo=(None,) * gives,
            nr_devices=1,
            platforms=("cpu",),
            ordered_effects=(),
            unordered_effects=(),
            disabled_safety_checks=(),
            mlir_module_serialized=artifact,
            calling_convention_version=export.maximum_supported_calling_convention_version,
            module_kept_var_idx=tuple(range(takes)),
            uses_global_constants=False,
            _get_vjp=None,
        )

    def __call__(self, given: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
        """Results by (kind, name), of arguments by name; the module has numbers of 64 bits, its
        arguments and results here have not."""
        import jax

        with jax.enable_x64(True):
            values = [jax.numpy.asarray(given[p.name]).astype(p.type) for p in self.arguments]
            found = [
                result.astype(port.computed.dtype)
                for port, result in zip(self.results, self._exported.call(*values), strict=True)
            ]
        return {(p.kind, p.name): result for p, result in zip(self.results, found, strict=True)}


def lowered_file(data: bytes) -> Lowered:
    """A traced program as one of (variables, inputs). Raises ImportRuleError."""
    program = Program.read(data)
    ports = (program.variables, program.inputs)
    for port in program.arguments:
        _check_type(port)
    names = [[port.name for port in side] for side in ports]

    def call(*sides: Any) -> list[Any]:
        pairs = (zip(*pair, strict=True) for pair in zip(names, sides, strict=True))
        given = {name: value for side in pairs for name, value in side}
        return list(program(given).values())

    artifact = function_artifact(call, *([port.computed for port in side] for side in ports))
    results = tuple(
        f"{port.name}_new" if port.kind == UPDATE else port.name for port in program.results
    )
    return Lowered(artifact, (*names[0], *names[1]), results)


def _check_type(port: Port) -> None:
    """Refuse an element type that the IR does not have. Raises ImportRuleError."""
    try:
        DType.from_numpy(port.computed.dtype)
    except (KeyError, TypeError) as error:
        raise ImportRuleError(
            "NCC_ESPP004",
            f"{port.kind} {port.name} requires an element type that the machine has, got"
            f" {port.dtype}",
            Loc(MODULE_FILE),
            "write complex numbers as pairs of real arrays",
        ) from error


def _sliced(bytecode: bytes, takes: int, gives: int) -> bytes:
    """The module without attributes of HLO alone, and with its first results: what XLA writes back
    to variables stands behind them, once more. Raises ImportRuleError where it has other
    arguments."""
    import io

    from jaxlib.mlir import ir

    from shardwright.compiler.frontend.context import make_context, parse_module

    with make_context():
        module, out = parse_module(bytecode), io.BytesIO()
        for name in list(module.operation.attributes):
            if name.startswith("mhlo."):
                del module.operation.attributes[name]
        main = next(op for op in module.body.operations if _symbol(op) == "main")
        block = main.regions[0].blocks[0]
        end = block.operations[len(block.operations) - 1]
        if len(block.arguments) != takes or len(end.operands) < gives:
            raise _damaged(f"a module of {len(block.arguments)} arguments, not {takes}")
        kept = list(end.operands)[:gives]
        with ir.InsertionPoint(end), end.location:
            ir.Operation.create(end.name, operands=kept)
        end.erase()
        types = ir.FunctionType.get([a.type for a in block.arguments], [v.type for v in kept])
        main.attributes["function_type"] = ir.TypeAttr.get(types)
        if "res_attrs" in main.attributes:
            del main.attributes["res_attrs"]
        for op in [op for op in _nested(module.operation) if op.name == "mhlo.copy"]:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
        for op in [op for op in _nested(module.operation) if _is_philox(op)]:
            _write_out(module, op)
        module.operation.write_bytecode(out)
    return out.getvalue()


def _is_philox(op: Any) -> bool:
    """Whether an operation draws words of 32 bits with Philox from a state of three of 64."""
    if op.name != "stablehlo.rng_bit_generator":
        return False
    state, drawn = (str(result.type) for result in op.results)
    is_it = "PHILOX" in str(op.attributes["rng_algorithm"])
    return is_it and state == "tensor<3xui64>" and "ui32" in drawn


def _write_out(module: Any, op: Any) -> None:
    """Put a function of `philox.py` in the place of an operation."""
    import jax
    from jaxlib.mlir import ir

    shape = tuple(ir.RankedTensorType(op.results[1].type).shape)
    state = jax.ShapeDtypeStruct((3,), np.uint64)
    parsed = ir.Module.parse(written_out(state, shape))  # which its operations do not keep
    (made,) = parsed.body.operations
    name = f"philox_{'x'.join(map(str, shape))}"
    if name not in [_symbol(function) for function in module.body.operations]:
        with ir.InsertionPoint(module.body):
            own = made.operation.clone()
        own.attributes["sym_name"] = ir.StringAttr.get(name)
        own.attributes["sym_visibility"] = ir.StringAttr.get("private")
    with ir.InsertionPoint(op), op.location:
        types = [result.type for result in op.results]
        callee = {"callee": ir.FlatSymbolRefAttr.get(name)}
        call = ir.Operation.create("func.call", types, list(op.operands), callee)
    for old, new in zip(op.results, call.results, strict=True):
        old.replace_all_uses_with(new)
    op.erase()


def _nested(operation: Any) -> Iterator[Any]:
    """All operations inside of one."""
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from _nested(op.operation)


def _symbol(op: Any) -> str:
    from jaxlib.mlir import ir

    return ir.StringAttr(op.attributes["sym_name"]).value if "sym_name" in op.attributes else ""


def _row(array: Array) -> tuple[str, Sequence[int], bytes]:
    return str(array.dtype), array.shape, array.tobytes()


def _array(dtype: str, shape: Iterable[int], data: bytes) -> Array:
    import ml_dtypes

    found = np.frombuffer(data, np.dtype(getattr(ml_dtypes, dtype, dtype)))
    return found.reshape(tuple(shape))


def _damaged(given: str) -> ImportRuleError:
    return ImportRuleError(
        "SW_TF_MODEL",
        f"a whole traced program is required, got {given}",
        Loc(MODULE_FILE),
        "trace the model again",
    )
