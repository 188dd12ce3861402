"""Model files that were changed: StableHLO as text and as bytecode, HLO as text and as proto.

Text is changed by token (numbers, types, names, operators, deletions, swaps), protos by field, all
binary forms by bit and by byte run. A case goes down the command's road: the reader in a process of
its own, passes, compilation, linking.
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.driver import compile_function, located
from shardwright.compiler.frontend.isolated import Reader
from shardwright.compiler.isa.program import Function
from shardwright.compiler.linking.link import link_program
from shardwright.compiler.outline import outline_programs
from shardwright.compiler.outline.unit import Unit, unpack_function
from shardwright.compiler.passes.pipeline import STEP_PASSES
from shardwright.compiler.program import StepProgram
from shardwright.compiler.rewriting.driver import run
from shardwright.compiler.surface.releases import Profile
from tests.support.forge.documents import changed_bytes
from tests.support.forge.pool import CASE_S, Judge

TARGET = "trn1n.32xlarge"
Sources = dict[str, list[bytes]]
"""Sound files by kind."""
_UNARY = (
    "stablehlo.cbrt",
    "stablehlo.sine",
    "stablehlo.abs",
    "stablehlo.sign",
    "stablehlo.popcnt",
    "stablehlo.not",
    "stablehlo.round_nearest_afz",
)
_TOKEN = re.compile(r"\d+|[%@!]?[A-Za-z_][\w.]*|\s+|.", re.S)
_TYPES = ("f32", "bf16", "f16", "f64", "i1", "i8", "i32", "i64", "ui32", "complex<f32>", "f8E4M3FN")


@cache
def sources() -> Sources:
    """Small programs that use much of the surface, in every form."""
    import jax
    import jax.numpy as jnp

    from tests.support.model_zoo import decoder, training_step

    def pointwise(x: Any, y: Any) -> Any:
        z = jnp.where(x > 0, jnp.exp(x) / (1 + y), jnp.tanh(y))
        return jnp.sum(z.reshape(4, 3, 2).transpose(2, 0, 1), axis=1).astype(jnp.bfloat16)

    def indexed(x: Any, i: Any) -> Any:
        rows = x[i].at[i % 3].add(1.0)
        return jax.lax.fori_loop(0, 3, lambda k, v: v.at[k].set(v[k] @ x[:6].T), rows)

    small = decoder(width=8, heads=2, ff=12, layers=2, vocabulary=16, time=6, samples=2)
    params = small.init(jax.random.key(0))
    init, step = training_step(small)
    cases: list[tuple[Callable[..., object], tuple[object, ...]]] = [
        (pointwise, (jnp.ones((4, 6)), jnp.ones((4, 6)))),
        (indexed, (jnp.ones((8, 6)), jnp.arange(5))),
        (small.forward, (params, *small.batch(jax.random.key(1)))),
        (step, (params, init(params), *small.batch(jax.random.key(1)))),
    ]
    found: Sources = {"stablehlo": [], "bytecode": [], "hlo text": [], "hlo proto": []}
    for fn, args in cases:
        lowered = jax.jit(fn).lower(*args)
        stream = io.BytesIO()
        lowered.compiler_ir().operation.write_bytecode(stream)
        hlo = lowered.compiler_ir("hlo")
        found["stablehlo"].append(lowered.as_text().encode())
        found["bytecode"].append(stream.getvalue())
        found["hlo text"].append(hlo.as_hlo_text().encode())
        found["hlo proto"].append(hlo.as_serialized_hlo_module_proto())
    return found


def consistent_text(source: bytes, rng: random.Random) -> bytes:
    """A change that often stays a valid module: one element type, one size or one operator
    replaced by another everywhere, or at one place.
    """
    text, kind = source.decode(), rng.random()
    if kind < 0.3:
        return re.sub(
            rf"\b{rng.choice(_TYPES[:1] * 3 + _TYPES)}\b", rng.choice(_TYPES), text
        ).encode()
    if kind < 0.6:
        sizes = sorted(set(re.findall(r"(?<=[<x])(\d+)x", text)), key=int)
        old, new = rng.choice(sizes), str(rng.choice((0, 1, 2, 5, 7, 129)))
        return re.sub(rf"(?<=[<x, \[]){old}(?=[x,\]])", new, text).encode()
    ops = re.findall(r"stablehlo\.\w+", text)
    places = [m.start() for m in re.finditer(r"stablehlo\.\w+", text)]
    at, new = rng.choice(places), rng.choice(ops + list(_UNARY))
    return (text[:at] + re.sub(r"stablehlo\.\w+", new, text[at:], count=1)).encode()


def mutated_text(source: bytes, rng: random.Random) -> bytes:
    """One to three tokens changed."""
    tokens = _TOKEN.findall(source.decode())
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(tokens))
        tokens[at] = _other(tokens, at, rng)
    return "".join(tokens).encode()


def _other(tokens: list[str], at: int, rng: random.Random) -> str:
    token, kind = tokens[at], rng.random()
    if kind < 0.15:
        return ""
    if kind < 0.3:
        return token + token
    if token.isdigit():
        number = int(token)
        return str(rng.choice((0, 1, number + 1, max(0, number - 1), 2 * number, 2**31, 2**63)))
    if token in _TYPES:
        return rng.choice(_TYPES)
    if kind < 0.4:
        at = rng.randrange(max(1, len(token)))
        return token[:at] + chr(rng.randrange(32, 126)) + token[at + 1 :]
    same = [t for t in tokens if t[:1] == token[:1] and t.strip()]
    return rng.choice(same or tokens)


Message = list[tuple[int, Any]]
"""Keys (field and wire type) and values of a protocol buffer; parsed bytes are a Message."""
_VARINTS = (0, 1, 2, 7, 127, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_MOST_DEPTH = 12


def mutated_proto(source: bytes, rng: random.Random) -> bytes:
    """One to three fields changed, whatever message they are of; lengths stay right."""
    message = _parsed(source)
    if message is None or rng.random() < 0.25:
        return changed_bytes(source, rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change(message, rng)
    return _packed_message(message)


def _change(message: Message, rng: random.Random) -> None:
    """A field of the message or of one in it."""
    inner = [value for _, value in message if isinstance(value, list)]
    if not message or (inner and rng.random() < 0.85):
        _change(rng.choice(inner), rng) if inner else None
        return
    at, other = rng.randrange(len(message)), rng.randrange(len(message))
    key, value = message[at]
    kind = rng.random()
    if kind < 0.15:
        del message[at]
    elif kind < 0.25:
        message.insert(at, message[other])
    elif kind < 0.35:
        message[at], message[other] = message[other], message[at]
    elif isinstance(value, int):
        near = rng.choice((value + 1, value - 1, 2 * value, -value))
        message[at] = (key, (near if rng.random() < 0.6 else rng.choice(_VARINTS)) % 2**64)
    elif isinstance(value, bytes):
        message[at] = (key, changed_bytes(value, rng))
    else:
        message[at] = message[other]


def _parsed(data: bytes, depth: int = 0) -> Message | None:
    """The fields of a message; None for bytes that are none."""
    found: Message = []
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key < 8 or at < 0:
            return None
        value: Any
        if key & 7 == 0:
            value, at = _varint(data, at)
        elif key & 7 == 2:
            size, at = _varint(data, at)
            if at < 0 or at + size > len(data):
                return None
            raw, at = data[at : at + size], at + size
            inner = _parsed(raw, depth + 1) if raw and depth < _MOST_DEPTH else None
            value = raw if inner is None else inner
        elif key & 7 in (1, 5):
            size = 8 if key & 7 == 1 else 4
            value, at = data[at : at + size], at + size
        else:
            return None
        if at < 0 or at > len(data):
            return None
        found.append((key, value))
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(number, place behind it), or a place below 0."""
    number = shift = 0
    while at < len(data) and shift < 70:
        number |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return number, at
        shift += 7
    return 0, -1


def _packed_varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _packed_message(message: Message) -> bytes:
    out = bytearray()
    for key, value in message:
        out += _packed_varint(key)
        if isinstance(value, int):
            out += _packed_varint(value)
            continue
        raw = _packed_message(value) if isinstance(value, list) else value
        out += (_packed_varint(len(raw)) if key & 7 == 2 else b"") + raw
    return bytes(out)


_SOUND = b"""func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  return %a : tensor<4xf32>
}"""
MUTATORS: dict[str, Sequence[Callable[[bytes, random.Random], bytes]]] = {
    "stablehlo": (mutated_text, consistent_text),
    "bytecode": (changed_bytes,),
    "hlo text": (mutated_text,),
    "hlo proto": (mutated_proto,),
}


def judge_of(kind: str, files: Sequence[bytes]) -> Judge:
    """Files of a kind, changed by number."""
    reader = _reader()

    def judge(number: int) -> str:
        rng = random.Random(number)
        data = rng.choice(MUTATORS[kind])(rng.choice(files), rng)
        answer = verdict(data, reader)
        assert answer != "SW_INTERNAL", "the reader met what nobody meant it to meet"
        return answer

    return judge


@cache
def _reader() -> Reader:
    """Of this process, started while memory has no limit yet."""
    reader = Reader(timeout_s=CASE_S - 2)
    reader.read(_SOUND, ".", Profile())
    return reader


def verdict(data: bytes, reader: Reader) -> str:
    """`compiled`, or the code of the refusal, with ` at` when it names a location.

    Whatever else is raised is a finding.
    """
    try:
        graph, _ = reader.read(data, ".", Profile())
        graph = run(graph, STEP_PASSES)
        step = StepProgram(
            name="main",
            graph=graph,
            inputs=tuple(f"arg{i}" for i in range(len(graph.inputs))),
            outputs=tuple(f"out{i}" for i in range(len(graph.outputs))),
        )
        _compile(step)
    except DiagnosticError as error:
        return error.code + (" at" if error.loc else "")
    return "compiled"


def _compile(step: StepProgram) -> None:
    """Compile and link as a job with a cache does: most cases change few functions of a program."""
    outlined = outline_programs((step,))
    units = {unit.key: unit for unit in outlined.functions}
    functions = {key: _function(unit) for key, unit in units.items()}
    link_program(outlined.programs[0], units, functions, TARGET)


def _function(unit: Unit) -> Function:
    try:
        return unpack_function(_packed(unit.payload))
    except DiagnosticError as error:
        raise located(error, unit.graph) from error


@lru_cache(maxsize=256)
def _packed(payload: bytes) -> bytes:
    return compile_function(payload, TARGET)
