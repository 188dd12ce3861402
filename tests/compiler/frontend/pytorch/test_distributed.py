"""PyTorch code that distributes a model, in the style of its tutorials, read on one process: what
it says, at which line, and that it leaves neither torch nor the module changed.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", exc_type=ImportError)

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.entry import call_entry
from shardwright.compiler.frontend.pytorch.distributed import active, reading
from shardwright.compiler.frontend.pytorch.distribution import (
    Axis,
    Distribution,
    Other,
    Precision,
    Recompute,
    Style,
)
from shardwright.orchestrator.config.importers.distributed_terms import tables_of, terms_of
from shardwright.orchestrator.config.importers.imported import Asked, imported
from shardwright.orchestrator.config.importers.term import DIFFERS

FOLDER = Path(__file__).parents[3] / "models" / "torch_distributed"
LAYERS = [f"layers.{n}" for n in range(4)]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files find each other, as scripts of one folder do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in [p.stem for p in FOLDER.glob("*.py")]:
        sys.modules.pop(name, None)


def said(name: str, function: str = "build", world: int = 8) -> Distribution:
    with reading(world, str(FOLDER)) as recording:
        made = call_entry(f"{name}:{function}", FOLDER, "reading")
        return recording.distribution(made[0] if isinstance(made, tuple) else made)


def keys(found: Distribution) -> dict[str, Any]:
    tables = tables_of(terms_of(found))
    return {f"{table}.{key}": value for table, own in tables.items() for key, value in own.items()}


def whys(found: Distribution) -> dict[str, str]:
    return {row.term: row.why for row in terms_of(found) if row.why}


def lines(name: str, text: str) -> set[int]:
    """Where a text stands in a file."""
    rows = (FOLDER / f"{name}.py").read_text().splitlines()
    return {number for number, row in enumerate(rows, 1) if text in row}


def test_blocks_then_the_model() -> None:
    found = said("fsdp2")
    assert [unit.modules for unit in found.units] == [*((name,) for name in LAYERS), ("",)]
    assert found.axes == (Axis(name="dp_shard", size=8),)
    assert {u.precision for u in found.units} == {
        Precision(param_dtype="bfloat16", reduce_dtype="float32")
    }
    assert {unit.loc.line for unit in found.units[:4]} == lines("fsdp2", "fully_shard(layer,")
    assert {unit.loc.file for unit in found.units} == {"fsdp2.py"}
    assert found.others == (Other(term="forward_prefetch", value="1", loc=found.others[0].loc),)
    assert keys(found) == {
        "mesh.dp_shard": 8,
        "strategy.name": "fsdp",
        "strategy.layers_per_group": 1,
        "strategy.reshard_after_forward": True,
        "strategy.early_all_gather_shift": 1,
        "strategy.late_reduce_scatter_shift": 1,
        "strategy.root_unit": "all",
        "strategy.reshard_root": False,
        "strategy.param_dtype": "bfloat16",
        "strategy.reduce_dtype": "float32",
        "strategy.remat": "none",
    }
    assert not whys(found)


def test_a_parameter_belongs_to_the_innermost_unit() -> None:
    found = said("titan")
    held = {unit.modules: set(unit.parameters) for unit in found.units}
    assert held["tok_embeddings",] == {"tok_embeddings.weight"}
    assert held["norm", "output"] == {"norm.weight", "norm.bias", "output.weight"}
    assert held["",] == set()
    assert all(p.startswith("layers.2.") for p in held["layers.2",])
    every = [name for own in held.values() for name in own]
    assert len(every) == len(set(every)) == 3 + 1 + 4 * 11


def test_torchtitans_order() -> None:
    found = said("titan")
    assert [axis.name for axis in found.axes] == ["dp_replicate", "dp_shard", "cp", "tp"]
    unit = found.units[1]
    assert (unit.replicas, unit.axes) == (("dp_replicate",), ("dp_shard", "cp"))
    styles = {one.module: one for one in found.parallel}
    assert styles["layers.3.attention.wo"].weights == (("weight", 1),)
    assert styles["tok_embeddings"].weights == (("weight", 0),)
    assert styles["layers.0.attention"].style is Style.INPUT
    assert styles["layers.0.attention"].inputs == "Replicate"
    assert [one.module for one in found.checkpointed] == LAYERS
    mapped = keys(found)
    assert (mapped["mesh.dp_replicate"], mapped["mesh.tp"]) == (2, 4)
    plan = mapped["strategy.tensor_plan"].split(", ")
    assert plan[:2] == ["tok_embeddings.weight:0", "output.weight:0"]
    assert "layers.*.attention.wo.weight:1" in plan and len(plan) == 9
    assert mapped["strategy.sequence_parallel"] and mapped["strategy.remat"] == "full"
    assert mapped["strategy.root_unit"] == "ends" and not mapped["strategy.reshard_root"]
    assert not whys(found)


def test_offload_is_listed() -> None:
    found = said("titan", "build_offloaded")
    assert {unit.offload for unit in found.units} == {"cpu"}
    assert "device memory" in whys(found)["offload_policy"]


def test_pairs_of_blocks_on_a_hybrid_mesh() -> None:
    found = said("hybrid")
    assert [unit.modules for unit in found.units[:2]] == [tuple(LAYERS[:2]), tuple(LAYERS[2:])]
    mapped = keys(found)
    assert {"mesh.dp_replicate": 2, "mesh.dp_shard": 4}.items() <= mapped.items()
    assert mapped["strategy.layers_per_group"] == 2
    assert mapped["strategy.reshard_after_forward"] and mapped["strategy.reshard_root"]
    assert mapped["strategy.reduce_gradients"] == "last"
    assert list(whys(found)) == ["reshard_after_forward of layers.*"]
    assert "the last of 2 differs" in whys(found)["reshard_after_forward of layers.*"]


def test_views_of_the_same_ranks() -> None:
    """The mesh is the view that terms name dims of."""
    found = said("views")
    assert [axis.name for axis in found.axes] == ["dp_replicate", "fsdp", "tp"]
    mapped = keys(found)
    assert (mapped["mesh.dp_replicate"], mapped["mesh.dp_shard"], mapped["mesh.tp"]) == (2, 4, 2)


def test_a_function_is_a_project_and_its_model() -> None:
    """`plan --from pytorch file.py:function`; recomputation is the module's own then."""
    path = FOLDER / "trained.py"
    asked = Asked(cores_of=lambda _: 32)
    found = imported("pytorch", Path(f"{path}:build_checkpointed"), asked)
    tables = found.below(())
    assert tables["model"] == {"entry": f"{path}:build_checkpointed"}
    assert tables["mesh"] == {"dp_shard": 32} and "remat" not in tables["strategy"]
    assert found.below(("model.preset",))["strategy"]["remat"] == "full"
    terms = {row["term"]: row for row in found.section()["terms"]}
    assert terms["fully_shard layers.*"]["file"] == "trained.py"
    two = imported("pytorch", Path(f"{path}:build"), Asked(cores_of=lambda _: 32, instances=2))
    assert two.below(())["mesh"] == {"dp_shard": 64}


def test_a_function_returns_a_module() -> None:
    with pytest.raises(UsageError, match="returns the module it has distributed, got dict") as e:
        imported("pytorch", Path(f"{FOLDER / 'wrong.py'}:nothing"), Asked(cores_of=lambda _: 32))
    assert e.value.code == "SW_ENTRY"


def test_weights_that_stay() -> None:
    mapped = keys(said("zero2"))
    assert not mapped["strategy.reshard_after_forward"] and not mapped["strategy.reshard_root"]
    assert mapped["mesh.dp_shard"] == 8


def test_one_unit() -> None:
    mapped = keys(said("only_root"))
    assert mapped["strategy.layers_per_group"] == 4 and mapped["strategy.root_unit"] == "all"
    assert not mapped["strategy.reshard_after_forward"]


def test_units_inside_of_blocks() -> None:
    found = said("inner_units")
    mapped, told = keys(found), whys(found)
    assert mapped["strategy.layers_per_group"] == 0
    assert "every weight is one alone" in told["fully_shard layers.*.attention"]
    assert "not over 8" in told["reshard_after_forward of layers.*.attention"]


def test_tensor_parallelism_alone() -> None:
    found = said("tensor")
    mapped, told = keys(found), whys(found)
    assert mapped["strategy.name"] == "llm-training" and mapped["strategy.zero"] == 0
    assert (mapped["mesh.dp_replicate"], mapped["mesh.tp"]) == (2, 4)
    assert not mapped["strategy.sequence_parallel"]
    assert set(told) == {"ColwiseParallel output", "parallelize_module"}
    assert any(other.value == "'lm_head' names no module" for other in found.others)


def test_data_parallelism() -> None:
    found = said("ddp")
    assert [one.module for one in found.checkpointed] == LAYERS[::2]
    mapped = keys(found)
    assert (mapped["strategy.name"], mapped["strategy.zero"]) == ("generic", 0)
    assert (mapped["mesh.dp_replicate"], mapped["strategy.bucket_mb"]) == (8, 50)
    assert "2 of 4 layers" in whys(found)["checkpoint layers.*"]


@pytest.mark.parametrize(
    ("name", "function", "keeps"),
    [
        ("fsdp1", "build", False),
        ("fsdp1", "build_grad_op", True),
        ("fsdp1_wrapped", "build", False),
        ("fsdp1_wrapped", "build_custom", False),
        ("fsdp1_wrapped", "build_by_hand", False),
    ],
)
def test_fully_sharded_data_parallel(name: str, function: str, keeps: bool) -> None:
    found = said(name, function)
    assert sorted(u.modules[0] for u in found.units) == ["", *LAYERS]
    assert found.units[-1].modules == ("",)
    assert keys(found)["strategy.reshard_after_forward"] is not keeps
    hybrid = (name, function) == ("fsdp1_wrapped", "build")
    assert found.units[0].replicas == (("outer",) if hybrid else ())


def test_shards_of_nothing_are_replicas() -> None:
    found = said("fsdp1", "build_no_shard")
    assert not found.units and len(found.replicated) == 1
    assert keys(found)["strategy.param_dtype"] == "bfloat16"


def test_stages_by_name() -> None:
    found = said("stages")
    assert found.pipeline is not None and found.pipeline.axes == ("pp",)
    (cut,) = found.pipeline.cuts
    assert (cut.module, cut.is_behind, cut.loc.file) == ("layers.3", False, "stages.py")
    mapped = keys(found)
    assert mapped["strategy.stage_layers"] == "3, 1" and mapped["strategy.schedule"] == "1f1b"
    assert (mapped["mesh.pp"], mapped["mesh.dp_shard"]) == (2, 4)
    assert mapped["strategy.global_batch"] == 8 * 4


def test_what_is_recomputed() -> None:
    assert {o.keeps for o in said("selective").checkpointed} == {Recompute.SELECTIVE}
    assert keys(said("selective"))["strategy.remat"] == "selective"
    assert keys(said("selective", "build_offload"))["strategy.remat"] == "offload"


def test_nothing_is_left_changed() -> None:
    """Neither names of torch, nor the environment, nor the module, nor what the file imported."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    fsdp = importlib.import_module("torch.distributed.fsdp")
    before = fsdp.fully_shard, torch.compile, torch.nn.Module.to, dict(os.environ)
    kind = torch.distributed.device_mesh.DeviceMesh
    with reading(8, str(FOLDER)) as recording:
        model, _ = call_entry("fsdp2:build", FOLDER, "reading")
        plain = call_entry("transformer:Transformer", FOLDER, "reading")
        assert fsdp.fully_shard is not before[0] and active() is recording
        assert type(model.layers[0]) is type(plain.layers[0])
    assert (fsdp.fully_shard, torch.compile, torch.nn.Module.to, dict(os.environ)) == before
    assert torch.distributed.device_mesh.DeviceMesh is kind and active() is None
    assert not torch.distributed.is_initialized()
    assert {*vars(model.layers[0])} == {*vars(plain.layers[0])}
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    with pytest.raises(Exception, match=r"(?i)process group|init"):
        sys.modules["fsdp2"].fully_shard(plain)  # what it stands for, again
    file = sys.modules["fsdp2"]
    assert not isinstance(model, FullyShardedDataParallel) and file.fully_shard is not before[0]


def test_a_file_that_was_imported_before() -> None:
    importlib.import_module("zero2")
    assert len(said("zero2").units) == 5


def test_a_recorder_outside_calls_what_it_stands_for() -> None:
    import torch

    said("selective")
    value = torch.ones(2, requires_grad=True)
    found = sys.modules["selective"].recomputed(lambda x: x * 3, value)
    found.sum().backward()
    assert value.grad is not None and value.grad.tolist() == [3.0, 3.0]


def test_recomputation_inside_of_forward_is_noted() -> None:
    import torch

    with reading(1, str(FOLDER)) as recording:
        module = call_entry("transformer:Transformer", FOLDER, "reading")
        importlib.import_module("selective").recomputed(module.norm, torch.ones(1, 16))
        found = recording.distribution(module)
    (one,) = found.checkpointed
    assert (one.module, one.loc.file) == ("norm", "selective.py")


REFUSED = {
    "names_and_sizes": ("SW_TORCH_MESH", "2 names, got 1: dp"),
    "no_such_dim": ("SW_TORCH_MESH", "one of dp, tp, got 'pp'"),
    "three_dims": ("SW_TORCH_MESH", "one dim, or of copies and shards, got a, b, c"),
    "twice": ("SW_TORCH_UNITS", "a unit once, got it again"),
    "outside_in": ("SW_TORCH_UNITS", "from the inside out"),
    "both": ("SW_TORCH_UNITS", "either DDP or FSDP"),
    "another_model": ("SW_TORCH_UNITS", "a module of the model, got a Transformer"),
    "style_of_a_block": ("SW_TORCH_PLAN", "nn.Linear or nn.Embedding, got a TransformerBlock"),
    "two_styles": ("SW_TORCH_PLAN", "RowwiseParallel after ColwiseParallel"),
    "two_dims": ("SW_TORCH_PLAN", "a mesh of one dim, got dp, tp"),
    "no_such_module": ("SW_TORCH_SPLIT", "names of modules in split_spec, got 'layers.9'"),
    "a_part": ("SW_TORCH_SPLIT", "the whole model"),
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_cannot_be_is_refused_at_its_line(function: str) -> None:
    with pytest.raises(UsageError) as caught:
        said("wrong", function)
    code, text = REFUSED[function]
    told = caught.value.diagnostic
    assert told.code == code and text in told.message and told.hint
    assert told.loc is not None and told.loc.file == "wrong.py"
    source = (FOLDER / "wrong.py").read_text().split(f"def {function}(")
    first = source[0].count("\n") + 1
    assert first < told.loc.line <= first + source[1].split("\n\n\n")[0].count("\n")


def test_terms_that_differ_have_a_code() -> None:
    rows = [row.as_dict() for row in terms_of(said("hybrid"))]
    assert {row["code"] for row in rows if row["why"]} == {DIFFERS}
    assert {row["code"] for row in rows if not row["why"]} == {""}
    assert all(row["file"] == "hybrid.py" and row["line"] for row in rows if row["keys"] != NONE)


NONE = {"strategy.remat": "none"}
"""What is done where nothing is said has no line."""


def test_a_distribution_is_data() -> None:
    found = said("titan")
    assert dataclasses.replace(found) == found and hash(found) == hash(said("titan"))
