"""The jaxlib calls of the importer: MLIR contexts, parsing in every form, CHLO legalisation,
portable artifacts.

Kept in one file because they are private to jaxlib and may move with its version; measured on
jaxlib 0.10.2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shardwright.compiler.diagnostics import ImportRuleError, Loc
from shardwright.compiler.frontend.locations import MODULE_FILE, UNNAMED, LocationReader
from shardwright.compiler.frontend.mlir import all_ops
from shardwright.compiler.frontend.rules import collective_matmul
from shardwright.compiler.frontend.rules.registry import Check, RefusedError
from shardwright.compiler.frontend.rules.respell import respell
from shardwright.compiler.ir.printer_ops import CHLO_OPS, MEANT, STAND_INS

BYTECODE = b"ML\xefR"
"""What MLIR bytecode begins with; a portable artifact is some whose producer is StableHLO's."""
_SHARDY = b"\0sdy\0"
"""How bytecode names the dialect of shardings, which portable artifacts do not have."""
_PORTABLE_PRODUCER = b"StableHLO_v"
_VERIFIER_WORDS = ("inferred", "must match", "incompatible", "requires compatible")
_CHLO_PIPELINE = "builtin.module(func.func(chlo-legalize-to-stablehlo))"
_SIZES_PIPELINE = "builtin.module(func.func(stablehlo-canonicalize-dynamism))"
_WITH_SIZES = frozenset(
    f"stablehlo.{name}"
    for name in ("dynamic_conv", "dynamic_gather", "dynamic_pad", "real_dynamic_slice")
)
"""Ops that have sizes as operands; where those are constants, another op says the same."""
_CSE_PIPELINE = "builtin.module(func.func(cse))"
_APART = "shardwright.apart"  # an attribute that makes an op unlike every other


def make_context() -> Any:
    """A fresh MLIR context with the dialects and passes of JAX programs.

    jaxlib alone has them: a process that only reads or partitions does not import jax.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo

    context = ir.Context.__new__(ir.Context)
    super(ir.Context, context).__init__()  # its own would load every dialect of the library
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    context.enable_multithreading(False)  # modules have one large function each
    for dialect in (chlo, sdy, stablehlo):
        dialect.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    return context


_NO_CHECKS: Mapping[str, Check] = MappingProxyType({})


def legalize_chlo(module: Any, checks: Mapping[str, Check] = _NO_CHECKS) -> None:
    """Rewrite CHLO ops of `module` into StableHLO, in place; its context must be entered.

    Functions of the scalar engine, and erfc of which GELU is made, stay one op, as the stand-in of
    the printer. top_k becomes a sort and slices, which lowering knows. So do their other spellings
    (`respell`). `checks` see the ops of their name first.

    Raises: ImportRuleError NCC_EVRF013 for a top_k of integers, and what a check refuses.
    """
    from jaxlib.mlir import passmanager
    from jaxlib.mlir._mlir_libs import _stablehlo

    respell(module)
    collective_matmul.spell_out(module)
    _stablehlo.register_stablehlo_passes()
    if not _WITH_SIZES.isdisjoint(op.name for op in all_ops(module)):
        passmanager.PassManager.parse(_SIZES_PIPELINE).run(module.operation)
    stand_ins = {f"chlo.{name}" for name in CHLO_OPS}
    for op in all_ops(module):
        if op.name in checks and op.name.startswith("chlo."):
            _checked(op, checks[op.name])
        if op.name == "chlo.top_k":
            _require_floats(op)
        elif op.name in stand_ins:
            _stand_in(op)
    passmanager.PassManager.parse(_CHLO_PIPELINE).run(module.operation)


def merge_equal(module: Any) -> None:
    """Merge equal ops of each function of `module`, in place; its context must be entered.

    Users write a scalar per use: half of the ops of an unrolled training step go, before each costs
    a visit. Barriers stay apart, as in `passes/cse.py`; so do ops of regions, which would otherwise
    read values from outside, and a loop would carry what it can make itself.
    """
    from jaxlib.mlir import ir, passmanager

    apart: list[Any] = []
    for op in all_ops(module):
        if op.name == "stablehlo.optimization_barrier":
            apart.append(op)
        elif op.name not in ("builtin.module", "func.func"):
            for region in op.regions:
                apart.extend(inner.operation for block in region for inner in block)
    for number, op in enumerate(apart):
        op.attributes[_APART] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)
    passmanager.PassManager.parse(_CSE_PIPELINE).run(module.operation)


def _checked(op: Any, check: Check) -> None:
    try:
        check(op)
    except RefusedError as error:
        raise error.at(LocationReader(None).read(op.location)) from error


def _require_floats(op: Any) -> None:
    from jaxlib.mlir import ir

    given = ir.RankedTensorType(op.operands[0].type).element_type
    if isinstance(given, ir.IntegerType):
        raise ImportRuleError(
            "NCC_EVRF013",
            f"top_k requires float elements, got {given}",
            LocationReader(None).read(op.location),
            "cast to float32, or use jnp.argsort",
        )


def _stand_in(op: Any) -> None:
    """Put the stand-in of a CHLO op in its place."""
    from jaxlib.mlir import ir

    name = op.name.removeprefix("chlo.")
    with op.location:
        new = ir.Operation.create(
            STAND_INS[name],
            results=[op.result.type],
            operands=list(op.operands),
            attributes={MEANT: ir.StringAttr.get(name)},
            ip=ir.InsertionPoint(op),
        )
    op.result.replace_all_uses_with(new.result)
    op.erase()


def serialize_portable(bytecode: bytes) -> bytes:
    """MLIR bytecode of a StableHLO module -> portable artifact of the current version.

    A module with ops outside of portable StableHLO (callbacks, user constraints) stays bytecode:
    the importer takes both, and knows which line to name when it refuses one.
    """
    from jaxlib.mlir.dialects import stablehlo

    if _SHARDY in bytecode:
        return bytecode
    try:
        artifact: bytes = stablehlo.serialize_portable_artifact_str(
            bytecode, stablehlo.get_current_version()
        )
    except ValueError:
        return bytecode
    return artifact


def parse_module(source: bytes | str) -> Any:
    """Parse a portable artifact, MLIR bytecode or MLIR text; a context must be entered.

    Raises: ImportRuleError when it is none of them.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    if isinstance(source, bytes) and is_portable(source):
        source = stablehlo.deserialize_portable_artifact_str(source)
    try:
        return ir.Module.parse(source)
    except ir.MLIRError as error:
        raise _parse_error(error) from error


def module_text(source: bytes | str) -> str:
    """A StableHLO module as MLIR text with locations."""
    with make_context():
        text: str = parse_module(source).operation.get_asm(enable_debug_info=True)
        return text


def _parse_error(error: Any) -> ImportRuleError:
    """What MLIR found: an instruction that contradicts itself (at the user's line, where the module
    has locations), or text and bytes it cannot read.
    """
    from jaxlib.mlir import ir

    first = next(iter(error.error_diagnostics), None)
    if first is None or not _is_inconsistent(first):
        return ImportRuleError(
            "SW_STABLEHLO_PARSE",
            f"the module requires valid StableHLO, got: {str(error)[:500]}",
            place_in_module(str(error)),
            "correct the module, or dump it again with the framework that made it",
        )
    loc = LocationReader().read(ir.Location.from_attr(first.location.attr))
    return ImportRuleError(
        "NCC_EVRF064",
        f"shapes and types of an instruction require to agree: {first.message}",
        loc if loc.file else place_in_module(str(error)),
        "fix the graph, or match the versions of what wrote it and this compiler",
    )


def _is_inconsistent(diagnostic: Any) -> bool:
    """Whether a finding is the verifier's: it shows the operation, speaks of types, or has a
    location of the user's instead of a place in the text.
    """
    shown = any("see current operation" in note.message for note in diagnostic.notes)
    spoken = any(word in diagnostic.message for word in _VERIFIER_WORDS)
    return shown or spoken or f'"{UNNAMED}"' not in str(diagnostic.location)


_PLACES = (re.compile(r'"-":(\d+):\d+'), re.compile(r"was parsing (\d+):\d+"))


def place_in_module(message: str) -> Loc | None:
    """The line a parser of MLIR or HLO text complains about."""
    found = (pattern.search(message) for pattern in _PLACES)
    match = next((m for m in found if m), None)
    return Loc(MODULE_FILE, int(match[1])) if match else None


def is_portable(data: bytes, at: int = 0) -> bool:
    """Whether a portable artifact begins at a byte of `data`."""
    return data.startswith(BYTECODE, at) and _PORTABLE_PRODUCER in data[at : at + 64]
