"""Control: `while` becomes `loop`, calls are inlined, barriers stay.

Branches are computed side by side and chosen from. What would need a library at run time (custom
calls) is refused here with what to do.
"""

from __future__ import annotations

from typing import Any, NoReturn

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.generator import WORD
from shardwright.compiler.frontend.mlir import call_target
from shardwright.compiler.frontend.rules.registry import (
    Scope,
    Site,
    Values,
    imports,
    refuse,
    refuses,
)
from shardwright.compiler.frontend.rules.trip_count import (
    Counter,
    WhileParts,
    find_counter,
    known_ends,
    known_scalar,
)
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import ConstantAttrs, LoopAttrs
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type


@imports("func.call")
def call(site: Site) -> Values:
    """Inline the callee."""
    return site.importer.call(site, site.op.attributes["callee"].value)


@imports("stablehlo.composite")
def composite(site: Site) -> Values:
    """A composite is its decomposition, but for a word of the machine's generator."""
    if site.op.attributes["name"].value == WORD:
        counter, key = site.operands
        return (site.make.op("random_bits", counter, key),)
    return site.importer.call(site, site.op.attributes["decomposition"].value)


@refuses("stablehlo.tuple")
def tuple_(site: Site) -> NoReturn:
    """Tuples are taken apart before; one that a call still reads has no arrays to pass on."""
    readers = [call_target(use.owner) for use in site.op.results[0].uses]
    for reader in readers:
        if reader.startswith(BOUNDARY):
            refuse(
                "NCC_ETUP002",
                f"{reader} requires arrays as operands, got a tuple of {len(site.operands)}",
                "pass the arrays one by one",
            )
    refuse("NCC_EVRF001", "values require a tensor type, got a tuple", "pass arrays one by one")


BOUNDARY = "NeuronBoundaryMarker"


@imports("stablehlo.while")
def while_(site: Site) -> Values:
    """A counted loop; what the regions capture passes through as extra carries."""
    parts, body, count = _convert_regions(site)
    counter = find_counter(parts)
    ends = known_ends(parts, counter.trip)
    inits = list(parts.inits)
    inputs, outputs = list(parts.body_inputs), list(parts.body_outputs)
    if parts.inits[counter.carry].type.rank:
        counter = _own_counter(site, body, counter, inits, inputs, outputs)
    normal = counter.start == 0 and counter.step == 1
    if not normal:
        _normalise(site, body, counter, inits, inputs, outputs)
    region = Graph(tuple(inputs), tuple(body.ops), tuple(outputs))
    loop = site.emit("loop", inits, LoopAttrs(counter.trip, counter.carry), (region,))
    results = list(loop.results[:count])
    for carry, last in ends.items():
        is_read = carry < count and any(True for _ in site.op.results[carry].uses)
        if is_read or (carry == counter.carry and not normal):
            results[carry] = site.make.splat(last, results[carry].type)
    return results


def _convert_regions(site: Site) -> tuple[WhileParts, Scope, int]:
    """Condition and body over common carries, the body's scope, and how many carries it names."""
    importer, (cond_region, body_region) = site.importer, site.op.regions
    cond, body = Scope(site.scope), Scope(site.scope)
    cond_inputs = [Value(v.type) for v in site.operands]
    body_inputs = [Value(v.type) for v in site.operands]
    hooks = importer.hooks
    importer.hooks = type(hooks)()  # the condition leaves nothing behind that a hook could name
    (test,) = importer.block(site.op, cond_region.blocks[0], cond, cond_inputs)
    importer.hooks = hooks
    outputs = importer.block(site.op, body_region.blocks[0], body, body_inputs)
    inner = [c.inner for c in body.captures]
    parts = WhileParts(
        inits=[*site.operands, *(c.outer for c in body.captures)],
        cond_inputs=[*cond_inputs, *(Value(v.type) for v in inner)],
        cond_output=test,
        body_inputs=[*body_inputs, *inner],
        body_outputs=[*outputs, *inner],
        scalars=importer.scalars,
        outer={c.inner: c.outer for c in cond.captures},
    )
    return parts, body, len(site.operands)


def _own_counter(
    site: Site,
    body: Scope,
    counter: Counter,
    inits: list[Value],
    inputs: list[Value],
    outputs: list[Value],
) -> Counter:
    """A scalar carry that counts beside a counter of one element that is none."""
    count = Value(tensor_type((), DType.I32))
    one = make_op("constant", (), ConstantAttrs.full(1, count.type), (), site.loc)
    following = make_op("add", (count, one.result), None, (), site.loc)
    body.ops[:0] = [one, following]
    inits.append(site.make.splat(0, count.type))
    inputs.append(count)
    outputs.append(following.result)
    return Counter(len(inits) - 1, 0, 1, counter.trip)


def _normalise(
    site: Site,
    body: Scope,
    counter: Counter,
    inits: list[Value],
    inputs: list[Value],
    outputs: list[Value],
) -> None:
    """Let the counter carry count 0, 1, ...; the body computes its old counter from it."""
    old, type = inputs[counter.carry], inputs[counter.carry].type
    count = Value(type)
    step, start, one = (
        make_op("constant", (), ConstantAttrs.full(n, type), (), site.loc)
        for n in (counter.step, counter.start, 1)
    )
    scaled = make_op("multiply", (count, step.result), None, (), site.loc)
    shifted = Op("add", (scaled.result, start.result), (old,), None, (), site.loc)
    following = make_op("add", (count, one.result), None, (), site.loc)
    body.ops[:0] = [step, start, one, scaled, shifted, following]
    inits[counter.carry] = site.make.splat(0, type)
    inputs[counter.carry] = count
    outputs[counter.carry] = following.result


@imports("stablehlo.case")
def case(site: Site) -> Values:
    """The machine does not branch on data: every branch is computed, then one is chosen.

    Ops have no side effects, so this costs time and never changes a value. A number without a
    branch takes the last one; a constant number leaves one branch.
    """
    (number,) = site.operands
    branches = [region.blocks[0] for region in site.op.regions]
    known = known_scalar(site.importer.scalars, number)
    if known is not None:
        at = int(known)
        return _branch(site, branches[at if 0 <= at < len(branches) else -1])
    results = list(_branch(site, branches[-1]))
    for at in reversed(range(len(branches) - 1)):
        is_taken = site.make.compare(number, site.make.splat(at, number.type), "EQ")
        results = _chosen(site, is_taken, _branch(site, branches[at]), results)
    return results


@imports("stablehlo.if")
def if_(site: Site) -> Values:
    """As `case`, with a truth value."""
    (test,) = site.operands
    then, otherwise = (region.blocks[0] for region in site.op.regions)
    known = known_scalar(site.importer.scalars, test)
    if known is not None:
        return _branch(site, then if known else otherwise)
    return _chosen(site, test, _branch(site, then), _branch(site, otherwise))


def _branch(site: Site, block: Any) -> Values:
    """Import a branch where the op stands; its ops read what is defined there."""
    return site.importer.block(site.op, block, site.scope, ())


def _chosen(site: Site, test: Value, on_true: Values, on_false: Values) -> list[Value]:
    pairs = zip(on_true, on_false, strict=True)
    return [a if a is b else site.make.op("select", test, a, b) for a, b in pairs]
