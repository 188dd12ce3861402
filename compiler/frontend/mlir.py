"""What is read off MLIR modules in more than one place; their contexts must be entered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.compiler.diagnostics import ImportRuleError


def all_ops(module: Any) -> list[Any]:
    """The ops of a module, those of regions too, the innermost first."""
    from jaxlib.mlir import ir

    found: list[Any] = []

    def visit(op: Any) -> Any:
        found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def functions_of(module: Any) -> dict[str, Any]:
    """The functions of a module by name."""
    return {
        op.operation.attributes["sym_name"].value: op.operation
        for op in module.body.operations
        if op.operation.name == "func.func"
    }


def entry_of(module: Any) -> Any:
    """The entry function of a module. Raises ImportRuleError without one."""
    functions = functions_of(module)
    return functions[entry_name(functions)]


def entry_name(functions: Mapping[str, Any]) -> str:
    """`main`, or the only public function. Raises ImportRuleError without one."""
    if "main" in functions:
        return "main"
    public: list[str] = [
        name
        for name, op in functions.items()
        if "sym_visibility" not in op.attributes
        or op.attributes["sym_visibility"].value == "public"
    ]
    if len(public) != 1:
        raise ImportRuleError(
            "SW_STABLEHLO_ENTRY", f"the module requires one public function, got {public}"
        )
    return public[0]


def producer(value: Any) -> Any:
    """The op that makes a value; None for an argument of a block."""
    from jaxlib.mlir import ir

    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def results_of(block: Any) -> list[Any]:
    """The values that the last op of a block returns."""
    return list(list(block.operations)[-1].operands)


def text_of(op: Any, name: str) -> str:
    """A text attribute; empty where there is none."""
    given = op.attributes.get(name)
    return "" if given is None else str(given.value)


def call_target(op: Any) -> str:
    """Whom a custom call calls; empty for another op."""
    return text_of(op, "call_target_name")


def direction(attribute: Any) -> str:
    """EQ, LT and so on, of an attribute that says how a comparison compares."""
    return str(attribute).removesuffix(">").split()[-1]
