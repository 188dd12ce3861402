"""BERT of transformers as a masked language model: 15 % of the tokens have labels."""

import torch
from transformers import BertConfig, BertForMaskedLM


def make():
    model = BertForMaskedLM(
        BertConfig(
            num_hidden_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            intermediate_size=128,
            vocab_size=256,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    ids = torch.randint(1, 256, (32, 8))
    labels = torch.where(torch.arange(8) % 4 == 3, ids, -100)
    masked = torch.where(labels == -100, ids, 0)
    attention_mask = torch.ones_like(ids)
    batch = {"input_ids": masked, "attention_mask": attention_mask, "labels": labels}
    return model, optimizer, batch
