"""How ops are defined: `define`, and the checks and wordings that type rules share.

A type rule is called with the attributes and the type of each operand, a reference with the op and
each array; both return one result, or a tuple of them. Rules refuse with `mismatch`, which `define`
turns into "X requires Y, got Z".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import DType, cast
from shardwright.compiler.ir.opdef import Kind, OpDef, register
from shardwright.compiler.ir.types import Graph, Op, TensorType

Types = Sequence[TensorType]
Rule = Callable[..., TensorType | tuple[TensorType, ...]]
Meaning = Callable[..., np.ndarray | tuple[np.ndarray, ...]]


class _MismatchError(ValueError):
    """What a type rule requires and what it got, not yet of which op."""


def no_flops(op: Op) -> int:
    """Ops that move data do no arithmetic."""
    del op
    return 0


def define(
    name: str,
    kind: Kind,
    attrs: type | None,
    rule: Rule,
    meaning: Meaning,
    *,
    operands: int | None = None,
    **facts: Any,
) -> None:
    """Register an op; `facts` are other fields of `OpDef`. It has as many operands as its rule has
    parameters for them, any number where `operands` does not say. The rule of an op that runs
    regions gets them as `regions`.
    """
    runs = kind is Kind.CONTROL
    places = [p.kind for p in signature(rule).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    if Parameter.VAR_POSITIONAL not in places:
        operands = len(places) - 1  # the first are the attributes

    def infer(types: Types, given: Any, regions: Sequence[Graph]) -> tuple[TensorType, ...]:
        try:
            if attrs is not None and type(given) is not attrs:
                raise mismatch(f"attributes of class {attrs.__name__}", type(given).__name__)
            if operands is not None and len(types) != operands:
                raise mismatch(f"{operands} operand{'s' * (operands != 1)}", len(types))
            results = rule(given, *types, regions=regions) if runs else rule(given, *types)
        except _MismatchError as error:
            raise ValueError(f"{name} {error}") from None
        return results if isinstance(results, tuple) else (results,)

    def reference(op: Op, args: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        results = meaning(op, *args)
        return results if isinstance(results, tuple) else (np.asarray(results),)

    computes = kind in (Kind.ELEMENTWISE, Kind.CAST)
    facts.setdefault("flops", result_elements if computes else no_flops)
    register(OpDef(name=name, kind=kind, attrs=attrs, infer=infer, reference=reference, **facts))


def mismatch(requires: str, got: object) -> ValueError:
    """The error that a type rule raises: what the op requires, and what it got."""
    return _MismatchError(f"requires {requires}, got {got}")


def check_dims(what: str, dims: Sequence[int], rank: int) -> None:
    """Refuse dims outside of `rank` and repeated dims."""
    if len(set(dims)) != len(dims) or any(not 0 <= d < rank for d in dims):
        raise mismatch(f"distinct {what} below rank {rank}", tuple(dims))


def check_same(*types: TensorType) -> None:
    """Refuse operands of different types."""
    if types.count(types[0]) < len(types):
        raise mismatch("operands of one type", " and ".join(str(t) for t in types))


def result_elements(op: Op) -> int:
    """Useful arithmetic of an elementwise op: one per result element."""
    return sum(r.type.num_elements for r in op.results)


def widen(x: np.ndarray) -> np.ndarray:
    """Narrow floats as fp32, everything else unchanged: the type arithmetic is done in."""
    return x.astype(np.float32) if DType.from_numpy(x.dtype).is_narrow else x


def rounded_once(fn: Callable[..., Any]) -> Meaning:
    """The meaning that computes `fn` on widened operands and rounds once to the result type."""

    def meaning(op: Op, *args: np.ndarray) -> np.ndarray:
        return cast(np.asarray(fn(*map(widen, args))), op.results[0].type.dtype)

    return meaning
