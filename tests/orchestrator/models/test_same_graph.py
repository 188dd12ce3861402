"""The table's Llama is the Llama of presets: for configs that both read, the graphs are equal."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.compiler.ir.printer import to_stablehlo
from shardwright.orchestrator.models import config_task, llama
from tests.support.road import captured_graph
from tests.support.small_job import SIZES

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer": {"num_hidden_layers": 1},
    "tied": {"tie_word_embeddings": True, "model_type": "llama"},
    "window beyond the sequence": {"model_type": "mistral", "sliding_window": 8},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2}, "head_dim": 16},
    "llama 3.1": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    },
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("dtype", "remat"), [("f32", "full"), ("bf16", "selective")])
def test_the_tables_llama_is_that_of_presets(
    changes: dict[str, Any], dtype: str, remat: str
) -> None:
    """Operation by operation, and argument by argument."""
    graphs = []
    for make in (llama.train_task, config_task.train_task):
        task = make(SIZES | changes, seq_len=8, dtype=dtype, remat=remat)
        graph, inputs, outputs = captured_graph(task, 2)
        graphs.append((to_stablehlo(graph), inputs, outputs))
    assert graphs[0] == graphs[1]
