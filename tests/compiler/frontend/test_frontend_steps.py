"""Imported training steps compute what JAX computes: every leaf of every model, in the NumPy
reference of the IR.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib import _jax

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.capture import Captured, capture
from shardwright.compiler.frontend.context import make_context, parse_module
from shardwright.compiler.frontend.hlo import hlo_to_stablehlo
from shardwright.compiler.frontend.reference import (
    batch_leaves,
    initial_state,
    reference_step,
    task_batches,
)
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.ir.verify import verify
from shardwright.orchestrator.models import config_task
from shardwright.sim_cluster.values.result import distance
from tests.models import flax_decoder, prime_model
from tests.support.cells import long_in_matrix

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
BATCH = 4
# Second moments are squares, and a bias that starts at 0 is a sum of normalised gradients: both at
# least double the relative error of the gradients.
LOOSE = re.compile(r"/nu/|params/.*/bias$")
REPO = Path(__file__).resolve().parents[3]
MODELS: dict[str, Callable[[], TrainTask]] = {
    "llama": lambda: config_task.train_task(CONFIG, seq_len=32, remat="none"),
    "llama_remat": lambda: config_task.train_task(CONFIG, seq_len=32, remat="full"),
    "llama_selective_tied": lambda: config_task.train_task(
        CONFIG | {"tie_word_embeddings": True}, seq_len=32, remat="selective"
    ),
    "flax": flax_decoder.train_task,
    "prime": prime_model.train_task,
    "llama_bf16": lambda: config_task.train_task(CONFIG, seq_len=32, dtype="bf16"),
}
SAME_STATE = ("llama_remat", "llama_bf16")  # same parameters: start from the state of "llama"
FP32 = [name for name in MODELS if not name.endswith("bf16")]


@cache
def task_of(name: str) -> TrainTask:
    return MODELS[name]()


@cache
def imported(name: str) -> tuple[Captured, Graph]:
    captured = capture(task_of(name), BATCH)
    return captured, verify(import_module(captured.artifact, base_dir=str(REPO)))


@cache
def second_step(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(state after one step, next batch)."""
    task = task_of(name)
    batches = task_batches(task, 0, BATCH)
    state = reference_step(task, initial_state(task, 0), next(batches))
    return {n: leaf for n, leaf in state.items() if not n.startswith("metrics/")}, next(batches)


@cache
def leaves_after_a_step(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(of the imported graph, of jax.jit) after a second step, so that the optimizer state is not
    zero.
    """
    task, (captured, graph) = task_of(name), imported(name)
    state, batch = second_step("llama" if name in SAME_STATE else name)
    given = state | batch_leaves(batch)
    outputs = evaluate(graph, [given[info.name] for info in captured.inputs])
    ours = dict(zip((info.name for info in captured.outputs), outputs, strict=True))
    return ours, reference_step(task, state, batch)


def worst(given: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> tuple[float, str]:
    return max((distance(given[name], reference[name]), name) for name in reference)


@pytest.mark.parametrize(
    "name", long_in_matrix(FP32, ("llama", "flax", "llama_remat", "llama_selective_tied"))
)
def test_fp32_step_equals_jax(name: str) -> None:
    ours, reference = leaves_after_a_step(name)
    assert set(ours) == set(reference)
    exact = {n: v for n, v in reference.items() if not LOOSE.search(n)}
    assert worst(ours, exact) < (1e-6, "")
    assert worst(ours, reference) < (2e-6, "")


@pytest.mark.parametrize("name", long_in_matrix(("llama_remat", "prime"), ("llama_remat",)))
def test_the_step_as_an_hlo_proto_is_the_same_step(name: str) -> None:
    captured, graph = imported(name)
    state, batch = second_step("llama" if name in SAME_STATE else name)
    given = state | batch_leaves(batch)
    inputs = [given[info.name] for info in captured.inputs]
    again = verify(import_module(hlo_to_stablehlo(as_hlo_proto(captured.artifact))))
    for ours, theirs in zip(evaluate(again, inputs), evaluate(graph, inputs), strict=True):
        assert (
            distance(ours, theirs) < 1e-6
        )  # not equal: BLAS sums by the alignment of its operands


def as_hlo_proto(artifact: bytes) -> bytes:
    with make_context():
        stream = io.BytesIO()
        parse_module(artifact).operation.write_bytecode(stream)
    convert = _jax.mlir.mlir_module_to_xla_computation
    computation = convert(stream.getvalue(), use_tuple_args=False, return_tuple=False)
    proto: bytes = computation.as_serialized_hlo_module_proto()
    return proto


def test_a_wrong_graph_is_noticed() -> None:
    """The comparison above has teeth: one doubled parameter breaks it far beyond the bound."""
    task, (captured, graph) = task_of("prime"), imported("prime")
    state, batch = second_step("prime")
    given = state | batch_leaves(batch)
    given["params/blk0.wide"] = given["params/blk0.wide"] * np.float32(1.001)
    outputs = evaluate(graph, [given[info.name] for info in captured.inputs])
    ours = dict(zip((info.name for info in captured.outputs), outputs, strict=True))
    assert worst(ours, reference_step(task, state, batch)) > (1e-5, "")


@pytest.mark.matrix
def test_bf16_step_is_no_farther_from_fp32_than_jax() -> None:
    ours, jax_bf16 = leaves_after_a_step("llama_bf16")
    task = task_of("llama_bf16")
    assert task.full_precision is not None
    precise = reference_step(task.full_precision, *second_step("llama"))
    bound = max(1e-2, worst(jax_bf16, precise)[0])
    assert worst(ours, precise)[0] <= bound
    assert any(
        v.type.dtype.value == "bf16" for op in imported("llama_bf16")[1].ops for v in op.results
    )


@pytest.mark.parametrize("name", MODELS)
def test_only_known_ops_and_no_captures(name: str) -> None:
    _, graph = imported(name)
    assert {op.name for op in graph.walk()} <= set(OPS)
    _check_closed(graph)


def _check_closed(graph: Graph) -> None:
    defined = {*graph.inputs, *(v for op in graph.ops for v in op.results)}
    assert {*graph.outputs, *(v for op in graph.ops for v in op.operands)} <= defined
    for op in graph.ops:
        for region in op.regions:
            _check_closed(region)


@pytest.mark.parametrize("name", ["llama", "llama_remat", "llama_selective_tied"])
def test_scan_becomes_two_loops_of_the_layers(name: str) -> None:
    _, graph = imported(name)
    assert [op.attrs.trip for op in graph.walk() if op.name == "loop"] == [3, 3]


def test_remat_is_visible_in_barriers_and_scopes() -> None:
    plain, full = imported("llama")[1], imported("llama_remat")[1]
    assert not [op for op in plain.walk() if op.name == "optimization_barrier"]
    assert [op for op in full.walk() if op.name == "optimization_barrier"]
    assert any("rematted_computation" in op.loc.scope for op in full.walk())
    assert any("transpose(jvp" in op.loc.scope for op in full.walk())


def line_of(file: Path, text: str) -> int:
    return next(i for i, line in enumerate(file.read_text().splitlines(), 1) if text in line)


def test_locations_point_at_the_model() -> None:
    _, graph = imported("prime")
    file = REPO / "tests/models/prime_model.py"
    line = line_of(file, '"napr,naqr->napq"')
    dots = [op for op in graph.walk() if op.name == "dot_general" and op.loc.line == line]
    assert {op.loc.file for op in dots} == {"tests/models/prime_model.py"}
    assert len(dots) == 2 * 3  # per block one forward, two backward
    computing = [op for op in graph.walk() if op.name == "dot_general"]
    assert all(op.loc.file == "tests/models/prime_model.py" for op in computing)


def test_own_models_are_located_inside_the_package() -> None:
    _, graph = imported("llama")
    files = {op.loc.file for op in graph.walk() if op.name in ("dot_general", "rsqrt", "gather")}
    models = "pkg:orchestrator/models"
    assert files == {f"{models}/{name}.py" for name in ("attending", "blocks", "decoder")}
    assert not any(os.path.isabs(op.loc.file) for op in graph.walk())


def test_library_ops_are_located_at_the_call_in_the_users_code() -> None:
    _, graph = imported("flax")
    step_line = line_of(REPO / "tests/models/flax_decoder.py", "chain.update(grads")
    files = {op.loc.file for op in graph.walk() if op.loc.line == step_line}
    assert "tests/models/flax_decoder.py" in files


def test_70b_captures_and_imports_small() -> None:
    """In a process of its own: no parameter is allocated anywhere (70B would be 280 GB)."""
    code = (
        "import pathlib, re\n"
        "from shardwright.compiler.frontend.capture import capture\n"
        "from shardwright.orchestrator.models.presets import preset_task\n"
        "from shardwright.compiler.frontend.stablehlo import import_module\n"
        "c = capture(preset_task('llama2-70b', dtype='bf16'), 8)\n"
        "g = import_module(c.artifact)\n"
        "import math\n"
        "n = sum(math.prod(i.shape) for i in c.inputs if i.role == 'parameter')\n"
        # getrusage would count the pages of the test process this one was forked from
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "kib = re.search(r'VmHWM:\\s+(\\d+)', status).group(1)\n"
        "trips = [o.attrs.trip for o in g.walk() if o.name == 'loop']\n"
        "print(n, sum(1 for _ in g.walk()), trips, kib)"
    )
    env = os.environ | {"PYTHONPATH": str(REPO)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    params, ops, trips, kib = re.fullmatch(r"(\d+) (\d+) (\[.*\]) (\d+)\n", run.stdout).groups()
    assert 6.8e10 < int(params) < 7.1e10
    assert int(ops) < 3000
    assert trips == "[80, 80]"
    assert int(kib) * 1024 < 1e9


def test_step_traces_at_any_batch_size() -> None:
    small, large = (capture(task_of("llama"), n) for n in (1, 6))
    assert small.inputs[:-2] == large.inputs[:-2]
    assert [i.shape[0] for i in large.inputs if i.role == "batch"] == [6, 6]
    assert large.aliases == tuple((i, i) for i in range(len(large.inputs) - 2))


def test_flax_bf16_imports_too() -> None:
    captured = capture(flax_decoder.train_task(dtype=jnp.bfloat16, num_layers=1), 2)
    graph = verify(import_module(captured.artifact))
    assert [v.type.shape for v in graph.inputs] == [i.shape for i in captured.inputs]
    products = [op.result.type.dtype for op in graph.walk() if op.name == "dot_general"]
    assert products.count(DType.BF16) > len(products) / 2
