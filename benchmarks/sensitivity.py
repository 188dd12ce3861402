"""What the model of the machine assumes and what each assumption moves: writes docs/model.md.

    python benchmarks/sensitivity.py [--cache DIR]

The text is in sensitivity.md. Figures, status and sources come from the machine's own files, the
statements from `orchestrator/report/limits.py`, costs of instructions from
`compiler/isa/costs.py`; every
figure is moved down and up for three jobs, whose programs are built once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shardwright.compiler.isa.costs import RULES
from shardwright.compiler.machine.target import Fact, load_target
from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.report.explain_sensitivity import LEAST, moved_by
from shardwright.orchestrator.report.limits import STATEMENTS
from shardwright.orchestrator.road.timing import step_of
from shardwright.orchestrator.service.executor import InlineExecutor
from shardwright.orchestrator.service.service import UnitService
from shardwright.orchestrator.validation.predict import build_workload
from shardwright.orchestrator.validation.published import Storage, Workload
from shardwright.sim_cluster.timing.sensitivity import SHARE, Moved, assumptions, sensitivity

TEMPLATE = Path(__file__).with_suffix(".md")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "model.md"
TARGET = "trn1n.32xlarge"
BF16 = Storage(params="bf16", activations="bf16", statistics="bf16", gradients="bf16")
BERT = Workload(
    family="encoder",
    layers=24,
    hidden=1024,
    heads=16,
    kv_heads=16,
    ffn=4096,
    vocab=30528,
    seq_len=128,
    tp=1,
    pp=1,
    dp=32,
    zero1=False,
    micro_batch=16,
    num_microbatches=32,
    storage=BF16,
    optimizer="adamw",
    attention="unfused",
    remat="none",
    accumulation=True,
    sequence_parallel=False,
    nodes=1,
    target="trn1.32xlarge",
)
"""BERT-Large as its published runs train it: phase 1 on one instance (Devlin et al. 2019)."""


def llama(preset: str, instances: int, cache: str) -> list[Moved]:
    """A Llama-2 preset with FSDP over all cores of the instances."""
    settings = (f"model.preset={preset}", f"cluster.instances={instances}", f"cache.dir={cache}")
    return moved_by(load(None, list(settings)))


def bert(cache: str) -> list[Moved]:
    """BERT-Large, data-parallel."""
    with UnitService(InlineExecutor, Cache(Path(cache)), None) as service:
        built = build_workload(BERT, service)
    return sensitivity(step_of(built, built.programs))


JOBS: Mapping[str, Callable[[str], list[Moved]]] = {
    "Llama-2 7B, FSDP, 1 trn1n": lambda cache: llama("llama2-7b", 1, cache),
    "Llama-2 70B, FSDP, 16 trn1n": lambda cache: llama("llama2-70b", 16, cache),
    "BERT-Large, data-parallel, 1 trn1": bert,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", default=str(Path.home() / ".cache" / "shardwright"))
    cache = parser.parse_args().cache
    found = {name: {m.name: m for m in job(cache)} for name, job in JOBS.items()}
    parts = {
        "statements": [f"- {one.text}" for one in STATEMENTS],
        "table": list(figures(assumptions(load_target(TARGET)), found)),
        "costs": list(costs()),
    }
    text = TEMPLATE.read_text().replace("@target", TARGET).replace("@share", f"{SHARE:.0%}")
    for name, lines in parts.items():
        text = text.replace(f"@{name}\n", "\n".join(lines) + "\n")
    PAGE.write_text(text)


def figures(facts: Mapping[str, Fact], found: Mapping[str, Mapping[str, Moved]]) -> Iterator[str]:
    """The table of assumptions, those that move any of the jobs most first."""
    yield _header("figure", "value", "status", *found, "source")
    most = {name: max((job[name].most for job in found.values()), default=0.0) for name in facts}
    for name in sorted(facts, key=lambda name: -most[name]):
        fact = facts[name]
        changes = (_changes(job[name]) for job in found.values())
        yield _line(f"`{name}`", f"{fact.value}", fact.status, *changes, fact.source)


def _changes(moved: Moved) -> str:
    if moved.most < LEAST:
        return "0"
    return f"{moved.lower:+.1%} / {moved.higher:+.1%}"


def costs() -> Iterator[str]:
    """Costs of instructions that no page prints."""
    yield _header("instruction", "engine", "cycles", "status", "source")
    for rule in RULES:
        if rule.status != "documented":
            engine = rule.engine.value if rule.engine else "any"
            cycles = f"max({rule.minimum:g}, {rule.slope:g} N) + {rule.extra:g}"
            yield _line(f"`{rule.opcode}`", engine, cycles, rule.status, rule.source)


def _header(*names: str) -> str:
    return f"{_line(*names)}\n{_line(*('---' for _ in names))}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(_plain(cells))} |"


def _plain(cells: Sequence[str]) -> Iterator[str]:
    return (cell.replace("|", "/") for cell in cells)


if __name__ == "__main__":
    main()
