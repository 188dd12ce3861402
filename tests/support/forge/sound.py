"""Small sound program files, one for each thing that files can hold: what the forge starts from."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.isa.program import Program
from shardwright.compiler.neff.bundle import program_bytes, read_program
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.options import CompileOptions
from shardwright.orchestrator.cli import main
from tests.support.forge.programs import Sound
from tests.support.model_run import compile_function

TRN2 = "trn2.48xlarge"
META = {"compiler_version": "test", "graph_sha256": "0" * 64, "options": {"optlevel": 2}}
RANKS = """module @m attributes {mhlo.num_replicas = 4 : i32} {
  func.func @main(%x: tensor<8x8xf32>) -> (tensor<8x16xf32>, tensor<8x8xf32>) {
    %a = "stablehlo.all_gather"(%x) <{all_gather_dim = 1 : i64,
      replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>}>
      : (tensor<8x8xf32>) -> tensor<8x16xf32>
    %b = "stablehlo.all_reduce"(%x) <{
      replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}> ({
    ^bb0(%p: tensor<f32>, %q: tensor<f32>):
      %s = stablehlo.add %p, %q : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    return %a, %b : tensor<8x16xf32>, tensor<8x8xf32>
  }
}"""


def product(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) * 2.0


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), q @ k.mT, -1e9)
    return jax.nn.softmax(scores, -1) @ v


def filtered(x: Any, k: Any) -> Any:
    return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME")


def lookup(table: Any, rows: Any, new: Any) -> Any:
    return table[rows] * 2.0, table.at[rows].add(new)


def narrow(x: Any, w: Any) -> Any:
    short = (x.astype(jnp.float8_e5m2) @ w.astype(jnp.float8_e5m2)).astype(jnp.float32)
    return short, jnp.round(x * 8).astype(jnp.int8) + jnp.int8(3)


def layers(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda c, m: (jnp.tanh(c @ m), c.sum()), x, w)


def placed(x: Any, at: Any, row: Any) -> Any:
    return jax.lax.dynamic_update_slice(x, row, (at, 0)), jnp.sort(x, 1), x[::-1]


def floats(*shape: int) -> np.ndarray:
    size = int(np.prod(shape))
    return (np.sin(np.arange(size)) / 2).astype(np.float32).reshape(shape)


LNC2 = CompileOptions(lnc=2)
ROWS: dict[str, tuple[Callable[..., Any], Sequence[Any], CompileOptions, str]] = {
    "product": (product, (floats(40, 24), floats(24, 16)), CompileOptions(), "trn1n.32xlarge"),
    "attention": (attention, (floats(1, 16, 8),) * 3, CompileOptions(), "trn1n.32xlarge"),
    "filtered": (filtered, (floats(1, 2, 6, 6), floats(4, 2, 3, 3)), CompileOptions(), TRN2),
    "lookup": (
        lookup,
        (floats(12, 16), np.array([3, 1, 7], np.int32), floats(3, 16)),
        CompileOptions(),
        "trn1n.32xlarge",
    ),
    "narrow": (narrow, (floats(16, 16), floats(16, 8)), CompileOptions(), TRN2),
    "layers": (layers, (floats(8, 8), floats(3, 8, 8)), CompileOptions(), "trn1.32xlarge"),
    "placed": (
        placed,
        (floats(10, 6), np.array(4, np.int32), floats(2, 6)),
        CompileOptions(),
        "inf2.xlarge",
    ),
    "two cores": (product, (floats(200, 24), floats(24, 16)), LNC2, TRN2),
}


def sound_files(folder: Path) -> list[Sound]:
    """Every file; `folder` is for intermediates."""
    found = []
    for name, (fn, args, options, target) in ROWS.items():
        program = compile_function(fn, args, options, target).program
        data = program_bytes(program, META, compress=False)
        found.append(Sound(name, data, packed(args)))
    return [*found, of_ranks(folder)]


def of_ranks(folder: Path) -> Sound:
    """A program of four ranks, as the compile command writes it."""
    model, out = folder / "ranks.mlir", folder / "ranks.neff"
    model.write_text(RANKS)
    words = ["compile", str(model), "--framework", "XLA", "--target", "trn1", "--output", str(out)]
    words += ["--logfile", str(folder / "log.txt")]
    assert main(words) == 0
    container = Container.open(out)
    program: Program = read_program(container)
    return Sound(
        "ranks", program_bytes(program, container.meta, compress=False), packed((floats(8, 8),))
    )


def packed(arrays: Sequence[Any]) -> bytes:
    """Arrays as `neff run` reads them."""
    stream = io.BytesIO()
    np.savez(stream, **{f"arg{k}": np.asarray(a) for k, a in enumerate(arrays)})
    return stream.getvalue()
