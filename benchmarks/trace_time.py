"""What a host takes to trace a micro-batch of Hugging Face's BERT with PyTorch/XLA: the source of
`trace_us_per_layer` in `orchestrator/validation/run_settings.toml`.

Needs its own environment (`pip install torch==2.9.0 torch_xla==2.9.0 transformers`) and
`python -P benchmarks/trace_time.py`: a file beside it has the name of a package. Traced graphs are
thrown away, so nothing is compiled or executed, and sizes of tensors do not matter. Prints CPU
milliseconds of forward and backward, and nodes of the graph.
"""

from __future__ import annotations

import os
import time

os.environ["PJRT_DEVICE"] = "CPU"

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from transformers import BertConfig, BertForPreTraining

REPEATS = 8


def traced(layers: int) -> tuple[float, int]:
    """Least CPU milliseconds of a forward and backward pass, and nodes of its graph."""
    device = xm.xla_device()
    config = BertConfig(
        hidden_size=32,
        num_attention_heads=16,
        intermediate_size=64,
        num_hidden_layers=layers,
        vocab_size=128,
        attn_implementation="eager",
    )
    model = BertForPreTraining(config).to(device).train()
    words = torch.zeros(2, 16, dtype=torch.long).to(device)
    batch = {"input_ids": words, "attention_mask": words + 1, "token_type_ids": words}
    xm.mark_step()
    milliseconds, nodes = [], 0
    for _ in range(REPEATS):
        begin = time.process_time()
        out = model(**batch, labels=words, next_sentence_label=words[:, 0])
        (out.loss / 2).backward()
        milliseconds.append(1e3 * (time.process_time() - begin))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        nodes = torch_xla._XLAC._get_xla_tensors_text(gradients).count(" = ")
        del out, gradients
        model.zero_grad(set_to_none=True)
        torch_xla._XLAC._clear_pending_irs(str(device))
    return min(milliseconds), nodes


if __name__ == "__main__":
    print(f"torch {torch.__version__}, torch_xla {torch_xla.__version__}")
    for layers in (6, 12, 24):
        ms, nodes = traced(layers)
        print(f"{layers} layers: {ms:.1f} ms, {1e3 * ms / layers:.0f} us per layer, {nodes} nodes")
