"""The modules of torch.nn, in training and evaluation, against torch: torch's own table of their
constructors and inputs, and what that has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from tests.support.torch_modules import called, is_drawn, module_outcomes, modules  # noqa: E402
from tests.support.torch_operators import Kind  # noqa: E402

nn = torch.nn
REFUSED = {
    "FractionalMaxPool2d": "its windows are random",
    "FractionalMaxPool3d": "its windows are random",
    "GaussianNLLLoss": "it raises where a variance is negative",
    "CTCLoss": "the shape of what it computes depends on lengths that are data",
}
SOME = {
    *("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "InstanceNorm1d"),
    *("InstanceNorm2d", "InstanceNorm3d", "LazyBatchNorm1d", "LazyBatchNorm2d", "LazyBatchNorm3d"),
}
"""Refused with `momentum=None`, whose average asks for the number of batches so far."""
APART = {"KLDivLoss": "the gradient by a target below zero is NaN in torch"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", modules())
def test_module(name: str, training: bool) -> None:
    if name.startswith("FractionalMaxPool"):
        pytest.skip("torch's own samples are of another type")
    found = list(module_outcomes(name, training))
    apart = [one.why for one in found if one.kind == Kind.WRONG]
    assert bool(apart) <= (name in APART), apart
    refused = [one.why for one in found if one.kind == Kind.REFUSED]
    assert bool(refused) <= (name in REFUSED or name in SOME), refused


def _randn(*shape: int) -> Any:
    return torch.randn(shape, requires_grad=True)


MORE: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]] = {
    "LSTM, two ways": (
        lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
        lambda: (_randn(2, 5, 3),),
    ),
    "LSTM, projected": (
        lambda: nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True, bias=False),
        lambda: (_randn(5, 2, 3),),
    ),
    "GRU, two ways": (
        lambda: nn.GRU(3, 4, 2, bidirectional=True),
        lambda: (_randn(5, 2, 3), _randn(4, 2, 4)),
    ),
    "RNN, one sequence": (lambda: nn.RNN(3, 4, nonlinearity="relu"), lambda: (_randn(5, 3),)),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        lambda: (_randn(2, 5, 8),),
    ),
    "TransformerEncoder, with a mask": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0), 2),
        lambda: (_randn(5, 2, 8), nn.Transformer.generate_square_subsequent_mask(5)),
    ),
    "PReLU": (lambda: nn.PReLU(), lambda: (_randn(),)),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: (_randn(2, 5, 8), _randn(2, 6, 8), _randn(2, 6, 8)),
    ),
    "Upsample, bilinear": (
        lambda: nn.Upsample(scale_factor=1.7, mode="bilinear"),
        lambda: (_randn(1, 2, 5, 4),),
    ),
    "Unfold": (lambda: nn.Unfold(2, 1, 1, 2), lambda: (_randn(1, 2, 5, 4),)),
    "Fold": (lambda: nn.Fold((5, 4), 2, 1, 1, 2), lambda: (_randn(1, 8, 9),)),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), lambda: (_randn(1, 4, 2, 2),)),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), lambda: (_randn(1, 2, 4, 4),)),
    "AdaptiveMaxPool2d": (
        lambda: nn.AdaptiveMaxPool2d(3, return_indices=True),
        lambda: (_randn(1, 2, 5, 7),),
    ),
    "AlphaDropout": (lambda: nn.AlphaDropout(), lambda: (_randn(3, 4),)),
    "Dropout": (lambda: nn.Dropout(), lambda: (_randn(3, 4),)),
    "Dropout1d": (lambda: nn.Dropout1d(), lambda: (_randn(2, 3, 4),)),
    "Dropout2d": (lambda: nn.Dropout2d(), lambda: (_randn(2, 3, 4, 2),)),
    "Dropout3d": (lambda: nn.Dropout3d(), lambda: (_randn(2, 3, 4, 2, 2),)),
    "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(), lambda: (_randn(2, 3, 4),)),
    "EmbeddingBag": (
        lambda: nn.EmbeddingBag(9, 4, mode="mean"),
        lambda: (torch.tensor([1, 2, 4, 5, 4]), torch.tensor([0, 2])),
    ),
    "EmbeddingBag, rows": (
        lambda: nn.EmbeddingBag(9, 4, mode="max"),
        lambda: (torch.tensor([[1, 2], [4, 5]]),),
    ),
    "Flatten": (lambda: nn.Flatten(), lambda: (_randn(2, 3, 4),)),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 3)), lambda: (_randn(2, 6),)),
    "Hardsigmoid": (lambda: nn.Hardsigmoid(), lambda: (_randn(3, 4),)),
    "Identity": (lambda: nn.Sequential(nn.Identity(), nn.ReLU()), lambda: (_randn(3, 4),)),
    "MaxUnpool1d": (lambda: nn.MaxUnpool1d(2), lambda: (_randn(1, 1, 2), torch.tensor([[[0, 3]]]))),
    "MaxUnpool2d": (
        lambda: nn.MaxUnpool2d(2),
        lambda: (_randn(1, 1, 1, 2), torch.tensor([[[[5, 2]]]])),
    ),
    "MaxUnpool3d": (
        lambda: nn.MaxUnpool3d(2),
        lambda: (_randn(1, 1, 1, 1, 1), torch.tensor([[[[[6]]]]])),
    ),
    "PairwiseDistance": (lambda: nn.PairwiseDistance(), lambda: (_randn(3, 4), _randn(3, 4))),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), lambda: (_randn(1, 8, 2, 3),)),
    "RReLU": (lambda: nn.RReLU(), lambda: (_randn(3, 4),)),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0), 2),
        lambda: (_randn(5, 2, 8), _randn(4, 2, 8)),
    ),
    "TripletMarginLoss": (
        lambda: nn.TripletMarginLoss(),
        lambda: (_randn(3, 4), _randn(3, 4), _randn(3, 4)),
    ),
    "TripletMarginWithDistanceLoss": (
        lambda: nn.TripletMarginWithDistanceLoss(),
        lambda: (_randn(3, 4), _randn(3, 4), _randn(3, 4)),
    ),
    "UpsamplingBilinear2d": (
        lambda: nn.UpsamplingBilinear2d(scale_factor=2),
        lambda: (_randn(1, 2, 3, 4),),
    ),
    "UpsamplingNearest2d": (
        lambda: nn.UpsamplingNearest2d(scale_factor=1.5),
        lambda: (_randn(1, 2, 3, 4),),
    ),
    "CosineSimilarity": (lambda: nn.CosineSimilarity(), lambda: (_randn(3, 4), _randn(3, 4))),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MORE)
def test_module_with_its_options(name: str, training: bool) -> None:
    torch.manual_seed(0)
    make, inputs = MORE[name]
    module = make().train(training)
    found = called(module, inputs(), {}, is_drawn(module, training))
    assert found.kind == Kind.EQUAL, found.why


ELSEWHERE = {
    "AdaptiveLogSoftmaxWithLoss": "takes the rows of each cluster, a number that depends on values",
    "SyncBatchNorm": "is batch norm of all samples of a step, which ours is",
    "CrossMapLRN2d": "writes to storages, which torch.export refuses; LocalResponseNorm is equal",
    "DataParallel": "is a strategy's",
    **dict.fromkeys(
        ("Container", "Module", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList"),
        "has no forward",
    ),
    **dict.fromkeys(("RNNBase", "RNNCellBase", "Sequential", "NLLLoss2d"), "is what others are of"),
}


def test_every_module_of_torch_nn_has_a_row() -> None:
    named = {name.partition(",")[0] for name in MORE} | set(modules()) | set(ELSEWHERE)
    every = {
        name
        for name, kind in vars(nn).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module)
    }
    assert {name for name in every if name.removeprefix("Lazy") not in named} == set()


def test_packed_sequences_are_refused() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4)

        def forward(self, x: Any, lengths: Any) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0])[0]

    found = called(Packed(), (_randn(5, 2, 3), torch.tensor([5, 3])), {})
    assert found.kind == Kind.REFUSED and found.why.startswith("SW_TASK_RAISED"), found.why
