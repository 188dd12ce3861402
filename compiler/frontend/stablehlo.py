"""StableHLO -> our graph IR: the entry points of the importer.

CHLO is legalised first, functions are inlined, loops get their trip counts, locations point at the
user's code. The engine is `importer.py`, the meaning of each op is in `rules/`; Shardy's output is
read back through the same engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from shardwright.compiler.diagnostics import Diagnostic
from shardwright.compiler.frontend.callbacks import dropped_callbacks
from shardwright.compiler.frontend.context import (
    legalize_chlo,
    make_context,
    merge_equal,
    parse_module,
)
from shardwright.compiler.frontend.donation import Aliases, read_aliases
from shardwright.compiler.frontend.importer import Importer, ImportHooks
from shardwright.compiler.frontend.locations import LocationReader
from shardwright.compiler.frontend.rules import RULES, Rule
from shardwright.compiler.frontend.rules.process_groups import MeshAxes
from shardwright.compiler.frontend.rules.ranks import RankMesh, read_ranks, whole
from shardwright.compiler.frontend.rules.registry import Check
from shardwright.compiler.frontend.shardings import (
    ModuleShardings,
    asked_shardings,
    read_shardings,
    unused_shardings,
)
from shardwright.compiler.frontend.shardy_hlo import restore_shardy
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.passes.indices import check_indices

__all__ = ["Check", "import_module", "import_parsed"]

T = TypeVar("T")


def import_module(source: bytes | str, *, base_dir: str | None = None) -> Graph:
    """Import a portable artifact, MLIR bytecode or MLIR text; graph inputs and outputs are those of
    `main`.

    `base_dir` (default: the working directory) is the job's folder: locations below it become
    relative.
    Raises: ImportRuleError with code, file and line for what the IR does not have, CompileError for
    constant indices that leave what they index.
    """
    return _imported(source, lambda *_: None, base_dir)[0]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a module says besides its graph: outputs that take over an input, the ranks its
    collectives are over as axes of a mesh (none without collectives), what is not done as it says,
    the shardings it asks to be partitioned by, and the programs of its manual regions, by number.
    """

    aliases: Aliases = ()
    mesh: MeshAxes = ()
    findings: tuple[Diagnostic, ...] = ()
    shardings: ModuleShardings | None = None
    regions: tuple[Graph, ...] = ()


NO_FACTS = Facts()


def import_partition(
    source: bytes | str,
    *,
    base_dir: str | None = None,
    checks: Mapping[str, Check] | None = None,
    known_indices: bool = True,
) -> tuple[Graph, Facts]:
    """As `import_module`, of a module that is the program of one rank: its collectives stay, over
    the mesh of its replica groups. `checks` see every op of their name before its rule and may
    refuse it; constant indices are refused unless `known_indices` is off.
    """
    locations = LocationReader(base_dir)
    regions: list[Graph] = []

    def read(module: Any, graph: Graph, ranks: RankMesh) -> Facts:
        aliases = read_aliases(module, graph)
        dropped = dropped_callbacks(module, locations)
        if ranks.count > 1:
            return Facts(aliases, ranks.axes, dropped)
        asked = asked_shardings(module, locations)
        unused = unused_shardings(module, locations) if asked is None else ()
        return Facts(aliases, ranks.axes, (*dropped, *unused), asked, tuple(regions))

    def ranks_of(module: Any) -> RankMesh:
        return read_ranks(module, locations)

    return _imported(source, read, base_dir, checks, ranks_of, regions, known_indices)


def import_with_shardings(
    source: bytes | str, *, base_dir: str | None = None
) -> tuple[Graph, ModuleShardings]:
    """As `import_module`, with what the module says about its distribution."""
    return _imported(source, lambda module, *_: read_shardings(module), base_dir)


def _imported(
    source: bytes | str,
    read: Callable[[Any, Graph, RankMesh], T],
    base_dir: str | None,
    checks: Mapping[str, Check] | None = None,
    ranks_of: Callable[[Any], RankMesh] | None = None,
    regions: list[Graph] | None = None,
    known_indices: bool = True,
) -> tuple[Graph, T]:
    """The graph of `source`, and what `read` finds in its module."""
    with make_context():
        module = parse_module(source)
        restore_shardy(module)
        legalize_chlo(module, checks or {})
        merge_equal(module)
        ranks = ranks_of(module) if ranks_of else None
        graph = import_parsed(
            module, base_dir=base_dir, checks=checks, ranks=ranks, regions=regions
        )
        found = read(module, graph, ranks or whole(module, LocationReader(base_dir)))
    for one in (graph, *(regions or ())) if known_indices else ():
        check_indices(one)
    return graph, found


def import_parsed(
    module: Any,
    *,
    base_dir: str | None = None,
    extra_rules: Mapping[str, Rule] | None = None,
    hooks: ImportHooks | None = None,
    checks: Mapping[str, Check] | None = None,
    ranks: RankMesh | None = None,
    regions: list[Graph] | None = None,
) -> Graph:
    """Import an MLIR module that is parsed and free of CHLO; its context must be entered.

    `extra_rules` are added to the table (`sdy.*` ops of Shardy's output) and win over it; `hooks`
    see every op and block; `checks` see every op of their name before its rule and may refuse it;
    with `ranks` the module is one rank's program, and its collectives are over them. `regions` gets
    the code of one rank that a whole step has (`shard_map`), by number; without, it is refused.
    Raises: ImportRuleError, as `import_module`.
    """
    rules = {**RULES, **(extra_rules or {})}
    with _collector_paused():
        locations = LocationReader(base_dir)
        seen = hooks or ImportHooks()
        return Importer(module, rules, locations, seen, checks or {}, ranks, regions).main()


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection while live objects are made: a third of the time otherwise."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
