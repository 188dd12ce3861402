"""HLO in: a serialised `HloModuleProto` or HLO text becomes StableHLO.

jaxlib converts; this file only tells the forms apart and translates failures.
"""

from __future__ import annotations

from compiler.diagnostics import ImportRuleError
from compiler.frontend.context import place_in_module

_TEXT_START = "HloModule"


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
    return bytecode


def _text_of(source: bytes | str) -> str | None:
    """The source as HLO text, or None for a proto."""
    if isinstance(source, str):
        return source
    if source.lstrip()[: len(_TEXT_START)] == _TEXT_START.encode():
        return source.decode()
    return None
