"""The order in which the stages of a pipeline run their programs, from counts alone.

A schedule is data: per stage, entries of programs and how often they repeat. `gpipe` runs all
micro-batches forward and then all backward; `1f1b` starts the backward pass of a micro-batch as
soon as it can; `interleaved` gives every stage several parts of the model and fills the pipeline
with smaller pieces. Nothing else in the project knows these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.neff.schedule import Schedule, flat, folded

Run = tuple[str, int]  # "forward" or "backward", part


def stage_schedules(
    name: str, num_stages: int, num_parts: int, num_microbatches: int
) -> tuple[Schedule, ...]:
    """The schedule of every stage; part `k` of `num_parts` lies on stage `k % num_stages`.

    Raises: UsageError (SW_PIPELINE_SCHEDULE) for an unknown name, and for counts the schedule
    cannot order.
    """
    make = SCHEDULES.get(name)
    if make is None:
        raise _refused(f"strategy.schedule requires one of {', '.join(SCHEDULES)}, got {name}")
    if name == "interleaved" and num_microbatches % num_stages:
        raise _refused(
            f"strategy.schedule interleaved requires a multiple of mesh.pp={num_stages}"
            f" micro-batches, got {num_microbatches}"
        )
    chunks = num_parts // num_stages
    stages = (make(s, num_stages, chunks, num_microbatches) for s in range(num_stages))
    return tuple(_entries(runs, s) for s, runs in enumerate(stages))


def _entries(runs: Iterable[Run], stage: int) -> Schedule:
    """The runs of a stage, and its update behind them."""
    names = [program_name(*run) for run in runs]
    return (*folded(names), ((program_name("update", stage),), 1))


def bubble(num_stages: int, num_parts: int, num_microbatches: int) -> float:
    """The share of the step in which a stage of a pipeline of equal stages waits for the others.

    Source: Narayanan et al. 2021, section 2.2.
    """
    work = num_parts // num_stages * num_microbatches
    return (num_stages - 1) / (work + num_stages - 1)


def _refused(message: str) -> UsageError:
    return UsageError("SW_PIPELINE_SCHEDULE", message, None, "change strategy.global_batch")


def _gpipe(stage: int, num_stages: int, chunks: int, count: int) -> Iterator[Run]:
    """Every part forward over all micro-batches, then backward in the opposite order.

    Source: Huang et al. 2019, figure 2c.
    """
    for chunk in range(chunks):
        yield from [("forward", chunk * num_stages + stage)] * count
    for chunk in reversed(range(chunks)):
        yield from [("backward", chunk * num_stages + stage)] * count


def _one_forward_one_backward(
    stage: int, num_stages: int, chunks: int, count: int
) -> Iterator[Run]:
    """As many forwards as there are stages behind, then one backward per forward.

    Several parts go round in groups of as many micro-batches as stages.
    Source: Narayanan et al. 2021, section 2.2, figure 4; for several parts the order of
    Megatron-LM's interleaved schedule.
    """
    forwards = list(_in_groups("forward", range(chunks), stage, num_stages, count))
    backwards = list(_in_groups("backward", range(chunks)[::-1], stage, num_stages, count))
    behind = num_stages - 1 - stage
    ahead = behind if chunks == 1 else 2 * behind + (chunks - 1) * num_stages
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield from (forward, backward)
    yield from backwards[len(forwards) - ahead :]


def _in_groups(
    kind: str, chunks: Sequence[int], stage: int, num_stages: int, count: int
) -> Iterator[Run]:
    """All runs of one kind: a group of micro-batches through every chunk, then the next group."""
    group = num_stages if len(chunks) > 1 else count
    for first in range(0, count, group):
        for chunk in chunks:
            runs = min(group, count - first)
            yield from [(kind, chunk * num_stages + stage)] * runs


SCHEDULES: Mapping[str, Callable[[int, int, int, int], Iterator[Run]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _one_forward_one_backward,
}


def program_name(kind: str, part: int) -> str:
    """The name of a program of one part (or, for `update`, of one stage)."""
    return f"{kind}.{part}"


def most_in_flight(schedule: Schedule, first: str, last: str) -> int:
    """The most micro-batches that have begun `first` and not ended `last`, at any time."""
    begun = ended = most = 0
    for name in flat(schedule):
        begun += name == first
        most = max(most, begun - ended)
        ended += name == last
    return most
