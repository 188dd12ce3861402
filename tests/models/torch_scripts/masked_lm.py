"""A masked language model whose head runs on the masked positions alone, as BERT's own code has it
(the decoder is the embedding, behind a transform), in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, LENGTH, IGNORED = 256, 64, 8, -100


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 4
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c)
        x = self.norm1(x + self.out(y))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class MaskedLM(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.transform = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        masked = labels != IGNORED
        hidden = self.transform(x[masked])
        logits = F.linear(hidden, self.tokens.weight, self.bias)
        return F.cross_entropy(logits, labels[masked])


def make():
    model = MaskedLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, eps=1e-4)
    ids = torch.randint(1, VOCABULARY, (32, LENGTH))
    labels = torch.where(torch.rand(ids.shape) < 0.15, ids, IGNORED)
    return model, optimizer, {"ids": torch.where(labels == IGNORED, ids, 0), "labels": labels}
