"""Sequences over `cp`: what a core holds grows with the positions, and not with their square."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.orchestrator.cli import main
from tests.support.cells import long_in_matrix

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
}
KEPT = 40 * 2**10
"""Bytes of a local position: activations of two layers of two samples, in fp32."""
WHOLE = 2760
"""Bytes of a gathered position: keys and values of a layer of two samples (2 KiB), and what is held
of their gradients meanwhile (measured: 2,720 at 65,536 positions, 2,710 at 262,144)."""


def peak_bytes(model: Path, context: str, positions: int, capsys: pytest.CaptureFixture) -> int:
    words = f"plan --tries 0 --json --progress quiet --seq-len {positions} --mesh cp=32"
    batch = f"--micro-batch 2 --global-batch 2 --remat none --set strategy.context={context}"
    code = main([*words.split(), *batch.split(), "--model", str(model)])
    assert code == 0
    peak = json.loads(capsys.readouterr().out)["memory"]["peak_bytes"]
    assert isinstance(peak, int)
    return peak


LONGEST = [("gather", 262144), ("ring", 262144)]
SHORTER = [("gather", 65536), ("ring", 65536)]


@pytest.mark.parametrize(
    ("context", "positions"), long_in_matrix([*LONGEST, *SHORTER], LONGEST, SHORTER)
)
def test_memory_grows_with_the_positions(
    context: str, positions: int, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(CONFIG))
    whole = WHOLE if context == "gather" else 0
    most = (KEPT // 32 + whole) * positions
    assert 0.9 * most <= peak_bytes(model, context, positions, capsys) <= most
