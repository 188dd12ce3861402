"""Models of PyTorch at the size they are published with; nothing of them is ever given values."""

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    ViTConfig,
    ViTForImageClassification,
)


def gpt2_xl():
    config = AutoConfig.for_model("gpt2", n_layer=48, n_embd=1600, n_head=25)
    return AutoModelForCausalLM.from_config(config)


def llama3_8b(seq_len=4096):
    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        rope_theta=500000.0,
    )
    return AutoModelForCausalLM.from_config(config), _tokens(128256, seq_len)


def qwen3_8b(seq_len=4096):
    config = AutoConfig.for_model(
        "qwen3",
        num_hidden_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config), _tokens(151936, seq_len)


def _tokens(vocab, seq_len):
    ids = torch.randint(0, vocab, (4, seq_len))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def bert_large():
    config = AutoConfig.for_model(
        "bert",
        num_hidden_layers=24,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    return AutoModelForMaskedLM.from_config(config)


def vit_large():
    return ViTForImageClassification(
        ViTConfig(
            num_hidden_layers=24,
            hidden_size=1024,
            num_attention_heads=16,
            intermediate_size=4096,
            num_labels=1000,
        )
    )


class Bottleneck(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, 4 * planes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inplanes != 4 * planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, 4 * planes, 1, stride, bias=False), nn.BatchNorm2d(4 * planes)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


def resnet50():
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    stages, width = [nn.MaxPool2d(3, 2, 1)], 64
    for planes, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            stages.append(Bottleneck(width, planes, stride if number == 0 else 1))
            width = 4 * planes
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    model = nn.Sequential(*stem, *stages, *head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    batch = torch.randn(4, 3, 224, 224), torch.randint(0, 1000, (4,))
    return model, nn.CrossEntropyLoss(), optimizer, batch
