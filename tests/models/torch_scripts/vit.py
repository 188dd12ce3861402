"""A vision transformer of transformers that classifies small images."""

import torch
from transformers import ViTConfig, ViTForImageClassification


def make():
    model = ViTForImageClassification(
        ViTConfig(
            num_hidden_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            intermediate_size=128,
            image_size=12,
            patch_size=4,
            num_labels=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    batch = {"pixel_values": torch.randn(32, 3, 12, 12), "labels": torch.randint(0, 8, (32,))}
    return model, optimizer, batch
