"""Weak and strong scaling of Llama-2 7B and 70B with FSDP from 1 to 512 instances: writes
docs/scaling.md and its plots.

    python benchmarks/scaling.py [--cache DIR] [--out DIR] [--models NAME ...] [--instances 1,2,...]

The points are those of `shardwright scale`, and so are the rows, which stay in `--out`: a run that
was ended goes on. Wants the extra `plot`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shardwright.orchestrator.changes.change import compared
from shardwright.orchestrator.config.config import JobConfig, load
from shardwright.orchestrator.report.tried import FITS, candidate
from shardwright.orchestrator.whatif.journal import Journal
from shardwright.orchestrator.whatif.rows import Row
from shardwright.orchestrator.whatif.scale import MODES, Curve, Study, curves, points, verdicts
from shardwright.orchestrator.whatif.scale_screen import write_plots
from shardwright.orchestrator.whatif.sweep import sweep

DOCS = Path(__file__).resolve().parent.parent / "docs"
MODELS = ("llama2-7b", "llama2-70b")
TARGETS = ("trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge")
INSTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STRONG_BATCH = 2048  # samples per step, however many instances
HEAD = """# Scaling

Weak and strong scaling of Llama-2 7B and 70B with FSDP, sequences of 4096 tokens, on
trn1.32xlarge, trn1n.32xlarge and trn2.48xlarge, each with the least recomputation and the largest
micro-batch that fit it ([auto](plan.md#what-the-memory-decides)). Written by
`benchmarks/scaling.py` from the rows of `shardwright scale`; every point is a whole plan (captured,
partitioned, compiled, linked, timed). All of it is **extrapolated**: no published run is FSDP.
Steps are nominal, with the band from `peak` to `conservative`.

- State is shared by up to 512 ranks; more ranks hold more copies of it (`dp_replicate`).
- *Weak*: one sample per rank. *Strong*: {batch} samples per step; with fewer ranks they do more
  micro-batches, with more `tp` takes them.
- *Efficiency* is tokens per second and instance against the smallest number of instances whose
  memory suffices, and above 100 % where that number needs more recomputation than larger ones.
  *Exposed* is the part of the step that waits for collectives.
- Rows whose state does not fit the memory of a core are timed all the same and say so.
- Prices are on demand; trn2.48xlarge is not sold so, and has no dollars here. `--price-kind
  capacity-block` compares it with trn1.32xlarge
  ([the buyer's question](sweep.md#the-buyers-question)).

The same for your own job:

```
shardwright scale --model llama2-70b --instances 8,16,32 --targets trn1n.32xlarge,trn2.48xlarge
```
"""
TABLE_HEAD = (
    "| instances | machine | mesh | remat x micro-batch | step s | band s | tokens/s | efficiency |"
    " exposed | MFU | peak GiB | USD per million tokens |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)


def study_of(instances: Sequence[int]) -> Study:
    """What the page shows."""
    return Study(targets=TARGETS, instances=instances)


def job_of(model: str, cache: str, changes: Mapping[str, Any] | None = None) -> JobConfig:
    """The job of a model, with changed keys on top."""
    settings = [f"model.preset={model}", f"cache.dir={cache}"]
    settings.append(f"strategy.global_batch={STRONG_BATCH}")
    return compared(load(None, settings, changes=changes))


def curves_of(model: str, instances: Sequence[int], cache: str, out: Path) -> list[Curve]:
    """The curves of a model; what `out` does not hold yet is planned."""
    base = job_of(model, cache)
    asked = points(study_of(instances), base, lambda keys: job_of(model, cache, keys))

    def tell(row: Row, done: int, total: int) -> None:
        print(model, f"{done}/{total}", *row.values.values(), row.status, flush=True)

    return curves(sweep(asked, base, Journal(out / f"{model}.jsonl"), tell).rows)


def table(found: Sequence[Curve]) -> Iterator[str]:
    """The rows of one mode, machines under each other for every number of instances."""
    yield from TABLE_HEAD
    for count in sorted({count for curve in found for count in curve.rows}):
        for curve in found:
            if (row := curve.rows.get(count)) is not None:
                yield f"| {' | '.join(_cells(count, row))} |"


def _cells(count: int, row: Row) -> list[str]:
    m = row.metrics
    if not m:
        return [str(count), row.values["target"], row.code, *["-"] * 9]
    cost = m["usd_per_1e6_tokens"]
    return [
        str(count),
        m["target"],
        m["mesh"].replace("=", " ").replace(",", ", "),
        candidate(m),
        f"{m['step_time_s']:.3f}",
        f"{m['step_time_low_s']:.3f} .. {m['step_time_high_s']:.3f}",
        f"{m['tokens_per_s']:,.0f}",
        f"{m['efficiency']:.1%}",
        f"{m['exposed']:.1%}",
        f"{m['mfu']:.1%}",
        f"{m['peak_gib']:.2f}" + ("" if row.status == FITS else " (does not fit)"),
        "-" if cost is None else f"{cost:.3f}",
    ]


def page(found: Mapping[str, Sequence[Curve]]) -> str:
    """The page of the curves of every model."""
    parts = [HEAD.format(batch=STRONG_BATCH)]
    for model, own in found.items():
        parts.append(f"\n## {model}\n\nMachines that fit, by number of instances:\n\n")
        parts += [f"- {name}: {'; '.join(lines)}\n" for name, lines in verdicts(own).items()]
        for mode in MODES:
            rows = "\n".join(table([curve for curve in own if curve.mode == mode]))
            picture = f"![{model}, {mode} scaling](scaling/{model}-scale-{mode}.svg)"
            parts.append(f"\n### {model}, {mode} scaling\n\n{picture}\n\n{rows}\n")
    return "".join(parts)


def main() -> None:
    """Plan what `--out` does not hold yet, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", default="", help="unit cache")
    parser.add_argument("--out", type=Path, default=Path("out/scaling"), help="rows that are done")
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--instances", default=",".join(map(str, INSTANCES)))
    args = parser.parse_args()
    counts = [int(word) for word in args.instances.split(",")]
    found = {model: curves_of(model, counts, args.cache, args.out) for model in args.models}
    for model, own in found.items():
        write_plots(DOCS / "scaling", own, f"{model}-", (".svg",))
    (DOCS / "scaling.md").write_text(page(found))


if __name__ == "__main__":
    main()
