"""CHLO operators that a producer has spelled another way become CHLO again, before it is legalised.

StableHLO and HLO have no error function and no top-k: portable files carry them as custom calls
named after an operator (`mhlo.erf`, attributes in `mhlo.attributes`), files that came through HLO
as operators of MHLO. What they mean is in the name, so all go the way of CHLO from here on. The two
ends of a message between ranks (send and recv of a channel) become the permute that they are.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.locations import LocationReader
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
_SEND, _RECV, _MOVE = "stablehlo.send", "stablehlo.recv", "stablehlo.collective_permute"
_PAIRS = "_xla_send_recv_source_target_pairs"
"""What XLA writes into both ends of a message between ranks."""
_OF_CALLS = ("call_target_name", "backend_config", "has_side_effect", "api_version")
"""Attributes of a custom call that are read; layouts and aliases are not."""


def respell(module: Any) -> None:
    """Put the CHLO operators in the place of their other spellings in `module`, and permutes in
    that of messages.

    Raises: ImportRuleError NCC_EVRF001 for an end of a message without the other.
    """
    _join_messages(module)
    _untie(module)
    for op in all_ops(module):
        name = _meant(op)
        if name and (name != _TOP_K or _setting(op, "k") is not None):
            _replace(op, name)


def _join_messages(module: Any) -> None:
    """Make a permute of every send and recv that belong together."""
    ends = [op for op in all_ops(module) if op.name in (_SEND, _RECV)]
    sends = {_channel(op): op for op in ends if op.name == _SEND}
    for recv in [op for op in ends if op.name == _RECV]:
        send = sends.pop(_channel(recv), None)
        is_pair = send is not None and _pairs(recv) and _pairs(recv) == _pairs(send)
        at = _place_of_both(send, recv) if is_pair else None
        if at is None:
            raise _lone(recv)
        _permute(send, recv, at)
    for send in sends.values():
        raise _lone(send)


def _lone(op: Any) -> ImportRuleError:
    """An end of a message that has no other."""
    name = op.name.partition(".")[2]
    return ImportRuleError(
        "NCC_EVRF001",
        f"{name} requires the other end of its channel in the same block, the same"
        f" source-target pairs ({_PAIRS}) on both, and an operand that does not depend on what"
        " arrives",
        LocationReader(None).read(op.location),
        "use collective_permute (jax.lax.ppermute); no core sends to the host by itself",
    )


def _channel(op: Any) -> tuple[Any, int]:
    """The block of a message's end, and its channel."""
    from jaxlib.mlir.dialects import stablehlo

    return op.block, int(stablehlo.ChannelHandle(op.attributes["channel_handle"]).handle)


def _pairs(op: Any) -> list[list[int]]:
    """Source and target of every move; none of a transfer to or from the host."""
    is_host = op.attributes.get("is_host_transfer")
    given = op.attributes.get("mhlo.frontend_attributes", {})
    if (is_host is not None and is_host.value) or _PAIRS not in given:
        return []
    numbers = [int(n) for n in re.findall(r"\d+", given[_PAIRS].value)]
    return [numbers[n : n + 2] for n in range(0, len(numbers) - 1, 2)]


def _place_of_both(send: Any, recv: Any) -> Any:
    """The op in front of which the operands of `send` are there and what `recv` gives is not read
    yet; None where there is none."""
    order = {op.operation: n for n, op in enumerate(send.block.operations)}
    makers = [producer(value) for value in list(send.operands)[:-1]]
    ready = max((order.get(made, -1) for made in makers if made is not None), default=-1)
    if ready < order[recv]:
        return recv
    uses = (use.owner for result in list(recv.results)[:-1] for use in result.uses)
    read = min((order.get(_in_block(op, order), -1) for op in uses), default=order[send] + 1)
    return send if read > order[send] else None


def _in_block(op: Any, order: Any) -> Any:
    """The op of a block that `op` is, or is inside of."""
    op = op.operation
    while op not in order and op.parent is not None:
        op = op.parent.operation
    return op


def _permute(send: Any, recv: Any, at: Any) -> None:
    from jaxlib.mlir import ir

    pairs = ir.DenseElementsAttr.get(np.array(_pairs(send), np.int64))
    attributes = {"source_target_pairs": pairs, "channel_handle": send.attributes["channel_handle"]}
    *sent, before = send.operands
    for value, result in zip(sent, list(recv.results)[:-1], strict=True):
        with recv.location, ir.InsertionPoint(at):
            moved = ir.Operation.create(_MOVE, [value.type], [value], attributes).result
        result.replace_all_uses_with(moved)
    recv.results[len(sent)].replace_all_uses_with(recv.operands[0])
    recv.erase()
    send.results[0].replace_all_uses_with(before)
    send.erase()


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
