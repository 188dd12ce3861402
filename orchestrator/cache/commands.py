"""`shardwright cache VERB`: the arguments, and what a person sees."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.cache.cache import open_cache
from shardwright.orchestrator.cache.location import locate
from shardwright.orchestrator.cache.store import StoreError
from shardwright.orchestrator.config.config import CacheConfig
from shardwright.orchestrator.config.job_flags import add_job_flags, job_config
from shardwright.orchestrator.terminal import terminal
from shardwright.orchestrator.terminal.terminal import one_line, say, say_json

if TYPE_CHECKING:
    from rich.table import Table

_AGE_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_KEY_CHARS = 12
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")


def add_verbs(verbs: Any) -> None:
    """Add `cache` and its verbs to the command."""
    cache = verbs.add_parser("cache", help="what the cache holds, whether it is sound, and why not")
    inner = cache.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, text: str, run: Callable[[argparse.Namespace], _Answer]) -> Any:
        parser = inner.add_parser(name, help=text)
        parser.json_flag()
        parser.set_defaults(verb=lambda args: _told(run, args))
        return parser

    ls = verb("ls", "entries, the last used first", _ls)
    ls.add_argument("--kind", default="", help="only this kind, for example compile")
    ls.add_argument("--limit", type=int, default=0, metavar="N", help="the first N; 0: all")
    stats = verb("stats", "entries, bytes, hits and misses per kind", _stats)
    verify = verb("verify", "check every entry; exit code 1 for a fault that stays", _verify)
    verify.add_argument("--repair", action="store_true", help="remove what is damaged")
    clean = verb("clean", "remove entries that no job works on", _clean)
    clean.add_argument("--kind", default="", help="of this kind")
    clean.add_argument("--older-than", default="", metavar="AGE", help="not used for 12h, 30d, ...")
    clean.add_argument("--all", action="store_true", help="whatever its kind and age")
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    locks = verb("clear-locks", "remove lock files that nobody holds", _clear_locks)
    for parser in (ls, stats, verify, clean, locks):
        parser.add_argument("--cache-dir", default="", metavar="PLACE", help="default: as a job's")
    for parser in (ls, stats, verify, clean):
        parser.add_argument("--shared", action="store_true", help="the s3:// store, not its copy")
    explain = verb("explain", "which units of a job are there, and what differs if not", _explain)
    explain.add_argument("job", type=Path, nargs="?", help="job.toml (optional)")
    add_job_flags(explain)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a verb found: as data, and as a person reads it."""

    data: dict[str, Any]
    text: str
    table: Table | None = None  # above the text
    exit_code: int = 0


def _told(run: Callable[[argparse.Namespace], _Answer], args: argparse.Namespace) -> int:
    """The exit code of a verb, whose answer is printed. Raises UsageError for a place that
    refuses."""
    try:
        answer = run(args)
    except StoreError as error:
        raise UsageError("SW_CACHE", f"the cache cannot be read or changed: {error}") from error
    if args.json:
        say_json(answer.data)
        return answer.exit_code
    if answer.table is not None:
        terminal.console().print(answer.table)
    say(answer.text)
    return answer.exit_code


def _opened(args: argparse.Namespace) -> tuple[Any, Any, str]:
    """(cache, the store that is meant, where it is and why). Raises UsageError."""
    settings = CacheConfig(dir=args.cache_dir)
    cache, location = open_cache(settings), locate(settings.dir)
    is_shared = getattr(args, "shared", False)
    if is_shared and len(cache.stores) < 2:
        raise UsageError("SW_USAGE", f"--shared requires an s3:// cache, got {location}")
    store = cache.stores[-1 if is_shared else 0]
    return cache, store, f"{store.place} ({location.reason})"


def _ls(args: argparse.Namespace) -> _Answer:
    from shardwright.orchestrator.cache.upkeep import listed

    _, store, place = _opened(args)
    rows = listed(store, args.kind)
    shown = rows[: args.limit] if args.limit else rows
    lines = [
        (r.kind, one_line(r.name), _size(r.bytes), _age(r.used_s), r.key[:_KEY_CHARS])
        for r in shown
    ]
    hidden = f", {len(shown)} shown" if len(shown) < len(rows) else ""
    return _Answer(
        data={"place": place, "entries": list(map(asdict, shown))},
        text=f"{len(rows)} entries, {_size(sum(r.bytes for r in rows))}{hidden}\n{place}",
        table=_table(("kind", "name", "size", "last used", "key"), lines, ("size", "last used")),
    )


def _stats(args: argparse.Namespace) -> _Answer:
    from shardwright.orchestrator.cache.upkeep import locks, totals

    cache, store, place = _opened(args)
    rows = totals(store, None if args.shared else cache.tally)
    lines = [
        (r.kind, str(r.entries), _size(r.bytes), str(r.hits), str(r.misses), _rate(r)) for r in rows
    ]
    right = ("entries", "size", "hits", "misses", "hit rate")
    entries, size = sum(r.entries for r in rows), _size(sum(r.bytes for r in rows))
    return _Answer(
        data={"place": place, "kinds": list(map(asdict, rows)), "locks": locks(cache.local)},
        text=f"{entries} entries, {size}\n{place}",
        table=_table(("kind", *right), lines, right),
    )


def _verify(args: argparse.Namespace) -> _Answer:
    from shardwright.orchestrator.cache.upkeep import faults

    _, store, place = _opened(args)
    rows = list(faults(store, args.repair))
    left = sum(not row.removed for row in rows)
    lines = [f"{row.name}: {row.what}{', removed' if row.removed else ''}" for row in rows]
    count = sum(1 for _ in store.entries())
    found = f"{len(rows)} faults, {left} left" if rows else "no faults"
    lines.append(f"{count} entries, {found}\n{place}")
    if left and not args.repair:
        lines.append("remove them with --repair; jobs compute them again")
    data = {"place": place, "faults": list(map(asdict, rows))}
    return _Answer(data=data, text="\n".join(lines), exit_code=1 if left else 0)


def _clean(args: argparse.Namespace) -> _Answer:
    from shardwright.orchestrator.cache.upkeep import cleaned

    if not (args.all or args.kind or args.older_than):
        raise UsageError("SW_USAGE", "cache clean requires --all, --kind or --older-than")
    age = _seconds(args.older_than) if args.older_than else 0.0
    _, store, place = _opened(args)
    done = cleaned(store, args.kind, age, args.dry_run)
    told = "would remove" if args.dry_run else "removed"
    kept = f", {done.in_use} left: a job works on them" if done.in_use else ""
    return _Answer(
        data={"place": place, "dry_run": args.dry_run, **asdict(done)},
        text=f"{told} {done.entries} entries, {_size(done.bytes)}{kept}\n{place}",
    )


def _clear_locks(args: argparse.Namespace) -> _Answer:
    cache, _, place = _opened(args)
    cleared, held = cache.local.clear_locks()
    kept = f", {held} left: a job holds them" if held else ""
    return _Answer(
        data={"place": place, "cleared": cleared, "held": held},
        text=f"removed {cleared} lock files{kept}\n{place}",
    )


def _explain(args: argparse.Namespace) -> _Answer:
    from shardwright.orchestrator.cache.explain import explain

    found = explain(job_config(args))
    lines = [(u.kind, one_line(u.name), u.cache, _why(u)) for u in found.units]
    hits = sum(u.cache != "miss" for u in found.units)
    head = f"{hits} of {len(found.units)} in the cache\n{found.place}"
    return _Answer(
        data=asdict(found),
        text="\n".join(filter(None, (head, found.ends, *found.warnings))),
        table=_table(("kind", "name", "cache", "what differs"), lines),
    )


def _why(unit: Any) -> str:
    """What a person is told about a miss."""
    if unit.cache != "miss":
        return ""
    if not unit.nearest_key:
        return f"no {unit.kind} entry there"
    lines = [_difference(d) for d in unit.differences[:_MOST_PARTS]]
    more = len(unit.differences) - len(lines)
    of = "" if unit.nearest == unit.name else f"of {one_line(unit.nearest)}: "
    return of + "; ".join([*lines, *([f"{more} more"] if more else [])])


_MOST_PARTS = 4


def _difference(d: Any) -> str:
    """`option optlevel 3, not 2`; digests tell nothing beyond that they differ."""
    if _DIGEST.search(d.wanted) or _DIGEST.search(d.stored):
        return str(d.part)
    return f"{d.part} {d.wanted or '-'}, not {d.stored or '-'}"


def _table(
    titles: Iterable[str], rows: Iterable[tuple[str, ...]], right: Sequence[str] = ()
) -> Table:
    table = terminal.table(*titles, right=right, box=None)
    for row in rows:
        table.add_row(*row)
    return table


def _size(num_bytes: int) -> str:
    from rich.filesize import decimal

    return decimal(num_bytes)


def _age(used_s: float) -> str:
    seconds = max(0.0, time.time() - used_s)
    unit = next((u for u, s in reversed(_AGE_S.items()) if seconds >= 2 * s), "s")
    return f"{seconds / _AGE_S[unit]:.0f}{unit} ago"


def _seconds(age: str) -> float:
    """Raises UsageError for what is no age."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", age)
    if match is None:
        raise UsageError(
            "SW_USAGE", f"--older-than requires 30d or the like (s, m, h, d, w), got {age!r}"
        )
    return float(match[1]) * _AGE_S[match[2]]


def _rate(row: Any) -> str:
    asked = row.hits + row.misses
    return f"{row.hits / asked:.0%}" if asked else "-"
