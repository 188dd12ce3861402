"""Models that PyTorch's own exporter writes, for batches and lengths of any size: the values are
those of torch."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("onnx.reference", exc_type=ImportError)
transformers = pytest.importorskip("transformers")

from shardwright.compiler.frontend.graphs.program import Program  # noqa: E402
from shardwright.compiler.frontend.graphs.sizes import Sizes  # noqa: E402

nn = torch.nn
WORDS = 50


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.by_channel = nn.Conv2d(8, 8, 3, groups=8, stride=2, padding=1)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.first(x)))
        x = nn.functional.silu(self.by_channel(x))
        x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
        return self.head(self.pool(nn.functional.pad(x, (1, 1, 0, 0))).flatten(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.words, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Any) -> Any:
        length = tokens.shape[1]
        mask = torch.triu(torch.full((length, length), float("-inf")), 1)
        return self.head(self.layers(self.words(tokens), mask=mask))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(32, 8)

    def forward(self, x: Any) -> Any:
        return self.gru(self.lstm(x)[0].transpose(0, 1))


class Family(nn.Module):
    """A model of transformers."""

    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__()
        config = transformers.AutoConfig.for_model(kind, **settings)
        config.use_cache, config._attn_implementation = False, "eager"
        self.model = transformers.AutoModel.from_config(config)

    def forward(self, x: Any) -> Any:
        if x.dtype != torch.int64:
            return self.model(x).last_hidden_state
        places = torch.arange(x.shape[1])[None]
        return self.model(
            x, position_ids=places, attention_mask=torch.ones_like(x)
        ).last_hidden_state


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 64}
IMAGES = {"image_size": 16, "patch_size": 4}


def tokens() -> Any:
    return torch.randint(WORDS, (2, 12))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "convolutions": (Convolutions, lambda: torch.randn(2, 3, 8, 8)),
    "encoder": (Encoder, tokens),
    "recurrent": (Recurrent, lambda: torch.randn(2, 5, 8)),
    "bert": (lambda: Family("bert", **SMALL), tokens),
    "gpt2": (lambda: Family("gpt2", **GPT2), tokens),
    "llama": (lambda: Family("llama", **SMALL, num_key_value_heads=2), tokens),
    "vit": (lambda: Family("vit", **SMALL, **IMAGES), lambda: torch.randn(2, 3, 16, 16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model(name: str) -> None:
    torch.manual_seed(0)
    make, example = MODELS[name]
    module, x = make().eval(), example()
    with torch.no_grad():
        wanted = module(x)
    dims = {0: "batch", 1: "seq"} if x.dtype is torch.int64 else {0: "batch"}
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            *(module, (x,), file),
            dynamo=False,
            opset_version=17,
            input_names=["x"],
            dynamic_axes={"x": dims},
        )
    program = Program.read(file.getvalue())
    inputs = program.inputs(Sizes({"x": tuple(x.shape)}))
    assert len(program.weights) >= 6
    given = {"x": x.numpy().astype(inputs["x"].dtype)}
    found = jax.jit(lambda weights, given: program(weights, given))(program.weights, given)
    own = wanted if isinstance(wanted, tuple) else (wanted,)
    for result, right in zip(program.results, own, strict=True):
        np.testing.assert_allclose(found[result], right.numpy(), rtol=0, atol=5e-6)
