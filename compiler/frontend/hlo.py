"""HLO in: a serialised `HloModuleProto` or HLO text becomes StableHLO.

jaxlib converts; this file tells the forms apart, keeps the number of replicas and partitions of a
text's header (a proto has no field for them, and jaxlib converts by way of one), and translates
failures.
"""

from __future__ import annotations

import io
import re

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.context import make_context, parse_module, place_in_module
from shardwright.compiler.frontend.rules.ranks import DECLARED

_TEXT_START = "HloModule"
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_HEADER = re.compile(r"^\s*HloModule[^\n]*(?:(?<=,)\n[^\n]*)*", re.MULTILINE)
_COUNT = re.compile(r"\b(replica_count|num_partitions)=(-?\d+)")
_ATTRIBUTES = {"replica_count": DECLARED["replicas"], "num_partitions": DECLARED["partitions"]}


def hlo_to_stablehlo(source: bytes | str) -> bytes:
    """StableHLO bytecode of an HLO module. Raises ImportRuleError when jaxlib cannot read it."""
    from jaxlib import _hlo, _jax

    try:
        text = _text_of(source)
        if text is not None:
            module = _hlo.hlo_module_from_text(text)
            source = module.as_serialized_hlo_module_proto()
        bytecode: bytes = _jax.mlir.hlo_to_stablehlo(source)
    except Exception as error:  # jaxlib raises its own status type
        raise ImportRuleError(
            "SW_HLO_PARSE",
            f"the module requires an HLO proto or HLO text, got: {str(error)[:500]}",
            place_in_module(str(error)),
            hint="dump it with `--xla_dump_to` or compile from StableHLO",
        ) from error
    counts = _counts_of(text) if text is not None else {}
    return _declaring(bytecode, counts) if counts else bytecode


def _text_of(source: bytes | str) -> str | None:
    """The source as HLO text, or None for a proto."""
    if isinstance(source, str):
        return source
    if source.lstrip()[: len(_TEXT_START)] == _TEXT_START.encode():
        return source.decode()
    return None


def _counts_of(text: str) -> dict[str, int]:
    """The counts that the header of HLO text declares, by the attribute of a StableHLO module."""
    header = _HEADER.search(text)
    found = _COUNT.findall(_QUOTED.sub("", header[0])) if header else ()
    return {_ATTRIBUTES[name]: int(count) for name, count in found}


def _declaring(bytecode: bytes, counts: dict[str, int]) -> bytes:
    """The module with `counts` as attributes."""
    from jaxlib.mlir import ir

    with make_context():
        module, out = parse_module(bytecode), io.BytesIO()
        number = ir.IntegerType.get_signless(64)  # what HLO counts with
        for name, count in counts.items():
            module.operation.attributes[name] = ir.IntegerAttr.get(number, count)
        module.operation.write_bytecode(out)
    return out.getvalue()
