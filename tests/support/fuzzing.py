"""Damaged model files: mutations of StableHLO text and of HLO protos, by seed.

Text is changed by token (numbers, types, names, operators, deletions, swaps), protos by bit and by
byte run. `verdict` takes one case down the command's road and says how it ended.
"""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType

import jax
import jax.numpy as jnp

from compiler.diagnostics import DiagnosticError
from compiler.driver import compile_function, located
from compiler.frontend.isolated import Reader
from compiler.isa.program import Function
from compiler.link import link_program
from compiler.outline import outline_programs
from compiler.outline.unit import Unit, unpack_function
from compiler.passes.pipeline import STEP_PASSES, run
from compiler.program import StepProgram
from compiler.surface.releases import Profile
from tests.support.model_zoo import decoder, training_step

TARGET = "trn1n.32xlarge"
CASE_LIMIT_S = 60
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


def sources() -> list[tuple[bytes, bytes]]:
    """(StableHLO text, HLO proto) of small programs that use much of the surface."""

    def pointwise(x: jax.Array, y: jax.Array) -> jax.Array:
        z = jnp.where(x > 0, jnp.exp(x) / (1 + y), jnp.tanh(y))
        return jnp.sum(z.reshape(4, 3, 2).transpose(2, 0, 1), axis=1).astype(jnp.bfloat16)

    def indexed(x: jax.Array, i: jax.Array) -> jax.Array:
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
    found = []
    for fn, args in cases:
        lowered = jax.jit(fn).lower(*args)
        proto = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
        found.append((lowered.as_text().encode(), proto))
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


def mutated_proto(source: bytes, rng: random.Random) -> bytes:
    """Bits flipped, runs removed, inserted or repeated."""
    data = bytearray(source)
    for _ in range(rng.randint(1, 4)):
        at, kind, size = rng.randrange(len(data)), rng.random(), rng.randint(1, 8)
        if kind < 0.6:
            data[at] ^= 1 << rng.randrange(8)
        elif kind < 0.75:
            del data[at : at + size]
        elif kind < 0.9:
            data[at:at] = rng.randbytes(size)
        else:
            data[at:at] = data[at : at + 8 * size]
    return bytes(data)


def verdict(data: bytes, reader: Reader) -> str:
    """`compiled`, or the code of the refusal, with ` at` when it names a location.

    Whatever else is raised is a finding.
    """
    try:
        with _limit(CASE_LIMIT_S):
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


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the block after that many seconds."""

    def expire(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"a case requires at most {seconds} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
