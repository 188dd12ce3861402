"""torch's own table of the modules of torch.nn (`module_db` of `torch.testing`): constructors and
inputs, in training and evaluation. Parameters and buffers are arguments of the call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from tests.support.torch_operators import Outcome, outcome, stand_in_for_expecttest

SAMPLES = 3
"""Of a module in one mode, spread over all that it has."""


@cache
def modules() -> Mapping[str, Any]:
    """torch's entries by the name of the class."""
    stand_in_for_expecttest()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db

    return {entry.module_cls.__name__: entry for entry in module_db}


def module_outcomes(name: str, training: bool, count: int = SAMPLES) -> Iterator[Outcome]:
    """What comes of a module's samples in a mode."""
    import torch

    entry = modules()[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = entry.module_inputs_func(
            entry, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
    for n in range(min(count, len(found))):
        sample = found[n * len(found) // min(count, len(found))]
        made, given = sample.constructor_input, sample.forward_input
        if given is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = entry.module_cls(*made.args, **made.kwargs).train(training)
            if any(map(torch.nn.parameter.is_lazy, module.parameters())):
                module(*given.args, **given.kwargs)
        has_gradient = not any(isinstance(leaf, str) for leaf in given.args)
        yield called(module, given.args, given.kwargs, is_drawn(module, training), has_gradient)


def called(
    module: Any, args: Any, kwargs: Any, drawn: bool = False, has_gradient: bool = True
) -> Outcome:
    """What comes of a module's call."""
    import torch

    def call(tensors: Any, args: Any, kwargs: Any) -> Any:
        return torch.func.functional_call(module, tensors, args, kwargs)

    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return outcome(call, (tensors, tuple(args), dict(kwargs)), {}, drawn, has_gradient=has_gradient)


def is_drawn(module: Any, training: bool) -> bool:
    """Whether a module draws numbers."""
    kinds = ("Dropout", "RReLU", "FractionalMaxPool")
    is_kind = any(
        type(part).__name__.find(kind) >= 0 for part in module.modules() for kind in kinds
    )
    rates = [getattr(part, "p", 1) for part in module.modules() if "Dropout" in type(part).__name__]
    own = getattr(module, "dropout", 0)
    drops = bool(own) if isinstance(own, float | int) else False
    if not training:
        return "FractionalMaxPool" in type(module).__name__
    return (is_kind and (not rates or any(rates))) or drops
