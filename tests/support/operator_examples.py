"""One small model per operator of XLA's published table, and per operator beyond it: what a user
would write, or the module text where JAX does not emit the operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwright.compiler.driver import compile_graph
from shardwright.compiler.frontend.detect import import_file
from shardwright.compiler.frontend.importer import Check
from shardwright.compiler.passes.pipeline import STEP_PASSES
from shardwright.compiler.program import StepProgram
from shardwright.compiler.rewriting.driver import run
from shardwright.sim_cluster.values.run_single import run_single
from tests.support import xla

RNG = np.random.default_rng(11)


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def ints(*shape: int) -> np.ndarray:
    return RNG.integers(0, 4, size=shape).astype(np.int32)


@dataclass(frozen=True)
class Example:
    """A model: a JAX function, or StableHLO text; `bits` asks for shape and range only, because the
    values are the machine's own.
    """

    model: Callable[..., Any] | str
    arguments: tuple[np.ndarray, ...]
    bits: bool = False
    reference: Callable[..., Any] | None = None  # where XLA itself cannot run the model

    def text(self) -> str:
        """The module as StableHLO."""
        if isinstance(self.model, str):
            return self.model
        return jax.jit(self.model).lower(*self.arguments).as_text(debug_info=True)

    def expected(self) -> list[np.ndarray]:
        """What XLA computes."""
        function = self.reference or self.model
        if isinstance(function, str):
            return xla.run(function, self.arguments)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(function)(*self.arguments))]


def compile_and_run(
    text: str,
    arguments: Sequence[np.ndarray],
    level: str,
    checks: Mapping[str, Check] | None = None,
) -> list[np.ndarray]:
    """The outputs of a module on one simulated core, through the compiler's own road."""
    graph, _ = import_file(text.encode(), checks=checks)
    graph = run(graph, STEP_PASSES)
    names = [f"arg{k}" for k in range(len(graph.inputs))]
    results = [f"out{k}" for k in range(len(graph.outputs))]
    whole = StepProgram(name="main", graph=graph, inputs=tuple(names), outputs=tuple(results))
    program = compile_graph(whole, "trn1.32xlarge")
    made = run_single(program, dict(zip(names, arguments, strict=True)), level)
    return [made[name] for name in results]


def unary(function: Callable[..., Any], positive: bool = False) -> Example:
    x = floats(4, 6)
    return Example(function, (np.abs(x) + 0.1 if positive else x,))


def binary(function: Callable[..., Any]) -> Example:
    return Example(function, (floats(4, 6), floats(4, 6)))


X, Y, P = floats(4, 6), floats(6, 5), np.array([[True, False], [False, False]])
IMAGE = floats(1, 6, 6, 2)


def _norm(kind: str, arguments: str, results: str, call: str) -> str:
    return (
        f"func.func @main({arguments}) -> ({results}) {{\n  {call}\n"
        f"  return {kind} : {results}\n}}\n"
    )


_C = "tensor<3xf32>"
_T = "tensor<4x3xf32>"
_FOUR = ", ".join((f"%x: {_T}", *(f"%{n}: {_C}" for n in ("s", "o", "m", "v"))))
_ATTRS = "{epsilon = 0.01 : f32, feature_index = 1 : i64}"
_TRAINING = _norm(
    "%r#0, %r#1, %r#2",
    f"%x: {_T}, %s: {_C}, %o: {_C}",
    f"{_T}, {_C}, {_C}",
    f'%r:3 = "stablehlo.batch_norm_training"(%x, %s, %o) {_ATTRS} : ({_T}, {_C}, {_C})'
    f" -> ({_T}, {_C}, {_C})",
)
_INFERENCE = _norm(
    "%r",
    _FOUR,
    _T,
    f'%r = "stablehlo.batch_norm_inference"(%x, %s, %o, %m, %v) {_ATTRS}'
    f" : ({_T}, {_C}, {_C}, {_C}, {_C}) -> {_T}",
)
_GRADIENT = _norm(
    "%r#0, %r#1, %r#2",
    f"%x: {_T}, %s: {_C}, %m: {_C}, %v: {_C}, %g: {_T}",
    f"{_T}, {_C}, {_C}",
    f'%r:3 = "stablehlo.batch_norm_grad"(%x, %s, %m, %v, %g) {_ATTRS}'
    f" : ({_T}, {_C}, {_C}, {_C}, {_T}) -> ({_T}, {_C}, {_C})",
)
_DOT = (
    "func.func @main(%a: tensor<4x6xf32>, %b: tensor<6x5xf32>) -> tensor<4x5xf32> {\n"
    '  %0 = "stablehlo.dot"(%a, %b) : (tensor<4x6xf32>, tensor<6x5xf32>) -> tensor<4x5xf32>\n'
    "  return %0 : tensor<4x5xf32>\n}\n"
)
_BROADCAST = (
    "func.func @main(%a: tensor<3xf32>) -> tensor<2x3xf32> {\n"
    '  %0 = "stablehlo.broadcast"(%a) {broadcast_sizes = array<i64: 2>}'
    " : (tensor<3xf32>) -> tensor<2x3xf32>\n  return %0 : tensor<2x3xf32>\n}\n"
)
_ROWS = floats(4, 3)
_CHANNELS = [floats(3) for _ in range(3)] + [np.abs(floats(3)) + 0.5]


_GATHER = (
    "func.func @main(%a: tensor<4x6xf32>) -> tensor<4x6xf32> {\n"
    '  %0 = "stablehlo.all_gather"(%a) {all_gather_dim = 0 : i64,'
    " replica_groups = dense<0> : tensor<1x1xi64>} : (tensor<4x6xf32>) -> tensor<4x6xf32>\n"
    "  return %0 : tensor<4x6xf32>\n}\n"
)
_REDUCE = (
    "func.func @main(%a: tensor<4x6xf32>) -> tensor<4x6xf32> {\n"
    '  %0 = "stablehlo.all_reduce"(%a) ({\n'
    "  ^bb0(%x: tensor<f32>, %y: tensor<f32>):\n"
    "    %s = stablehlo.add %x, %y : tensor<f32>\n    stablehlo.return %s : tensor<f32>\n"
    "  }) {replica_groups = dense<0> : tensor<1x1xi64>} : (tensor<4x6xf32>) -> tensor<4x6xf32>\n"
    "  return %0 : tensor<4x6xf32>\n}\n"
)


def _pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


_COMPARE = {"Eq": jnp.equal, "Ne": jnp.not_equal, "Ge": jnp.greater_equal, "Gt": jnp.greater}
_COMPARE |= {"Le": jnp.less_equal, "Lt": jnp.less}

EXAMPLES: dict[str, Example] = {
    "Abs": unary(jnp.abs),
    "Add": binary(jnp.add),
    "Allgather": Example(_GATHER, (X,)),
    "Allreduce": Example(_REDUCE, (X,)),
    "Atan2": binary(jnp.arctan2),
    "Batchnorm": Example(_TRAINING, (_ROWS, *_CHANNELS[:2])),
    "Batchnormgrad": Example(_GRADIENT, (_ROWS, *_CHANNELS[1:], floats(4, 3))),
    "Batchnorminference": Example(_INFERENCE, (_ROWS, *_CHANNELS)),
    "BitcastConvertType": unary(lambda x: lax.bitcast_convert_type(x, jnp.int32)),
    "Broadcast": Example(_BROADCAST, (floats(3),)),
    "BroadcastInDim": Example(lambda x: jnp.broadcast_to(x[:, None], (3, 2)), (floats(3),)),
    "Ceil": unary(jnp.ceil),
    "Clamp": unary(lambda x: lax.clamp(-0.5, x, 0.5)),
    "Compare": binary(lambda x, y: (x < y).astype(jnp.float32)),
    "Concatenate": binary(lambda x, y: jnp.concatenate([x, y], 1)),
    "Constant": unary(lambda x: x + 2.5),
    "ConstantLiteral": unary(lambda x: x * np.arange(6, dtype=np.float32)),
    "ConvertElementType": unary(lambda x: (4 * x).astype(jnp.int32)),
    "Cos": unary(jnp.cos),
    "Customcall": Example(
        "func.func @main(%a: tensor<4x6xf32>) -> tensor<4x6xf32> {\n"
        "  %0 = stablehlo.custom_call @AwsNeuronGelu(%a) : (tensor<4x6xf32>) -> tensor<4x6xf32>\n"
        "  return %0 : tensor<4x6xf32>\n}\n",
        (X,),
        reference=partial(jax.nn.gelu, approximate=False),
    ),
    "Div": binary(jnp.divide),
    "Dot": Example(_DOT, (X, Y)),
    "DotGeneral": Example(
        lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (floats(2, 3, 4), floats(2, 4, 3))
    ),
    "DynamicUpdateSlice": Example(
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)),
        (X, floats(1, 6), np.array(2, np.int32)),
    ),
    "Exp": unary(jnp.exp),
    "Floor": unary(jnp.floor),
    "Gather": Example(lambda x, i: x[i], (X, np.array([3, 0, 3], np.int32))),
    "Iota": unary(lambda x: x + lax.broadcasted_iota(jnp.float32, (4, 6), 1)),
    "Log": unary(jnp.log, positive=True),
    "LogicalAnd": Example(lambda x, y: x & y, (P, ~P)),
    "LogicalNot": Example(jnp.logical_not, (P,)),
    "Max": binary(jnp.maximum),
    "Min": binary(jnp.minimum),
    "Mul": binary(jnp.multiply),
    "Neg": unary(jnp.negative),
    "Pad": unary(lambda x: jnp.pad(x, ((1, 2), (0, 3)))),
    "Pow": Example(jnp.power, (np.abs(floats(4, 6)) + 0.1, floats(4, 6))),
    "Reduce": unary(lambda x: (x.sum(0), x.max(1), x.min(), x.prod(1))),
    "Reshape": unary(lambda x: x.reshape(3, 8)),
    "Rev": unary(lambda x: x[::-1, ::-1]),
    "RngBitGenerator": Example(
        lambda k: lax.rng_bit_generator(k, (16,), jnp.uint32),
        (np.arange(4, dtype=np.uint32),),
        bits=True,
    ),
    "RngUniform": Example(
        lambda a, b: lax.rng_uniform(a, b, (32,)),
        (np.float32(2), np.float32(3)),
        bits=True,
    ),
    "Rsqrt": unary(lax.rsqrt, positive=True),
    "Scatter": Example(
        lambda x, i, y: x.at[i].add(y), (X, np.array([3, 0, 3], np.int32), floats(3, 6))
    ),
    "Select": binary(lambda x, y: jnp.where(x > 0, x, y)),
    "SelectAndScatter": Example(lambda x: jax.grad(lambda x: (_pool(x) ** 2).sum())(x), (IMAGE,)),
    "ShiftRightLogical": Example(lax.shift_right_logical, (ints(3, 4) * 1000, ints(3, 4))),
    "Sign": unary(jnp.sign),
    "Sin": unary(jnp.sin),
    "Slice": unary(lambda x: x[1:3, ::2]),
    "Sqrt": unary(jnp.sqrt, positive=True),
    "Sub": binary(jnp.subtract),
    "Tanh": unary(jnp.tanh),
    "Transpose": unary(jnp.transpose),
    "Tuple": binary(lambda x, y: (x + y, (x, y))),
    "GetTupleElement": binary(lambda x, y: (x + y, (x, y))),
} | {name: binary(partial(lambda f, x, y: f(x, y), f)) for name, f in _COMPARE.items()}
"""By builder name: all 62 of the published table."""
