"""A character language model of two LSTM layers, as in PyTorch's word language model example."""

import torch
import torch.nn.functional as F
from torch import nn


class CharLM(nn.Module):
    def __init__(self, vocab=64, width=32, layers=2):
        super().__init__()
        self.encoder = nn.Embedding(vocab, width)
        self.rnn = nn.LSTM(width, width, layers, batch_first=True)
        self.decoder = nn.Linear(width, vocab)
        for p in self.parameters():
            nn.init.uniform_(p, -0.1, 0.1)

    def forward(self, tokens):
        output, _ = self.rnn(self.encoder(tokens))
        return self.decoder(output)


def loss_fn(model, batch):
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), batch[:, 1:])


def make():
    model = CharLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, loss_fn, optimizer, torch.randint(0, 64, (32, 9))
