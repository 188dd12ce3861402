"""Whether flags keep what they are for: plans models with the values of every flag whose documented
purpose is speed or memory, and writes docs/flag-orders.md.

    python benchmarks/flag_orders.py [--cache DIR] [--out DIR] [--workers N] [--every N]
        [--orders KEY ...]

Prints every comparison that is the wrong way round with both figures, and ends with 1 when there is
one. Rows stay in `--out`: a run that was ended goes on. With `--orders` no page is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shardwright.orchestrator.config.config import JobConfig, load
from shardwright.orchestrator.whatif.journal import Journal
from shardwright.orchestrator.whatif.points import Point
from shardwright.orchestrator.whatif.rows import Row
from shardwright.orchestrator.whatif.sweep import sweep
from tests.support.cells import on_diagonals

PAGE = Path(__file__).resolve().parent.parent / "docs" / "flag-orders.md"
TOLERANCE = 0.001
"""Of a figure: less is no inversion. Our choice, a fiftieth of what a band usually is wide."""
EVERY, SELDOM = 3, 6  # of the cells, one of so many; SELDOM where a plan takes long

Settings = Mapping[str, str]
"""Keys of a job, and their values."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A model, the type it computes in, and how large a sample is or how many there are: `rank` 0
    is the least of the model's sizes."""

    model: str
    dtype: str
    rank: int
    size: str
    settings: Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A flag's documented purpose as an order of its values."""

    key: str
    purpose: str
    fastest: tuple[str, ...] = ()
    """Values of which each is no slower than the next."""
    smallest: tuple[str, ...] = ()
    """Values of which each needs no more memory than the next."""
    within: float = 1 + TOLERANCE
    """What the better one may be of the other."""
    beside: Settings = field(default_factory=dict)
    """What else is set."""
    models: tuple[str, ...] = ()
    dtype: str = ""
    every: int = EVERY

    @property
    def title(self) -> str:
        """The key, and what is set beside it."""
        beside = ", ".join(f"`{key}={value}`" for key, value in self.beside.items())
        return f"`{self.key}`" + (f" beside {beside}" if beside else "")

    @property
    def values(self) -> tuple[str, ...]:
        """All values, in the order of the table."""
        return self.fastest or self.smallest

    def settings(self, cell: Cell, value: str) -> Settings:
        """The job of a cell with one of the values."""
        return {**cell.settings, **self.beside, self.key: value}


@dataclass(frozen=True, slots=True)
class Compared:
    """Two values of a flag in one cell: by `metric`, `better` ought to be no worse."""

    order: Order
    cell: Cell
    metric: str
    better: str
    worse: str
    figures: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Of the better one's figure over the other's."""
        return self.figures[0] / self.figures[1]

    @property
    def holds(self) -> bool:
        """Whether the flag keeps its purpose here."""
        return self.ratio <= self.order.within

    @property
    def text(self) -> str:
        """Where, both figures, and by how much they differ."""
        scale, unit, form = UNITS[self.metric]
        better, worse = (f"{figure * scale:{form}} {unit}" for figure in self.figures)
        where = f"{self.cell.model} {self.cell.dtype}, {self.cell.size}"
        return (
            f"{where}: {self.order.title}: {self.better} {better}, {self.worse} {worse}"
            f" ({self.ratio - 1:+.2%})"
        )


TIME, MEMORY = "step_time_s", "peak_gib"
UNITS = {TIME: (1e3, "ms", ",.3f"), MEMORY: (1, "GiB", ".3f")}

LENGTHS: Mapping[str, tuple[int, ...]] = {
    "gpt3-125m": (512, 1024, 2048),
    "gpt3-350m": (512, 1024, 2048),
    "bert-base": (128, 256, 512),
    "bert-large": (128, 256, 512),
    "llama2-7b": (1024, 2048, 4096),
    "llama3-8b": (1024, 2048, 4096),
    "llama2-70b": (1024, 2048, 4096),
}
SAMPLES: Mapping[str, tuple[int, ...]] = {"vit-base": (1, 4, 16)}
"""Per core, of a model whose length is its image's."""
DTYPES = ("float32", "bfloat16")
INSTANCES = {"llama2-70b": "16"}
"""Of trn1n.32xlarge, where one does not hold the state."""


def cells() -> list[Cell]:
    """Every model in both types and three sizes."""
    return [
        Cell(model, dtype, rank, size, {**_job(model, dtype), key: str(number)})
        for model in (*LENGTHS, *SAMPLES)
        for dtype in DTYPES
        for rank, (key, number, size) in enumerate(_sizes(model))
    ]


def _sizes(model: str) -> Iterator[tuple[str, int, str]]:
    for length in LENGTHS.get(model, ()):
        yield "model.seq_len", length, f"{length} tokens"
    for samples in SAMPLES.get(model, ()):
        yield "strategy.micro_batch", samples, f"{samples} samples"


def _job(model: str, dtype: str) -> Settings:
    instances = INSTANCES.get(model, "1")
    return {"model.preset": model, "model.dtype": dtype, "cluster.instances": instances}


LAYOUT = ("gpt3-350m", "llama2-7b")
"""Models of the flags that need a certain mesh or several micro-batches."""
TP = {"mesh.dp_shard": "4", "mesh.tp": "8"}
PP = {"mesh.dp_shard": "8", "mesh.pp": "4", "strategy.global_batch": "64"}
CP = {"mesh.dp_shard": "8", "mesh.cp": "4"}
STEPS = {"strategy.global_batch": "128"}  # four micro-batches on 32 cores
EARLY = {"strategy.early_all_gather_shift": "1"}
BOTH = EARLY | {"strategy.late_reduce_scatter_shift": "1"}

ORDERS = (
    Order(
        key="compiler.optlevel",
        purpose="a higher level is no slower",
        fastest=("3", "2", "1"),
        every=SELDOM,
    ),
    Order(
        key="compiler.optlevel",
        purpose="the quick level is within 1.4 times of the default",
        fastest=("1", "2"),
        within=1.4,
    ),
    Order(
        key="compiler.model_type",
        purpose="a type of model is no slower than none",
        fastest=("transformer", "generic"),
        every=SELDOM,
    ),
    Order(
        key="compiler.attention",
        purpose="scores that stay on chip are no slower than scores that are stored",
        fastest=("flash", "fused", "unfused"),
        every=SELDOM,
    ),
    Order(
        key="compiler.auto_cast",
        purpose="casts of products are no slower than none",
        fastest=("matmult", "none"),
        dtype="float32",
    ),
    Order(
        key="compiler.auto_cast",
        purpose="casts of everything are no slower than none",
        fastest=("all", "none"),
        dtype="float32",
    ),
    Order(
        key="strategy.remat",
        purpose="recomputation buys memory with time",
        fastest=("none", "selective", "full"),
        smallest=("full", "selective", "none"),
    ),
    *(
        Order(
            key="strategy.reshard_after_forward",
            purpose="keeping gathered weights buys time with memory",
            fastest=("false", "true"),
            smallest=("true", "false"),
            beside={"strategy.remat": remat},
            every=SELDOM,
        )
        for remat in ("none", "full")
    ),
    *(
        Order(
            key=f"strategy.{policy}",
            purpose="a shorter type is no slower",
            fastest=("bfloat16", "auto"),
            dtype="float32",
            models=LAYOUT,
        )
        for policy in ("param_dtype", "reduce_dtype", "output_dtype")
    ),
    Order(
        key="strategy.early_all_gather_shift",
        purpose="gathering early buys time with memory",
        fastest=("1", "0"),
        smallest=("0", "1"),
        models=LAYOUT,
    ),
    Order(
        key="strategy.late_reduce_scatter_shift",
        purpose="reducing late costs memory",
        smallest=("0", "1"),
        beside=EARLY,
        models=LAYOUT,
    ),
    Order(
        key="strategy.cc_streams",
        purpose="a second stream is no slower",
        fastest=("2", "1"),
        beside=BOTH | TP,
        models=LAYOUT,
    ),
    Order(
        key="strategy.dependency_tokens",
        purpose="what is shifted keeps out of a layer's way",
        fastest=("true", "false"),
        beside=BOTH | TP,
        models=LAYOUT,
    ),
    Order(
        key="strategy.sequence_parallel",
        purpose="what lies between tensor-parallel blocks is split",
        smallest=("true", "false"),
        beside=TP,
        models=LAYOUT,
    ),
    Order(
        key="cluster.placement",
        purpose="axes on rings of neighbours are no slower",
        fastest=("torus", "linear"),
        beside=TP,
        models=LAYOUT,
    ),
    Order(
        key="strategy.reduce_gradients",
        purpose="one reduction for all micro-batches buys time with memory",
        fastest=("last", "each"),
        smallest=("each", "last"),
        beside=STEPS,
        models=LAYOUT,
    ),
    Order(
        key="strategy.gradient_accumulation_fusion",
        purpose="a sum where a gradient is made saves its way through memory",
        fastest=("true", "false"),
        smallest=("true", "false"),
        beside=STEPS,
        models=LAYOUT,
    ),
    Order(
        key="strategy.accumulate_dtype",
        purpose="short accumulators are smaller and no slower",
        fastest=("auto", "float32"),
        smallest=("auto", "float32"),
        beside=STEPS,
        models=LAYOUT,
        dtype="bfloat16",
    ),
    Order(
        key="strategy.zero",
        purpose="each stage shares more of the state",
        smallest=("2", "1", "0"),
        beside={"strategy.name": "generic"},
        models=LAYOUT,
    ),
    Order(
        key="strategy.context",
        purpose="a ring buys memory with time",
        fastest=("gather", "ring"),
        smallest=("ring", "gather"),
        beside=CP,
        models=LAYOUT,
    ),
    Order(
        key="strategy.schedule",
        purpose="parts of a stage make the bubble shorter",
        fastest=("interleaved", "1f1b"),
        beside=PP,
        models=LAYOUT,
    ),
    Order(
        key="strategy.schedule",
        purpose="one forward, one backward holds fewer micro-batches",
        smallest=("1f1b", "gpipe"),
        beside=PP,
        models=LAYOUT,
    ),
    Order(
        key="strategy.stage_balance",
        purpose="stages of even cost are no slower than stages of as many layers",
        fastest=("cost", "layers"),
        beside=PP,
        models=LAYOUT,
    ),
)

HEAD = f"""# What flags are for, and whether they keep it

Every flag whose documented purpose is speed or memory, as an order of its values that has to hold.
Written by `benchmarks/flag_orders.py`, which ends with 1 when one does not; every figure is that of
a whole plan on trn1n.32xlarge under FSDP (nominal; extrapolated, no published run is FSDP), and
every order is looked at in a sample of eight models x two types x three sizes that has each value
of each (`--every 1`: in all of them). Sizes are tokens of a sample, one sample per core, or samples
per core. Differences up to {TOLERANCE:.1%} count as none.

Not here, because they are trades by their description: `bucket_mb`, `layers_per_group`,
`stage_parts`, packet sizes, `strategy.name` and meshes ([overlap.md](overlap.md),
[strategies/](strategies/README.md)); flags of numerics ([numerics.md](numerics.md)).
"""


Asked = Sequence[tuple[Order, Sequence[Cell]]]
"""Orders, and the cells that each is looked at in."""
Rows = Mapping[frozenset[tuple[str, str]], Row]
"""What was planned, by its settings."""


def asked_of(orders: Iterable[Order], among: Sequence[Cell], every: int = 0) -> Asked:
    """The cells of each order: one of `every` that it fits (0: of its own number), with each model,
    type and size."""
    return [(order, _sample(order, among, every or order.every)) for order in orders]


def _sample(order: Order, among: Sequence[Cell], every: int) -> list[Cell]:
    fitting = {
        (cell.model, cell.dtype, cell.rank): cell
        for cell in among
        if cell.model in (order.models or (cell.model,))
        and cell.dtype == (order.dtype or cell.dtype)
    }
    return [fitting[place] for place in on_diagonals(list(fitting), every)]


def planned(asked: Asked, host: JobConfig, out: Path) -> Rows:
    """The rows of all cells; what `out` does not hold yet is planned.

    Raises KeyboardInterrupt where that was interrupted.
    """
    jobs = {
        frozenset(settings.items()): settings
        for order, own in asked
        for cell in own
        for settings in (order.settings(cell, value) for value in order.values)
    }
    points = [
        Point(settings, load(None, [f"{key}={value}" for key, value in settings.items()]))
        for settings in jobs.values()
    ]

    def tell(row: Row, done: int, total: int) -> None:
        print(f"{done}/{total}", *row.values.values(), row.status, row.code, flush=True)

    swept = sweep(points, host, Journal(out / "rows.jsonl"), tell)
    if swept.interrupted:
        raise KeyboardInterrupt
    return dict(zip(jobs, swept.rows, strict=True))


def compared(asked: Asked, rows: Rows) -> list[Compared]:
    """Every two neighbours of every order; a job that is refused has no figures to compare."""
    return [
        Compared(order, cell, metric, better, worse, (figures[better], figures[worse]))
        for order, own in asked
        for cell in own
        for metric, values in ((TIME, order.fastest), (MEMORY, order.smallest))
        for figures in [_figures(order, cell, metric, rows)]
        for better, worse in pairwise(values)
        if better in figures and worse in figures
    ]


def _figures(order: Order, cell: Cell, metric: str, rows: Rows) -> dict[str, float]:
    found = {value: _row(order, cell, value, rows).metrics for value in order.values}
    return {value: metrics[metric] for value, metrics in found.items() if metrics}


def _row(order: Order, cell: Cell, value: str, rows: Rows) -> Row:
    return rows[frozenset(order.settings(cell, value).items())]


def page(asked: Asked, rows: Rows) -> str:
    """The page: what does not hold, how much of each order does, and every figure."""
    found = compared(asked, rows)
    wrong = [f"- {one.text}" for one in found if not one.holds]
    parts = [
        HEAD,
        f"## {len(wrong)} of {len(found)} comparisons are the wrong way round\n",
        *([*wrong, ""] if wrong else []),
        *_overview(asked, found),
    ]
    for order, own in asked:
        parts += [f"\n## {order.title}\n", f"{order.purpose.capitalize()}.\n"]
        parts += _table(order, own, rows)
    return "\n".join(parts) + "\n"


def _overview(asked: Asked, found: Sequence[Compared]) -> Iterator[str]:
    yield _line("flag", "what for", "order", "holds", "at worst")
    yield _line(*["---"] * 5)
    for order, _ in asked:
        own = [one for one in found if one.order is order]
        kept = f"{sum(one.holds for one in own)} of {len(own)}"
        worst = f"{max(one.ratio for one in own) - 1:+.2%}" if own else "-"
        yield _line(order.title, order.purpose, _promise(order), kept, worst)


def _promise(order: Order) -> str:
    """The order in words: `time: a <= b; memory: b <= a`."""
    times = f" {order.within:g} x " if order.within > 1 + TOLERANCE else " "
    promised = {"time": order.fastest, "memory": order.smallest}
    return "; ".join(
        f"{what}: {f' <={times}'.join(values)}" for what, values in promised.items() if values
    )


def _table(order: Order, own: Sequence[Cell], rows: Rows) -> Iterator[str]:
    """Time and memory of every value, side by side."""
    heads = [f"{value}, {unit}" for _, unit, _ in UNITS.values() for value in order.values]
    yield _line("model", "type", "size", *heads)
    yield _line(*["---"] * (3 + len(heads)))
    for cell in own:
        found = [_row(order, cell, value, rows) for value in order.values]
        figures = [_figure(row, metric) for metric in UNITS for row in found]
        yield _line(cell.model, cell.dtype, cell.size, *figures)


def _figure(row: Row, metric: str) -> str:
    scale, _, form = UNITS[metric]
    return f"{row.metrics[metric] * scale:{form}}" if row.metrics else row.code


def _line(*words: str) -> str:
    return f"| {' | '.join(words)} |"


def main() -> int:
    """Plan what `--out` does not hold yet, say what is the wrong way round, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", default="", help="unit cache")
    parser.add_argument("--out", type=Path, default=Path("out/flag-orders"), help="rows so far")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one per CPU")
    parser.add_argument("--every", type=int, default=0, help="one of N cells; 1: all of them")
    parser.add_argument("--orders", nargs="*", default=(), metavar="KEY", help="only these flags")
    args = parser.parse_args()
    chosen = [order for order in ORDERS if not args.orders or order.key in args.orders]
    asked = asked_of(chosen, cells(), args.every)
    host = load(None, [f"cache.dir={args.cache}", f"run.workers={args.workers}"])
    rows = planned(asked, host, args.out)
    wrong = [one for one in compared(asked, rows) if not one.holds]
    print(*(one.text for one in wrong), f"inversions: {len(wrong)}", sep="\n")
    if not args.orders:
        PAGE.write_text(page(asked, rows))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
