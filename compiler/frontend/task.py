"""What a user hands over: a training step with its abstract state and batches, as one `TrainTask`.

A job names a function that returns a task, or a decorated step (`entry.py`); presets build theirs
in `models/`. Nothing here imports jax: a task only holds the user's functions, `capture.py` and
`reference.py` call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import Diagnostic, UsageError
from shardwright.compiler.frontend.roles import ROLES

if TYPE_CHECKING:
    from shardwright.compiler.frontend.capture import Captured

BATCH = "batch"


class Mode(StrEnum):
    """What a step does: trains, reads prompts into a cache, or adds a token to every sequence."""

    TRAIN = "train"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def trains(self) -> bool:
        """Whether the step has gradients and an optimizer."""
        return self is Mode.TRAIN

    @property
    def result(self) -> str:
        """The metric that a step computes all else for: a scalar loss, or logits [B, V]."""
        return "loss" if self.trains else "logits"

    def number(self, result: Any) -> float:
        """What a run says of a step: its loss, or the mean over sequences of their best logit."""
        return float(result if self.trains else result.max(axis=-1).mean())


BatchFactory = Callable[[int, int, str | None], Iterator[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTask:
    """A training step as a JAX and optax user writes it.

    `step(*state, batch) -> (*state, metrics)`: pure, traces at any batch size, returns the state
    with unchanged types;
    `metrics` is a scalar loss or a pytree with a scalar `loss`. The loss and gradients are means
    over the samples, so that micro-batches average. A step may take the batch as several arguments,
    and keys that it does not return, and return the same in another way: `step_form.py` finds what
    is what, unless it is said. `arguments` is what the step takes, in order: names of the state's
    parts, "batch", or pieces of it ("batch/x"); any other name is a key, a fresh one per step.
    `generator` is what draws with such keys (`generator.py`; "": jax's own choice).
    `results` names what it returns, a tuple ("params", "opt_state", "metrics"), and `loss` is the
    path of the loss among the metrics. `fresh_keys` are the parts of the state that are such keys.
    `init(key) -> state` (a tuple) draws the first state from a `jax.random.key`. Without it the
    task is timing-only. `state` is the tuple of its pytrees with `jax.ShapeDtypeStruct` leaves,
    which need not be said where `init` can be traced.
    `batch(n)` is the pytree of `jax.ShapeDtypeStruct` of `n` samples; `batch_dim` is its sample
    dim.
    `batches(seed, n, data)` iterates over NumPy pytrees of `n` samples; `data` is `[run] data` of
    the job. What leaves of the state are is found by name and use (`roles.py`); `roles` says it by
    path or path prefix ("state/step" -> "optimizer").
    `mode` says what the step does. One that does not train has the metric `logits` in place of
    `loss`; the state that it keeps per sample is the `cache`, whose leaves have their samples along
    the dims of `cache_dims`, by path, and `context` positions. It is a step of as many samples as
    its cache.
    `samples` is how many the batch has that the user's example is of; 0 where there is none.
    `notes` and `findings` are what else was found about the step, for the screen.
    `captured` is there instead of the functions where the step comes as a file (`module_task.py`):
    the capture of `n` samples.
    `full_precision` is the same task computed in fp32: what runs of a bf16 task are compared with.
    `model` is the task without copies, where `step` computes parts of the model on several ranks
    alike (key-value heads of more tensor-parallel ranks than there are): what MFU counts.
    `findings` are told about the model in every report.
    """

    step: Callable[..., Any]
    batch: Callable[[int], Any]
    init: Callable[[Any], tuple[Any, ...]] | None = None
    state: tuple[Any, ...] | None = None
    batches: BatchFactory | None = None
    state_names: tuple[str, ...] = ("params", "opt_state")
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    loss: str = ""
    fresh_keys: tuple[str, ...] = ()
    generator: str = ""
    roles: Mapping[str, str] = field(default_factory=dict)
    samples: int = 0
    batch_dim: int = 0
    tokens_per_sample: int = 1
    full_precision: TrainTask | None = None
    model: TrainTask | None = None
    mode: Mode = Mode.TRAIN
    context: int = 0
    cache_dims: Mapping[str, int] = field(default_factory=dict)
    captured: Callable[[int], Captured] | None = None
    findings: tuple[Diagnostic, ...] = ()
    notes: tuple[str, ...] = ()
    name: str = "step"

    def __post_init__(self) -> None:
        if self.init is None and self.state is None:
            raise UsageError(
                "SW_TASK_STATE",
                "a TrainTask requires `init` or `state`, got neither",
                hint="give init=fn(key) -> (params, opt_state), or the abstract state for timing",
            )
        unknown = sorted(set(self.roles.values()) - set(ROLES))
        if unknown:
            raise UsageError(
                "SW_TASK_ROLE", f"roles of a TrainTask are {', '.join(ROLES)}, got {unknown}"
            )
