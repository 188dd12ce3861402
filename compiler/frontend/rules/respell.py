"""CHLO operators that a producer has spelled another way become CHLO again, before it is legalised.

StableHLO and HLO have no error function and no top-k: portable files carry them as custom calls
named after an operator (`mhlo.erf`, attributes in `mhlo.attributes`), files that came through HLO
as operators of MHLO. What they mean is in the name, so all go the way of CHLO from here on.
"""

from __future__ import annotations

from typing import Any

from shardwright.compiler.frontend.mlir import all_ops, call_target, producer

_UNARY = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i1e", "cosh", "digamma", "erf"),
    *("erf_inv", "erfc", "is_inf", "is_neg_inf", "is_pos_inf", "lgamma", "sinh", "square", "tan"),
)
_BINARY = ("mulhi", "next_after", "polygamma", "zeta")
_TOP_K = "top_k"
_NAMES = {name: name for name in (*_UNARY, *_BINARY, _TOP_K)} | {"topk": _TOP_K}
_TUPLE, _ELEMENT = "stablehlo.tuple", "stablehlo.get_tuple_element"
_TOKENS = ("stablehlo.create_token", "stablehlo.after_all")
_CALL = "stablehlo.custom_call"
_OF_CALLS = ("call_target_name", "backend_config", "has_side_effect", "api_version")
"""Attributes of a custom call that are read; layouts and aliases are not."""


def respell(module: Any) -> None:
    """Put the CHLO operators in the place of their other spellings in `module`."""
    _untie(module)
    for op in all_ops(module):
        name = _meant(op)
        if name and (name != _TOP_K or _setting(op, "k") is not None):
            _replace(op, name)


def _untie(module: Any) -> None:
    """Read elements of tuples where they come from, and drop tokens that nothing is ordered by."""
    for op in all_ops(module):
        if op.name == _CALL and [str(r.type)[: len("tuple<")] for r in op.results] == ["tuple<"]:
            _untie_results(op)
    elements, makers = [], []
    for op in all_ops(module):
        if op.name == _ELEMENT:
            elements.append(op)
        elif op.name in (_TUPLE, *_TOKENS):
            makers.append(op)
    for op in elements:
        made = producer(op.operands[0])
        if made is not None and made.name == _TUPLE:
            op.result.replace_all_uses_with(made.operands[op.attributes["index"].value])
            op.erase()
    for op in reversed(makers):
        if not any(True for _ in op.result.uses):
            op.erase()


def _untie_results(op: Any) -> None:
    """Give a custom call the elements of its tuple as results, as HLO calls of several have it."""
    from jaxlib.mlir import ir

    tuple_type = ir.TupleType(op.result.type)
    types = [tuple_type.get_type(i) for i in range(tuple_type.num_types)]
    if any(isinstance(type, ir.TupleType) for type in types):
        return
    attributes = {name: op.attributes[name] for name in _OF_CALLS if name in op.attributes}
    with op.location, ir.InsertionPoint(op):
        made = ir.Operation.create(_CALL, types, list(op.operands), attributes)
        tied = ir.Operation.create(_TUPLE, [tuple_type], list(made.results))
    op.result.replace_all_uses_with(tied.result)
    op.erase()


def _meant(op: Any) -> str:
    """The CHLO operator that `op` is another spelling of, or nothing."""
    spelled = call_target(op) if op.name == _CALL else op.name
    dialect, _, name = spelled.partition(".")
    is_other = dialect == "mhlo" or (dialect == "chlo" and op.name == _CALL)
    return _NAMES.get(name, "") if is_other else ""


def _setting(op: Any, name: str) -> Any:
    """An attribute of the operator itself, or None."""
    if op.name != _CALL:
        return op.attributes.get(name)
    given = op.attributes.get("mhlo.attributes", ())
    return {named.name: named.attr for named in given}.get(name)


def _replace(op: Any, name: str) -> None:
    """The largest k of the negated are the smallest k."""
    from jaxlib.mlir import ir

    operands, attributes, is_smallest = list(op.operands), {}, False
    if name == _TOP_K:
        attributes["k"] = _setting(op, "k")
        largest = _setting(op, "largest")
        is_smallest = largest is not None and not largest.value
    with op.location, ir.InsertionPoint(op):
        if is_smallest:
            operands = [_negated(v) for v in operands]
        types = [result.type for result in op.results]
        results = list(ir.Operation.create(f"chlo.{name}", types, operands, attributes).results)
        if is_smallest:
            results[0] = _negated(results[0])
    for old, result in zip(op.results, results, strict=True):
        old.replace_all_uses_with(result)
    op.erase()


def _negated(value: Any) -> Any:
    from jaxlib.mlir import ir

    return ir.Operation.create("stablehlo.negate", [value.type], [value]).result
