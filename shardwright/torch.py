"""PyTorch as its users write it, on Trainium's simulator.

    import shardwright.torch
    traced = shardwright.torch.trace(module.eval(), example_inputs)

What a name needs is loaded with its first use: importing this loads neither torch nor jax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from shardwright.orchestrator.api import Report
    from shardwright.orchestrator.traced.module import TracedModule
    from shardwright.orchestrator.traced.report import PartitionReport

__all__ = ["analyze", "load", "plan", "run", "trace"]


def plan(
    module: torch.nn.Module,
    example_batch: Any,
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    mesh: Mapping[str, int] | Any = None,
    **settings: object,
) -> Report:
    """Whether a training step of a module fits and how fast it is, without values.

    `example_batch` is a batch as a loader yields it: a mapping of the module's keywords, a tensor,
    or a tuple. `loss` is a function of (output, target), which takes the last of the batch, or of
    (model, batch); without it the module returns its loss, as those of transformers do. `mesh` has
    sizes by axis, `{"dp_shard": 8, "tp": 4}`, or is a DeviceMesh with such dims; `settings` are
    those of a job, `cluster__target="trn2"`. The batch is shared evenly by the data-parallel ranks
    where no setting says how many samples there are.

    Raises UsageError, at the line of the module, for what cannot be traced; else as
    `shardwright.plan`.
    """
    _require()
    from shardwright.compiler.frontend.pytorch.training import Training
    from shardwright.orchestrator.traced import training

    given = Training(
        module=module, batch=example_batch, loss=loss, optimizer=optimizer, scheduler=scheduler
    )
    return training.plan(given, mesh, settings)


def run(
    module: torch.nn.Module,
    example_batch: Any,
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    mesh: Mapping[str, int] | Any = None,
    **settings: object,
) -> Report:
    """The same step in values too, every step compared with the unsharded one; arguments are those
    of `plan`. Raises as `shardwright.run`."""
    _require()
    from shardwright.compiler.frontend.pytorch.training import Training
    from shardwright.orchestrator.traced import training

    given = Training(
        module=module, batch=example_batch, loss=loss, optimizer=optimizer, scheduler=scheduler
    )
    return training.run(given, mesh, settings)


def trace(
    module: torch.nn.Module | Any,
    example_inputs: Any = (),
    *,
    example_kwarg_inputs: Mapping[str, Any] | None = None,
    compiler_args: Sequence[str] | str = (),
    target: str = "trn1",
    allow_partition: bool = True,
    min_operators: int = 2,
    inline_weights_to_neff: bool = True,
    compiler_workdir: Path | str = "",
) -> TracedModule:
    """A module (or a function of tensors) in evaluation mode, compiled for the shapes and types of
    an example: a callable that takes and returns tensors, and runs on the simulator.

    `example_inputs` is a tensor, a tuple of what the module takes, or a mapping of keywords;
    `compiler_args` are flags of `shardwright compile`, as text or words. Operators that are not
    compiled stay on the CPU, with compiled parts of fewer than `min_operators`, unless
    `allow_partition=False`, which refuses them. Weights are constants of the NEFF, or, with
    `inline_weights_to_neff=False`, its first arguments, kept beside it. `compiler_workdir` keeps
    what is made on the way: StableHLO, NEFF files, the log.

    Raises UsageError for a module that torch.export refuses and for flags that are not understood;
    else the DiagnosticError of the compiler.
    """
    _require()
    from shardwright.orchestrator.traced import trace as tracing

    settings = tracing.Settings(
        compiler_args=compiler_args,
        target=target,
        allow_partition=allow_partition,
        min_operators=min_operators,
        inline_weights_to_neff=inline_weights_to_neff,
        compiler_workdir=compiler_workdir,
    )
    return tracing.trace(module, example_inputs, example_kwarg_inputs, settings)


def analyze(
    module: torch.nn.Module | Any,
    example_inputs: Any = (),
    *,
    example_kwarg_inputs: Mapping[str, Any] | None = None,
    compiler_args: Sequence[str] | str = (),
    target: str = "trn1",
    min_operators: int = 2,
) -> PartitionReport:
    """Which operators of a module `trace` would compile, which would stay on the CPU, and why.
    Raises UsageError for a module that torch.export refuses."""
    _require()
    from shardwright.orchestrator.traced import trace as tracing

    settings = tracing.Settings(
        compiler_args=compiler_args, target=target, min_operators=min_operators
    )
    return tracing.analyze(module, example_inputs, example_kwarg_inputs, settings)


def load(path: Path | str) -> TracedModule:
    """What `trace(...).save(path)` wrote. Raises LoadError for another file, or a damaged one."""
    _require()
    from shardwright.orchestrator.traced import module

    return module.load(Path(path))


def _require() -> None:
    """Raise UsageError where torch is not installed."""
    from shardwright.compiler.frontend.user_code import called

    with called("importing torch"):
        import torch  # noqa: F401
