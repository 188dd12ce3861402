"""The best MFU that is published of a machine and a kind of model: `published_mfu.toml`.

MFU of every row follows from its facts by the formula that a report's MFU counts by
(`orchestrator/report/rates.py`), so that like is compared with like. MFU that
sources print themselves is not read: at least three definitions are in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from shardwright.compiler.machine.target import Target
from shardwright.orchestrator.validation.published_columns import entries


def sequence_flops(layers: int, hidden: int, seq_len: int, matmul_params: float) -> float:
    """6 FLOPs per matmul parameter and token and 12 layers x hidden x seq_len^2 per sequence (PaLM,
    appendix B: recomputation not counted, attention not halved)."""
    return 6.0 * seq_len * matmul_params + 12.0 * layers * hidden * seq_len**2


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One published run; sizes as in the columns of docs/validation.md, `cores` NeuronCores."""

    id: str
    model: str
    attention: str
    machines: tuple[str, ...]
    layers: int
    hidden: int
    seq_len: int
    tp: int
    pp: int
    cores: int
    matmul_params: float
    global_batch: int
    step_time_s: float
    release: str
    published: str
    source: str
    confidence: str

    def mfu(self, flops_per_s_per_core: float) -> float:
        """The FLOPs of its step over the peak."""
        sequence = sequence_flops(self.layers, self.hidden, self.seq_len, self.matmul_params)
        peak = flops_per_s_per_core * self.cores
        return self.global_batch * sequence / self.step_time_s / peak


@cache
def measured_runs() -> tuple[MeasuredRun, ...]:
    """All rows of the file."""
    rows = entries("published_mfu.toml", "run")
    return tuple(MeasuredRun(**(row | {"machines": tuple(row["machines"])})) for row in rows)


def best_run(target: Target, attention: str) -> MeasuredRun | None:
    """The run of the highest MFU on a machine, of models with that attention; None without one, and
    for a machine that there is not."""
    if target.is_hypothetical:
        return None
    peak = target.published_flops_per_s_per_core
    runs = (r for r in measured_runs() if target.name in r.machines and r.attention == attention)
    return max(runs, key=lambda run: run.mfu(peak), default=None)
