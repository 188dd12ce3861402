"""What keys of a job stand for that leave a choice, and who shows it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shardwright.orchestrator.config.config import TABLES, JobConfig, MeshConfig
from shardwright.orchestrator.config.goodput_keys import GoodputConfig
from shardwright.orchestrator.config.model_keys import ModelConfig
from shardwright.orchestrator.report import sections
from shardwright.orchestrator.report.compare import _jobs, _settings
from shardwright.orchestrator.report.page.page import _settings as page_settings
from shardwright.orchestrator.report.resolved import resolved_job, resolved_keys
from shardwright.orchestrator.road.plan_cache import NOT_IN_KEY
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.settings import AUTO, StrategySettings
from tests.orchestrator.test_screen_lines_by_hand import report as screen_report
from tests.support.invented_job import invented

GOODPUT = {"interval_s": 100.0, "interval_steps": 50, "checkpoint_s": 2.5}
NO_SIZE = {"model.seq_len", "strategy.global_batch", "cluster.lnc", "goodput.checkpoint_s"}
NO_SIZE |= {"goodput.checkpoint_interval_s", "goodput.checkpoint_interval_steps"}
"""Keys whose 0 is no size, beside those of the mesh."""


def job(**tables: Any) -> dict[str, dict[str, Any]]:
    built = invented()
    return resolved_keys(
        dataclasses.replace(built, job=dataclasses.replace(built.job, **tables)), GOODPUT
    )


def test_every_key_that_says_auto_is_resolved() -> None:
    """Of the tables that answers depend on: a new key with `auto` needs its row."""
    asked = JobConfig().as_dict()
    open_keys = {
        f"{table}.{key}"
        for table in TABLES
        if table not in NOT_IN_KEY
        for key, value in asked[table].items()
        if value in (AUTO, "auto") or table == "mesh"
    }
    found = resolved_keys(invented(), GOODPUT)
    assert set(found) == open_keys | NO_SIZE
    assert not any(row["value"] in (0, AUTO, "auto") for row in found.values())


def test_values_and_where_they_are_from() -> None:
    found = job(model=ModelConfig(preset="llama2-7b"), strategy=StrategySettings(zero=AUTO))
    assert found["model.seq_len"] == {"value": 7, "why": "of the preset"}
    assert found["model.dtype"]["value"] == "bfloat16"
    assert found["mesh.dp_shard"] == {"value": 64, "why": "of the mesh"}
    assert found["mesh.tp"] == {"value": 1, "why": "not in the mesh"}
    assert found["strategy.global_batch"]["value"] == 48
    assert found["strategy.zero"] == {"value": 3, "why": "of strategy fsdp"}
    assert found["strategy.reduce_gradients"]["value"] == "each"
    assert found["goodput.checkpoint_interval_s"] == {"value": "the best", "why": "100.000 s"}
    assert found["goodput.checkpoint_interval_steps"]["why"] == "50"
    own = job(goodput=GoodputConfig(checkpoint_interval_steps=50))
    assert own["goodput.checkpoint_interval_s"]["value"] == "as its steps take"
    assert "goodput.checkpoint_interval_steps" not in own
    entry = job(model=ModelConfig(entry="own:task"))
    assert entry["model.dtype"] == {"value": "as the step says", "why": "of the step"}


def test_what_is_said_is_not_resolved() -> None:
    said = job(
        model=ModelConfig(preset="llama2-7b", seq_len=16, dtype="float32"),
        mesh=MeshConfig(dp_shard=64),
        strategy=StrategySettings(zero=1, global_batch=48),
    )
    assert not {"model.seq_len", "model.dtype", "mesh.dp_shard", "strategy.zero"} & set(said)
    assert "strategy.global_batch" not in said and said["mesh.tp"]["value"] == 1


def test_experts_are_named_as_a_job_names_them() -> None:
    built = invented()
    layout = dataclasses.replace(built.layout, mesh=make_mesh({"dp_shard": 8, "ep": 8}))
    found = resolved_keys(dataclasses.replace(built, layout=layout), GOODPUT)
    assert (found["mesh.dp_shard"]["value"], found["mesh.ep"]["value"]) == (64, 8)


SHOWN: dict[str, Any] = {
    "job": {"model": {"seq_len": 0, "preset": "a"}, "run": {"steps": 2}, "base": "/a"},
    "resolved": {"model.seq_len": {"value": 4096, "why": "of the preset"}},
}


def test_the_page_shows_what_was_chosen_and_why() -> None:
    assert page_settings(SHOWN) == [
        ("model", [("seq_len", "4096 (of the preset)"), ("preset", "a")]),
        ("run", [("steps", "2")]),
    ]
    older = {"job": SHOWN["job"]}
    assert page_settings(older)[0] == ("model", [("seq_len", "0"), ("preset", "a")])
    assert resolved_job(older) == SHOWN["job"]


def test_compare_takes_what_was_chosen_where_both_sides_say_it() -> None:
    said: dict[str, Any] = {
        "job": {"model": {"seq_len": 4096, "preset": "a"}, "run": {"steps": 2}},
        "resolved": {},
    }
    assert not list(_settings(*_jobs(SHOWN, said)))
    older = {"job": said["job"]}
    assert [row["key"] for row in _settings(*_jobs(SHOWN, older))] == ["model.seq_len"]


@pytest.mark.parametrize(("config", "told"), [("config.json", True), ("", False)])
def test_the_screen_says_where_the_length_of_a_config_is_from(config: str, told: bool) -> None:
    shown = screen_report()
    shown["job"]["model"] = {"config": config}
    shown["resolved"] = {"model.seq_len": {"value": 4096, "why": "max_position_embeddings"}}
    text = " ".join(" ".join(line.plain for line in sections.laid(sections.job(shown), 80)).split())
    assert ("of 4,096 tokens (the config's)," in text) == told
