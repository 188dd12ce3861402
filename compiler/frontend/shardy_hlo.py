"""HLO's spelling of Shardy becomes Shardy again: meshes, shardings, and code of one rank.

HLO has no attributes but texts, and no regions but those of loops. A sharding stands among the
texts of a parameter, or of a call that hands its operand on (`Sharding`, and
`xla.sdy.FuncResultSharding` in front of a result). Code of one rank is a function: what it reads
comes from a call of `xla.sdy.GlobalToLocalShape`, which hands on a rank's parts, and what it makes
goes to one of `xla.sdy.LocalToGlobalShape`. XLA writes the same for GSPMD beside it; that goes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from shardwright.compiler.frontend.mlir import (
    all_ops,
    call_target,
    entry_of,
    functions_of,
    producer,
    results_of,
)
from shardwright.compiler.frontend.rules.ranks import DECLARED, MANUAL, module_meshes

_BODY = "xla.sdy.manual_computation_body"
_ENTER, _LEAVE = "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"
_CONSTRAINT, _RESULT = "Sharding", "xla.sdy.FuncResultSharding"
_HINTS = (_RESULT, "xla.sdy.PropagationBarrier", "xla.sdy.ShardingGroup")
"""Calls that hand their operand on, or only look at it."""
_TEXTS, _GSPMD = "mhlo.frontend_attributes", "mhlo.sharding"
_MESHES, _SHARDING = "xla.sdy.meshes", "xla.sdy.sharding"
_MESH = re.compile(r"([\w.$-]+) = (#sdy\.mesh<.*?>)(?=, [\w.$-]+ = #|\}$)")
_NOTHING = "#sdy.sharding_per_value<[]>"


def restore_shardy(module: Any) -> None:
    """Put what Shardy means in the place of HLO's words for it in `module`; its context must be
    entered. A module that names no mesh stays as it is.
    """
    meshes = _MESH.findall(_said(module.operation, _MESHES))
    if not meshes:
        return
    _declare(module, meshes)
    for op in all_ops(module):
        if _GSPMD in op.attributes and not call_target(op):
            del op.attributes[_GSPMD]
    _restore_ends(entry_of(module))
    functions = functions_of(module)
    for op in all_ops(module):
        if op.name == "func.call" and (name := op.attributes["callee"].value).startswith(_BODY):
            _restore_region(op, functions[name])
        elif call_target(op) == _CONSTRAINT and _said(op, _SHARDING):
            _constrain(op)
        elif call_target(op) in _HINTS:
            _drop(op)
    if any(op.name == MANUAL for op in all_ops(module)):
        _ask_partitions(module)


def _declare(module: Any, meshes: Sequence[tuple[str, str]]) -> None:
    """Declare the meshes, by name and text, in front."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    with ir.InsertionPoint.at_block_begin(module.body), ir.Location.unknown():
        for name, text in meshes:
            sdy.MeshOp(name, ir.Attribute.parse(text))


def _ask_partitions(module: Any) -> None:
    """A module with code of one rank is for as many as its mesh has cores; an HLO proto has no
    field for it.
    """
    from jaxlib.mlir import ir

    attributes = module.operation.attributes
    meshes = {axes for axes, _ in module_meshes(module).values()}
    if len(meshes) == 1 and DECLARED["partitions"] not in attributes:
        cores = math.prod(size for _, size in meshes.pop())
        number = ir.IntegerType.get_signless(32)
        attributes[DECLARED["partitions"]] = ir.IntegerAttr.get(number, cores)


def _restore_ends(entry: Any) -> None:
    """The shardings of arguments and results."""
    from jaxlib.mlir import ir

    (block,) = entry.regions[0].blocks
    arguments = [_said_in(row, _SHARDING) for row in entry.attributes.get("arg_attrs", ())]
    made = map(producer, results_of(block))
    results = [
        str(_per_value(op)[0]) if op is not None and call_target(op) == _RESULT else ""
        for op in made
    ]
    for key, texts in (("arg_attrs", arguments), ("res_attrs", results)):
        if not texts:
            continue
        rows = entry.attributes.get(key) or [ir.DictAttr.get({})] * len(texts)
        entry.attributes[key] = ir.ArrayAttr.get(
            [_placed(row, text) for row, text in zip(rows, texts, strict=True)]
        )


def _placed(row: Any, text: str) -> Any:
    """The attributes of an argument or result with the sharding that `text` is, if any."""
    from jaxlib.mlir import ir

    kept = {named.name: named.attr for named in row if named.name not in (_TEXTS, _GSPMD)}
    return ir.DictAttr.get(kept | ({"sdy.sharding": ir.Attribute.parse(text)} if text else {}))


def _constrain(op: Any) -> None:
    """Put a constraint in the place of a call that stands for one."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    with ir.InsertionPoint(op), op.location:
        made = sdy.ShardingConstraintOp(op.operands[0], _per_value(op)[0])
    op.result.replace_all_uses_with(made.result)
    op.erase()


def _drop(op: Any) -> None:
    """Take a call away that hands its operands on."""
    for old, new in zip(op.results, op.operands, strict=bool(op.results)):
        old.replace_all_uses_with(new)
    op.erase()


def _per_value(op: Any) -> Any:
    """The shardings of a call that stands for some, one per value."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    return sdy.TensorShardingPerValueAttr(ir.Attribute.parse(_said(op, _SHARDING))).shardings


def _restore_region(call: Any, function: Any) -> None:
    """Put the region in the place of a call of its function, of what it reads and of its end; where
    an end is missing, the call stays.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    makers = {_maker(value) for value in call.operands}
    users = {use.owner.operation for value in call.results for use in value.uses}
    enter, leave = (next(iter(ops), None) for ops in (makers, users))
    if len(makers) > 1 or len(users) > 1 or leave is None or call_target(leave) != _LEAVE:
        return
    if enter is not None and call_target(enter) != _ENTER:
        return
    results = _elements(leave)
    layouts = (_said(enter, "xla.sdy.in_shardings"), _said(leave, "xla.sdy.out_shardings"))
    with ir.InsertionPoint(leave), call.location:
        region = sdy.ManualComputationOp(
            [value.type for value in results],
            [] if enter is None else list(enter.operands),
            *(ir.Attribute.parse(text or _NOTHING) for text in layouts),
            ir.Attribute.parse(_said(leave, "xla.sdy.manual_axes")),
        )
    _fill(region.operation.regions[0], function)
    for old, new in zip(results, region.operation.results, strict=True):
        old.replace_all_uses_with(new)
    read = [op for op in (producer(value) for value in call.operands) if op != enter]
    for op in (*(op for op in map(producer, results) if op != leave), leave, call, *read):
        op.erase()
    if enter is not None:
        enter.erase()


def _fill(region: Any, function: Any) -> None:
    """Give `region` a copy of the body of `function`."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    copy = function.clone()
    (body,) = copy.regions[0].blocks
    types = [argument.type for argument in body.arguments]
    block = region.blocks.append(*types, arg_locs=[function.location] * len(types))
    for old, new in zip(body.arguments, block.arguments, strict=True):
        old.replace_all_uses_with(new)
    *ops, end = [view.operation for view in body.operations]
    for op in ops:
        block.append(op)
    with ir.InsertionPoint(block), end.location:
        sdy.ReturnOp(list(end.operands))
    copy.erase()


def _maker(value: Any) -> Any:
    """The op that makes a value; of an element of a tuple, the one that makes the tuple."""
    op = producer(value)
    if op is not None and op.name == "stablehlo.get_tuple_element":
        return producer(op.operands[0])
    return op


def _elements(op: Any) -> Sequence[Any]:
    """The results of an op, or what is read of the tuple that it makes, in order."""
    from jaxlib.mlir import ir

    if not isinstance(op.result.type, ir.TupleType):
        return [op.result]
    reads = (use.owner.operation for use in op.result.uses)
    return [read.result for read in sorted(reads, key=lambda read: read.attributes["index"].value)]


def _said(op: Any, name: str) -> str:
    """A text among the attributes that a front end has given to `op`; empty where there is none."""
    return "" if op is None else _said_in(op.attributes, name)


def _said_in(attributes: Any, name: str) -> str:
    """The same, of attributes."""
    if _TEXTS not in attributes or name not in (texts := attributes[_TEXTS]):
        return ""
    return str(texts[name].value)
