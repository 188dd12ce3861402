"""FLOPs of a model with experts: those of the experts that every row chose."""

from __future__ import annotations

import jax
import pytest

from shardwright.compiler.frontend.task import Mode
from shardwright.compiler.ir.analysis import flops
from shardwright.compiler.ir.traits import CONTRACTIONS
from shardwright.orchestrator.models import config_task, decoder, leaves
from shardwright.orchestrator.models.architecture import Architecture, Attention, Experts
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.orchestrator.models.generation import Serving, serving_task
from shardwright.orchestrator.models.layers import How
from tests.support.compiled import graph_of
from tests.support.tiny_configs import tiny

ROWS = 16  # of one sequence


def counted(model: Architecture) -> int:
    """FLOPs of the products of a forward pass."""
    params = jax.eval_shape(lambda: leaves.init_params(model, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((1, ROWS), "int32")
    graph = graph_of(lambda p, t: decoder.logits(model, p, t, How()), params, tokens)
    return flops(graph, CONTRACTIONS)


def attention_flops(part: Attention, hidden: int) -> int:
    inner, kv = part.heads * part.head_dim, part.kv_heads * part.head_dim
    return 2 * ROWS * (2 * hidden * (inner + kv) + 2 * ROWS * inner)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_row_counts_for_the_experts_it_chose(family: str) -> None:
    model = architecture_of(tiny(family))
    d, expected = model.hidden, 2 * ROWS * model.hidden * model.vocab
    for layer in model.layers:
        feed = layer.feed
        expected += attention_flops(layer.attention, d)
        if isinstance(feed, Experts):
            each = 3 * d * feed.width + d  # and its share of the sum
            expected += 2 * ROWS * (feed.chosen * each + d * feed.count)
        else:
            expected += 2 * ROWS * 3 * d * feed.width
    assert counted(decoder.as_visited(model)) == expected < counted(model)
    assert leaves.count_params(decoder.as_visited(model)) == leaves.count_params(model)


@pytest.mark.parametrize(("family", "has"), [("mixtral", True), ("llama", False)])
def test_a_model_without_experts_is_counted_as_it_is(family: str, has: bool) -> None:
    task = config_task.train_task(tiny(family), seq_len=8)
    serving = Serving(mode=Mode.DECODE, sequences=2, context=8)
    served = serving_task(architecture_of(tiny(family)), serving)
    assert (task.model is not None) == has == (served.model is not None)
