"""Module, loss, optimizer and batch of a PyTorch training script, which knows nothing of us.

Needs `pip install -e '.[torch]'`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

VOCAB, WIDTH, LAYERS, HEADS, POSITIONS = 256, 128, 2, 4, 64


class Block(torch.nn.Module):
    """Causal attention and an MLP, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = (
            torch.nn.LayerNorm(WIDTH),
            torch.nn.LayerNorm(WIDTH),
        )
        self.query, self.key, self.value, self.out = (
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.before_mlp = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before_attention(x)
        heads = (self._heads(part(y)) for part in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2)


class Decoder(torch.nn.Module):
    """Bytes in, chances of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, WIDTH)
        self.places = torch.nn.Parameter(0.02 * torch.randn(POSITIONS, WIDTH))
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = torch.nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.places))


def loss_fn(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def make() -> tuple[object, ...]:
    """What the loop of a training script has at hand, in any order."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = torch.randint(0, VOCAB, (64, 1))
    line = (first + torch.arange(POSITIONS + 1)) % VOCAB  # the next token is one more
    return model, loss_fn, optimizer, (line[:, :-1], line[:, 1:])
