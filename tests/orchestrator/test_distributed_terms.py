"""PyTorch's terms of distribution, said in a table, as keys of a job; no torch is needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.diagnostics import Loc, UsageError
from shardwright.compiler.frontend.pytorch.distribution import (
    Axis,
    Checkpointed,
    Cut,
    Distribution,
    Other,
    Pipeline,
    Precision,
    Unit,
    matches,
    pattern_of,
)
from shardwright.compiler.frontend.pytorch.distribution_table import distribution_of
from shardwright.orchestrator.config.config import KEYS
from shardwright.orchestrator.config.importers.distributed_terms import (
    roles_of,
    tables_of,
    terms_of,
)
from shardwright.orchestrator.config.importers.imported import Asked, imported
from shardwright.orchestrator.config.importers.term import DIFFERS, Term
from shardwright.orchestrator.report import explain_imported, sections

BLOCKS = {"modules": "layers.*"}
ROOT = {"modules": ""}
CORES = 32


def rows(table: Mapping[str, Any]) -> dict[str, Term]:
    return {row.term: row for row in terms_of(distribution_of(table))}


def keys(said: Distribution | Mapping[str, Any]) -> dict[str, Any]:
    found = said if isinstance(said, Distribution) else distribution_of(said)
    tables = tables_of(terms_of(found))
    return {f"{table}.{key}": value for table, own in tables.items() for key, value in own.items()}


def test_every_term_is_a_key_of_a_job() -> None:
    found = keys(
        {
            "mesh": {"pp": 2, "dp_replicate": 2, "dp_shard": 4, "cp": 2, "tp": 2},
            "fully_shard": [
                BLOCKS | {"group": 2, "param_dtype": "bfloat16", "reduce_dtype": "float32"},
                ROOT | {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
            ],
            "parallelize": {
                "tok_embeddings": "RowwiseParallel Embedding",
                "layers.*.wq": "ColwiseParallel",
                "layers.*.norm": "SequenceParallel",
            },
            "checkpoint": {"modules": "layers.*", "mode": "selective"},
            "pipeline": {"split": ["layers.3"], "schedule": "GPipe", "micro_batches": 4},
        }
    )
    assert found == {
        "mesh.pp": 2,
        "mesh.dp_replicate": 2,
        "mesh.dp_shard": 4,
        "mesh.cp": 2,
        "mesh.tp": 2,
        "strategy.name": "fsdp",
        "strategy.layers_per_group": 2,
        "strategy.reshard_after_forward": True,
        "strategy.early_all_gather_shift": 1,
        "strategy.late_reduce_scatter_shift": 1,
        "strategy.root_unit": "all",
        "strategy.reshard_root": False,
        "strategy.param_dtype": "bfloat16",
        "strategy.reduce_dtype": "float32",
        "strategy.tensor_plan": "tok_embeddings.weight:0, layers.*.wq.weight:0",
        "strategy.sequence_parallel": True,
        "strategy.remat": "selective",
        "strategy.stage_layers": "3, *",
        "strategy.schedule": "gpipe",
        "strategy.global_batch": 4 * 8,
    }
    assert found.keys() <= KEYS.keys()


@pytest.mark.parametrize(
    ("names", "units", "wanted"),
    [
        ({"dp": 8}, {"mesh": ["dp"]}, {"dp_shard": 8}),
        ({"fsdp": 4, "tensor": 2}, {"mesh": ["fsdp"]}, {"dp_shard": 4, "tp": 2}),
        (
            {"ddp": 2, "fsdp": 4},
            {"mesh": ["ddp", "fsdp"]},
            {"dp_replicate": 2, "dp_shard": 4},
        ),
        ({"weird": 8}, {"mesh": ["weird"]}, {"dp_shard": 8}),
        ({"dp_shard": 4, "cp": 2}, {"mesh": ["dp_shard", "cp"]}, {"dp_shard": 4, "cp": 2}),
        ({"dp_shard": 4, "ep": 2}, {"mesh": ["dp_shard", "ep"]}, {"dp_shard": 8, "ep": 2}),
        (
            {"dp_shard_mod_ep": 4, "dp_shard_in_ep": 2},
            {"mesh": ["dp_shard_mod_ep", "dp_shard_in_ep"]},
            {"dp_shard": 8, "ep": 2},
        ),
    ],
)
def test_names_of_dims(
    names: dict[str, int], units: dict[str, Any], wanted: dict[str, int]
) -> None:
    found = keys({"mesh": names, "fully_shard": [BLOCKS | units]})
    own = {key.partition(".")[2]: v for key, v in found.items() if key.startswith("mesh.")}
    assert own == wanted


def test_a_dim_without_use_or_name_is_refused() -> None:
    with pytest.raises(UsageError, match="a use or a known name, got x") as caught:
        roles_of(distribution_of({"mesh": {"x": 2, "tp": 4}}, "d.toml", lambda *_: 3))
    assert caught.value.diagnostic.loc == Loc("d.toml", 3)


def test_another_order_of_dims_is_said() -> None:
    table = {"mesh": {"tp": 2, "dp_shard": 4}, "fully_shard": [BLOCKS]}
    assert "cluster.placement" in rows(table)["DeviceMesh"].why


def units_of(*kept: bool | int | None) -> Distribution:
    made = [
        Unit(modules=(f"layers.{n}",), parameters=("w",), reshard=reshard, axes=("dp_shard",))
        for n, reshard in enumerate(kept)
    ]
    root = Unit(modules=("",), parameters=("e",), axes=("dp_shard",))
    return Distribution(
        axes=(Axis(name="dp_shard", size=4),),
        units=(*made, root),
        lists=(("layers", len(kept)),),
        modules=tuple(f"layers.{n}" for n in range(len(kept))),
    )


@pytest.mark.parametrize(
    ("kept", "reshards", "why"),
    [
        ((None, None, None), True, ""),
        ((True, True, False), True, "the last of 3 differs"),
        ((False, False, True), False, "2 of 3 differs"),
        ((False, False, False), False, ""),
        ((8, 8, 8), True, "not over 8"),
    ],
)
def test_layers_are_kept_alike(
    kept: tuple[bool | int | None, ...], reshards: bool, why: str
) -> None:
    said = units_of(*kept)
    assert keys(said)["strategy.reshard_after_forward"] is reshards
    (row,) = [r for r in terms_of(said) if r.term == "reshard_after_forward of layers.*"]
    assert why in row.why and bool(why) == bool(row.why)
    assert (row.as_dict()["code"] == DIFFERS) is bool(why)


def test_checkpoints_of_some_layers_are_of_most() -> None:
    said = units_of(None, None, None)
    for chosen, remat in (((0, 1), "full"), ((0,), "none"), ((0, 1, 2), "full")):
        some = tuple(Checkpointed(module=f"layers.{n}") for n in chosen)
        made = Distribution(
            axes=said.axes,
            units=said.units,
            lists=said.lists,
            modules=said.modules,
            checkpointed=some,
        )
        assert keys(made)["strategy.remat"] == remat
        (row,) = [r for r in terms_of(made) if r.term == "checkpoint layers.*"]
        assert bool(row.why) == (len(chosen) < 3)


@pytest.mark.parametrize(
    ("cuts", "pp", "required"),
    [
        ((Cut(module="norm"),), 2, "between layers"),
        ((Cut(module="layers.0"),), 2, "layers between any two cuts"),
        ((Cut(module="layers.2", is_behind=True),), 2, "layers between any two cuts"),
        ((Cut(module="layers.1"), Cut(module="layers.2")), 2, "cuts for 2 stages, got 3 parts"),
        ((Cut(module="layers.1"), Cut(module="blocks.1")), 3, "between"),
    ],
)
def test_cuts_that_cannot_be(cuts: tuple[Cut, ...], pp: int, required: str) -> None:
    said = units_of(None, None, None)
    made = Distribution(
        axes=(Axis(name="pp", size=pp),),
        pipeline=Pipeline(cuts=cuts, axes=("pp",)),
        lists=said.lists,
        modules=said.modules,
    )
    with pytest.raises(UsageError, match=required) as caught:
        terms_of(made)
    assert caught.value.code == "SW_TORCH_SPLIT"


def test_more_parts_than_stages_are_interleaved() -> None:
    table = {"mesh": {"pp": 2}, "pipeline": {"split": ["layers.1", "layers.2", "layers.3"]}}
    found = keys(table)
    assert found["strategy.stage_layers"] == "1, 1, 1, *"
    assert (found["strategy.stage_parts"], found["strategy.schedule"]) == (2, "interleaved")


def test_replicas() -> None:
    found = keys({"mesh": {"dp": 8}, "ddp": {}})
    assert (found["strategy.name"], found["strategy.zero"]) == ("generic", 0)
    assert (found["mesh.dp_replicate"], found["strategy.bucket_mb"]) == (8, 25)


def test_what_has_no_counterpart_is_listed() -> None:
    said = units_of(None)
    others = (
        Other(term="something_new", value="3", loc=Loc("a.py", 4)),
        Other(term="torch.compile", loc=Loc("a.py", 5)),
    )
    made = Distribution(axes=said.axes, units=said.units, others=others)
    told = {row.term: row for row in terms_of(made)}
    assert told["something_new"].why == "it has no counterpart here"
    assert told["something_new"].done == "nothing" and not told["torch.compile"].why
    half = Unit(
        modules=("",), precision=Precision(param_dtype="float16"), axes=("dp_shard",), offload="cpu"
    )
    told = {r.term: r for r in terms_of(Distribution(axes=said.axes, units=(half,)))}
    assert "bfloat16" in told["MixedPrecisionPolicy"].why
    assert "device memory" in told["offload_policy"].why
    with pytest.raises(UsageError, match="got none"):
        terms_of(Distribution())


TABLE = """
[mesh]
dp_replicate = 2
dp_shard = 8

[[fully_shard]]
modules = "layers.*"
reshard_after_forward = false

[[fully_shard]]
modules = ""

[parallelize]
"layers.*.wq" = "ColwiseParallel"
"""


def test_a_table_is_a_project_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "distribution.toml"
    path.write_text(TABLE.replace("dp_shard = 8", "dp_shard = 8\ntp = 2"))
    found = imported("pytorch", path, Asked(cores_of=lambda _: CORES))
    tables = found.below(())
    assert tables["mesh"] == {"dp_replicate": 2, "dp_shard": 8, "tp": 2}
    assert tables["cluster"] == {"instances": 1}
    assert tables["strategy"]["reshard_after_forward"] is False
    assert found.with_batch(16, ()) == {}
    section = found.section()
    by_term = {row["term"]: row for row in section["terms"]}
    lines = path.read_text().splitlines()
    assert lines[by_term["DeviceMesh"]["line"] - 1] == "[mesh]"
    assert lines[by_term["fully_shard layers.*"]["line"] - 1] == "[[fully_shard]]"
    assert lines[by_term["ColwiseParallel layers.*.wq"]["line"] - 1].startswith('"layers')
    text = dict(sections.imported({"imported": section}))
    assert text["from"].startswith("pytorch distribution.toml: ") and "terms read" in text["from"]
    assert "a rank is a core: 1 instance of 32 cores" in text["assumed"]


def test_the_answer_completes_a_row(tmp_path: Path) -> None:
    path = tmp_path / "d.toml"
    path.write_text(TABLE.replace("dp_shard = 8", "dp_shard = 8\ntp = 2"))
    found = imported("pytorch", path, Asked(cores_of=lambda _: CORES))
    findings = [
        {"code": "SW_TENSOR_PLAN", "severity": "note", "message": "1 of 2 lie so"},
        {"code": "SW_TENSOR_PLAN", "severity": "warning", "message": "wo: dim 0 is whole"},
        {"code": "SW_OTHER", "severity": "note", "message": "elsewhere"},
    ]
    rows = {row["term"]: row for row in found.section(findings)["terms"]}
    row = rows["parallelize_module"]
    assert row["done"].endswith("; 1 of 2 lie so") and row["why"] == "wo: dim 0 is whole"
    assert row["code"] == DIFFERS and "elsewhere" not in str(rows)
    before = {row["term"]: row for row in found.section()["terms"]}
    assert before["parallelize_module"]["done"] == f"strategy.tensor_plan = {PLAN}"


PLAN = "layers.*.wq.weight:0"


def test_terms_are_shown_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "d.toml"
    path.write_text(TABLE)
    explain_imported.show(imported("pytorch", path, Asked(cores_of=lambda _: CORES)).section())
    out = " ".join(capsys.readouterr().out.split())
    assert "DeviceMesh" in out and "dp_replicate=2" in out
    assert "strategy.remat = none" in out and "one unit: the model" in out


@pytest.mark.parametrize(
    ("text", "required", "line"),
    [
        ("[mesh]\ndp_shard = 0", "mesh.dp_shard requires a whole number of at least 1", 2),
        ("[mash]\ndp_shard = 2", "keys among mesh,", 0),
        ('[[fully_shard]]\nmodule = "x"', "keys among modules", 1),
        ('[mesh]\ndp = 2\n[[fully_shard]]\nmesh = "tp"', "one of dp, got 'tp'", 0),
        ('[parallelize]\n"a.b" = "Colwise"', "one of ColwiseParallel", 2),
        ('[checkpoint]\nmodules = "a"\nmode = "some"', "one of full, selective, offload", 3),
        ("[[fully_shard]]\nmodules = 3", "a text or a list of texts, got 3", 2),
        ('[[fully_shard]]\nparam_dtype = "int8"', "one of float32, bfloat16, float16", 2),
        ('[[fully_shard]]\n[ddp]\nmodules = ""', "without fully_shard", 2),
        ("mesh = 3", "mesh requires a table", 1),
        ("[mesh]\ndp = [", "not valid TOML", 2),
    ],
)
def test_tables_that_cannot_be(tmp_path: Path, text: str, required: str, line: int) -> None:
    path = tmp_path / "d.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        imported("pytorch", path, Asked(cores_of=lambda _: CORES))
    told = caught.value.diagnostic
    assert required in told.message and told.code in ("SW_TORCH_TABLE", "SW_IMPORT")
    assert told.loc is not None and (not line or told.loc.line == line)


@pytest.mark.parametrize("name", ["train.py", "absent.py:build"])
def test_files_of_code_name_a_function(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        imported("pytorch", tmp_path / name, Asked(cores_of=lambda _: CORES))
    assert caught.value.code == "SW_ENTRY"


def test_patterns() -> None:
    assert pattern_of("layers.11.mlp.w1") == "layers.*.mlp.w1"
    assert pattern_of("h.0") == "h.*" and pattern_of("layer4.bn2") == "layer4.bn2"
    assert matches("layers.*.w[13]", "layers.0.w3") and not matches("layers.*", "layers.0.w3")
