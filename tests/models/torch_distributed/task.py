"""The decoder's training step, for jobs."""

import optax
import torch
import torch.nn.functional as F
from transformer import seeded

from shardwright.compiler.frontend.pytorch.training import Training, train_task


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def make(remat="none"):
    tokens = torch.arange(16).reshape(2, 8)
    batch = {"tokens": tokens, "labels": tokens + 1}
    return train_task(Training(module=seeded(), batch=batch, loss=loss), optax.adamw(1e-3))
