"""`shardwright errors [CODE]`: the error catalogue on the screen, as a list or one code in full."""

from __future__ import annotations

from dataclasses import asdict

from rich.panel import Panel
from rich.table import Table

from shardwright.compiler.diagnostics.catalogue import WHO, Entry, catalogue, find
from shardwright.orchestrator.terminal import terminal


def run(code: str, as_json: bool) -> int:
    """Print one code, or all of them by stage. Raises UsageError for an unknown code."""
    entries = [find(code)] if code else list(catalogue().values())
    if as_json:
        terminal.say_json([asdict(entry) for entry in entries])
        return 0
    console = terminal.console()
    console.print(_one(entries[0]) if code else _all(entries))
    return 0


def _one(entry: Entry) -> Panel:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("Meaning", entry.meaning)
    table.add_row("What to do", entry.advice)
    table.add_row("Stage", entry.stage)
    table.add_row("Kind", WHO[entry.who])
    return Panel(table, title=entry.code, title_align="left")


def _all(entries: list[Entry]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("code", "stage", "meaning"):
        table.add_column(title, no_wrap=title == "code")
    for entry in entries:
        table.add_row(entry.code, entry.stage, entry.meaning)
    return table
