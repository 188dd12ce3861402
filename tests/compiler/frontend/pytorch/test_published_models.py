"""Models of PyTorch at full size: as many parameters as published, and a plan of their step."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("transformers")

from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.road import plan_cache
from tests.models import torch_full

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]

PARAMETERS = {
    "gpt2_xl": 1_557_611_200,
    "llama3_8b": 8_030_261_248,
    "qwen3_8b": 8_190_735_360,
    "bert_large": 335_174_458,
    "vit_large": 304_326_632,
    "resnet50": 25_557_032,
}
"""Of the published checkpoints, embeddings that are tied counted once."""
LARGE = ("llama3_8b", "qwen3_8b")


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_plan_of_a_published_model(name: str, tmp_path: Path) -> None:
    instances, mesh = (4, "dp_shard=32,tp=4") if name in LARGE else (1, "dp_shard=32")
    axes = [f"mesh.{axis}" for axis in mesh.split(",")]
    entry = f"model.entry={Path(torch_full.__file__)}:{name}"
    job = load(None, [entry, *axes, f"cluster.instances={instances}", f"cache.dir={tmp_path}"])
    report = plan_cache.plan(job)
    print(name, report["timing"]["step_time_s"], report["memory"]["peak_bytes"] / 2**30)
    assert report["graph"]["params"] == PARAMETERS[name]
    assert report["memory"]["fits"] and 0 < report["timing"]["mfu"] < 1
